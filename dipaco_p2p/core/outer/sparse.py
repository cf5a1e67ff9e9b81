"""The largest values of each chunk of 4096, of a shorter last chunk the same share. What is left out comes back as the
residual; without it, these codecs lose most of their input.

`ternary640`, `ternary320` and `ternary160`: of each value that is kept its sign, times the one magnitude of its chunk;
and its distance from the one before, in the code that is shortest for places taken by chance. `top128`: one of two
magnitudes, and places in a code whose length is known beforehand. For the same bytes `ternary` captures more.

Sources: sparse ternary compression (arXiv 1903.02891), with Rice's code where that has Golomb's. SparseLoCo (arXiv
2508.15706): top-k in chunks, 2-bit values, error feedback. Elias and Fano for the places of `top128`: of each the low
bits, and for each group of values in unary how many are in it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ...errors import IntegrityError
from ..arrays import Array, Floats
from .codec import SCALE_MIN, Codec, Compressed, check_range, check_scales, require_finite, take
from .two_bits import norm_of, pack_codes, take_magnitudes, unpack_codes

CHUNK = 4096

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int32]
"""Half the memory of int64, and enough: the parameters of a module of 2^30 values would take 4 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sparse(Compressed):
    """`size` values of which so many of each chunk are `kept`, K in all; the others are zero."""

    family: ClassVar[str]
    """What the names of its codecs begin with."""
    size: int
    kept: int
    places: Places
    """(K,), rising."""
    codes: Bytes
    """(K,): the number of its magnitude; of a negative value as many more as a chunk has magnitudes."""
    scales: Floats
    """The magnitudes (chunks, M), the smaller one first."""

    @property
    def codec(self) -> str:
        return f"{self.family}{self.kept}"

    def expand(self) -> Floats:
        values = np.zeros(self.size, dtype=np.float32)
        values[self.places] = self.values()
        return values

    def add_to(self, total: Floats, factor: float) -> None:
        # What is zero changes nothing.
        total[self.places] += self.values() * np.float32(factor)

    def less(self, before: Floats, *, out: Floats) -> None:
        if out is not before:
            out[:] = before
        out[self.places] -= self.values()

    def values(self, chosen: slice | npt.NDArray[np.bool_] = slice(None)) -> Floats:
        """Those (K,) at `places`, or the chosen of these."""
        magnitudes = self.scales.ravel()[self._cells(chosen)]
        return np.where(self.codes[chosen] >= self.scales.shape[1], -magnitudes, magnitudes)

    def _cells(self, chosen: slice | npt.NDArray[np.bool_] = slice(None)) -> Places:
        """Where each has its magnitude in all `scales`."""
        levels = self.scales.shape[1]
        cells: Places = self.places[chosen] // CHUNK * levels + self.codes[chosen] % levels
        return cells

    def norm(self) -> float:
        return norm_of(np.bincount(self._cells(), minlength=self.scales.size), self.scales)

    def dot(self, other: Sparse) -> float:
        ours, theirs = other._has()[self.places], self._has()[other.places]  # places rise in both: in the same order
        # As float64 a product of two float32 is exact.
        return math.fsum((self.values(ours).astype(np.float64) * other.values(theirs)).tolist())

    def _has(self) -> npt.NDArray[np.bool_]:
        """Of each value (N,) whether it is kept."""
        found = np.zeros(self.size, dtype=np.bool_)
        found[self.places] = True
        return found

    def thinned(self, every: int, first: int) -> Sparse:
        chosen = self.places // CHUNK % every == first
        return replace(self, places=self.places[chosen], codes=self.codes[chosen])


class Largest(Codec):
    """The largest values of each chunk, with so many magnitudes."""

    goes_on: ClassVar[bool] = True
    _levels: ClassVar[int]
    """Magnitudes of a chunk."""
    _vector: ClassVar[type[Sparse]]

    def __init__(self, kept: int) -> None:
        """So many of each chunk."""
        self.name = f"{self._vector.family}{kept}"
        self.metadata = {"codec": self.name, "chunk": str(CHUNK), "kept": str(kept)}
        self._kept = kept

    def _total(self, size: int) -> int:
        """What is kept of so many values."""
        return size // CHUNK * self._kept + _share(size % CHUNK, self._kept)

    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        whole, full = slice(0, size), size // CHUNK * CHUNK
        values = require_finite(bring(whole))
        total, levels = self._total(size), self._levels
        places, codes = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.uint8)
        scales = np.empty((-(-size // CHUNK), levels), dtype=np.float32)
        for first, rows in ((0, values[:full].reshape(-1, CHUNK)), (full, values[full:].reshape(1, -1))):
            if rows.size:
                span = slice(self._total(first), self._total(first + rows.size))
                found = _largest(rows, _share(rows.shape[1], self._kept), levels)
                places[span] = (found[0] + (first + np.arange(len(rows)) * rows.shape[1])[:, None]).ravel()
                codes[span] = found[1].ravel()
                scales[first // CHUNK :][: len(rows)] = found[2]
        sparse = self._vector(size=size, kept=self._kept, places=places, codes=codes, scales=scales)
        told(whole, sparse)
        return sparse

    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        chunks = -(-size // CHUNK)
        places, codes, scales = self._parts(tensors, size=size, total=self._total(size), chunks=chunks)
        if places.size and (places[-1] >= size or (np.diff(places) <= 0).any()):
            raise IntegrityError("a compressed vector whose places do not rise, or lie beyond its end")
        if (np.bincount(places // CHUNK, minlength=chunks)[: size // CHUNK] != self._kept).any():
            raise IntegrityError(f"a compressed vector with a chunk of which not {self._kept} values are kept")
        return self._vector(size=size, kept=self._kept, places=places, codes=codes, scales=scales)

    @abstractmethod
    def _parts(self, tensors: dict[str, Array], *, size: int, total: int, chunks: int) -> tuple[Places, Bytes, Floats]:
        """Places, codes and magnitudes of so many chunks, with `total` values kept; raises IntegrityError."""


def _share(length: int, kept: int) -> int:
    """How many values of a chunk this long a codec keeps that keeps `kept` of a whole one."""
    return -(-length * kept // CHUNK)


def _largest(rows: Floats, kept: int, levels: int) -> tuple[Places, Bytes, Floats]:
    """Of each row (R, L): places (R, K), rising; codes (R, K); magnitudes (R, M). Of equal values the first are taken,
    and sums are made from left to right, so that every machine finds the same."""
    length = rows.shape[1]
    sizes = np.abs(rows)
    least = np.partition(sizes, length - kept, axis=1)[:, length - kept, None]
    chosen = sizes >= least
    tied = np.flatnonzero(np.count_nonzero(chosen, axis=1) > kept)
    if tied.size:
        above, is_least = sizes[tied] > least[tied], sizes[tied] == least[tied]
        room = kept - np.count_nonzero(above, axis=1)[:, None]
        chosen[tied] = above | (is_least & (np.cumsum(is_least, axis=1) <= room))
    places = np.flatnonzero(chosen).reshape(-1, kept) % length
    found = np.take_along_axis(rows, places, axis=1)
    means = _means(np.abs(found), levels)
    scales = means.astype(np.float32)
    check_range(scales)
    scales[scales < SCALE_MIN] = 0
    is_high = (np.abs(found) > means.mean(axis=1)[:, None]) & (levels > 1)
    return places, (is_high + levels * (found < 0)).astype(np.uint8), scales


def _means(sizes: Floats, levels: int) -> npt.NDArray[np.float64]:
    """Of each row (R, K) the mean (R, 1), or those of its smaller and its greater half (R, 2)."""
    kept = sizes.shape[1]
    sums = np.cumsum(np.sort(sizes, axis=1), axis=1, dtype=np.float64)
    half = kept // 2 if levels > 1 else 0
    below = sums[:, half - 1] if half else np.zeros(len(sizes))
    high = (sums[:, -1] - below) / (kept - half)
    low = below / half if half else high
    return np.stack([low, high][:levels], axis=1)


# -- one magnitude, and gaps in Rice's code


class Ternary(Sparse):
    """Of each value its sign."""

    __slots__ = ()
    family = "ternary"

    def tensors(self) -> dict[str, Array]:
        """Of each gap the low bits; the rest of it in unary, as so many zeros and a 1; and a bit for each sign."""
        gaps, low_bits = np.diff(self.places, prepend=np.int32(-1)) - 1, _gap_bits(self.kept)
        flags = np.zeros(self.places.size + int((gaps >> low_bits).sum()), dtype=np.uint8)
        flags[np.cumsum((gaps >> low_bits) + 1) - 1] = 1
        return {
            "gaps": np.packbits(flags, bitorder="little"),
            "lows": _pack_lows(gaps, low_bits),
            "signs": np.packbits(self.codes, bitorder="little"),
            "scales": self.scales.ravel(),
        }


class TernaryK(Largest):
    """`ternary640`, for one."""

    _levels, _vector = 1, Ternary

    def _parts(self, tensors: dict[str, Array], *, size: int, total: int, chunks: int) -> tuple[Places, Bytes, Floats]:
        low_bits, rest = _gap_bits(self._kept), take(tensors, "gaps", np.dtype(np.uint8), None)
        if rest.size > self._gap_bytes(size):
            raise IntegrityError(f"a compressed vector of {size} values with {rest.size} bytes of gaps")
        ends = np.flatnonzero(np.unpackbits(rest, bitorder="little")).astype(np.int32)
        if ends.size != total or rest.size != (-(-(int(ends[-1]) + 1) // 8) if total else 0):
            raise IntegrityError(f"a compressed vector with gaps that are not {total}, or end before their bytes do")
        lows = take(tensors, "lows", np.dtype(np.uint8), -(-total * low_bits // 8))
        steps = ((np.diff(ends, prepend=np.int32(-1)) - 1) << low_bits) + _unpack_lows(lows, total, low_bits) + 1
        signs = np.unpackbits(take(tensors, "signs", np.dtype(np.uint8), -(-total // 8)), bitorder="little")
        if signs[total:].any():
            raise IntegrityError("a compressed vector with a sign beyond its end")
        scales = take(tensors, "scales", np.dtype(np.float32), chunks)
        check_scales(scales)
        return np.cumsum(steps, dtype=np.int32) - 1, signs[:total], scales.reshape(-1, 1)

    def _gap_bytes(self, size: int) -> int:
        """At most."""
        return -(-(self._total(size) + (size >> _gap_bits(self._kept))) // 8)

    def tensor_bytes(self, size: int) -> int:
        """At most, if the places are as far from chance as they can be; by chance a tenth less."""
        kept = self._total(size)
        return self._gap_bytes(size) + -(-kept * _gap_bits(self._kept) // 8) + -(-kept // 8) + 4 * -(-size // CHUNK)


def _gap_bits(kept: int) -> int:
    """The low bits of a gap that make its code the shortest, if so many of a chunk are kept by chance: half of all gaps
    are then below the divisor."""
    return round(math.log2(math.log(2) * CHUNK / kept))


# -- two magnitudes, and places in a code of known length


class Top(Sparse):
    """Of each value its sign, and which magnitude it has."""

    __slots__ = ()
    family = "top"

    def tensors(self) -> dict[str, Array]:
        """Of each place the low bits, and in which group it is; four codes to a byte."""
        every = CHUNK // self.kept
        return {
            "counts": _pack_counts(self.places // every),
            "lows": _pack_lows(self.places, _bits(every)),
            "codes": pack_codes(self.codes),
            "scales": self.scales.ravel(),
        }


class TopK(Largest):
    """`top128`: so many of each chunk, a power of 2."""

    _levels, _vector = 2, Top

    def _parts(self, tensors: dict[str, Array], *, size: int, total: int, chunks: int) -> tuple[Places, Bytes, Floats]:
        every = CHUNK // self._kept
        low_bits = _bits(every)
        groups = _unpack_counts(take(tensors, "counts", np.dtype(np.uint8), -(-total // 4)), total)
        lows = take(tensors, "lows", np.dtype(np.uint8), -(-total * low_bits // 8))
        places = groups * every + _unpack_lows(lows, total, low_bits)
        codes = unpack_codes(take(tensors, "codes", np.dtype(np.uint8), -(-total // 4)), total)
        return places, codes, take_magnitudes(tensors, chunks)

    def tensor_bytes(self, size: int) -> int:
        kept = self._total(size)
        return 2 * -(-kept // 4) + -(-kept * _bits(CHUNK // self._kept) // 8) + 8 * -(-size // CHUNK)


def _bits(every: int) -> int:
    """The low bits of a place."""
    return every.bit_length() - 1


def _pack_counts(groups: Places) -> Bytes:
    """By the group (K,) of each place: for each of the K groups a 1 for each of its places, then a 0."""
    bits = np.zeros(2 * groups.size, dtype=np.uint8)
    bits[groups + np.arange(groups.size)] = 1
    return np.packbits(bits, bitorder="little")


def _unpack_counts(packed: Bytes, count: int) -> Places:
    found = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    if found.size != count or (count and found[-1] >= 2 * count - 1):
        raise IntegrityError(f"a compressed vector whose groups have not {count} places in all")
    return (found - np.arange(count)).astype(np.int32)


def _pack_lows(places: Places, low_bits: int) -> Bytes:
    lows = (places % (1 << low_bits)).astype(np.uint8)
    bits = np.unpackbits(lows[:, None], axis=1, count=low_bits, bitorder="little")
    return np.packbits(bits.ravel(), bitorder="little")


def _unpack_lows(packed: Bytes, count: int, low_bits: int) -> Places:
    bits = np.unpackbits(packed, bitorder="little")
    if bits[count * low_bits :].any():
        raise IntegrityError("a compressed vector with a place beyond its end")
    rows = bits[: count * low_bits].reshape(count, low_bits)
    return np.packbits(rows, axis=1, bitorder="little").ravel().astype(np.int32)
