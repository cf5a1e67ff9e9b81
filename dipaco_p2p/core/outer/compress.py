"""Outer gradients and updates in few bits, with error feedback: which codecs there are, and their bytes.

Rule 1: what a codec loses is handed back as a residual, which the caller adds to the next values it sends.
Rule 2: size and codec are known before anything is read.
What each codec costs is measured by `python -m benchmarks.compression`; see docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...canonical import Parts
from ...errors import IntegrityError
from ..arrays import Floats
from ..tensor_file import decode, encode_parts
from .blocks import IntBlocks
from .codec import Codec, Compressed
from .sparse import TernaryK, TopK
from .two_bits import QuarterBytes

CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (IntBlocks(8), IntBlocks(4), QuarterBytes(), TernaryK(640), TernaryK(320), TernaryK(160), TopK(128))
}
"""By their names in a run file (config.py)."""
INT8, INT4 = "int8", "int4"
HEADER_BYTES_MAX = 4096
"""Of the names and shapes in front of the values."""


def compress(
    values: Floats, residual: Floats | None = None, *, codec: str = INT8, out: Floats | None = None
) -> tuple[Compressed, Floats]:
    """`values` plus the `residual` of the last call in the codec; returns it with the new residual.

    The residual lies in `out`, which may be the memory of `values` itself if nobody wants them any more. Raises
    ValueError for values that are not finite or too large to scale; what `out` holds is then worth nothing.
    """
    left = np.empty(values.size, dtype=np.float32) if out is None else out

    def bring(part: slice) -> Floats:
        if residual is None:
            left[part] = values[part]
        else:
            np.add(values[part], residual[part], out=left[part])
        return left[part]

    def told(part: slice, found: Compressed) -> None:
        found.less(left[part], out=left[part])

    return CODECS[codec].make(values.size, bring, told), left


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How much one message said of what was to be sent."""

    captured: float
    """The share that went out, of the squared norm of values and residual."""
    owed: float
    """The norm of what is left, over that of the values."""

    @classmethod
    def of(cls, norm: float, compressed: Compressed, left: Floats) -> Self:
        """Of values of that norm, as `compressed`, what is `left` being the new residual. The share is exact where each
        code stands for the mean of its values, and else near."""
        out, owed = compressed.norm() ** 2, float(np.linalg.norm(left))
        return cls(captured=out / (out + owed**2) if out else 0.0, owed=owed / norm if norm else 0.0)


def beginning(version: Floats, owed: Floats | None, *, codec: str) -> Floats:
    """Where a path's inner steps begin: at the module's `version`; with a codec that goes on at the version less what
    it still owes, so that what it owes is how far it is from the version, and no more."""
    return version - owed if owed is not None and CODECS[codec].goes_on else version


def encode_compressed(compressed: Compressed) -> bytes:
    """The bytes of a contribution or an update."""
    return b"".join(compressed_parts(compressed))


def compressed_parts(compressed: Compressed) -> Parts:
    """The same, not joined: as far as that goes the memory of `compressed`."""
    return encode_parts(compressed.tensors(), metadata=CODECS[compressed.codec].metadata)


def decode_compressed(data: bytes, *, size: int, codec: str = INT8) -> Compressed:
    """The inverse of `encode_compressed` for `size` values, in the memory of `data` as far as that goes; raises
    IntegrityError for anything else."""
    tensors, found = decode(data, is_view=True)
    metadata = CODECS[codec].metadata
    if found != metadata:
        raise IntegrityError("a compressed vector of another codec", hint=f"this run's is {metadata}")
    compressed = CODECS[codec].read(tensors, size=size)
    if tensors:
        raise IntegrityError(f"a compressed vector with the extra tensor {ascii(min(tensors))[:80]}")
    return compressed


def bytes_max(size: int, codec: str) -> int:
    """The largest file of `size` values."""
    return CODECS[codec].tensor_bytes(size) + HEADER_BYTES_MAX
