"""One call over a pair of streams, on a Unix socket without a daemon."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm import frames, streams
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.frames import Caller, Dispatcher
from dipaco_p2p.swarm.streams import StreamServer

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
