"""Web pages over plain HTTP: uvicorn around an app, bounded in clients and in their patience.

Signals are the program's business. A server listens before it serves, so that a port that is taken is one clear line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import EnvironmentUnfit

CONNECTIONS_MAX = 200
KEEP_ALIVE_S = 5
READ_S = 30.0
"""For what waits to be read by a client, which may be the rest of a page."""
BACKLOG = 128

PAGE_CLIENTS_MAX = 8
PAGE_HEAD_BYTES_MAX = 8192
PAGE_CLIENT_S = 10.0
"""For all that a client of a single page says and reads."""


@contextlib.contextmanager
def listening(host: str, port: int, *, refused: str, hint: str) -> Iterator[socket.socket]:
    """A socket that listens at `port`, 0 for any free one. Raises EnvironmentUnfit: `refused`, the reason, `hint`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise EnvironmentUnfit(f"{refused}: {error.strerror or error}", hint=hint) from None
    with listener:
        yield listener


async def serve_app(app: Starlette, listener: socket.socket) -> None:
    """Serve `app` on a socket that listens already, until cancelled."""
    client = functools.partial(_Client, most=CONNECTIONS_MAX)
    await _server(app, http=client).serve(sockets=[listener])


@contextlib.asynccontextmanager
async def page_served(
    listener: socket.socket, path: str, text: Callable[[], Awaitable[str]], *, content_type: str
) -> AsyncIterator[None]:
    """Serve `text` at `path` while the block runs, and nothing else: one request per connection, bounds for all."""

    kept = {"X-Content-Type-Options": "nosniff", "Connection": "close"}

    async def page(request: Request) -> Response:
        return Response(await text(), headers={**kept, "Content-Type": content_type})

    async def problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = f"only {path}" if error.status_code == 404 else "only GET"
        return PlainTextResponse(f"{said}\n", error.status_code, {**kept, **(error.headers or {})})

    app = Starlette(routes=[Route(path, page, methods=["GET"])], exception_handlers={HTTPException: problem})
    app.router.redirect_slashes = False
    client = functools.partial(_Client, most=PAGE_CLIENTS_MAX, time_s=PAGE_CLIENT_S)
    server = _server(app, http=client, h11_max_incomplete_event_size=PAGE_HEAD_BYTES_MAX)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: Starlette, **options: Any) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            log_level="error",  # a warning is what any client may cause, as often as it likes
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
            **options,
        )
    )


class _Client(H11Protocol):
    """One of `most` connections. uvicorn waits for a request, and for a reader, for ever: so nobody keeps a place by
    being silent. When all are taken, the one that has been there longest without a request gives way."""

    def __init__(self, *given: Any, most: int, time_s: float | None = None, **options: Any) -> None:
        """`time_s` is for all that the client says and reads; None: as long as it likes."""
        super().__init__(*given, **options)
        self._most, self._time_s = most, time_s
        self._leaving: asyncio.TimerHandle | None = None
        self._read_by: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        self._began_s = self.loop.time()
        if self._time_s is not None:
            self._leaving = self.loop.call_later(self._time_s, transport.abort)
        if len(self.connections) > self._most:
            silent = [each for each in self.connections if isinstance(each, _Client) and each._is_silent]
            min(silent, key=lambda each: each._began_s)._hang_up()  # ourselves, if all others are served

    @property
    def _is_silent(self) -> bool:
        is_served = self.cycle is not None and not self.cycle.response_complete
        return not is_served and not self.transport.get_write_buffer_size()

    def _hang_up(self) -> None:
        self.connections.discard(self)  # which `abort` does a moment later: others may come before
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_by = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_by is not None:
            self._read_by.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._leaving, self._read_by):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
