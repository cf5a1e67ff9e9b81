"""Sequences that are never trained on: for figures (validation), early stopping (holdout), and routers (router split).

Each knows its document, since documents are independent and the sequences of one document are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import IntegrityError
from .codec import decode, encode
from .shards import Tokens, check_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOut:
    """Sequences (n, context) int32 and the number of each one's document (n,) int32."""

    tokens: Tokens
    documents: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)


def encode_held_out(part: HeldOut) -> bytes:
    """The bytes of a held-out part."""
    return encode({"tokens": part.tokens, "documents": part.documents})


def decode_held_out(data: bytes, *, vocab_size: int, context: int) -> HeldOut:
    """The inverse; raises IntegrityError for what is not sequences of `context` ids below `vocab_size`."""
    tensors, _ = decode(data)
    if tensors.keys() != {"tokens", "documents"}:
        raise IntegrityError("a held-out part must hold exactly `tokens` and `documents`")
    tokens, documents = tensors["tokens"], tensors["documents"]
    check_tokens(tokens, vocab_size=vocab_size, context=context)
    if documents.dtype != np.int32 or documents.shape != (len(tokens),):
        raise IntegrityError(f"documents of shape {documents.shape} for {len(tokens)} sequences")
    return HeldOut(tokens=tokens, documents=documents)
