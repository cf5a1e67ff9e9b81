"""Web pages over plain HTTP: uvicorn around an app, bounded in clients, and in their patience and words if asked.

Signals are the program's business. A server listens before it serves, so that a port that is taken is one clear line.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    await _server(app, limit_concurrency=CONNECTIONS_MAX, log_level="warning").serve(sockets=[listener])


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
    server = _server(app, http=_OneRequest, h11_max_incomplete_event_size=PAGE_HEAD_BYTES_MAX, log_level="error")
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


class _OneRequest(H11Protocol):
    """Hangs up on one client too many, and on one that takes too long: uvicorn waits for a first request forever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        self._patience = self.loop.call_later(PAGE_CLIENT_S, transport.abort)
        if len(self.connections) > PAGE_CLIENTS_MAX:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)
