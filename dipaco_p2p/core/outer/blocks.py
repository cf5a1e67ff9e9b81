"""Whole numbers of 8 or 4 bits: blocks of 256 values share a scale, the largest magnitude over the largest code, 127 or
7; codes are rounded half to even."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import IntegrityError
from ..arrays import Array, Floats, spans, spread
from .codec import SCALE_MIN, Codec, Compressed, Dense, check_range, check_scales, take

BLOCK = 256
PART = 256 * BLOCK
"""Values that are expanded at a time: whole blocks, 256 KiB as float32."""
SPAN = 4 * PART
"""Values that one core works on at a time."""
CODE_MAX = {8: 127, 4: 7}
"""The largest code, by bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks(Dense):
    """`size` values as codes (N,) of int8, whatever they take on the wire, and float32 scales (ceil(N / BLOCK),)."""

    bits: int
    size: int
    codes: npt.NDArray[np.int8]
    scales: Floats

    def cut(self, part: slice) -> Blocks:
        """The same memory from `part.start`, where a block begins, up to `part.stop`."""
        codes, scales = self.codes[part], self.scales[_blocks_of(part)]
        return Blocks(bits=self.bits, size=codes.size, codes=codes, scales=scales)

    @property
    def codec(self) -> str:
        return f"int{self.bits}"

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def dot(self, other: Blocks) -> float:
        terms: list[float] = []
        for part in spans(0, self.size, PART):
            # Whole numbers: as float32 they are exact up to 2^24, four times what 256 squares of 128 come to.
            ours, our_scales = self._wide(part)
            theirs, their_scales = (ours, our_scales) if other is self else other._wide(part)
            terms += (np.einsum("ij,ij->i", ours, theirs) * (our_scales * their_scales)).tolist()
        return math.fsum(terms)

    def _wide(self, part: slice) -> tuple[Array, Array]:
        """Codes in rows of a block, and scales, as floats that keep products exact."""
        return _in_blocks(self.codes[part]).astype(np.float32), self.scales[_blocks_of(part)].astype(np.float64)

    def thinned(self, every: int, first: int) -> Blocks:
        codes, scales = _in_blocks(self.codes)[first::every].reshape(-1), self.scales[first::every].copy()
        return Blocks(bits=self.bits, size=codes.size, codes=codes, scales=scales)

    def tensors(self) -> dict[str, Array]:
        return {"codes": self.codes if self.bits == 8 else _pack(self.codes), "scales": self.scales}

    def each_part(self, take: Callable[[slice, Floats], object]) -> None:
        def expand(span: slice) -> None:
            rows = _scratch(span)
            for part in spans(span.start, span.stop, PART):
                take(part, self._values(part, rows))

        spread(expand, spans(0, self.size, SPAN))

    def _values(self, part: slice, rows: Floats) -> Floats:
        scales = self.scales[_blocks_of(part)]
        blocks = rows[: scales.size]
        values = blocks.reshape(-1)
        count = part.stop - part.start
        values[:count] = self.codes[part]
        values[count:] = 0
        blocks *= scales[:, None]
        return values[:count]


class IntBlocks(Codec):
    """Codes of `bits` bits."""

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self.metadata = {"codec": self.name, "block": str(BLOCK)}
        self._bits = bits

    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        scales = np.empty(-(-size // BLOCK), dtype=np.float32)
        blocks = Blocks(bits=self._bits, size=size, codes=np.empty(size, dtype=np.int8), scales=scales)

        def make(span: slice) -> None:
            rows = _scratch(span)
            for part in spans(span.start, span.stop, PART):
                found = blocks.cut(part)
                _quantise(bring(part), found, rows)
                told(part, found)

        spread(make, spans(0, size, SPAN))
        return blocks

    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        if self._bits == 8:
            codes = take(tensors, "codes", np.dtype(np.int8), size)
        else:
            codes = _unpack(take(tensors, "codes", np.dtype(np.uint8), -(-size // 2)), size)
        scales = take(tensors, "scales", np.dtype(np.float32), -(-size // BLOCK))
        if codes.min(initial=0) < -CODE_MAX[self._bits]:
            raise IntegrityError(f"a compressed vector with the code {-CODE_MAX[self._bits] - 1}")
        check_scales(scales)
        return Blocks(bits=self._bits, size=size, codes=codes, scales=scales)

    def tensor_bytes(self, size: int) -> int:
        return -(-size * self._bits // 8) + 4 * -(-size // BLOCK)


def _scratch(span: slice) -> Floats:
    """Rows of a block for one part of `span`: made once for all its parts, so that they stay in the cache."""
    return np.empty((-(-min(PART, span.stop - span.start) // BLOCK), BLOCK), dtype=np.float32)


def _blocks_of(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _quantise(values: Floats, into: Blocks, rows: Floats) -> None:
    """`values` (N,) of one part, of which `into` is to be the codes and scales; `rows` is room to work in.

    Raises ValueError for values that are not finite or too large to scale.
    """
    blocks, steps = _in_blocks(values), rows[: into.scales.size]
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


def _in_blocks(values: Array) -> Array:
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
