"""One call over one pair of asyncio streams, from either end; nothing here knows what carries the bytes."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..canonical import canonical_bytes, read_canonical
from ..errors import IntegrityError, Refused
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, public_key_of
from . import frames
from .api import BODY_BYTES_MAX, HEADER_BYTES_MAX
from .frames import Caller, Dispatcher, Frame, Share

T = TypeVar("T")

CHUNK_BYTES = 256 * 1024
DISCARD_BYTES_MAX = HEADER_BYTES_MAX + BODY_BYTES_MAX
HANG_UP_S_MAX = 2.0
REFUSALS_MAX = 64
"""Streams that may not come in and are told so: each is an open file of ours until its caller has hung up,"""
REFUSALS_PER_PEER_MAX = 8
"""and of one peer. More are closed at once, without a word."""


async def exchange(reader: StreamReader, writer: StreamWriter, request: Frame) -> Frame:
    """Send `request` and read the reply at the same time: a refusal may come before all has been sent.

    Raises IntegrityError for what is no frame, IncompleteReadError or ConnectionError when the other side hangs up.
    """
    sending = asyncio.ensure_future(_send_or_stop(writer, request))
    try:
        return await frames.read_frame(reader.readexactly)
    except Refused as oversize:
        raise IntegrityError(f"a reply that cannot be read: {oversize}") from None
    finally:
        sending.cancel()
        await asyncio.wait({sending})


class StreamServer:
    """Serves calls on streams; reading a request and sending a reply may each take `timeout_s`, and less while peers
    without a turn wait (`Turns`). A handler answers for its own time."""

    def __init__(self, dispatcher: Dispatcher, counts: Counter[str], *, timeout_s: float) -> None:
        self._dispatcher, self._counts, self._timeout_s = dispatcher, counts, timeout_s
        self._refused = Share(REFUSALS_MAX, per_peer=REFUSALS_PER_PEER_MAX)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def answer(
        self, caller: Caller, reader: StreamReader, writer: StreamWriter, *, is_relayed: bool = False
    ) -> None:
        """Serve one call and close; whatever `caller` sends, or fails to send in time, harms nobody else."""
        await asyncio.wait({self._start(self._answer(caller, reader, writer, is_relayed))})

    async def answer_self(self, us: PeerId, request: Frame) -> Frame:
        """Serve a call of our own; like one from elsewhere, it goes on when the caller stops waiting for it."""
        copy = Frame(kind=request.kind, header=read_canonical(canonical_bytes(request.header)), body=request.body)
        return await asyncio.shield(self._start(self._dispatcher.answer(us, copy)))

    async def close(self) -> None:
        """End all calls that are being served, except one that closes us."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, caller: Caller, reader: StreamReader, writer: StreamWriter, is_relayed: bool) -> None:
        """A stream is an open file of this process, so each has a place from its beginning to its end."""
        try:
            with self._dispatcher.entered(caller):
                await self._answer_or_refuse(caller, reader, writer, is_relayed)
                await wait_hang_up(reader)
        except Refused as refused:
            await self._turn_away(caller, refused, reader, writer)
        except (TimeoutError, ConnectionError, IncompleteReadError):
            self._counts["calls_broken"] += 1
        finally:
            writer.transport.abort()  # closed, it would stay until all is sent, and its caller may read nothing

    async def _turn_away(self, caller: Caller, refused: Refused, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            with self._refused.place(caller):
                await self._refuse(writer, refused)
                await wait_hang_up(reader)
        except Refused:
            self._counts["calls_refused"] += 1

    async def _answer_or_refuse(
        self, caller: Caller, reader: StreamReader, writer: StreamWriter, is_relayed: bool
    ) -> None:
        try:
            public_key_of(caller.peer)  # A foreign kind of key could not sign anything for us.
            await self._answer_entered(caller, reader, writer, is_relayed)
        except (Refused, IntegrityError) as error:
            refused = error if isinstance(error, Refused) else Refused(str(error), reason=Reason.MALFORMED)
            await self._refuse(writer, refused)

    async def _refuse(self, writer: StreamWriter, refused: Refused) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(HANG_UP_S_MAX):
                await send(writer, self._dispatcher.refuse(refused))

    async def _answer_entered(
        self, caller: Caller, reader: StreamReader, writer: StreamWriter, is_relayed: bool
    ) -> None:
        heads = self._dispatcher.heads

        async def read_exactly(length: int) -> bytes:
            async with heads.awaiting(length):
                return await reader.readexactly(length)

        async with heads.turn(caller), asyncio.timeout(self._timeout_s):
            head = await frames.read_head(read_exactly)
        async with self._dispatcher.turn(caller, head.header, head.body_bytes) as awaiting:
            async with asyncio.timeout(self._timeout_s), awaiting(head.body_bytes):
                request = await head.frame(reader.readexactly)
            self._counts["bytes_received"] += (received := frames.size_bytes(request))
            reply = await self._dispatcher.answer(caller.peer, request)
            async with asyncio.timeout(self._timeout_s), awaiting(len(reply.body)):
                await send(writer, reply)
            self._counts["bytes_sent"] += (sent := frames.size_bytes(reply))
            self._counts["bytes_relayed"] += (received + sent) * is_relayed


def why_broken(error: Exception, timeout_s: float) -> str:
    """Why a call got no reply, for people."""
    if isinstance(error, TimeoutError):
        return f"not in {timeout_s:g} s"
    return "it hung up" if isinstance(error, (IncompleteReadError, ConnectionError)) else "it cannot be dialled"


async def send(writer: StreamWriter, frame: Frame) -> None:
    """Write a frame, waiting for the other side chunk by chunk, until nothing of it is left here."""
    writer.write(frames.encode_head(frame))
    body = memoryview(frame.body)
    for start in range(0, len(body), CHUNK_BYTES):
        writer.write(body[start : start + CHUNK_BYTES])
        await writer.drain()
    writer.transport.set_write_buffer_limits(high=0)  # up to 64 KiB count as drained else
    await writer.drain()


async def _send_or_stop(writer: StreamWriter, frame: Frame) -> None:
    with contextlib.suppress(ConnectionError):
        await send(writer, frame)


async def wait_hang_up(reader: StreamReader) -> None:
    """Let the caller close first, within bounds: when we do, the daemon may reset the stream, and a reply that it has
    not handed over yet is lost. One who is still sending is heard out, too."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(HANG_UP_S_MAX):
            discarded_bytes = 0
            while discarded_bytes < DISCARD_BYTES_MAX and (chunk := await reader.read(CHUNK_BYTES)):
                discarded_bytes += len(chunk)
