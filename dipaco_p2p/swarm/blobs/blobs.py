"""Blobs over calls: bytes named by their digest, moved in ranges, resumable in both directions.

Fetching has a file of its own (fetch.py). Ranges are shorter on slow links (range_size.py) and under a limit of either
side (bandwidth.py): they go when there is room on the line, and what is not a blob never waits for them. What takes
time with large blobs, to digest, read and write them, is done beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from ...canonical import digest as digest_of
from ...errors import DipacoError, IntegrityError, Refused
from ...protocol.reasons import Reason
from ...protocol.signing import PeerId, short
from ..api import Swarm
from ..calls import Range, ReadBlob, WriteBlob, Written
from .bandwidth import CUT_BYTES_MIN, Line
from .range_size import RANGE_BYTES, pace_of

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

    async def handle(peer: PeerId, request: ReadBlob) -> Range:
        digest, offset = request.digest, request.offset
        size = await asyncio.to_thread(size_of, digest)
        if size is None:
            raise Refused(f"the blob {digest[:12]} is not here", reason=Reason.MISSING)
        up = _line(swarm, peer).up
        length = up.range_bytes(max(0, min(request.length, RANGE_BYTES, size - offset)))
        await up.take(length)
        data = await asyncio.to_thread(read_range, digest, offset, length) if length else b""
        if data is None:
            raise Refused(f"the blob {digest[:12]} is not here any more", reason=Reason.MISSING)
        return Range(size=size, body=data)

    ReadBlob.serve(swarm, handle)


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
        request = WriteBlob(digest=digest, size=size, offset=have, body=body)
        await _line(swarm, peer).up.take(len(body))
        with _timed(swarm, peer, len(body)):
            reply = await request.call(swarm, peer, timeout_s=timeout_s, addresses=addresses)
        there, done = reply.have, reply.done
        if there > size or (body and there <= have and not done):
            raise IntegrityError(f"{short(peer)} says it has {there!r} of {size} bytes")
        have = there
        if on_progress is not None:
            on_progress(have, size)
        body = data[have : have + _upload_bytes(swarm, peer, reply.range)]
    return digest


def serve_uploads(swarm: Swarm, accept: Callable[[PeerId, str, int], Awaitable[PartialSink]]) -> None:
    """Take blobs: `accept(peer, digest, size)` gives the sink of an upload, always the same one until it is finished,
    or raises Refused. A call without a body asks how much is there. Under a limit the answer comes when our line has
    had room for the body, and says how much the next one may bring."""
    writing: set[tuple[PeerId, str]] = set()

    async def handle(peer: PeerId, request: WriteBlob) -> Written:
        digest, size, offset, body = request.digest, request.size, request.offset, request.body
        if offset + len(body) > size:
            raise Refused(f"{len(body)} bytes at {offset} do not fit into {size}", reason=Reason.MALFORMED)
        if (peer, digest) in writing:
            raise Refused(f"another call writes {digest[:12]}", reason=Reason.BUSY)
        writing.add((peer, digest))
        try:
            have, done = await _take(await accept(peer, digest, size), size, offset, body)
        finally:
            writing.discard((peer, digest))
        down = _line(swarm, peer).down
        await down.take(len(body))
        return Written(have=have, done=done, range=down.range_bytes(RANGE_BYTES))

    WriteBlob.serve(swarm, handle)


async def _take(sink: PartialSink, size: int, offset: int, body: bytes) -> tuple[int, bool]:
    """Write what continues the sink; what it has already is not written twice (calls may be repeated). How many bytes
    are there now, and whether that is all."""
    if body and offset == sink.received:
        await asyncio.to_thread(sink.write, offset, body)
    if sink.received < size:
        return sink.received, False
    try:
        await asyncio.to_thread(sink.finish)
    except IntegrityError as error:
        raise Refused(str(error), reason=Reason.INTEGRITY) from None
    return size, True


def _line(swarm: Swarm, peer: PeerId) -> Line:
    return OWN_LINE if peer == swarm.peer else swarm.line


def _upload_bytes(swarm: Swarm, peer: PeerId, wanted: int | None) -> int:
    """How long the next range to `peer` is to be: what the link, our line and the receiver's carry."""
    most = RANGE_BYTES if wanted is None else min(RANGE_BYTES, max(CUT_BYTES_MIN, wanted))
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
