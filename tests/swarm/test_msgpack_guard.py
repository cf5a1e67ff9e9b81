"""What msgpack may be unpacked: every honest value, and nothing that costs more than its bytes."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.swarm.hivemind.guard import is_modest

ITEMS = 200
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@given(VALUES)
def test_plain_values_are_modest_whole_and_in_a_dictionary(value: object) -> None:
    data = msgpack.dumps(value)
    assert is_modest(data, items_max=ITEMS)
    assert is_modest(msgpack.dumps(msgpack.ExtType(0x50, data)), items_max=ITEMS)


@given(st.binary(max_size=300))
def test_any_bytes_get_an_answer_and_what_is_modest_costs_little(data: bytes) -> None:
    if is_modest(data, items_max=ITEMS):
        try:
            msgpack.unpackb(data, ext_hook=lambda code, inner: inner)
        except (ValueError, TypeError, msgpack.UnpackException):
            pass  # of another form, which is cheap to find


def inside(depth: int, code: int) -> bytes:
    data: bytes = msgpack.dumps([])
    for _ in range(depth):
        data = msgpack.dumps(msgpack.ExtType(code, data))
    return data


@pytest.mark.parametrize(
    "data",
    [
        inside(2, 0x50),
        inside(200, 0x50),
        inside(1, 0x40),
        inside(1, 0x51),
        msgpack.dumps([msgpack.ExtType(0x50, b"\x90")]),
        msgpack.dumps(msgpack.ExtType(0x50, b"\x90")) + b"\x90",
        b"\xdd\x7f\xff\xff\xff",
        b"\xdf\x00\x00\x40\x00",
        b"\x90" * (ITEMS + 1),
        msgpack.dumps([[]] * ITEMS),
        b"\xc6\xff\xff\xff\xff",
        b"\xc7",
        b"\xda\x00",
    ],
)
def test_bombs_are_not(data: bytes) -> None:
    assert not is_modest(data, items_max=ITEMS)
