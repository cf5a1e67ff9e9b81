"""Tensors as bytes, in the safetensors format: a length, a JSON header, then the values.

Rule 1: the writer is deterministic, since digests and signatures are over exact bytes.
Rule 2: the reader trusts nothing: every length, type, shape and offset is checked before memory is taken for it, and
the only thing it raises is IntegrityError.
Format: https://huggingface.co/docs/safetensors (header of u64 length; tensors without gaps; little-endian).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ..canonical import Parts, canonical_bytes
from ..errors import IntegrityError
from .arrays import Array

LENGTH_BYTES = 8
ALIGNMENT_BYTES = 8
RANK_MAX = 8
METADATA = "__metadata__"

DTYPES = {"F32": "<f4", "F16": "<f2", "I8": "|i1", "U8": "|u1", "U16": "<u2", "I32": "<i4", "I64": "<i8", "U32": "<u4"}
_NAMES = {np.dtype(code): name for name, code in DTYPES.items()}


def encode(tensors: Mapping[str, Array], *, metadata: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The bytes of `tensors`: the same tensors and metadata always give the same bytes."""
    return b"".join(encode_parts(tensors, metadata=metadata))


def encode_parts(tensors: Mapping[str, Array], *, metadata: Mapping[str, str] = MappingProxyType({})) -> Parts:
    """The same, not joined: the header, then the memory of the tensors, which must not change as long as it is used."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    parts, end = list[memoryview](), 0
    for name in sorted(tensors):
        dtype = _NAMES.get(tensors[name].dtype.newbyteorder("<"))
        assert dtype is not None and name != METADATA, (name, tensors[name].dtype)
        part = tensors[name].astype(DTYPES[dtype], order="C", copy=False)
        header[name] = {"dtype": dtype, "shape": list(part.shape), "data_offsets": [end, end + part.nbytes]}
        parts.append(memory(part))
        end += part.nbytes
    text = canonical_bytes(header)
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return [len(text).to_bytes(LENGTH_BYTES, "little") + text, *parts]


def decode(
    data: bytes, *, header_bytes_max: int = 1 << 20, is_view: bool = False
) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors and metadata in `data`; raises IntegrityError for anything malformed.

    The tensors are fresh arrays, or with `is_view` the memory of `data` wherever it is aligned, which none may change.
    """
    header, body = _split(data, header_bytes_max)
    metadata = _check_metadata(header.pop(METADATA, {}))
    spans = {name: _check_entry(name, entry) for name, entry in header.items()}
    _check_cover(spans, len(body))
    tensors = {}
    for name, (dtype, shape, begin, end) in spans.items():
        try:
            tensor = np.frombuffer(body[begin:end], dtype=dtype).reshape(shape)
        except ValueError:  # with a zero in it a shape needs no bytes, and may be larger than numpy takes
            raise IntegrityError(f"tensor `{short(name)}` has a shape that no array has: {short(shape)}") from None
        tensors[name] = tensor if is_view and tensor.flags.aligned else tensor.copy()
    return tensors, metadata


def memory(values: Array) -> memoryview:
    """The bytes of `values`, not copied."""
    return values.reshape(-1).view(np.uint8).data


_Span = tuple[str, tuple[int, ...], int, int]


def _split(data: bytes, header_bytes_max: int) -> tuple[dict[str, Any], memoryview]:
    if len(data) < LENGTH_BYTES:
        raise IntegrityError(f"{len(data)} bytes are too short for a tensor file")
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > header_bytes_max:
        raise IntegrityError(f"a tensor header of {length} bytes, at most {header_bytes_max} are allowed")
    if length > len(data) - LENGTH_BYTES:
        raise IntegrityError(f"a tensor header of {length} bytes in a file of {len(data)}")
    body_start = LENGTH_BYTES + length
    try:
        header = json.loads(data[LENGTH_BYTES:body_start].decode(), object_pairs_hook=_unique)
        canonical_bytes(header)  # JSON may say what no bytes can, half a surrogate: whoever encodes it again would fail
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"a tensor header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise IntegrityError("a tensor header that is not a JSON object")
    return header, memoryview(data)[body_start:]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise IntegrityError("a tensor header that names something twice")
    return table


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise IntegrityError("tensor metadata that is not a table of texts")
    return metadata


def _check_entry(name: str, entry: Any) -> _Span:
    where = f"tensor `{short(name)}`"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise IntegrityError(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise IntegrityError(f"{where} has the unknown dtype {short(dtype)}")
    if not _are_counts(shape) or len(shape) > RANK_MAX:
        raise IntegrityError(f"{where} has a shape that is not up to {RANK_MAX} counts")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise IntegrityError(f"{where} has offsets that are not two counts")
    begin, end = offsets
    if end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise IntegrityError(f"{where} has {end - begin} bytes, which is not what its shape {short(shape)} needs")
    return DTYPES[dtype], tuple(shape), begin, end


def _check_cover(spans: Mapping[str, _Span], body_bytes: int) -> None:
    """The tensors must fill the file exactly: a gap could hide bytes that no reader sees."""
    position = 0
    for begin, end, name in sorted((span[2], span[3], name) for name, span in spans.items()):
        if begin != position:
            raise IntegrityError(f"tensor `{short(name)}` begins at byte {begin}, expected {position}")
        position = end
    if position != body_bytes:
        raise IntegrityError(f"tensors of {position} bytes in a file with {body_bytes}")


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def short(value: object) -> str:
    """For messages: what a stranger chose, cut."""
    return ascii(value)[:80].strip("'")
