"""The tokenizer of a run: byte-level BPE, trained on the run's own corpus, passed on as the bytes of its JSON file.

Byte-level means that every text can be encoded and decoded without loss. Id 0 is `<|end|>`, which ends a document.
Training the same texts in the same order gives the same bytes. `TOKENIZERS_PARALLELISM` and `RAYON_NUM_THREADS`
are left to the `tokenizers` library, which obeys them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import CorpusError, IntegrityError

from .samples import Document

END = "<|end|>"
END_ID = 0
TOKENIZER_BYTES_MAX = 16 << 20
TOKEN_CHARS_MAX = 32
"""No token is a whole ruler of dashes: it would waste a place in the vocabulary."""


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, on_progress: Callable[[int], None] = lambda done: None
) -> bytes:
    """Train on all `texts`; `on_progress` hears how many bytes (UTF-8) have been read so far.

    Raises CorpusError if the texts hold too few repeated pairs for `vocab_size` tokens.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=TOKEN_CHARS_MAX,
        show_progress=False,
    )
    bytes_read = 0

    def counted() -> Iterator[str]:
        nonlocal bytes_read
        for text in texts:
            yield text
            bytes_read += len(text.encode())
            on_progress(bytes_read)

    bpe.train_from_iterator(counted(), trainer)
    if bpe.get_vocab_size() != vocab_size:
        reached = f"{bytes_read} bytes of text give {bpe.get_vocab_size()} tokens, not {vocab_size}"
        raise CorpusError(
            f"the corpus is too small for its vocabulary: {reached}", hint="add text, or lower `vocab_size`"
        )
    return bpe.to_str().encode()


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

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of text (vocab_size,) that each token stands for; 0 for the end of a document, which is no text.

        Exact, halves of characters included: byte-level BPE writes each byte of a token as one character.
        """
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._bpe.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(token)
        lengths[END_ID] = 0
        return lengths


BATCH_DOCUMENTS = 64
"""Documents handed to the tokenizer at once: enough to keep its threads busy, few enough to show progress."""


def tokenise(
    documents: Sequence[Document], tokenizer: Tokenizer, *, on_progress: Callable[[int], None] = lambda done: None
) -> list[NDArray[np.int32]]:
    """The tokens of each document, each ended by `<|end|>`, in the same order.

    Cutting them to sequences is the work of core/model/shards.py. `on_progress` hears how many documents are done.
    """
    arrays: list[NDArray[np.int32]] = []
    for start in range(0, len(documents), BATCH_DOCUMENTS):
        texts = [document.text for document in documents[start : start + BATCH_DOCUMENTS]]
        arrays.extend(np.array([*ids, END_ID], dtype=np.int32) for ids in tokenizer.encode_batch(texts))
        on_progress(len(arrays))
    return arrays
