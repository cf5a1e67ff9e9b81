"""The largest values of each chunk, at two bits each: of 4096 values the 128, 256 or 512 largest are kept (of a shorter
last chunk the same share), each as its sign and one of two magnitudes of its chunk. What is left out comes back as the
residual; without it, these codecs lose most of their input.

Sources: SparseLoCo (arXiv 2508.15706): top-k in chunks, 2-bit values, error feedback. Elias and Fano for the places: of
each the low bits, and for each group of values in unary how many are in it. Of one in 32 that is kept: 7 bits a place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ...errors import IntegrityError
from ..arrays import Array, Floats
from .codec import SCALE_MIN, Codec, Compressed, check_range, require_finite, take
from .two_bits import LEVELS, norm_of, pack_codes, take_magnitudes, unpack_codes

CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sparse(Compressed):
    """`size` values of which one in `every` is not zero, K in all: places (K,) in the vector, rising; codes (K,): sign
    and magnitude, and float32 magnitudes (chunks, 2), the smaller one first."""

    size: int
    every: int
    places: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]
    """0 and 1: plus the smaller and the greater magnitude of the chunk; 2 and 3: minus them."""
    scales: Floats

    @property
    def codec(self) -> str:
        return f"top{CHUNK // self.every}"

    def expand(self) -> Floats:
        values = np.zeros(self.size, dtype=np.float32)
        values[self.places] = self.kept()
        return values

    def add_to(self, total: Floats, factor: float) -> None:
        # What is zero changes nothing.
        total[self.places] += self.kept() * np.float32(factor)

    def less(self, before: Floats, *, out: Floats) -> None:
        if out is not before:
            out[:] = before
        out[self.places] -= self.kept()

    def kept(self) -> Floats:
        """The values (K,) at `places`."""
        magnitudes = self.scales[self.places // CHUNK, self.codes & 1]
        return np.where(self.codes >= LEVELS, -magnitudes, magnitudes)

    def norm(self) -> float:
        cells = self.places // CHUNK * LEVELS + (self.codes & 1)
        return norm_of(np.bincount(cells, minlength=self.scales.size), self.scales)

    def dot(self, other: Sparse) -> float:
        _, ours, theirs = np.intersect1d(self.places, other.places, assume_unique=True, return_indices=True)
        # As float64 a product of two float32 is exact.
        return math.fsum((self.kept()[ours].astype(np.float64) * other.kept()[theirs]).tolist())

    def thinned(self, every: int, first: int) -> Sparse:
        chosen = self.places // CHUNK % every == first
        return Sparse(
            size=self.size,
            every=self.every,
            places=self.places[chosen],
            codes=self.codes[chosen],
            scales=self.scales,
        )

    def tensors(self) -> dict[str, Array]:
        """Of each place the low bits, and in which group it is; four codes to a byte."""
        return {
            "counts": _pack_counts(self.places // self.every),
            "lows": _pack_lows((self.places % self.every).astype(np.uint8), _bits(self.every)),
            "codes": pack_codes(self.codes),
            "scales": self.scales.ravel(),
        }


class TopK(Codec):
    """What it has not sent yet is most of what a path did. A path that began every round at the version would do it
    again, round after round until its turn comes, and send it that many times over: so it goes on from where it was."""

    goes_on: ClassVar[bool] = True

    def __init__(self, kept: int) -> None:
        """So many of each chunk: a power of 2."""
        self.name = f"top{kept}"
        self.metadata = {"codec": self.name, "chunk": str(CHUNK), "kept": str(kept)}
        self._kept, self._every = kept, CHUNK // kept
        assert self._every == 1 << _bits(self._every)

    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        whole = slice(0, size)
        sparse = sparsify(require_finite(bring(whole)), every=self._every)
        told(whole, sparse)
        return sparse

    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        total, chunks, low_bits = -(-size // self._every), -(-size // CHUNK), _bits(self._every)
        groups = _unpack_counts(take(tensors, "counts", np.dtype(np.uint8), -(-total // 4)), total)
        lows = take(tensors, "lows", np.dtype(np.uint8), -(-total * low_bits // 8))
        places = groups * self._every + _unpack_lows(lows, total, low_bits)
        codes = unpack_codes(take(tensors, "codes", np.dtype(np.uint8), -(-total // 4)), total)
        scales = take_magnitudes(tensors, chunks)
        if total and (places[-1] >= size or (np.diff(places) <= 0).any()):
            raise IntegrityError("a compressed vector whose places do not rise, or lie beyond its end")
        if (np.bincount(places // CHUNK, minlength=chunks)[: size // CHUNK] != self._kept).any():
            raise IntegrityError(f"a compressed vector with a chunk of which not {self._kept} values are kept")
        return Sparse(size=size, every=self._every, places=places, codes=codes, scales=scales)

    def tensor_bytes(self, size: int) -> int:
        kept = -(-size // self._every)
        return 2 * -(-kept // 4) + -(-kept * _bits(self._every) // 8) + 4 * LEVELS * -(-size // CHUNK)


def _bits(every: int) -> int:
    """The low bits of a place."""
    return every.bit_length() - 1


def sparsify(values: Floats, *, every: int) -> Sparse:
    """The largest of finite `values`, one in `every`; raises ValueError for values too large to scale."""
    places, codes, scales = [], [], np.zeros((-(-values.size // CHUNK), LEVELS), dtype=np.float32)
    full = values.size // CHUNK
    if full:
        found = _largest(values[: full * CHUNK].reshape(full, CHUNK), every)
        places.append((found[0] + np.arange(full)[:, None] * CHUNK).ravel())
        codes.append(found[1].ravel())
        scales[:full] = found[2]
    if values.size > full * CHUNK:
        found = _largest(values[None, full * CHUNK :], every)
        places.append(found[0].ravel() + full * CHUNK)
        codes.append(found[1].ravel())
        scales[full:] = found[2]
    nothing = np.zeros(0, dtype=np.int64)
    return Sparse(
        size=values.size,
        every=every,
        places=np.concatenate([nothing, *places]),
        codes=np.concatenate([nothing.astype(np.uint8), *codes]),
        scales=scales,
    )


def _largest(rows: Floats, every: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], Floats]:
    """Of each row (R, L): places (R, K), rising; codes (R, K); magnitudes (R, 2). Of equal values the first are taken,
    and sums are made from left to right, so that every machine finds the same."""
    length = rows.shape[1]
    kept = -(-length // every)
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
    sums = np.cumsum(np.sort(np.abs(found), axis=1), axis=1, dtype=np.float64)
    half = kept // 2
    below = sums[:, half - 1] if half else np.zeros(len(rows))
    high = (sums[:, -1] - below) / (kept - half)
    low = below / half if half else high
    scales = np.stack([low, high], axis=1).astype(np.float32)
    check_range(scales)
    scales[scales < SCALE_MIN] = 0
    is_high = np.abs(found) > ((low + high) / 2)[:, None]
    codes = (is_high + LEVELS * (found < 0)).astype(np.uint8)
    return places, codes, scales


def _pack_counts(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """By the group (K,) of each place: for each of the K groups a 1 for each of its places, then a 0."""
    bits = np.zeros(2 * groups.size, dtype=np.uint8)
    bits[groups + np.arange(groups.size)] = 1
    return np.packbits(bits, bitorder="little")


def _unpack_counts(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    found = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    if found.size != count or (count and found[-1] >= 2 * count - 1):
        raise IntegrityError(f"a compressed vector whose groups have not {count} places in all")
    return found - np.arange(count)


def _pack_lows(lows: npt.NDArray[np.uint8], low_bits: int) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(lows[:, None], axis=1, count=low_bits, bitorder="little")
    return np.packbits(bits.ravel(), bitorder="little")


def _unpack_lows(packed: npt.NDArray[np.uint8], count: int, low_bits: int) -> npt.NDArray[np.int64]:
    bits = np.unpackbits(packed, bitorder="little")
    if bits[count * low_bits :].any():
        raise IntegrityError("a compressed vector with a place beyond its end")
    rows = bits[: count * low_bits].reshape(count, low_bits)
    return np.packbits(rows, axis=1, bitorder="little").ravel().astype(np.int64)
