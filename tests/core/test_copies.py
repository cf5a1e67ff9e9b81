"""Copies of outer gradients: which are found, what counts of them, and what stays bounded."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.core.outer import copies
from dipaco_p2p.core.outer.blocks import BLOCK
from dipaco_p2p.core.outer.codec import Compressed
from dipaco_p2p.core.outer.compress import CODECS, compress, decode_compressed, encode_compressed
from dipaco_p2p.core.outer.copies import ALIKE, alike, counted
from dipaco_p2p.core.outer.sparse import CHUNK
from dipaco_p2p.core.outer.two_bits import WIDTH

SIZE = 3 * CHUNK + 777


def vector(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def at(cosine: float, seed: int = 0, other: int = 1) -> np.ndarray:
    """A vector with this cosine to `vector(seed)`."""
    one, more = vector(seed), vector(other)
    more -= one * np.float32(np.dot(one, more) / np.dot(one, one))
    more *= np.float32(np.linalg.norm(one) / np.linalg.norm(more))
    return np.float32(cosine) * one + np.float32(math.sqrt(1 - cosine**2)) * more


def packed(values: np.ndarray, codec: str) -> Compressed:
    """As it comes out of a payload."""
    data = encode_compressed(compress(values.astype(np.float32), codec=codec)[0])
    return decode_compressed(data, size=values.size, codec=codec)


def found(*gradients: Compressed, lot: int = 0) -> list[list[int]]:
    return alike([partial(lambda one: one, each) for each in gradients], size=gradients[0].size, lot=lot)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(size=st.integers(1, 9000), seed=st.integers(0, 2**32), power=st.integers(-20, 15))
def test_the_scalar_product_is_that_of_the_values(codec: str, size: int, seed: int, power: int) -> None:
    one, other = packed(vector(seed, size) * 10.0**power, codec), packed(vector(seed + 1, size) + 0.3, codec)
    products = [a * b for a, b in zip(one.expand().tolist(), other.expand().tolist(), strict=True)]
    scale = math.fsum(map(abs, products))
    # Values of blocks are rounded to float32 when they are expanded; scalar products are not.
    assert one.dot(other) == other.dot(one) == pytest.approx(math.fsum(products), abs=3e-7 * scale)
    assert one.dot(one) == pytest.approx(one.norm() ** 2, rel=1e-14)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [1.0, 1.0001, 0.01, 3.0])
def test_a_copy_is_found_whatever_its_length_and_with_a_little_noise(codec: str, length: float) -> None:
    """The copier has nothing but the payload."""
    original = packed(vector(0), codec)
    copy = packed((original.expand() + np.float32(0.02) * vector(5)) * length, codec)
    assert found(original, packed(vector(1), codec), copy) == [[0, 2], [1], [2, 0]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cosine", [0.0, 0.29, 0.85, 0.988, -1.0])
def test_replicas_that_trained_other_text_are_different_work(codec: str, cosine: float) -> None:
    assert found(packed(vector(0), codec), packed(at(cosine), codec)) == [[0], [1]]


def test_the_bound_is_a_cosine_of_the_whole_vector() -> None:
    assert found(packed(vector(0), "int8"), packed(at(0.9985), "int8")) == [[0], [1]]
    assert found(packed(vector(0), "int8"), packed(at(0.9993), "int8")) == [[0, 1], [1, 0]]


def test_every_codec_has_a_bound() -> None:
    assert ALIKE.keys() == CODECS.keys()


@pytest.mark.parametrize("codec", CODECS)
def test_a_gradient_of_zeros_is_like_nothing(codec: str) -> None:
    nothing = packed(np.zeros(SIZE), codec)
    assert found(nothing, packed(vector(0), codec), nothing) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("amounts", "near", "expected"),
    [
        ([300], [[0]], [300]),
        ([300, 300], [[0], [1]], [300, 300]),
        ([300, 300], [[0, 1], [1, 0]], [150, 150]),
        ([300, 300, 300, 300], [[0, 1, 2], [1, 0, 2], [2, 0, 1], [3]], [100, 100, 100, 300]),
        ([300, 100], [[0, 1], [1, 0]], [225, 75]),
        ([300, 75], [[0, 1], [1, 0]], [240, 60]),
        # Two honest ones, and one between them that is near to both: the copier makes neither a copy of the other.
        ([300, 300, 300], [[0, 1], [1, 0, 2], [2, 1]], [100, 100, 100]),
        # Further away it takes from the one that it is near to.
        ([300, 300, 300], [[0, 1], [1, 0], [2]], [150, 150, 300]),
        # Many noisy copies of one that are not near to each other count as one all the same.
        ([300] * 4, [[0, 1, 2, 3], [1, 0], [2, 0], [3, 0]], [75] * 4),
    ],
)
def test_what_counts_of_copies(amounts: list[float], near: list[list[int]], expected: list[float]) -> None:
    assert counted(amounts, near) == pytest.approx(expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=8),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20),
)
def test_around_each_no_more_counts_than_the_greatest_and_who_has_no_copies_loses_nothing(
    amounts: list[int], pairs: set[tuple[int, int]]
) -> None:
    near = [[place] for place in range(len(amounts))]
    for one, other in pairs:
        if one < other < len(amounts):
            near[one].append(other)
            near[other].append(one)
    left = counted(amounts, near)
    for place, places in enumerate(near):
        assert math.fsum(left[each] for each in places) <= max(amounts[each] for each in places) * (1 + 1e-12)
        assert 0 < left[place] <= amounts[place]
        assert len(places) > 1 or left[place] == amounts[place], "to the bit"


@pytest.mark.parametrize("codec", CODECS)
def test_of_a_crowd_a_part_is_compared_which_the_lot_chooses(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "VALUES_MAX", 4 * CHUNK)
    size, kept = 16 * CHUNK, list[Compressed]()
    honest = [packed(vector(seed, size), codec) for seed in range(4)]
    parrots = [packed(vector(2, size) * 1.0001, codec) for _ in range(4)]
    thinned = type(honest[0]).thinned

    def note(one: Compressed, every: int, first: int) -> Compressed:
        kept.append(thinned(one, every, first))
        assert first < every
        return kept[-1]

    monkeypatch.setattr(type(honest[0]), "thinned", note)
    parts = []
    for lot in (0, 1, 10**70 + 7):
        near = found(*honest, *parrots, lot=lot)
        assert [sorted(places) for places in near] == [[0], [1], [2, 4, 5, 6, 7], [3], *[[2, 4, 5, 6, 7]] * 4]
        values = sum(np.count_nonzero(each.expand()) for each in kept)
        assert 0 < values <= copies.VALUES_MAX, "in memory at once"
        parts.append(kept[0].expand().tobytes())
        kept.clear()
    assert len(set(parts)) == 3


def test_every_block_is_in_one_part() -> None:
    whole = packed(vector(0, 10 * BLOCK + 7), "int4")
    parts = [whole.thinned(3, first) for first in range(3)]
    assert math.fsum(part.norm() ** 2 for part in parts) == pytest.approx(whole.norm() ** 2, rel=1e-12)


@pytest.mark.parametrize("size", [WIDTH, 3 * WIDTH, 10 * WIDTH + 7, 2 * WIDTH + 1])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_block_of_two_bits_is_in_one_part_and_none_is_filled_up(size: int, every: int) -> None:
    whole = packed(vector(0, size), "int2")
    parts = [whole.thinned(every, first) for first in range(every)]
    assert sum(part.size for part in parts) == size
    assert math.fsum(part.norm() ** 2 for part in parts) == pytest.approx(whole.norm() ** 2, rel=1e-12)
    found = np.concatenate([part.expand() for part in parts])
    assert np.array_equal(np.sort(found), np.sort(whole.expand()))


def test_every_chunk_is_in_one_part() -> None:
    whole = packed(vector(0), "top128")
    values = sum(whole.thinned(3, first).expand() for first in range(3))
    assert np.asarray(values).tobytes() == whole.expand().tobytes()
