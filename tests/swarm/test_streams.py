"""One call over a pair of streams, on a Unix socket without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm import frames, streams
from dipaco_p2p.swarm.api import OPEN_CALLS_PER_PEER_MAX, Reply
from dipaco_p2p.swarm.frames import Caller, Dispatcher
from dipaco_p2p.swarm.hivemind.daemon import TAKEN_AT_ONCE, long_backlog
from dipaco_p2p.swarm.streams import REFUSALS_PER_PEER_MAX, StreamServer

CALLER = Caller(Signer(bytes(31) + b"\x07").peer)


async def echo(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
    return Reply(header, body)


@pytest.mark.parametrize("method", ["echo", "nobody serves this"], ids=["answered", "refused"])
async def test_a_server_lets_the_caller_hang_up_first(tmp_path: Path, method: str) -> None:
    """The daemon resets a stream whose server closes at once now and then, and the reply is lost."""

    counts: Counter[str] = Counter()
    dispatcher = Dispatcher(counts)
    dispatcher.serve("echo", echo)
    server, ended = StreamServer(dispatcher, counts, timeout_s=5.0), asyncio.Event()

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        await server.answer(CALLER, reader, writer)
        ended.set()

    async with await asyncio.start_unix_server(answer, path=tmp_path / "server.sock"):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "server.sock")
        await streams.exchange(reader, writer, frames.request(method, {}, b"body"))
        await asyncio.sleep(0.2)
        assert not ended.is_set()
        writer.close()
        await asyncio.wait_for(ended.wait(), streams.HANG_UP_S_MAX / 2)


async def test_who_never_hangs_up_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HANG_UP_S_MAX", 0.1)

    counts: Counter[str] = Counter()
    server = StreamServer(Dispatcher(counts), counts, timeout_s=5.0)

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        await server.answer(CALLER, reader, writer)

    async with await asyncio.start_unix_server(answer, path=tmp_path / "server.sock"):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "server.sock")
        await streams.exchange(reader, writer, frames.request("x", {}, b""))
        assert await asyncio.wait_for(reader.read(), 5.0) == b"", "it was closed"
        writer.close()


class Door:
    """A server on a Unix socket, and its ends of the streams that callers have opened there."""

    def __init__(self, folder: Path, *, timeout_s: float = 5.0, reply_bytes: int = 0) -> None:
        self.path, self.inside, self.outside = folder / "server.sock", list[StreamWriter](), list[StreamWriter]()
        dispatcher, reply = Dispatcher(counts := Counter[str]()), Reply({}, bytes(reply_bytes))
        self.server = StreamServer(dispatcher, counts, timeout_s=timeout_s)

        async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            return reply

        dispatcher.serve("fetch", answer)

    async def answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.inside.append(writer)
        await self.server.answer(CALLER, reader, writer)

    async def call(self, method: str = "") -> StreamReader:
        """Open a stream and never hang up; without a method, say nothing either."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        self.outside.append(writer)
        if method:
            await streams.send(writer, frames.request(method, {}))
        return reader

    def open_files(self) -> int:
        return sum(writer.get_extra_info("socket").fileno() >= 0 for writer in self.inside)


@contextlib.asynccontextmanager
async def door_in(folder: Path, **options: Any) -> AsyncIterator[Door]:
    door = Door(folder, **options)
    async with await asyncio.start_unix_server(door.answer, path=door.path, backlog=1024):
        yield door
        await door.server.close()
        for writer in door.outside:
            writer.close()


@pytest.mark.parametrize("method", ["", "nobody serves this", "fetch"], ids=["silent", "refused", "answered"])
async def test_a_caller_that_never_hangs_up_has_no_more_files_of_ours_than_calls(tmp_path: Path, method: str) -> None:
    async with door_in(tmp_path) as door:
        for _ in range(3 * OPEN_CALLS_PER_PEER_MAX):
            await door.call(method)
        await asyncio.sleep(0.2)
        assert len(door.inside) == len(door.outside)
        assert door.open_files() == OPEN_CALLS_PER_PEER_MAX + REFUSALS_PER_PEER_MAX


async def test_who_may_not_come_in_is_told_why_and_the_next_ones_are_hung_up_on(tmp_path: Path) -> None:
    async with door_in(tmp_path) as door:
        for _ in range(OPEN_CALLS_PER_PEER_MAX):
            await door.call()
        for _ in range(REFUSALS_PER_PEER_MAX):
            frame = await frames.read_frame((await door.call()).readexactly)
            assert frame.header["reason"] == "busy"
        assert await asyncio.wait_for((await door.call()).read(), 1.0) == b""


async def test_streams_that_come_while_we_are_busy_wait_and_few_are_taken_at_a_time(tmp_path: Path) -> None:
    taken = Counter[str]()

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        taken["all"] += 1
        writer.close()

    with long_backlog(), long_backlog():  # two swarms are opened at once
        server = await asyncio.start_unix_server(answer, path=tmp_path / "server.sock")
    with contextlib.ExitStack() as waiting:
        for _ in range(500):
            waiting.enter_context(caller := socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            caller.connect(str(tmp_path / "server.sock"))  # raises when none may wait any more
        async with server:
            most = 0
            while taken["all"] < 500:
                before = taken["all"]
                await asyncio.sleep(0)
                most = max(most, taken["all"] - before)
    assert 0 < most <= TAKEN_AT_ONCE


async def test_a_reply_that_nobody_reads_keeps_no_file_open(tmp_path: Path) -> None:
    async with door_in(tmp_path, timeout_s=0.3, reply_bytes=4 * 1024 * 1024) as door:
        await door.call("fetch")
        await asyncio.sleep(0.8)
        assert len(door.inside) == 1 and door.open_files() == 0
