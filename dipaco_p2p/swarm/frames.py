"""One frame per request and per reply on a binary stream, with its lengths checked before anything is allocated.

    magic "DPP" | version u8 | kind u8 | header length u32 | body length u32 | header | body        (big-endian)

The header is canonical JSON, a table; the body is bytes. These functions do no I/O of their own: `read_frame` is
given a coroutine that reads exactly so many bytes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ..canonical import canonical_bytes, read_canonical
from ..errors import IntegrityError, Refused
from ..protocol.reasons import Reason
from .api import BODY_BYTES_MAX, HEADER_BYTES_MAX

MAGIC = b"DPP"
VERSION = 1
_PREFIX = struct.Struct(">3sBBII")
PREFIX_BYTES = _PREFIX.size
HEADER_VALUES_MAX = 16 * 1024
"""Of the JSON values in a header, more or less: fifty bytes of memory each. Of the largest document about 12 000."""
MESSAGE_CHARS_MAX = 400
REASON_CHARS_MAX = 32

ReadExactly = Callable[[int], Awaitable[bytes]]


class Kind(enum.IntEnum):
    """What a frame is."""

    REQUEST = 0
    REPLY = 1
    REFUSAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A decoded frame."""

    kind: Kind
    header: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


def encode_head(frame: Frame) -> bytes:
    """Prefix and header; the body follows as it is, so that large bodies are not copied."""
    header = canonical_bytes(frame.header)
    assert len(header) <= HEADER_BYTES_MAX, f"a header of {len(header)} bytes; at most {HEADER_BYTES_MAX} fit"
    assert len(frame.body) <= BODY_BYTES_MAX, f"a body of {len(frame.body)} bytes; at most {BODY_BYTES_MAX} fit"
    return _PREFIX.pack(MAGIC, VERSION, frame.kind, len(header), len(frame.body)) + header


def encode(frame: Frame) -> bytes:
    """The whole frame as bytes."""
    return encode_head(frame) + frame.body


def size_bytes(frame: Frame) -> int:
    """The length of the whole frame."""
    return len(encode_head(frame)) + len(frame.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A frame whose body has not been read."""

    kind: Kind
    header: dict[str, Any]
    body_bytes: int

    async def frame(self, read_exactly: ReadExactly) -> Frame:
        """Read the body, too."""
        body = await read_exactly(self.body_bytes) if self.body_bytes else b""
        return Frame(kind=self.kind, header=self.header, body=body)


async def read_head(read_exactly: ReadExactly) -> Head:
    """Read a frame up to its body; nothing is read, so nothing allocated, beyond the limits of lengths.

    Raises IntegrityError for what is not a frame, and Refused ("oversize") for lengths beyond the limits."""
    data = await read_exactly(PREFIX_BYTES)
    magic, version, kind, header_bytes, body_bytes = _PREFIX.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise IntegrityError(f"not a frame of version {VERSION}: it begins with {data[:4].hex()}")
    if kind not in set(Kind):
        raise IntegrityError(f"a frame of unknown kind {kind}")
    if header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise Refused(f"a frame of {header_bytes} + {body_bytes} bytes is over the limits", reason=Reason.OVERSIZE)
    data = await read_exactly(header_bytes)
    if sum(map(data.count, (b",", b"[", b"{"))) > HEADER_VALUES_MAX:
        raise IntegrityError(f"a header of more than {HEADER_VALUES_MAX} values")
    header = read_canonical(data)
    if not isinstance(header, dict):
        raise IntegrityError("the header of a frame must be a table")
    return Head(kind=Kind(kind), header=header, body_bytes=body_bytes)


async def read_frame(read_exactly: ReadExactly) -> Frame:
    """Read one whole frame; raises as `read_head`."""
    return await (await read_head(read_exactly)).frame(read_exactly)


def request(method: str, header: dict[str, Any], body: bytes = b"") -> Frame:
    """The frame that asks for `method`."""
    return Frame(kind=Kind.REQUEST, header={"method": method, "header": header}, body=body)


def read_request(frame: Frame) -> tuple[str, dict[str, Any]]:
    """Method and header of a request; raises IntegrityError."""
    method, header = frame.header.get("method"), frame.header.get("header")
    if frame.kind is not Kind.REQUEST or not isinstance(method, str) or not isinstance(header, dict):
        raise IntegrityError("not a request")
    return method, header


def refusal(refused: Refused) -> Frame:
    """The frame that says why a request is refused."""
    message, reason = str(refused)[:MESSAGE_CHARS_MAX], refused.reason[:REASON_CHARS_MAX]
    return Frame(kind=Kind.REFUSAL, header={"message": message, "reason": reason})


def read_reply(frame: Frame) -> tuple[dict[str, Any], bytes]:
    """Header and body of a reply; raises Refused if it is a refusal, IntegrityError if it is neither."""
    if frame.kind is Kind.REPLY:
        return frame.header, frame.body
    message, reason = frame.header.get("message"), frame.header.get("reason")
    if frame.kind is not Kind.REFUSAL or not isinstance(message, str) or not isinstance(reason, str):
        raise IntegrityError("not a reply")
    raise Refused(_printable(message[:MESSAGE_CHARS_MAX]), reason=_printable(reason[:REASON_CHARS_MAX]))


def _printable(text: str) -> str:
    """Another peer's words end up on our terminal: no control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)
