"""Strangers who speak HTTP: silent ones, ones that read nothing, and ones that fill a log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dipaco_p2p.program import web

LONG_BYTES = 64 * 2**20
"""Of an answer that no system keeps for a client that does not read."""
WAIT_S = 20.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
GET_LONG = GET.replace(b"/ ", b"/long ", 1)
OK = b"HTTP/1.1 200 "


class Clients:
    """Strangers at one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[Client] = []

    async def come(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        self._open.append(client)
        return client

    async def leave(self) -> None:
        for client in self._open:
            await client.leave()


class Client:
    """One of them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def hears(self, data: bytes = b"") -> bytes:
        """What comes first after it said `data`; nothing once the server has hung up."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            return await asyncio.wait_for(self._reader.read(2**16), WAIT_S)
        return b""

    async def leave(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def served(scene: Callable[[Clients], Awaitable[None]]) -> None:
    """Run `scene` at a site of a short page and a long one."""

    async def short(request: Request) -> Response:
        return PlainTextResponse("here")

    async def long(request: Request) -> Response:
        return PlainTextResponse(bytes(LONG_BYTES))

    async def main() -> None:
        with web.listening("127.0.0.1", 0, refused="", hint="") as listener:
            app = Starlette(routes=[Route("/", short), Route("/long", long)])
            serving = asyncio.create_task(web.serve_app(app, listener))
            clients = Clients(listener.getsockname()[1])
            try:
                await scene(clients)
            finally:
                await clients.leave()
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(main())


def test_silent_clients_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECTIONS_MAX", 4)

    async def scene(clients: Clients) -> None:
        silent = [await clients.come() for _ in range(12)]
        assert (await (await clients.come()).hears(GET)).startswith(OK)
        assert [await client.hears() for client in silent[:9]] == [b""] * 9
        assert (await silent[-1].hears(GET)).startswith(OK), "who came last has its place"

    served(scene)


UPGRADE = GET.replace(b"\r\n\r\n", b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")


def test_no_request_makes_the_server_say_anything(capfd: pytest.CaptureFixture[str]) -> None:
    """What it says goes where nothing bounds it: the journal, or a file of the coordinator's."""

    async def scene(clients: Clients) -> None:
        for request in (UPGRADE, b"\xff\r\n\r\n", GET):
            assert await (await clients.come()).hears(request)

    served(scene)
    assert capfd.readouterr() == ("", "")


def test_nobody_ousts_a_client_that_is_being_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(web, "READ_S", 1e9)

    async def scene(clients: Clients) -> None:
        assert (await (await clients.come()).hears(GET_LONG)).startswith(OK)
        assert await (await clients.come()).hears(GET) == b""

    served(scene)


def test_who_reads_nothing_gives_way_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(web, "READ_S", 0.01)

    async def scene(clients: Clients) -> None:
        await (await clients.come()).hears(GET_LONG)  # or it is hung up on before it looks
        async with asyncio.timeout(WAIT_S):
            while not (await (await clients.come()).hears(GET)).startswith(OK):
                pass  # until the time for reading is over

    served(scene)
