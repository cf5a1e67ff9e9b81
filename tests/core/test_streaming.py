"""Averaging what is read one contribution at a time: the same bytes as with all at hand, and bounded memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dipaco_p2p.core.arrays import CHUNK, tree_norm
from dipaco_p2p.core.outer.blocks import BLOCK, PART, Blocks
from dipaco_p2p.core.outer.compress import (
    CODECS,
    INT8,
    Compressed,
    compress,
    decode_compressed,
    encode_compressed,
)
from dipaco_p2p.core.outer.outer_step import average

SIZE = 2 * PART + 3 * BLOCK + 77
"""Of several parts, the last of them not whole, nor its last block."""
RULES = ("mean", "sqrt", "rda")


def values(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def several(codec: str, count: int = 4, size: int = SIZE) -> list[Compressed]:
    return [compress(values(seed, size) * np.float32(seed + 1), codec=codec)[0] for seed in range(count)]


def whole(compressed: Compressed) -> np.ndarray:
    """What `expand` says, as one expression over the whole vector."""
    if isinstance(compressed, Blocks):
        return compressed.codes.astype(np.float32) * np.repeat(compressed.scales, BLOCK)[: compressed.size]
    return compressed.expand()


def plain_average(
    contributions: Sequence[Compressed], alphas: Sequence[float], *, rule: str, clip_norm: float | None
) -> np.ndarray:
    """The rules once more, with every contribution as a vector of floats."""
    norms = [one.norm() for one in contributions]
    capped = [min(value, clip_norm or math.inf) for value in norms]
    if rule == "rda":
        factors = [alpha / math.fsum(alphas) / value for alpha, value in zip(alphas, norms, strict=True)]
    else:
        root = math.sqrt(1 / math.fsum(alpha**2 for alpha in alphas)) if rule == "sqrt" else 1.0
        factors = [a * root * (c / n if c < n else 1.0) for a, n, c in zip(alphas, norms, capped, strict=True)]
    total = np.zeros(contributions[0].size, dtype=np.float32)
    for one, factor in zip(contributions, factors, strict=True):
        total = total + whole(one) * np.float32(factor)
    if rule == "rda":
        mean_norm = math.fsum(alpha * cap for alpha, cap in zip(alphas, capped, strict=True)) / math.fsum(alphas)
        total = total * np.float32(mean_norm / tree_norm(total))
    return total


class Watched:
    """A contribution that tells how many of its kind are alive."""

    def __init__(self, shelf: Shelf, inner: Compressed) -> None:
        self._shelf, self._inner, self.size = shelf, inner, inner.size
        shelf.alive += 1
        shelf.most_alive = max(shelf.most_alive, shelf.alive)

    def __del__(self) -> None:
        self._shelf.alive -= 1

    def norm(self) -> float:
        return self._inner.norm()

    def add_to(self, total: np.ndarray, factor: float) -> None:
        self._inner.add_to(total, factor)


class Shelf:
    """Contributions that are made when they are asked for."""

    def __init__(self, contributions: Sequence[Compressed]) -> None:
        self._contributions = contributions
        self.alive = self.most_alive = 0
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self._contributions)

    def __getitem__(self, place: int) -> Watched:
        self.asked.append(place)
        return Watched(self, self._contributions[place])


ALPHAS = (0.4, 0.3, 0.2, 0.1)


@pytest.mark.parametrize("clip", [None, 600.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("codec", CODECS)
def test_it_gives_the_bytes_of_whole_vectors_with_one_contribution_alive(
    codec: str, rule: str, clip: float | None
) -> None:
    contributions = several(codec)
    lengths = [one.norm() for one in contributions]
    assert clip is None or min(lengths) < clip < max(lengths) or codec.startswith("top")
    wanted = plain_average(contributions, ALPHAS, rule=rule, clip_norm=clip)
    for norms in (None, lengths):
        shelf = Shelf(contributions)
        found = average(shelf, ALPHAS, rule=rule, clip_norms=clip and [clip] * len(ALPHAS), norms=norms)
        assert found.tobytes() == wanted.tobytes()
        assert shelf.most_alive == 1 and shelf.alive == 0
        passes = 2 if rule == "rda" and norms is None else 1
        assert shelf.asked == [*range(len(contributions))] * passes


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that `work` had at once."""
    tracemalloc.start()
    try:
        result = work()
        assert result is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("codec", CODECS)
def test_it_takes_less_than_two_modules_of_memory_whatever_the_number(codec: str, rule: str) -> None:
    size = 16 * PART
    payloads = [encode_compressed(one) for one in several(codec, count=8, size=size)]

    class OnDisk:
        def __init__(self, count: int) -> None:
            self._count = count

        def __len__(self) -> int:
            return self._count

        def __getitem__(self, place: int) -> Compressed:
            return decode_compressed(bytes(bytearray(payloads[place])), size=size, codec=codec)

    peaks = [
        peak_bytes(lambda count=count: average(OnDisk(count), [1 / count] * count, rule=rule, clip_norms=[1.0] * count))  # type: ignore[misc]
        for count in (2, 8)
    ]
    assert max(peaks) < 2.1 * 4 * size
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


@pytest.mark.parametrize("factor", [-1.0, 0.1, 1e-3])
@pytest.mark.parametrize("codec", CODECS)
def test_adding_in_parts_gives_the_bytes_of_adding_whole_vectors(codec: str, factor: float) -> None:
    compressed, total = compress(values(1), codec=codec)[0], values(2)
    wanted = total + whole(compressed) * np.float32(factor)
    compressed.add_to(total, factor)
    assert total.tobytes() == wanted.tobytes()
    assert compressed.expand().tobytes() == whole(compressed).tobytes()


def test_a_vector_of_several_parts_is_quantised_block_by_block() -> None:
    vector = values(3)
    compressed, residual = compress(vector, codec=INT8)
    assert isinstance(compressed, Blocks)
    assert residual.tobytes() == (vector - whole(compressed)).tobytes()
    for begin in (0, PART - BLOCK, PART, SIZE - 77):
        block = vector[begin : begin + BLOCK]
        scale = np.abs(block).max() / np.float32(127)
        assert compressed.scales[begin // BLOCK] == scale
        assert (compressed.codes[begin : begin + BLOCK] == np.rint(block / scale)).all()


def test_the_norm_of_several_parts_is_exact() -> None:
    compressed = compress(values(4), codec=INT8)[0]
    assert isinstance(compressed, Blocks)
    squares = [int(code) ** 2 for code in compressed.codes]
    sums = [sum(squares[begin : begin + BLOCK]) for begin in range(0, SIZE, BLOCK)]
    scales = compressed.scales.tolist()
    assert compressed.norm() == math.sqrt(math.fsum(s * (x * x) for s, x in zip(sums, scales, strict=True)))


@pytest.mark.parametrize("size", [CHUNK, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK + 3])
def test_the_first_level_of_the_tree_may_be_added_in_chunks(size: int) -> None:
    vector = values(5, size)
    squares = vector.astype(np.float64) ** 2
    while squares.size > 1:
        half = (squares.size + 1) // 2
        squares[: squares.size - half] += squares[half:].copy()
        squares = squares[:half]
    assert tree_norm(vector) == math.sqrt(squares[0])


@pytest.mark.parametrize("codec", CODECS)
def test_the_residual_may_take_the_memory_of_the_values(codec: str) -> None:
    vector, owed = values(6), values(7)
    compressed, residual = compress(vector, owed, codec=codec)
    spent = vector.copy()
    again, left = compress(spent, owed, codec=codec, out=spent)
    assert left is spent and left.tobytes() == residual.tobytes() == (vector + owed - whole(compressed)).tobytes()
    assert encode_compressed(again) == encode_compressed(compressed)
    assert owed.tobytes() == values(7).tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_left_of_zeros_keeps_their_sign(codec: str) -> None:
    """For a residual is hashed: minus zero less nothing is minus zero."""
    vector = values(8)
    vector[::3] = -0.0
    compressed, residual = compress(vector, codec=codec)
    wanted = vector + whole(compressed) * np.float32(-1)
    assert residual.tobytes() == wanted.tobytes()
    assert codec == "int2" or np.signbit(residual[residual == 0]).any(), "two bits have no zero"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, PART - 1, SIZE - 1])
def test_no_value_that_is_not_finite_is_overlooked(value: float, place: int) -> None:
    vector = values(9)
    vector[place] = value
    with pytest.raises(ValueError, match="not finite"):
        compress(vector, codec=INT8)


def test_values_too_small_for_a_scale_are_left_whole() -> None:
    vector = np.full(2 * BLOCK, 1e-39, dtype=np.float32)
    vector[BLOCK:] = 1.0
    compressed, residual = compress(vector, codec=INT8)
    assert isinstance(compressed, Blocks) and (compressed.codes[:BLOCK] == 0).all() and compressed.scales[0] == 0
    assert residual.tobytes() == (vector - whole(compressed)).tobytes() and (residual[:BLOCK] == vector[:BLOCK]).all()
