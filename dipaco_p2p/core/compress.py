"""Outer gradients and updates in few bits, with error feedback: which codecs there are, and their bytes.

Rule 1: what a codec loses is handed back as a residual, which the caller adds to the next values it sends.
Rule 2: the reader trusts nothing: size and codec are known before, and every length, place, code and scale is checked.
What each codec costs is measured by `python -m benchmarks.compression`; see docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import IntegrityError
from .arrays import Array, Floats
from .blocks import BLOCK, SPAN, Blocks, join_blocks, quantise, read_blocks
from .codec import decode, encode
from .cores import spans, spread
from .sparse import CHUNK, KEPT, LEVELS, Sparse, kept_counts, read_sparse, sparsify, tensors_of

Compressed = Blocks | Sparse

INT8, INT4, TOP64 = "int8", "int4", "top64"
BITS = {INT8: 8, INT4: 4}
CODECS = (INT8, INT4, TOP64)
HEADER_BYTES_MAX = 4096
"""Of the names and shapes in front of the values."""


def compress(values: Floats, residual: Floats | None = None, *, codec: str = INT8) -> tuple[Compressed, Floats]:
    """`values` plus the `residual` of the last call in the codec; returns it with the new residual.

    Raises ValueError for values that are not finite or too large to scale.
    """
    left = np.empty(values.size, dtype=np.float32)

    def make(span: slice) -> Compressed:
        left[span] = values[span] if residual is None else values[span] + residual[span]
        return _compress(left[span], codec)

    return joined(spread(make, spans_of(values.size, codec))), left


def _compress(wanted: Floats, codec: str) -> Compressed:
    """`wanted` in the codec; what that loses is left in its place."""
    if not np.isfinite(wanted).all():
        raise ValueError("values that are not finite cannot be compressed")
    compressed: Compressed = quantise(wanted, bits=BITS[codec]) if codec in BITS else sparsify(wanted)
    compressed.add_to(wanted, -1.0)
    return compressed


def spans_of(size: int, codec: str) -> list[slice]:
    """Parts of a vector that come out the same when each is compressed alone, in what the caches hold; one at least."""
    return spans(size, SPAN) if codec in BITS and size else [slice(0, size)]


def joined(pieces: Sequence[Compressed]) -> Compressed:
    """The whole of what was compressed span by span."""
    return pieces[0] if len(pieces) == 1 else join_blocks([piece for piece in pieces if isinstance(piece, Blocks)])


def expand(compressed: Compressed) -> Floats:
    """The float32 values (N,) that it stands for: the same bits on every machine."""
    return compressed.expand()


def norm(compressed: Compressed) -> float:
    """Euclidean norm of `expand(compressed)`, from exact sums and therefore the same on every machine."""
    return compressed.norm()


def codec_of(compressed: Compressed) -> str:
    """The name of its codec."""
    if isinstance(compressed, Sparse):
        return TOP64
    return next(name for name, bits in BITS.items() if bits == compressed.bits)


def encode_compressed(compressed: Compressed) -> bytes:
    """The bytes of a contribution or an update."""
    tensors = tensors_of(compressed) if isinstance(compressed, Sparse) else compressed.tensors()
    return encode(tensors, metadata=metadata(codec_of(compressed)))


def decode_compressed(data: bytes, *, size: int, codec: str = INT8) -> Compressed:
    """The inverse of `encode_compressed` for `size` values; raises IntegrityError for anything else."""
    tensors, found = decode(data)
    if found != metadata(codec):
        raise IntegrityError("a compressed vector of another codec", hint=f"this run's is {metadata(codec)}")
    compressed = _read(tensors, size=size, codec=codec)
    if tensors:
        raise IntegrityError(f"a compressed vector with the extra tensor {ascii(min(tensors))[:80]}")
    return compressed


def bytes_max(size: int, codec: str) -> int:
    """The largest file of `size` values."""
    if codec in BITS:
        return -(-size * BITS[codec] // 8) + 4 * -(-size // BLOCK) + HEADER_BYTES_MAX
    kept = int(kept_counts(size).sum())
    return 3 * -(-kept // 2) + -(-kept // 4) + 4 * LEVELS * -(-size // CHUNK) + HEADER_BYTES_MAX


def metadata(codec: str) -> Mapping[str, str]:
    """What says in the file how it is to be read."""
    if codec in BITS:
        return {"codec": codec, "block": str(BLOCK)}
    return {"codec": codec, "chunk": str(CHUNK), "kept": str(KEPT)}


def _read(tensors: dict[str, Array], *, size: int, codec: str) -> Compressed:
    if codec in BITS:
        return read_blocks(tensors, bits=BITS[codec], size=size)
    return read_sparse(tensors, size=size)
