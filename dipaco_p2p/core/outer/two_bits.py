"""Two bits for every value: its sign, and which of two magnitudes its block of 512 values has.

The magnitudes are centroids: the mean of the values below a bound, and the mean of those above it, where the bound is
halfway between both (Lloyd, 1982, two steps from the bound that suits a normal distribution). A scale that follows the
largest value, as four bits have it, would leave most values of two bits at the smallest code.

Owners must make the same bytes of an update, so means are made of whole numbers: each magnitude is first rounded to a
127th of the block's largest, and sums of these are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ...errors import IntegrityError
from ..arrays import Array, Floats, spans, spread
from .codec import SCALE_MIN, Codec, Compressed, Dense, check_range, check_scales, take

INT2 = "int2"
WIDTH = 512
"""Values of a block."""
PART = 64 * WIDTH
"""Values that are worked on at a time: 128 KiB as float32, and twice that to look them up by their codes."""
SPAN = 8 * PART
"""Values that one core works on at a time."""
LEVELS = 2
FINEST = 127
"""Whole numbers that magnitudes are rounded to before their means are made."""
FIRST_BOUND = 0.9957
"""Of a normal distribution's deviation: between the two magnitudes of the best four levels (Max, 1960)."""
LLOYD_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoBits(Dense):
    """`size` values as codes (N,) of sign and magnitude, and float32 magnitudes (blocks, 2), the smaller one first."""

    size: int
    codes: npt.NDArray[np.uint8]
    """0 and 1: plus the smaller and the greater magnitude of the block; 2 and 3: minus them."""
    scales: Floats

    @property
    def codec(self) -> str:
        return INT2

    def norm(self) -> float:
        counts = np.full(len(self.scales), WIDTH, dtype=np.int64)
        counts[-1:] -= -self.size % WIDTH
        greater = np.count_nonzero(_in_rows(self.codes & 1), axis=1)
        counts = np.stack([counts - greater, greater], axis=1).ravel()
        return norm_of(counts, self.scales)

    def dot(self, other: TwoBits) -> float:
        """Of each block and each pair of magnitudes the number of equal signs less that of others is a whole number,
        and so small that it is exact; as float64 a product of two magnitudes is exact as well."""
        terms: list[float] = []
        for part in spans(0, self.size, PART):
            ours, theirs = self._signs(part), other._signs(part)
            blocks = _blocks_of(part)
            for level, theirs_level in ((one, two) for one in range(LEVELS) for two in range(LEVELS)):
                counts = np.einsum("ij,ij->i", ours[level], theirs[theirs_level]).astype(np.float64)
                scales = self.scales[blocks, level].astype(np.float64) * other.scales[blocks, theirs_level]
                terms += (counts * scales).tolist()
        return math.fsum(terms)

    def _signs(self, part: slice) -> list[Floats]:
        """For each magnitude the signs (blocks, WIDTH) of the values that have it; 0 for others."""
        codes = self.codes[part]
        signs = (1 - (codes & LEVELS).view(np.int8)).astype(np.float32)
        greater = signs * (codes & 1)
        return [_in_rows(signs - greater), _in_rows(greater)]

    def thinned(self, every: int, first: int) -> TwoBits:
        rows, missing = _in_rows(self.codes), -self.size % WIDTH
        has_last = len(rows) > first and (len(rows) - 1 - first) % every == 0
        codes = rows[first::every].reshape(-1)
        codes = codes[: codes.size - missing] if has_last else codes
        return TwoBits(size=codes.size, codes=codes.copy(), scales=self.scales[first::every].copy())

    def tensors(self) -> dict[str, Array]:
        return {"codes": pack_codes(self.codes), "scales": self.scales.ravel()}

    def each_part(self, take: Callable[[slice, Floats], object]) -> None:
        def expand(span: slice) -> None:
            for part in spans(span.start, span.stop, PART):
                take(part, self._values(part))

        spread(expand, spans(0, self.size, SPAN))

    def _values(self, part: slice) -> Floats:
        codes, scales = self.codes[part], self.scales[_blocks_of(part)]
        values = np.concatenate([scales, -scales], axis=1)  # of each block what its four codes stand for
        places = _in_rows(codes) + np.arange(0, values.size, 2 * LEVELS)[:, None]
        found: Floats = values.take(places.reshape(-1)[: codes.size])
        return found


class QuarterBytes(Codec):
    """Four values to a byte. An eighth of what a path did waits, so it goes on from where it was: that costs a run of
    60 rounds 0.2 % of perplexity, and rounds that begin at the version cost it 1.5 % (docs/performance.md)."""

    goes_on: ClassVar[bool] = True
    name = INT2
    metadata = {"codec": INT2, "block": str(WIDTH)}

    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        codes = np.empty(size, dtype=np.uint8)
        scales = np.empty((-(-size // WIDTH), LEVELS), dtype=np.float32)

        def make(span: slice) -> None:
            for part in spans(span.start, span.stop, PART):
                blocks = _blocks_of(part)
                codes[part], scales[blocks] = _quantise(bring(part))
                told(part, TwoBits(size=part.stop - part.start, codes=codes[part], scales=scales[blocks]))

        spread(make, spans(0, size, SPAN))
        return TwoBits(size=size, codes=codes, scales=scales)

    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        codes = unpack_codes(take(tensors, "codes", np.dtype(np.uint8), -(-size // 4)), size)
        return TwoBits(size=size, codes=codes, scales=take_magnitudes(tensors, -(-size // WIDTH)))

    def tensor_bytes(self, size: int) -> int:
        return -(-size // 4) + 4 * LEVELS * -(-size // WIDTH)


def _quantise(values: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Codes (N,) and magnitudes (blocks, 2) of one part. Raises ValueError for values that are not finite or too large
    to scale."""
    rows = np.abs(_in_rows(values))
    largest = rows.max(axis=1, initial=0)
    if not np.isfinite(largest).all():
        raise ValueError("values that are not finite cannot be compressed")
    check_range(largest)
    counts = np.full(len(rows), WIDTH, dtype=np.float64)
    counts[-1:] -= -values.size % WIDTH
    is_tiny = largest < FINEST * SCALE_MIN
    rows /= np.where(is_tiny, np.float32(1), largest / np.float32(FINEST))[:, None]
    np.rint(rows, out=rows)
    squares = np.einsum("ij,ij->i", rows, rows).astype(np.float64)  # exact, as all that follows: below 2^24
    sums = rows.sum(axis=1).astype(np.float64)
    bound = FIRST_BOUND * np.sqrt(squares / counts)
    for _ in range(LLOYD_STEPS):
        is_high = rows > np.floor(bound)[:, None].astype(np.float32)
        high_counts = np.count_nonzero(is_high, axis=1).astype(np.float64)
        high_sums = np.einsum("ij,ij->i", rows, is_high.astype(np.float32)).astype(np.float64)
        high = high_sums / np.maximum(high_counts, 1)
        low_counts = counts - high_counts
        low = np.where(low_counts > 0, (sums - high_sums) / np.maximum(low_counts, 1), high)
        bound = np.where(low_counts > 0, (low + high) / 2, bound)
    scales = (np.stack([low, high], axis=1) * (largest.astype(np.float64) / FINEST)[:, None]).astype(np.float32)
    scales[(scales < SCALE_MIN) | is_tiny[:, None]] = 0
    codes = is_high.reshape(-1)[: values.size] + np.uint8(LEVELS) * (values < 0)
    return codes.astype(np.uint8), scales


def _blocks_of(part: slice) -> slice:
    return slice(part.start // WIDTH, -(-part.stop // WIDTH))


def _in_rows(values: Array) -> Array:
    """Rows (blocks, WIDTH), the last one filled up with zeros."""
    missing = -values.size % WIDTH
    return (np.pad(values, (0, missing)) if missing else values).reshape(-1, WIDTH)


def norm_of(counts: npt.NDArray[np.int64], scales: Floats) -> float:
    """Of a vector in which so many values have each of the magnitudes, from an exact sum."""
    pairs = zip(counts.tolist(), scales.ravel().tolist(), strict=True)
    return math.sqrt(math.fsum(count * (scale * scale) for count, scale in pairs))


def take_magnitudes(tensors: dict[str, Array], count: int) -> Floats:
    """`scales` as so many pairs (count, 2); raises IntegrityError unless the smaller of each comes first."""
    scales = take(tensors, "scales", np.dtype(np.float32), LEVELS * count)
    check_scales(scales)
    if (scales[0::LEVELS] > scales[1::LEVELS]).any():
        raise IntegrityError("a compressed vector with two magnitudes that are not in order")
    return scales.reshape(count, LEVELS)


def pack_codes(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Four codes of two bits to a byte, the first in its lowest bits."""
    rows = np.pad(codes, (0, -codes.size % 4)).reshape(-1, 4)
    return (rows[:, 0] | (rows[:, 1] << 2) | (rows[:, 2] << 4) | (rows[:, 3] << 6)).astype(np.uint8)


def unpack_codes(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    """The inverse; raises IntegrityError for codes beyond the end."""
    codes = np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).ravel()
    if codes[count:].any():
        raise IntegrityError("a compressed vector with a code beyond its end")
    return codes[:count]
