"""The tokenizer of a run: byte-level BPE, as the bytes of its JSON file; and tokens as text while they come.

Byte-level means that every text can be encoded and decoded without loss. Id 0 is `<|end|>`, which ends a document.
`TOKENIZERS_PARALLELISM` and `RAYON_NUM_THREADS` are left to the `tokenizers` library, which obeys them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tokenizers

from ..canonical import digest
from ..errors import IntegrityError

END = "<|end|>"
END_ID = 0
TOKENIZER_BYTES_MAX = 16 << 20
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A trained tokenizer; `data` is what `train_tokenizer` gave. Raises IntegrityError for anything else."""

    def __init__(self, data: bytes) -> None:
        if len(data) > TOKENIZER_BYTES_MAX:
            raise IntegrityError(f"a tokenizer of {len(data)} bytes is larger than the bound of {TOKENIZER_BYTES_MAX}")
        try:
            self._bpe = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            raise IntegrityError(f"not a tokenizer: {error}") from None
        if self._bpe.token_to_id(END) != END_ID:
            raise IntegrityError(f"a tokenizer without `{END}` as token {END_ID}")
        self._bpe.encode_special_tokens = True  # the characters `<|end|>` in a text are text, not the end of it
        self.digest = digest(data)

    @property
    def vocab_size(self) -> int:
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` for each text, in parallel and without the offsets that nobody here needs."""
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ends of documents show as `<|end|>`, halves of characters as U+FFFD."""
        return self._bpe.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for (UTF-8): perhaps half a character. `<|end|>` for the end of a document."""
        letters = str(self._bpe.id_to_token(token))
        return END.encode() if token == END_ID else bytes(_bytes_of_letters()[letter] for letter in letters)

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of text (vocab_size,) that each token stands for; 0 for the end of a document, which is no text.

        Exact, halves of characters included: byte-level BPE writes each byte of a token as one character.
        """
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._bpe.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(token)
        lengths[END_ID] = 0
        return lengths


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones for themselves, the others in
    order from 256 on (as in GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {chr(256 + place): value for place, value in enumerate(others)}


class Pieces:
    """Tokens as text that can be printed at once: half a character waits for its other half."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[int] = []
        self._printed = 0
        """Characters of the waiting tokens that were given already."""

    def add(self, token: int) -> str:
        """What can be printed now that `token` is there."""
        self._waiting.append(token)
        text = self._tokenizer.decode(self._waiting)
        if not text.endswith(HALF_CHARACTER):
            return self.rest()
        # Only the last one may still become another character.
        piece, self._printed = text[self._printed : -1], len(text) - 1
        return piece

    def rest(self) -> str:
        """What is left at the end."""
        piece = self._tokenizer.decode(self._waiting)[self._printed :]
        self._waiting.clear()
        self._printed = 0
        return piece
