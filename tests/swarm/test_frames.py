from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.errors import DipacoError, IntegrityError, Refused
from dipaco_p2p.swarm import frames
from dipaco_p2p.swarm.api import BODY_BYTES_MAX, HEADER_BYTES_MAX
from dipaco_p2p.swarm.frames import Frame, Kind


class Source:
    """Bytes to read exactly, and the lengths that were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, []

    async def read_exactly(self, length: int) -> bytes:
        self.asked.append(length)
        piece, self.data = self.data[:length], self.data[length:]
        if len(piece) < length:
            raise asyncio.IncompleteReadError(piece, length)
        return piece


def read(data: bytes) -> Frame:
    return asyncio.run(frames.read_frame(Source(data).read_exactly))


def test_a_frame_reads_back() -> None:
    for kind in Kind:
        frame = Frame(kind=kind, header={"a": [1, 2.5, None, "ü"]}, body=b"body")
        data = frames.encode_head(frame) + frame.body
        assert read(data) == frame and len(data) == frames.size_bytes(frame)


@pytest.mark.parametrize("lengths", [(HEADER_BYTES_MAX + 1, 0), (0, BODY_BYTES_MAX + 1), (2**32 - 1, 2**32 - 1)])
def test_lengths_are_checked_before_anything_is_read(lengths: tuple[int, int]) -> None:
    source = Source(struct.pack(">3sBBII", b"DPP", 1, 0, *lengths) + bytes(100))
    with pytest.raises(Refused) as refused:
        asyncio.run(frames.read_frame(source.read_exactly))
    assert refused.value.reason == "oversize" and source.asked == [frames.PREFIX_BYTES]


def test_wrong_magic_version_and_kind_are_refused() -> None:
    for prefix in [(b"GET", 1, 0), (b"DPP", 2, 0), (b"DPP", 1, 3)]:
        with pytest.raises(IntegrityError):
            read(struct.pack(">3sBBII", *prefix, 2, 0) + b"{}")


@pytest.mark.parametrize("header", [b"[]", b"{ }", b'{"a":NaN}', b"\xff", b"1", b'{"a":1,"a":1}'])
def test_headers_that_are_no_canonical_table_are_refused(header: bytes) -> None:
    with pytest.raises(IntegrityError):
        read(struct.pack(">3sBBII", b"DPP", 1, 0, len(header), 0) + header)


@given(st.binary(max_size=300))
def test_garbage_raises_only_what_readers_expect(data: bytes) -> None:
    for prefix in (b"", b"DPP\x01\x00\x00\x00\x00"):
        try:
            frames.read_request(read(prefix + data))
        except (DipacoError, asyncio.IncompleteReadError):
            pass


def test_a_refusal_arrives_bounded_and_printable() -> None:
    with pytest.raises(Refused) as refused:
        frames.read_reply(frames.refusal(Refused("\x1b[2Jgone" + "x" * 1000, reason="stale\n")))
    assert str(refused.value).startswith("?[2Jgone") and len(str(refused.value)) == frames.MESSAGE_CHARS_MAX
    assert refused.value.reason == "stale?"


def test_what_is_too_large_to_send_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError):
        frames.encode_head(Frame(kind=Kind.REPLY, body=bytes(BODY_BYTES_MAX + 1)))
