"""Whole numbers of 8 or 4 bits in blocks that share a scale.

Rule 1: blocks of 256 values share a scale, the largest magnitude over the largest code (127 or 7); codes are rounded
half to even.
Rule 2: the norm is exact (integer sums of squared codes per block), so every owner computes the same one.
Rule 3: floats are made a part at a time, in what a core's own cache holds: a whole vector takes a module's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import IntegrityError
from .arrays import Array, Floats
from .cores import spans, spread

BLOCK = 256
PART = 256 * BLOCK
"""Values that are expanded at a time: whole blocks, 256 KiB as float32."""
SPAN = 4 * PART
"""Values that one core works on at a time."""
CODE_MAX = {8: 127, 4: 7}
"""The largest code, by bits."""

# A scale is zero or a normal float32: some machines flush smaller ones to zero. And `128 * scale` must not overflow.
SCALE_MIN = np.finfo(np.float32).tiny
SCALE_MAX = np.finfo(np.float32).max / 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """`size` values as codes (N,) of int8, whatever they take on the wire, and float32 scales (ceil(N / BLOCK),)."""

    bits: int
    size: int
    codes: npt.NDArray[np.int8]
    scales: Floats

    def cut(self, part: slice) -> Blocks:
        """The same memory from `part.start`, where a block begins, up to `part.stop`."""
        codes, scales = self.codes[part], self.scales[_blocks_of(part)]
        return Blocks(bits=self.bits, size=codes.size, codes=codes, scales=scales)

    def expand(self) -> Floats:
        """The float32 values (N,) that the codes stand for."""
        values = np.empty(self.size, dtype=np.float32)
        self._each_part(lambda part, found: np.copyto(values[part], found))
        return values

    def add_to(self, total: Floats, factor: float) -> None:
        """`total += expand() * factor` to the bit, with `factor` as float32, and without a second vector."""

        def add(part: slice, values: Floats) -> None:
            values *= np.float32(factor)
            total[part] += values

        self._each_part(add)

    def less(self, before: Floats, *, out: Floats) -> None:
        """`before - expand()` goes to `out`, which may be `before`: the bits of adding it with the factor -1."""
        self._each_part(lambda part, values: np.subtract(before[part], values, out=out[part]))

    def norm(self) -> float:
        """Euclidean norm of `expand()`, from exact sums and therefore the same on every machine."""
        terms: list[float] = []
        for part in parts(0, self.size):
            # Whole numbers: as float32 they are exact up to 2^24, four times what 256 squares of 128 come to.
            rows = in_blocks(self.codes[part]).astype(np.float32)
            scales = self.scales[_blocks_of(part)].astype(np.float64)
            terms += (np.einsum("ij,ij->i", rows, rows) * (scales * scales)).tolist()
        return math.sqrt(math.fsum(terms))

    def tensors(self) -> dict[str, Array]:
        """What goes over the wire."""
        return {"codes": self.codes if self.bits == 8 else _pack(self.codes), "scales": self.scales}

    def _each_part(self, take: Callable[[slice, Floats], object]) -> None:
        """Call `take` with every part and its values, which lie where those of the next one will."""

        def expand(span: slice) -> None:
            rows = scratch(span)
            for part in parts(span.start, span.stop):
                take(part, self._values(part, rows))

        spread(expand, spans(self.size, SPAN))

    def _values(self, part: slice, rows: Floats) -> Floats:
        scales = self.scales[_blocks_of(part)]
        blocks = rows[: scales.size]
        values = blocks.reshape(-1)
        count = part.stop - part.start
        values[:count] = self.codes[part]
        values[count:] = 0
        blocks *= scales[:, None]
        return values[:count]


def blank(size: int, *, bits: int) -> Blocks:
    """Of `size` values that are still to be quantised."""
    codes = np.empty(size, dtype=np.int8)
    return Blocks(bits=bits, size=size, codes=codes, scales=np.empty(-(-size // BLOCK), dtype=np.float32))


def scratch(span: slice) -> Floats:
    """Rows of a block for one part of `span`: made once for all its parts, so that they stay in the cache."""
    return np.empty((-(-min(PART, span.stop - span.start) // BLOCK), BLOCK), dtype=np.float32)


def parts(start: int, stop: int) -> Iterator[slice]:
    """All places from `start`, where a block begins, up to `stop`, PART at a time."""
    return (slice(begin, min(begin + PART, stop)) for begin in range(start, stop, PART))


def _blocks_of(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def quantise(values: Floats, into: Blocks, rows: Floats) -> None:
    """`values` (N,) of one part, of which `into` is to be the codes and scales; `rows` is room to work in.

    Raises ValueError for values that are not finite or too large to scale.
    """
    blocks, steps = in_blocks(values), rows[: into.scales.size]
    np.abs(blocks, out=steps)
    scales = into.scales
    np.divide(steps.max(axis=1, initial=0), np.float32(CODE_MAX[into.bits]), out=scales)
    if not np.isfinite(scales).all():  # the largest magnitude of a block is not, if any of its values is not
        raise ValueError("values that are not finite cannot be compressed")
    check_range(scales * np.float32(CODE_MAX[into.bits] / 127))
    scales[scales < SCALE_MIN] = 0
    # A block without a scale has values so small that they round to zero as they are.
    np.divide(blocks, np.where(scales == 0, np.float32(1), scales)[:, None], out=steps)
    np.rint(steps, out=steps)
    # No clipping: a normal scale is exact to 1e-7, so that no step can round beyond the largest code.
    np.copyto(into.codes, steps.reshape(-1)[: into.size], casting="unsafe")


def read_blocks(tensors: dict[str, Array], *, bits: int, size: int) -> Blocks:
    """The inverse of `tensors()`; takes what it reads out of the mapping. Raises IntegrityError."""
    if bits == 8:
        codes = take(tensors, "codes", np.dtype(np.int8), size)
    else:
        codes = _unpack(take(tensors, "codes", np.dtype(np.uint8), -(-size // 2)), size)
    scales = take(tensors, "scales", np.dtype(np.float32), -(-size // BLOCK))
    if codes.min(initial=0) < -CODE_MAX[bits]:
        raise IntegrityError(f"a compressed vector with the code {-CODE_MAX[bits] - 1}")
    check_scales(scales)
    return Blocks(bits=bits, size=size, codes=codes, scales=scales)


def take(tensors: dict[str, Array], name: str, dtype: np.dtype[np.generic], length: int) -> Array:
    """The tensor of this name, which must be flat, of this type and length; raises IntegrityError."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise IntegrityError(f"a compressed vector without `{name}`")
    if tensor.dtype != dtype or tensor.shape != (length,):
        raise IntegrityError(f"`{name}` is {tensor.dtype} of shape {tensor.shape}, expected {dtype} of ({length},)")
    return tensor


def check_scales(scales: Floats) -> None:
    """Raise IntegrityError unless each is zero or in range."""
    # Written so that NaN fails too.
    if not ((scales == 0) | ((scales >= SCALE_MIN) & (scales <= SCALE_MAX))).all():
        raise IntegrityError("a compressed vector with a scale that is negative, not finite or out of range")


def check_range(scales: Floats) -> None:
    """Raise ValueError for scales of values that are too large."""
    if (scales > SCALE_MAX).any():
        raise ValueError(f"values above {SCALE_MAX * 127:.3g} cannot be compressed")


def in_blocks(values: Array) -> Array:
    """Rows (ceil(N / BLOCK), BLOCK), the last one filled up with zeros."""
    missing = -values.size % BLOCK
    return (np.pad(values, (0, missing)) if missing else values).reshape(-1, BLOCK)


def _pack(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Two codes to a byte, the first in its lower half, each plus 8; a code that is missing at the end is 0."""
    shifted = (np.pad(codes, (0, codes.size % 2)) + 8).astype(np.uint8)
    return (shifted[0::2] | (shifted[1::2] << 4)).astype(np.uint8)


def _unpack(packed: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.int8]:
    codes = np.empty(2 * packed.size, dtype=np.int8)
    codes[0::2] = (packed & 15).view(np.int8) - 8
    codes[1::2] = (packed >> 4).view(np.int8) - 8
    if size % 2 and codes[-1] != 0:
        raise IntegrityError("a compressed vector with a code beyond its end")
    return codes[:size]
