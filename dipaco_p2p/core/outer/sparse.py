"""The largest values of each chunk at two bits each: for runs of many rounds over a slow line.

Rule 1: of each chunk of 4096 values the 128 largest are kept (of a shorter last chunk the same share), each as its sign
and one of two magnitudes of its chunk.
Rule 2: what is left out comes back as the residual, without which this codec loses most of what it is given.
Sources: SparseLoCo (arXiv 2508.15706): top-k in chunks, 2-bit values, error feedback. Elias and Fano for the places: of
each the low 5 bits, and for each group of 32 values in unary how many are in it. One in 32 is kept: 7 bits a place.
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
from .codec import SCALE_MIN, Codec, Compressed, check_range, check_scales, require_finite, take

TOP128 = "top128"
CHUNK = 4096
KEPT = 128
LOW_BITS = 5
GROUP = CHUNK // KEPT
"""One value in this many is kept."""
LEVELS = 2
assert GROUP == 1 << LOW_BITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sparse(Compressed):
    """`size` values of which K are not zero: places (K,) in the vector, rising; codes (K,): sign and magnitude, and
    float32 magnitudes (chunks, 2), the smaller one first."""

    size: int
    places: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]
    """0 and 1: plus the smaller and the greater magnitude of the chunk; 2 and 3: minus them."""
    scales: Floats

    @property
    def codec(self) -> str:
        return TOP128

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
        counts = np.bincount(cells, minlength=self.scales.size).tolist()
        scales = self.scales.ravel().tolist()
        return math.sqrt(math.fsum(n * (scale * scale) for n, scale in zip(counts, scales, strict=True)))

    def tensors(self) -> dict[str, Array]:
        """Places in 7 bits, four codes to a byte."""
        return {
            "counts": _pack_counts(self.places // GROUP),
            "lows": _pack_lows((self.places % GROUP).astype(np.uint8)),
            "codes": _pack_codes(self.codes),
            "scales": self.scales.ravel(),
        }


class Top128(Codec):
    """What top128 has not sent yet is most of what a path did. A path that began every round at the version would do it
    again, round after round until its turn comes, and send it that many times over: so it goes on from where it was."""

    name = TOP128
    metadata = {"codec": TOP128, "chunk": str(CHUNK), "kept": str(KEPT)}
    goes_on: ClassVar[bool] = True

    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        whole = slice(0, size)
        sparse = sparsify(require_finite(bring(whole)))
        told(whole, sparse)
        return sparse

    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        total, chunks = kept_count(size), -(-size // CHUNK)
        groups = _unpack_counts(take(tensors, "counts", np.dtype(np.uint8), -(-total // 4)), total)
        lows = take(tensors, "lows", np.dtype(np.uint8), -(-total * LOW_BITS // 8))
        places = groups * GROUP + _unpack_lows(lows, total)
        codes = _unpack_codes(take(tensors, "codes", np.dtype(np.uint8), -(-total // 4)), total)
        scales = take(tensors, "scales", np.dtype(np.float32), LEVELS * chunks)
        check_scales(scales)
        if (scales[0::LEVELS] > scales[1::LEVELS]).any():
            raise IntegrityError("a compressed vector whose two magnitudes of a chunk are not in order")
        if total and (places[-1] >= size or (np.diff(places) <= 0).any()):
            raise IntegrityError("a compressed vector whose places do not rise, or lie beyond its end")
        if (np.bincount(places // CHUNK, minlength=chunks)[: size // CHUNK] != KEPT).any():
            raise IntegrityError(f"a compressed vector with a chunk of which not {KEPT} values are kept")
        return Sparse(size=size, places=places, codes=codes, scales=scales.reshape(chunks, LEVELS))

    def tensor_bytes(self, size: int) -> int:
        kept = kept_count(size)
        return 2 * -(-kept // 4) + -(-kept * LOW_BITS // 8) + 4 * LEVELS * -(-size // CHUNK)


def sparsify(values: Floats) -> Sparse:
    """The largest of finite `values`; raises ValueError for values too large to scale."""
    places, codes, scales = [], [], np.zeros((-(-values.size // CHUNK), LEVELS), dtype=np.float32)
    full = values.size // CHUNK
    if full:
        found = _largest(values[: full * CHUNK].reshape(full, CHUNK))
        places.append((found[0] + np.arange(full)[:, None] * CHUNK).ravel())
        codes.append(found[1].ravel())
        scales[:full] = found[2]
    if values.size > full * CHUNK:
        found = _largest(values[None, full * CHUNK :])
        places.append(found[0].ravel() + full * CHUNK)
        codes.append(found[1].ravel())
        scales[full:] = found[2]
    nothing = np.zeros(0, dtype=np.int64)
    return Sparse(
        size=values.size,
        places=np.concatenate([nothing, *places]),
        codes=np.concatenate([nothing.astype(np.uint8), *codes]),
        scales=scales,
    )


def kept_count(size: int) -> int:
    """How many values are kept, of a vector of this size: one of each group, on average."""
    return -(-size // GROUP)


def _largest(rows: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], Floats]:
    """Of each row (R, L): places (R, K), rising; codes (R, K); magnitudes (R, 2)."""
    length = rows.shape[1]
    kept = kept_count(length)
    sizes = np.abs(rows)
    places = np.sort(np.argpartition(sizes, length - kept, axis=1)[:, length - kept :], axis=1)
    found = np.take_along_axis(rows, places, axis=1)
    ranked = np.sort(np.abs(found), axis=1).astype(np.float64)
    half = kept // 2
    high = ranked[:, half:].mean(axis=1)
    low = ranked[:, :half].mean(axis=1) if half else high
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


def _pack_lows(lows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(lows[:, None], axis=1, count=LOW_BITS, bitorder="little")
    return np.packbits(bits.ravel(), bitorder="little")


def _unpack_lows(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    bits = np.unpackbits(packed, bitorder="little")
    if bits[count * LOW_BITS :].any():
        raise IntegrityError("a compressed vector with a place beyond its end")
    rows = bits[: count * LOW_BITS].reshape(count, LOW_BITS)
    return np.packbits(rows, axis=1, bitorder="little").ravel().astype(np.int64)


def _pack_codes(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    rows = np.pad(codes, (0, -codes.size % 4)).reshape(-1, 4)
    return (rows[:, 0] | (rows[:, 1] << 2) | (rows[:, 2] << 4) | (rows[:, 3] << 6)).astype(np.uint8)


def _unpack_codes(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    codes = np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).ravel()
    if codes[count:].any():
        raise IntegrityError("a compressed vector with a code beyond its end")
    return codes[:count]
