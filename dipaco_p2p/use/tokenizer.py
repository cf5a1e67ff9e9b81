"""The tokenizer of a run: byte-level BPE, as the bytes of its JSON file; and tokens as text while they come.

Byte-level means that every text can be encoded and decoded without loss. Id 0 is `<|end|>`, which ends a document.
`TOKENIZERS_PARALLELISM` and `RAYON_NUM_THREADS` are left to the `tokenizers` library, which obeys them.

The file comes from the coordinator, and the library does whatever it says: a normalizer of five stages makes a million
letters of one, and a regular expression of ten characters takes for ever, or ends the process. So it gets only what a
run may have: `train_tokenizer` writes it, or a checkpoint of Llama's kind has it (bootstrap/checkpoint.py).
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from ..canonical import digest
from ..errors import IntegrityError

END = "<|end|>"
END_ID = 0
TOKENIZER_BYTES_MAX = 16 << 20
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = tuple(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}{_REST}"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
"""How Llama 3 and Qwen 2 cut a text to words; ByteLevel knows how GPT-2 does."""
BOOL = (False, True)
_BYTE_LEVEL = {"type": ("ByteLevel",), "add_prefix_space": (False,), "trim_offsets": BOOL, "use_regex": BOOL}
_DECODER = _BYTE_LEVEL | {"add_prefix_space": BOOL}
_DIGITS = {"type": ("Digits",), "individual_digits": BOOL}
_SPLIT = {
    "type": ("Split",),
    "pattern": tuple({"Regex": each} for each in SPLITS),
    "behavior": ("Isolated",),
    "invert": (False,),
}
_MODEL = {
    "type": ("BPE",),
    "dropout": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": BOOL,
    "byte_fallback": (False,),
    "ignore_merges": BOOL,
}
_ABSENT = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"), (None,))
_PARTS = ("version", "added_tokens", "pre_tokenizer", "decoder", "model")
HINT = "it must be byte-level BPE without a normalizer that cuts texts as GPT-2, Llama 3, Qwen 2 or SmolLM do"


class Tokenizer:
    """A trained tokenizer; `data` is what `train_tokenizer` gave. Raises IntegrityError for anything else."""

    def __init__(self, data: bytes) -> None:
        if len(data) > TOKENIZER_BYTES_MAX:
            raise IntegrityError(f"a tokenizer of {len(data)} bytes is larger than the bound of {TOKENIZER_BYTES_MAX}")
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"not a tokenizer: {error}") from None
        _check(found)
        try:
            # Not `data`: of a name that stands there twice the library may take the other one.
            self._bpe = tokenizers.Tokenizer.from_str(json.dumps(found))
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
        letters = self._bpe.id_to_token(token) or ""
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

    @functools.cached_property
    def longest(self) -> int:
        """The bytes of the longest token."""
        return int(self.byte_lengths().max())


def _check(found: Any) -> None:
    """Raise IntegrityError for what a run's tokenizer cannot have."""
    if not isinstance(found, dict):
        raise IntegrityError("not a tokenizer: no JSON object")
    _check_part(found, _ABSENT, "", others=_PARTS)
    pieces = found.get("pre_tokenizer")
    if isinstance(pieces, dict) and pieces.get("type") == "Sequence" and isinstance(pieces.get("pretokenizers"), list):
        *firsts, last = pieces["pretokenizers"] or [None]
        if len(firsts) > 2:
            raise _refusal("pre_tokenizer", pieces)
        for first in firsts:
            _check_part(first, _DIGITS if _type(first) == "Digits" else _SPLIT, "pre_tokenizer")
        _check_part(last, _BYTE_LEVEL, "pre_tokenizer")
    else:
        _check_part(pieces, _BYTE_LEVEL, "pre_tokenizer")
    _check_part(found.get("decoder"), _DECODER, "decoder")
    model: Any = found.get("model")
    _check_part(model, _MODEL, "model", others=("unk_token", "vocab", "merges"))
    _check_words(model.get("vocab"), found.get("added_tokens"))


def _check_part(part: Any, allowed: Mapping[str, tuple[Any, ...]], name: str, *, others: Sequence[str] = ()) -> None:
    """Each value is one of those that are allowed under its name; one that is not there is the library's to add."""
    if not isinstance(part, dict) or ("type" in allowed and "type" not in part):
        raise _refusal(name, part)
    for key, value in part.items():
        if key not in others and not any(type(value) is type(each) and value == each for each in allowed.get(key, ())):
            raise _refusal(f"{name}.{key}".lstrip("."), value)


def _check_words(vocab: Any, added: Any) -> None:
    """Tokens are bytes, numbered without a gap, and those beside the model's are among them."""
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        raise _refusal("model.vocab", vocab)
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise _refusal("model.vocab", "numbers with gaps")
    if odd := set("".join(vocab)).difference(_bytes_of_letters()):
        raise _refusal("model.vocab", min(odd))
    for one in added if isinstance(added, list) else [added]:
        content = one.get("content") if isinstance(one, dict) else None
        if not isinstance(content, str) or not content or vocab.get(content) != one.get("id"):
            raise _refusal("added_tokens", one)


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _refusal(what: str, value: object) -> IntegrityError:
    return IntegrityError(f"a tokenizer with `{what}` = {json.dumps(value)[:80]}, which no run has", hint=HINT)


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
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """What can be printed now that `token` is there."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def rest(self) -> str:
        """What is left at the end."""
        return self._decoder.decode(b"", final=True)
