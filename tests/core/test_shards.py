"""Cutting, splitting, batches and the bytes of shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.core.model.shards import Shard, batch, cut, decode_shard, encode_shard, split_by_document
from dipaco_p2p.core.tensor_file import encode
from dipaco_p2p.errors import IntegrityError


def numbered(count: int, context: int = 4) -> Shard:
    return Shard(tokens=np.repeat(np.arange(count, dtype=np.int32)[:, None], context, axis=1))


@pytest.mark.parametrize(
    ("length", "starts"),
    [(0, []), (9, []), (10, [0]), (14, [0]), (15, [0, 5]), (19, [0, 9]), (20, [0, 10]), (36, [0, 10, 20, 26])],
)
def test_a_document_is_cut_into_full_sequences_the_last_from_its_end(length, starts):
    pieces = cut(np.arange(length), context=10)
    assert pieces.dtype == np.int32 and pieces.shape == (len(starts), 10)
    assert pieces[:, 0].tolist() == starts
    assert all((np.diff(piece) == 1).all() for piece in pieces)


def test_an_epoch_has_every_sequence_once_and_epochs_differ():
    shard = numbered(12)
    epochs = [
        [row for step in steps for row in batch(shard, seed=1, step=step, size=4)[:, 0].tolist()]
        for steps in (range(3), range(3, 6))
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_seed_and_step_only():
    shard = numbered(50)
    late = batch(shard, seed=1, step=900, size=8)
    assert late.dtype.is_floating_point is False and late.shape == (8, 4)
    batch(shard, seed=2, step=3, size=8)
    assert batch(shard, seed=1, step=900, size=8).tolist() == late.tolist()
    assert batch(shard, seed=2, step=900, size=8).tolist() != late.tolist()


def test_batches_of_any_size_read_the_same_stream():
    shard = numbered(7)
    by_two = [row for step in range(30) for row in batch(shard, seed=4, step=step, size=2)[:, 0].tolist()]
    by_five = [row for step in range(12) for row in batch(shard, seed=4, step=step, size=5)[:, 0].tolist()]
    assert by_two == by_five


def test_a_shard_smaller_than_a_batch_wraps_around():
    assert sorted(batch(numbered(3), seed=0, step=0, size=7)[:6, 0].tolist()) == [0, 0, 1, 1, 2, 2]
    assert batch(numbered(1), seed=0, step=5, size=3)[:, 0].tolist() == [0, 0, 0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(count=st.integers(0, 200), seed=st.integers(0, 99), validation=st.floats(0, 0.5), router=st.floats(0, 0.49))
def test_parts_are_disjoint_complete_and_not_empty(count, seed, validation, router):
    parts = split_by_document(count, seed=seed, validation=validation, router=router)
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    if count >= 3:
        assert all(len(part) for part in parts)


def test_parts_have_the_shares_asked_for_and_depend_on_the_seed():
    parts = split_by_document(1000, seed=0, validation=0.06, router=0.04)
    assert (len(parts.train), len(parts.validation), len(parts.router)) == (900, 60, 40)
    again = split_by_document(1000, seed=0, validation=0.06, router=0.04)
    other = split_by_document(1000, seed=1, validation=0.06, router=0.04)
    assert parts.validation.tolist() == again.validation.tolist() != other.validation.tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sequences=st.integers(1, 30), count=st.integers(1, 9))
def test_replicas_train_disjoint_parts_of_all_of_a_shard(sequences, count):
    parts = [numbered(sequences).part(index, count).tokens[:, 0].tolist() for index in range(count)]
    if sequences >= count:
        assert sorted(row for part in parts for row in part) == list(range(sequences))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert all(sorted(part) == list(range(sequences)) for part in parts)


def test_one_alone_trains_the_whole_shard_and_too_many_draw_other_batches():
    assert numbered(7).part(0, 1).tokens.tolist() == numbered(7).tokens.tolist()
    first, second = (batch(numbered(3).part(index, 4), seed=0, step=0, size=2).tolist() for index in (0, 1))
    assert first != second


def test_a_shard_survives_its_bytes():
    shard = numbered(9)
    again = decode_shard(encode_shard(shard), vocab_size=9, context=4)
    assert again.tokens.tolist() == shard.tokens.tolist() and again.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"tokens": np.array([[0, 1, 2, 9]], np.int32)}, "the vocabulary has 9"),
        ({"tokens": np.array([[0, -1, 2, 3]], np.int32)}, "from -1"),
        ({"tokens": np.zeros((2, 5), np.int32)}, "expected int32"),
        ({"tokens": np.zeros(4, np.int32)}, "expected int32"),
        ({"tokens": np.zeros((0, 4), np.int32)}, "expected int32"),
        ({"tokens": np.zeros((2, 4), np.int64)}, "expected int32"),
        ({"words": np.zeros((2, 4), np.int32)}, "exactly `tokens`"),
        ({"tokens": np.zeros((2, 4), np.int32), "more": np.zeros(1, np.int32)}, "exactly `tokens`"),
    ],
)
def test_a_malformed_shard_is_refused(tensors, message):
    with pytest.raises(IntegrityError, match=message):
        decode_shard(encode(tensors), vocab_size=9, context=4)
