"""The end of the control socket that is in the running program. Nobody but its own user is answered, and what any
client does or leaves undone costs the others nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...errors import DipacoError, EnvironmentUnfit, IntegrityError, Unreachable
from .client import Socket, credentials_of
from .messages import ANSWER_BYTES_MAX, REQUEST_BYTES_MAX, Asking, encode_answer, encode_error, read_request
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

R = TypeVar("R", bound=Asking)
Answer = Callable[[R], dict[str, Any] | Awaitable[dict[str, Any]]]


@asynccontextmanager
async def listening(home: Path, kind: type[R], answer: Answer[R]) -> AsyncIterator[None]:
    """Answer the commands for `home` while the block runs, whose lock is held; without a socket it runs all the same.

    `answer` is asked in the event loop for each request of this `kind`, and must not wait; but it may return something
    to be awaited, which goes on when its client hangs up, and is cancelled when the block ends.
    """
    try:
        made, path = open_socket(home)
    except EnvironmentUnfit as error:
        log.warning("nobody can control this %s but with signals: %s", kind.program.noun, error)
        yield
        return
    server = ControlServer(kind, answer)
    try:
        await server.start(made)
        log.info("commands are answered at %s", path)
        yield
    finally:
        await server.close()
        remove_socket(home)


class ControlServer(Generic[R]):
    """Answers every line that is a request."""

    def __init__(self, kind: type[R], answer: Answer[R], *, idle_s: float = IDLE_S) -> None:
        self._kind = kind
        self._program = kind.program
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
                return await self._send(writer, encode_error(problem, self._program))
            await self._send(writer, await self._reply(line))

    def _refusal(self, connection: Socket) -> DipacoError | None:
        """Why this client is not answered at all."""
        asked_by = credentials_of(connection)
        if not asked_by.is_ours:
            log.warning("user %d wanted to control this program", asked_by.uid)
            message = f"this {self._program.noun} belongs to another user"
            return EnvironmentUnfit(message, hint="ask as the user who started it")
        if len(self._clients) > CLIENTS_MAX:
            return Unreachable(f"{CLIENTS_MAX} commands are being answered already", hint="try again in a moment")
        return None

    async def _reply(self, line: bytes) -> bytes:
        try:
            found = self._answer(read_request(line, self._kind))
            data = encode_answer(await found if inspect.isawaitable(found) else found, self._program)
            if len(data) > ANSWER_BYTES_MAX:
                raise IntegrityError(f"the answer has {len(data)} bytes, of {ANSWER_BYTES_MAX} at most")
            return data
        except DipacoError as error:
            return encode_error(error, self._program)
        except Exception as error:
            log.exception("a request of a command failed")
            message = f"the {self._program.noun} failed to answer: {error!r}"
            return encode_error(DipacoError(message, hint="its log says more"), self._program)

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
