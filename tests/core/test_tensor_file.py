"""The tensor codec against the `safetensors` library, and against bytes made to hurt."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dipaco_p2p.config import ModelConfig
from dipaco_p2p.core.model.layout import decode_module, encode_module, module_layout
from dipaco_p2p.core.model.transformer import initial_modules
from dipaco_p2p.core.tensor_file import DTYPES, decode, encode
from dipaco_p2p.errors import IntegrityError

HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def file_of(header: object, body: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def every_dtype() -> dict[str, np.ndarray]:
    return {name.lower(): np.arange(6).reshape(2, 3).astype(code) for name, code in DTYPES.items()}


def test_the_library_reads_what_we_write():
    tensors = every_dtype() | {"empty": np.zeros((0, 4), dtype=np.float32), "scalar": np.array(7, dtype=np.int64)}
    loaded = safetensors.numpy.load(encode(tensors, metadata={"codec": "ü"}))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        np.testing.assert_array_equal(loaded[name], tensor)


def test_we_read_what_the_library_writes():
    tensors = every_dtype()
    loaded, metadata = decode(safetensors.numpy.save(tensors, metadata={"format": "np"}))
    assert metadata == {"format": "np"}
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        np.testing.assert_array_equal(loaded[name], tensor)


def test_bytes_do_not_depend_on_order_memory_layout_or_byte_order():
    wide = np.arange(6, dtype=np.float32).reshape(2, 3)
    one = encode({"a": wide, "b": wide})
    assert one == encode({"b": np.asfortranarray(wide), "a": wide.astype(">f4")})
    assert (8 + int.from_bytes(one[:8], "little")) % 8 == 0


BAD = {
    "too short": b"1234567",
    "allowed": (2**60).to_bytes(8, "little") + bytes(100),
    "in a file of": (100).to_bytes(8, "little") + bytes(8),
    "not JSON": file_of(b"{oops"),
    "is not JSON: 'utf": file_of(b'{"\xff": 1}'),
    "not a JSON object": file_of([]),
    "twice": file_of(b'{"a": 1, "a": 1}'),
    "metadata": file_of({**HEADER, "__metadata__": {"a": 1}}),
    "needs exactly": file_of({"a": {"dtype": "F32"}}),
    "unknown dtype": file_of({"a": {**HEADER["a"], "dtype": "F64"}}),
    "unknown dtype ": file_of({"a": {**HEADER["a"], "dtype": ["F32"]}}),
    "shape": file_of({"a": {**HEADER["a"], "shape": [-2]}}),
    "shape ": file_of({"a": {**HEADER["a"], "shape": [True, 2]}}),
    "shape  ": file_of({"a": {**HEADER["a"], "shape": [2**62, 4]}}),
    "which is not what": file_of({"a": {**HEADER["a"], "shape": [2**40, 2**40]}}),
    "which is not what ": file_of({"a": {**HEADER["a"], "shape": [3]}}),
    "offsets": file_of({"a": {**HEADER["a"], "data_offsets": [0, 8, 8]}}),
    "offsets ": file_of({"a": {**HEADER["a"], "data_offsets": [-8, 0]}}),
    "begins at": file_of({**HEADER, "b": {**HEADER["a"], "data_offsets": [4, 12]}}, bytes(12)),
    "begins at ": file_of({"a": {**HEADER["a"], "data_offsets": [8, 16]}}, bytes(16)),
    "in a file with": file_of(HEADER, bytes(9)),
    "in a file with ": file_of(HEADER, bytes(4)),
    "recursion": file_of(b"[" * 100_000),
    "no array has": file_of({"a": {"dtype": "F32", "shape": [0, 2**47, 2**47], "data_offsets": [0, 0]}}, b""),
    "no array has ": file_of({"a": {"dtype": "F32", "shape": [2**47, 2**47, 0, 2**47], "data_offsets": [0, 0]}}, b""),
    "surrogates": file_of(b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
}


@pytest.mark.parametrize("message", BAD)
def test_a_malformed_file_is_refused_in_one_line(message):
    with pytest.raises(IntegrityError) as caught:
        decode(BAD[message])
    assert message.strip() in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_a_header_beyond_the_bound_is_refused():
    data = encode({"a": np.zeros(2, dtype=np.float32)})
    with pytest.raises(IntegrityError, match="at most 16"):
        decode(data, header_bytes_max=16)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(sorted(DTYPES)),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "__metadata__", "dtype", "shape", "data_offsets"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    ),
    body=st.binary(max_size=16),
)
def test_only_integrity_errors_escape_from_odd_headers(header, body):
    try:
        tensors, _ = decode(file_of(header, body))
    except IntegrityError:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(body)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(place=st.integers(0, 200), value=st.integers(0, 255), length=st.integers(0, 200))
@example(place=0, value=255, length=200)
def test_only_integrity_errors_escape_from_damaged_files(place, value, length):
    data = bytearray(encode(every_dtype(), metadata={"k": "v"}))
    data[place] = value
    for damaged in (bytes(data), bytes(data[:length])):
        try:
            decode(damaged)
        except IntegrityError:
            continue


def test_a_module_survives_the_codec_and_opens_in_the_library():
    layout = module_layout(ModelConfig(), 1)
    flat = initial_modules(ModelConfig(), seed=0)[1]
    data = encode_module(flat, layout)
    assert decode_module(data, layout).tobytes() == flat.tobytes()
    assert safetensors.numpy.load(data).keys() == set(layout.names)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_module_with_values_that_are_not_finite_is_refused(value):
    layout = module_layout(ModelConfig(), 1)
    flat = np.zeros(layout.size, dtype=np.float32)
    flat[5] = value
    with pytest.raises(IntegrityError, match="not finite"):
        decode_module(encode_module(flat, layout), layout)


def test_a_module_of_another_level_or_type_is_refused():
    layout = module_layout(ModelConfig(), 1)
    other = module_layout(ModelConfig(), 2)
    data = encode_module(np.zeros(other.size, dtype=np.float32), other)
    with pytest.raises(IntegrityError, match="another module"):
        decode_module(data, layout)
    halves = {n: v.astype(np.float16) for n, v in layout.split(np.zeros(layout.size, dtype=np.float32)).items()}
    with pytest.raises(IntegrityError, match="float16"):
        decode_module(encode(halves), layout)


def test_a_view_is_the_memory_of_the_file_and_cannot_be_changed():
    data = encode({"a": np.arange(3, dtype=np.int8), "b": np.arange(5, dtype=np.float32)})
    fresh, _ = decode(data)
    views, _ = decode(data, is_view=True)
    assert all((views[name] == fresh[name]).all() and fresh[name].flags.writeable for name in fresh)
    assert views["b"].flags.aligned and views["b"].flags.writeable  # behind three bytes: copied
    with pytest.raises(ValueError, match="read-only"):
        views["a"][0] = 1
