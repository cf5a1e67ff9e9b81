"""Outer gradients and updates in one byte per value, with error feedback.

Rule 1: blocks of 256 values share a scale of absmax / 127; codes are rounded half to even.
Rule 2: what rounding loses is handed back as a residual, which the caller adds to the next values it sends.
Rule 3: the norm is exact (integer sums of squared codes per block), so every owner computes the same one.
int8 in blocks costs no measurable loss on small runs; see docs/design.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import IntegrityError
from .arrays import Array, Floats
from .codec import decode, encode

BLOCK = 256
CODE_MAX = 127
METADATA = {"codec": "int8", "block": str(BLOCK)}

# A scale is zero or a normal float32: some machines flush smaller ones to zero. And `128 * scale` must not overflow.
SCALE_MIN = np.finfo(np.float32).tiny
SCALE_MAX = np.finfo(np.float32).max / 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compressed:
    """`size` values as int8 codes (N,) and float32 scales (ceil(N / BLOCK),)."""

    size: int
    codes: npt.NDArray[np.int8]
    scales: Floats


def compress(values: Floats, residual: Floats | None = None) -> tuple[Compressed, Floats]:
    """Quantise `values` plus the `residual` of the last call; returns it with the new residual.

    Raises ValueError for values that are not finite or too large to scale.
    """
    wanted = values if residual is None else values + residual
    if not np.isfinite(wanted).all():
        raise ValueError("values that are not finite cannot be compressed")
    blocks = _blocks(wanted)
    scales: Floats = np.abs(blocks).max(axis=1, initial=0) / np.float32(CODE_MAX)
    if (scales > SCALE_MAX).any():
        raise ValueError(f"values above {SCALE_MAX * CODE_MAX:.3g} cannot be compressed")
    scales[scales < SCALE_MIN] = 0
    steps = np.rint(blocks / np.where(scales == 0, np.float32(1), scales)[:, None])
    steps[scales == 0] = 0
    # No clipping: a normal scale is exact to 1e-7, so that no step can round beyond 127.
    codes = steps.astype(np.int8).reshape(-1)[: wanted.size]
    compressed = Compressed(size=wanted.size, codes=codes, scales=scales)
    return compressed, wanted - expand(compressed)


def expand(compressed: Compressed) -> Floats:
    """The float32 values (N,) that the codes stand for."""
    values = compressed.codes.astype(np.float32)
    values *= np.repeat(compressed.scales, BLOCK)[: compressed.size]
    return values


def norm(compressed: Compressed) -> float:
    """Euclidean norm of `expand(compressed)`, from exact sums and therefore the same on every machine."""
    blocks = _blocks(compressed.codes).astype(np.int64)
    squares = np.square(blocks).sum(axis=1).tolist()
    return math.sqrt(
        math.fsum(s * (scale * scale) for s, scale in zip(squares, compressed.scales.tolist(), strict=True))
    )


def encode_compressed(compressed: Compressed) -> bytes:
    """The bytes of a contribution or an update."""
    return encode({"codes": compressed.codes, "scales": compressed.scales}, metadata=METADATA)


def decode_compressed(data: bytes, *, size: int) -> Compressed:
    """The inverse of `encode_compressed` for `size` values; raises IntegrityError for anything else."""
    tensors, metadata = decode(data)
    if metadata != METADATA:
        raise IntegrityError("a compressed vector of another codec", hint=f"this version reads {METADATA}")
    codes = _take(tensors, "codes", np.dtype(np.int8), size)
    scales = _take(tensors, "scales", np.dtype(np.float32), -(-size // BLOCK))
    if tensors:
        raise IntegrityError(f"a compressed vector with the extra tensor {ascii(min(tensors))[:80]}")
    if (codes < -CODE_MAX).any():
        raise IntegrityError("a compressed vector with the code -128")
    # Written so that NaN fails too.
    if not ((scales == 0) | ((scales >= SCALE_MIN) & (scales <= SCALE_MAX))).all():
        raise IntegrityError("a compressed vector with a scale that is negative, not finite or out of range")
    return Compressed(size=size, codes=codes, scales=scales)


def _take(tensors: dict[str, Array], name: str, dtype: np.dtype[np.generic], length: int) -> Array:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise IntegrityError(f"a compressed vector without `{name}`")
    if tensor.dtype != dtype or tensor.shape != (length,):
        raise IntegrityError(f"`{name}` is {tensor.dtype} of shape {tensor.shape}, expected {dtype} of ({length},)")
    return tensor


def _blocks(values: Array) -> Array:
    return np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)
