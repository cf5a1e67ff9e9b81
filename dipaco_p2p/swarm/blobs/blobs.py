"""Blobs over calls: bytes named by their digest, moved in ranges, resumable in both directions.

Fetching has a file of its own (fetch.py). Ranges are shorter on slow links (pace.py) and under a limit of either side
(line.py): they go when there is room on the line, and what is no blob never waits for them. What takes time with large
blobs, to digest, read and write them, is done beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeGuard

from ...canonical import digest as digest_of
from ...canonical import is_digest
from ...errors import DipacoError, IntegrityError, Refused
from ...protocol.signing import PeerId, short
from ..api import Reply, Swarm
from .bandwidth import CUT_BYTES_MIN, Line
from .range_size import RANGE_BYTES, pace_of

READ, WRITE = "blob.read", "blob.write"
OWN_LINE = Line()
"""What a peer sends to itself goes over no line."""

OnProgress = Callable[[int, int], None]


class PartialSink(Protocol):
    """Where an upload goes: what it holds survives a broken connection."""

    @property
    def received(self) -> int:
        """How many bytes are there already, from the start on."""

    def write(self, offset: int, data: bytes) -> None:
        """Add `data` at `offset`, which is `received`."""

    def finish(self) -> None:
        """All bytes are there: check and keep them; raises IntegrityError."""


def serve_blobs(
    swarm: Swarm, read_range: Callable[[str, int, int], bytes | None], size_of: Callable[[str], int | None]
) -> None:
    """Give away blobs: `read_range(digest, offset, length)` and `size_of(digest)` say None for what is not held.

    A range is cut to what our line carries in half a second, so a reader may get less than it asked for.
    """

    async def handle(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        digest, offset, length = _read_header(header, "offset", "length")
        size = await asyncio.to_thread(size_of, digest)
        if size is None:
            raise Refused(f"the blob {digest[:12]} is not here", reason="missing")
        up = _line(swarm, peer).up
        length = up.range_bytes(max(0, min(length, RANGE_BYTES, size - offset)))
        await up.take(length)
        data = await asyncio.to_thread(read_range, digest, offset, length) if length else b""
        if data is None:
            raise Refused(f"the blob {digest[:12]} is not here any more", reason="missing")
        return Reply({"size": size}, data)

    swarm.serve(READ, handle)


async def send_blob(
    swarm: Swarm,
    peer: PeerId,
    data: bytes,
    *,
    timeout_s: float,
    addresses: Sequence[str] = (),
    digest: str | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Bring `data` to `peer`, going on where an earlier attempt ended, and return its digest.

    `timeout_s` is for each range. Who knows the `digest` already says it, and spares a pass over the data: a wrong one
    is refused. Raises Unreachable, Refused (with the receiver's reason), IntegrityError.
    """
    if digest is None:
        digest = await asyncio.to_thread(digest_of, data)
    size = len(data)
    have, done = 0, False
    body = b""
    while not done:
        header = {"digest": digest, "size": size, "offset": have}
        await _line(swarm, peer).up.take(len(body))
        with _timed(swarm, peer, len(body)):
            reply = await swarm.call(peer, WRITE, header, body, timeout_s=timeout_s, addresses=addresses)
        there, done = reply.header.get("have"), reply.header.get("done") is True
        if not is_count(there) or there > size or (body and there <= have and not done):
            raise IntegrityError(f"{short(peer)} says it has {there!r} of {size} bytes")
        have = there
        if on_progress is not None:
            on_progress(have, size)
        body = data[have : have + _upload_bytes(swarm, peer, reply)]
    return digest


def serve_uploads(swarm: Swarm, accept: Callable[[PeerId, str, int], Awaitable[PartialSink]]) -> None:
    """Take blobs: `accept(peer, digest, size)` gives the sink of an upload, always the same one until it is finished,
    or raises Refused. A call without a body asks how much is there. Under a limit the answer comes when our line has
    had room for the body, and says how much the next one may bring."""
    writing: set[tuple[PeerId, str]] = set()

    async def handle(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        digest, size, offset = _read_header(header, "size", "offset")
        if offset + len(body) > size:
            raise Refused(f"{len(body)} bytes at {offset} do not fit into {size}", reason="malformed")
        if (peer, digest) in writing:
            raise Refused(f"another call writes {digest[:12]}", reason="busy")
        writing.add((peer, digest))
        try:
            told = await _take(await accept(peer, digest, size), size, offset, body)
        finally:
            writing.discard((peer, digest))
        down = _line(swarm, peer).down
        await down.take(len(body))
        return Reply(told | {"range": down.range_bytes(RANGE_BYTES)})

    swarm.serve(WRITE, handle)


async def _take(sink: PartialSink, size: int, offset: int, body: bytes) -> dict[str, Any]:
    """Write what continues the sink; what it has already is not written twice (calls may be repeated)."""
    if body and offset == sink.received:
        await asyncio.to_thread(sink.write, offset, body)
    if sink.received < size:
        return {"have": sink.received, "done": False}
    try:
        await asyncio.to_thread(sink.finish)
    except IntegrityError as error:
        raise Refused(str(error), reason="integrity") from None
    return {"have": size, "done": True}


def _line(swarm: Swarm, peer: PeerId) -> Line:
    return OWN_LINE if peer == swarm.peer else swarm.line


def _upload_bytes(swarm: Swarm, peer: PeerId, reply: Reply) -> int:
    """How long the next range to `peer` is to be: what the link, our line and the receiver's carry."""
    wanted = reply.header.get("range")
    most = min(RANGE_BYTES, max(CUT_BYTES_MIN, wanted)) if is_count(wanted) else RANGE_BYTES
    return _line(swarm, peer).up.range_bytes(min(most, pace_of(swarm).range_bytes(peer)))


@contextlib.contextmanager
def _timed(swarm: Swarm, peer: PeerId, length: int) -> Iterator[None]:
    """Tell the pace how long the block took."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    try:
        yield
    except DipacoError:
        pace_of(swarm).failed(peer, length, loop.time() - start_s)
        raise
    if length:
        pace_of(swarm).took(peer, length, loop.time() - start_s)


def _read_header(header: dict[str, Any], first: str, second: str) -> tuple[str, int, int]:
    """The digest and two counts of a request; raises Refused."""
    digest, one, other = header.get("digest"), header.get(first), header.get(second)
    if not is_digest(digest) or not is_count(one) or not is_count(other):
        raise Refused(f"a digest, `{first}` and `{second}` were expected", reason="malformed")
    return str(digest), one, other


def is_count(value: object) -> TypeGuard[int]:
    """Whether a peer's `value` is a length or an offset."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
