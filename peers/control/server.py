"""The end of the control socket that is in the running volunteer. Nobody but its own user is answered, and what any
client does or leaves undone costs the others nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, Unreachable

from .credentials import Socket, credentials_of
from .messages import REQUEST_BYTES_MAX, Request, encode_answer, encode_error, read_request
from .place import open_socket, remove_socket

log = logging.getLogger(__name__)

CLIENTS_MAX = 16
IDLE_S = 60.0
"""A client that says nothing for so long is hung up on."""
REFUSAL_S = 2.0
"""The same for one that will be refused (it may say first what it wants, else it would not hear why), or hung up on."""
ACCEPT_TURNS = 8
"""Of the event loop, until a connection that was just accepted has come to us: Python 3.11 loses those that it accepts
for a server that is closed meanwhile."""

Answer = Callable[[Request], dict[str, Any]]


@asynccontextmanager
async def listening(home: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer the commands for `home` while the block runs, whose lock is held; without a socket it runs all the same.

    `answer` is asked in the event loop, and must not wait.
    """
    try:
        made, path = open_socket(home)
    except EnvironmentUnfit as error:
        log.warning("nobody can control this volunteer but with signals: %s", error)
        yield
        return
    server = ControlServer(answer)
    try:
        await server.start(made)
        log.info("commands are answered at %s", path)
        yield
    finally:
        await server.close()
        remove_socket(home)


class ControlServer:
    """Answers every line that is a request."""

    def __init__(self, answer: Answer, *, idle_s: float = IDLE_S) -> None:
        self._answer = answer
        self._idle_s = idle_s
        self._made: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self, made: socket.socket) -> None:
        self._made = made
        self._server = await asyncio.start_unix_server(self._on_client, sock=made, limit=REQUEST_BYTES_MAX)

    async def close(self) -> None:
        """Hang up on everybody."""
        if self._made is not None:
            asyncio.get_running_loop().remove_reader(self._made)
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        if self._server is not None:
            self._server.close()
        clients = list(self._clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.current_task()
        assert client is not None
        self._clients.add(client)
        try:
            await self._serve(reader, writer)
        except (TimeoutError, OSError, asyncio.CancelledError):
            pass  # it hung up, fell silent, or the program ends
        finally:
            writer.close()
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(REFUSAL_S):
                    await writer.wait_closed()
            writer.transport.abort()  # it does not read what it asked for
            self._clients.discard(client)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        problem = self._refusal(writer.get_extra_info("socket"))
        while True:
            async with asyncio.timeout(self._idle_s if problem is None else REFUSAL_S):
                line = await self._line(reader)
            if line == b"":
                return
            if line is None:
                problem = EnvironmentUnfit(f"a request of more than {REQUEST_BYTES_MAX} bytes")
            if line is None or problem is not None:
                assert problem is not None
                return await self._send(writer, encode_error(problem))
            await self._send(writer, self._reply(line))

    def _refusal(self, connection: Socket) -> DipacoError | None:
        """Why this client is not answered at all."""
        asked_by = credentials_of(connection)
        if not asked_by.is_ours:
            log.warning("user %d wanted to control this volunteer", asked_by.uid)
            return EnvironmentUnfit("this volunteer belongs to another user", hint="ask as the user who started it")
        if len(self._clients) > CLIENTS_MAX:
            return Unreachable(f"{CLIENTS_MAX} commands are being answered already", hint="try again in a moment")
        return None

    def _reply(self, line: bytes) -> bytes:
        try:
            return encode_answer(self._answer(read_request(line)))
        except DipacoError as error:
            return encode_error(error)
        except Exception as error:
            log.exception("a request of a command failed")
            return encode_error(DipacoError(f"the volunteer failed to answer: {error!r}", hint="its log says more"))

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        async with asyncio.timeout(self._idle_s):
            writer.write(data)
            await writer.drain()

    @staticmethod
    async def _line(reader: asyncio.StreamReader) -> bytes | None:
        """The next line; nothing at the end; None for one that is too long."""
        try:
            return await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return b""
        except asyncio.LimitOverrunError:
            return None
