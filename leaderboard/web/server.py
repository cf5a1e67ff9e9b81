"""Uvicorn around the app: signals are the program's business, and nobody may hold a connection for long."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

CONNECTIONS_MAX = 200
KEEP_ALIVE_S = 5
BACKLOG = 128


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_app(app: Starlette, listener: socket.socket) -> None:
    """Serve `app` on a socket that listens already, until cancelled."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
    )
    await _Server(config).serve(sockets=[listener])
