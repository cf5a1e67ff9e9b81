"""Blobs over calls: bytes named by their digest, moved in ranges, resumable in both directions.

Fetching has a file of its own (fetch.py). Large blobs are digested, read and written in threads, beside the event loop.

A blob in transit fills the buffers between two peers, and a heartbeat or a receipt of the same peers queues behind it.
So a range is as long as the link carries in about a second (`Pace`): a slow range halves the next one, a fast one
doubles it, as with TCP's window. Several transfers at once share the link: each finds its own part of it, and together
they fill it no further ahead. On a fast link all ranges have the full length. A limit of either side shortens them too
(bandwidth.py); the time that a range waits for our own limit is not the link's.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from ...canonical import digest as digest_of
from ...errors import DipacoError, IntegrityError, Refused
from ...protocol.reasons import Reason
from ...protocol.signing import PeerId, short
from ..api import Swarm
from ..calls import Range, ReadBlob, WriteBlob, Written
from .bandwidth import CUT_BYTES_MIN, Line

V = TypeVar("V", int, float)

OWN_LINE = Line()
"""What a peer sends to itself goes over no line."""
RANGE_BYTES = 1024 * 1024
RANGE_BYTES_MIN = 16 * 1024
SLOW_S = 2.0
FAST_S = 0.5
PEERS_MAX = 1024
TIME_MIN_S = 1e-3
"""A range that took less says no more of a peer's speed."""

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

    `timeout_s` is for each range. A caller that knows the `digest` passes it, and spares a pass over the data: a wrong
    one is refused. Raises Unreachable, Refused (with the receiver's reason), IntegrityError.
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


class Pace:
    """The length of the next range from or to each peer; remembered, since a range that never arrived says most. And
    who brought wrong bytes."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[PeerId, int] = OrderedDict()
        self._speeds: OrderedDict[PeerId, float] = OrderedDict()
        self._liars: OrderedDict[PeerId, int] = OrderedDict()

    def range_bytes(self, peer: PeerId) -> int:
        """How long the next range is to be, at most."""
        return self._lengths.get(peer, RANGE_BYTES)

    def speed(self, peer: PeerId) -> float | None:
        """Bytes per second of one range from `peer`, the newest ones counting most; None if it never brought any."""
        return self._speeds.get(peer)

    def took(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        """A range of `length` bytes took `elapsed_s`."""
        self._note_slow(peer, length, elapsed_s)
        if elapsed_s < FAST_S and length >= self.range_bytes(peer):  # a short last range says little
            self._set(peer, 2 * length)

    def brought(self, peer: PeerId, asked: int, length: int, elapsed_s: float) -> None:
        """Of `asked` bytes `peer` sent `length` in `elapsed_s`; if fewer, that is all that it gives at once."""
        self.took(peer, length, elapsed_s)
        if length < asked:
            self._set(peer, length)
        speed = length / max(elapsed_s, TIME_MIN_S)
        _remember(self._speeds, peer, (self._speeds.get(peer, speed) + speed) / 2)

    def failed(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        """A range was given up after `elapsed_s`: a link may be too slow for its length, or the peer not there."""
        self._note_slow(peer, length, elapsed_s)
        if elapsed_s > SLOW_S and peer in self._speeds:
            self._speeds[peer] /= 2

    def lied(self, peer: PeerId) -> None:
        """What it brought was not the blob: it is asked last from now on."""
        _remember(self._liars, peer, 1)

    def has_lied(self, peer: PeerId) -> bool:
        return peer in self._liars

    def _note_slow(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        if elapsed_s > SLOW_S:
            self._set(peer, min(self.range_bytes(peer), length) // 2)

    def _set(self, peer: PeerId, length: int) -> None:
        self._lengths.pop(peer, None)
        if length < RANGE_BYTES:
            _remember(self._lengths, peer, max(RANGE_BYTES_MIN, length))


def _remember(known: OrderedDict[PeerId, V], peer: PeerId, value: V) -> None:
    """Of many peers the last are remembered."""
    known.pop(peer, None)
    known[peer] = value
    if len(known) > PEERS_MAX:
        known.popitem(last=False)


_paces: weakref.WeakKeyDictionary[Swarm, Pace] = weakref.WeakKeyDictionary()


def pace_of(swarm: Swarm) -> Pace:
    """The pace of all transfers over `swarm`."""
    return _paces.setdefault(swarm, Pace())
