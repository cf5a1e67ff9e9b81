"""Canonical bytes: one value, one spelling, one digest."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.canonical import canonical_bytes, digest, is_digest, read_canonical
from dipaco_p2p.errors import IntegrityError


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
        (0.1 + 0.2, b"0.30000000000000004"),
        (1.0, b"1.0"),
        (1, b"1"),
        (-0.0, b"-0.0"),
        (1e300, b"1e+300"),
        (5e-324, b"5e-324"),
        (2**70, b"1180591620717411303424"),
        ("é\u2028\U0001f600", '"é\u2028\U0001f600"'.encode()),
        ('"\\\n\x00', b'"\\"\\\\\\n\\u0000"'),
        ({"é": 1, "z": 2}, '{"z":2,"é":1}'.encode()),
        ([], b"[]"),
    ],
)
def test_a_value_is_written_in_one_way(value: Any, data: bytes) -> None:
    assert canonical_bytes(value) == data
    assert read_canonical(data) == value
    assert type(read_canonical(data)) is type(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {1}, b"bytes", object(), "\ud800", 1j, [math.nan]])
def test_what_json_cannot_say_is_not_written(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        canonical_bytes(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" 1",
        b"1\n",
        b"[1, 2]",
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',  # a key twice
        b'{"a": 1}',
        b"1.50",
        b"1e0",
        b"1E5",
        b"100000.00",
        b"-0",
        b"01",
        b"+1",
        b'"\\u00e9"',
        b'"\\/"',
        b'"\\ud800"',  # half of a pair has no UTF-8
        b'"\xff"',
        b"\xef\xbb\xbf1",  # a byte-order mark
        '"a"'.encode("utf-16"),
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"null null",
        b"{",
        b"9" * 5000,  # more digits than Python reads
        b"[" * 100_000 + b"]" * 100_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_another_spelling_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="canonical"):
        read_canonical(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=15,
)


@given(values)
def test_what_is_written_reads_back(value: Any) -> None:
    data = canonical_bytes(value)
    assert read_canonical(data) == value
    assert canonical_bytes(read_canonical(data)) == data


@given(st.dictionaries(st.text("abc", max_size=3), st.integers()))
def test_the_order_of_keys_does_not_matter(value: dict[str, int]) -> None:
    assert canonical_bytes(dict(reversed(value.items()))) == canonical_bytes(value)


@given(st.binary(max_size=40) | st.text('{}[]":,0123456789.eE-+ntfaulrs ', max_size=20).map(str.encode))
def test_any_bytes_are_one_value_or_refused(data: bytes) -> None:
    try:
        value = read_canonical(data)
    except IntegrityError:
        return
    assert canonical_bytes(value) == data


def test_a_digest_is_sha_256() -> None:
    # FIPS 180-2, appendix B.1.
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest(b"abc") == digest(bytearray(b"abc")) == digest(memoryview(b"abc")) == expected
    assert is_digest(expected)


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "\u0661" * 64, "a" * 63 + "\n", None, 7])
def test_what_is_no_digest_is_told_apart(text: object) -> None:
    assert not is_digest(text)
    assert not is_digest([*("a" * 64)])
