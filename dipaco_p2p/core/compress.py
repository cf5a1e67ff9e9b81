"""Outer gradients and updates in few bits, with error feedback: which codecs there are, and their bytes.

Rule 1: what a codec loses is handed back as a residual, which the caller adds to the next values it sends.
Rule 2: what top128 has not sent yet is most of what a path did. A path that began every round at the version would do
it again, round after round until its turn comes, and send it that many times over: so it goes on from where it was.
Rule 3: the reader trusts nothing: size and codec are known before, and every length, place, code and scale is checked.
What each codec costs is measured by `python -m benchmarks.compression`; see docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..canonical import Parts
from ..errors import IntegrityError
from .arrays import Array, Floats
from .blocks import BLOCK, SPAN, Blocks, blank, parts, quantise, read_blocks, scratch
from .codec import decode, encode_parts
from .cores import spans, spread
from .sparse import CHUNK, KEPT, LEVELS, LOW_BITS, Sparse, kept_count, read_sparse, sparsify, tensors_of

Compressed = Blocks | Sparse

INT8, INT4, TOP128 = "int8", "int4", "top128"
BITS = {INT8: 8, INT4: 4}
CODECS = (INT8, INT4, TOP128)
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

    return compress_parts(values.size, codec, bring, told), left


def compress_parts(
    size: int, codec: str, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
) -> Compressed:
    """`size` values in the codec. `bring` gives those of a part, and `told` hears right after that what they came out
    as; on more than one core, and in parts that the caches hold, if each can be compressed alone. Raises ValueError."""
    if codec not in BITS:
        whole = slice(0, size)
        sparse = sparsify(_finite(bring(whole)))
        told(whole, sparse)
        return sparse
    blocks = blank(size, bits=BITS[codec])

    def make(span: slice) -> None:
        rows = scratch(span)
        for part in parts(span.start, span.stop):
            found = blocks.cut(part)
            quantise(bring(part), found, rows)
            told(part, found)

    spread(make, spans(size, SPAN))
    return blocks


def beginning(version: Floats, owed: Floats | None, *, codec: str) -> Floats:
    """Where a path's inner steps begin: at the module's `version`; with top128 at the version less what it still owes,
    so that what it owes is how far it is from the version, and no more."""
    return version if owed is None or codec != TOP128 else version - owed


def _finite(values: Floats) -> Floats:
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite cannot be compressed")
    return values


def expand(compressed: Compressed) -> Floats:
    """The float32 values (N,) that it stands for: the same bits on every machine."""
    return compressed.expand()


def norm(compressed: Compressed) -> float:
    """Euclidean norm of `expand(compressed)`, from exact sums and therefore the same on every machine."""
    return compressed.norm()


def codec_of(compressed: Compressed) -> str:
    """The name of its codec."""
    if isinstance(compressed, Sparse):
        return TOP128
    return next(name for name, bits in BITS.items() if bits == compressed.bits)


def encode_compressed(compressed: Compressed) -> bytes:
    """The bytes of a contribution or an update."""
    return b"".join(compressed_parts(compressed))


def compressed_parts(compressed: Compressed) -> Parts:
    """The same, not joined: as far as that goes the memory of `compressed`."""
    tensors = tensors_of(compressed) if isinstance(compressed, Sparse) else compressed.tensors()
    return encode_parts(tensors, metadata=metadata(codec_of(compressed)))


def decode_compressed(data: bytes, *, size: int, codec: str = INT8) -> Compressed:
    """The inverse of `encode_compressed` for `size` values, in the memory of `data` as far as that goes; raises
    IntegrityError for anything else."""
    tensors, found = decode(data, is_view=True)
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
    kept = kept_count(size)
    return 2 * -(-kept // 4) + -(-kept * LOW_BITS // 8) + 4 * LEVELS * -(-size // CHUNK) + HEADER_BYTES_MAX


def metadata(codec: str) -> Mapping[str, str]:
    """What says in the file how it is to be read."""
    if codec in BITS:
        return {"codec": codec, "block": str(BLOCK)}
    return {"codec": codec, "chunk": str(CHUNK), "kept": str(KEPT)}


def _read(tensors: dict[str, Array], *, size: int, codec: str) -> Compressed:
    if codec in BITS:
        return read_blocks(tensors, bits=BITS[codec], size=size)
    return read_sparse(tensors, size=size)
