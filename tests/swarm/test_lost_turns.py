"""Turns of callers that send nothing, or read nothing: they last as long as nobody else wants them."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader
from collections import Counter
from typing import Any, cast

import pytest
from virtual_time import play

from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm import frames
from dipaco_p2p.swarm.api import BULK_AT_ONCE, FRAME_TIMEOUT_S, Reply
from dipaco_p2p.swarm.calls import ReadBlob, WriteBlob
from dipaco_p2p.swarm.frames import LATE_S, THIN_BYTES_S, Caller, Dispatcher, Frame, Kind
from dipaco_p2p.swarm.streams import StreamServer

assert play  # this file's tests run in virtual time
BODY = bytes(16 * 1024)


class Stream:
    """The other side of one call to `server`, by a peer with an address of its own."""

    def __init__(self, server: StreamServer, number: int, *, is_read: bool = True) -> None:
        self.reader, self.sent, self._is_read = StreamReader(), bytearray(), is_read
        caller = Caller(Signer(bytes([number + 1]) * 32).peer, f"203.0.113.{number}")
        self.served = asyncio.create_task(server.answer(caller, self.reader, cast(Any, self)))

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        if not self._is_read:
            await asyncio.Event().wait()

    @property
    def transport(self) -> Stream:
        return self

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def abort(self) -> None:
        pass

    def head(self, method: str, body_bytes: int) -> None:
        header = {"method": method, "header": {}}
        self.reader.feed_data(frames.encode_head(Frame(kind=Kind.REQUEST, header=header, body=bytes(body_bytes))))

    async def end(self) -> Kind | None:
        """Hang up once it was answered; what kind of answer came."""
        self.reader.feed_eof()
        await self.served
        return Kind(self.sent[4]) if self.sent else None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StreamServer:
    monkeypatch.setattr(frames, "INBOUND_CALLS_MAX", 4)
    monkeypatch.setattr(frames, "INBOUND_CALLS_PER_PEER_MAX", 1)

    async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({}, BODY)

    dispatcher = Dispatcher(counts := Counter[str]())
    for method in (ReadBlob.METHOD, WriteBlob.METHOD):
        dispatcher.serve(method, answer)
    return StreamServer(dispatcher, counts, timeout_s=FRAME_TIMEOUT_S)


async def crowd_of(server: StreamServer, way: str) -> list[Stream]:
    """Every place taken, by calls that send and read nothing more."""
    crowd = []
    for number in range(4 if way == "head" else BULK_AT_ONCE):
        crowd.append(Stream(server, number, is_read=way != "reply"))
        if way == "body":
            crowd[-1].head(WriteBlob.METHOD, len(BODY))
        if way == "reply":
            crowd[-1].head(ReadBlob.METHOD, 0)
        await asyncio.sleep(0.01)
    return crowd


@pytest.mark.parametrize("way", ["head", "body", "reply"])
async def test_who_lets_a_turn_wait_loses_it_to_a_peer_that_has_none(server: StreamServer, way: str) -> None:
    crowd = await crowd_of(server, way)
    began_s = asyncio.get_running_loop().time()
    honest = Stream(server, 100)
    honest.head(ReadBlob.METHOD, 0)
    assert await honest.end() is Kind.REPLY
    assert asyncio.get_running_loop().time() - began_s <= LATE_S + len(BODY) / THIN_BYTES_S
    for other in crowd:
        other.served.cancel()
    await server.close()


async def test_a_slow_body_is_waited_for_while_nobody_else_wants_its_turn(server: StreamServer) -> None:
    crowd = await crowd_of(server, "body")
    await asyncio.sleep(FRAME_TIMEOUT_S - 1)
    for other in crowd:
        other.reader.feed_data(BODY)
    assert [await other.end() for other in crowd] == [Kind.REPLY] * BULK_AT_ONCE


async def test_a_body_over_a_thin_line_keeps_its_turn_while_others_wait(server: StreamServer) -> None:
    crowd = await crowd_of(server, "body")
    waiting = Stream(server, 100)
    waiting.head(ReadBlob.METHOD, 0)
    for _ in range(4):
        await asyncio.sleep(len(BODY) / 4 / THIN_BYTES_S)
        for other in crowd:
            other.reader.feed_data(BODY[: len(BODY) // 4])
    assert [await other.end() for other in [*crowd, waiting]] == [Kind.REPLY] * (BULK_AT_ONCE + 1)
