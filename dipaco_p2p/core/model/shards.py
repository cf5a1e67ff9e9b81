"""From tokens to sequences, shards and batches; and the sequences that are held out of them.

Rule 1: a sequence is `context` tokens without padding, and each is routed as a document of its own.
Rule 2: a batch is a function of (shard, seed, step), so a path goes on anywhere as if it had never stopped.
Rule 3: what is held out is never trained on: it is for figures (validation), early stopping (holdout), and routers
(router split). It knows its documents, since these are independent and the sequences of one document are not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...errors import IntegrityError
from ..arrays import Array
from ..tensor_file import decode, encode

Tokens = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The sequences of one path: tokens (n, context) int32."""

    tokens: Tokens

    def part(self, index: int, count: int) -> Shard:
        """What the replica of this `index` trains, of `count`: every count-th sequence, disjoint and never empty.

        With fewer sequences than replicas all of them, begun at another place, so that batches differ.
        """
        assert 0 <= index < count, (index, count)
        if len(self.tokens) < count:
            return Shard(tokens=np.roll(self.tokens, -index, axis=0))
        return Shard(tokens=self.tokens[index::count])


class Split(NamedTuple):
    """Indices of documents, disjoint and sorted."""

    train: Indices
    validation: Indices
    router: Indices


def cut(tokens: Array, *, context: int) -> Tokens:
    """The sequences (n, context) of one document; none if it is shorter than `context`.

    A rest of at least half a context is kept too, by a last sequence that overlaps the one before.
    """
    assert context > 0 and tokens.ndim == 1, (context, tokens.shape)
    count, rest = divmod(len(tokens), context)
    starts = [number * context for number in range(count)]
    if count and 2 * rest >= context:
        starts.append(len(tokens) - context)
    rows = [tokens[start : start + context] for start in starts]
    return np.array(rows, dtype=np.int32).reshape(-1, context)


def split_by_document(count: int, *, seed: int, validation: float, router: float) -> Split:
    """Shares `validation` and `router` of `count` documents, drawn at random; train gets the rest.

    Each part has at least one document when there are three.
    """
    assert 0 <= validation and 0 <= router and validation + router < 1, (validation, router)
    order = np.random.default_rng(seed).permutation(count)
    least = 1 if count >= 3 else 0
    most = max(count - 2 * least, 0)
    validation_count = min(max(round(count * validation), least), most)
    router_count = min(max(round(count * router), least), count - least - validation_count)
    parts = np.split(order, [validation_count, validation_count + router_count])
    return Split(train=np.sort(parts[2]), validation=np.sort(parts[0]), router=np.sort(parts[1]))


def batch(shard: Shard, *, seed: int, step: int, size: int) -> torch.Tensor:
    """Sequences (size, context) int64 of `step`: places step * size and on of an endless stream of shuffled epochs."""
    count = len(shard.tokens)
    assert count and step >= 0, (count, step)
    rows = []
    for place in range(step * size, (step + 1) * size):
        epoch, within = divmod(place, count)
        rows.append(_permutation(seed, epoch, count)[within])
    return torch.from_numpy(shard.tokens[rows].astype(np.int64))


def encode_shard(shard: Shard) -> bytes:
    """The bytes of a shard."""
    return encode({"tokens": shard.tokens})


def decode_shard(data: bytes, *, vocab_size: int, context: int) -> Shard:
    """The inverse; raises IntegrityError unless it is sequences of `context` ids below `vocab_size`, at least one."""
    tensors, _ = decode(data)
    tokens = tensors.get("tokens")
    if tokens is None or len(tensors) != 1:
        raise IntegrityError("a shard must hold exactly `tokens`")
    check_tokens(tokens, vocab_size=vocab_size, context=context)
    return Shard(tokens=tokens)


def check_tokens(tokens: Array, *, vocab_size: int, context: int) -> None:
    """Raise IntegrityError unless `tokens` is at least one sequence of `context` ids below `vocab_size`."""
    if tokens.dtype != np.int32 or tokens.ndim != 2 or tokens.shape[1] != context or not len(tokens):
        raise IntegrityError(
            f"shard tokens are {tokens.dtype} of shape {tokens.shape}, expected int32 of (n, {context})"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise IntegrityError(f"shard tokens from {tokens.min()} to {tokens.max()}, the vocabulary has {vocab_size}")


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, count: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(count)


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
