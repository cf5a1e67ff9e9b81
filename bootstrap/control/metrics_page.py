"""Where Prometheus fetches the metrics of a running coordinator: `GET /metrics`, over plain HTTP, and nothing else.

Off unless asked for, and on this machine only unless an address is named: the figures are no secret, but whoever may
fetch them may also keep the coordinator busy. So clients, their patience and what they may say are bounded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.program.metrics import CONTENT_TYPE

LOOPBACK = "127.0.0.1"
HEAD_BYTES_MAX = 8192
CLIENTS_MAX = 8
CLIENT_S = 10.0
"""For all that a client says and reads."""
HINT = "a port, as 9464, or a host and a port, as 0.0.0.0:9464 or [::]:9464"

Text = Callable[[], Awaitable[str]]


class Place(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_place(text: str) -> Place | None:
    """`9464` is on this machine only; nothing is nowhere. Raises ConfigError."""
    if not text:
        return None
    found = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]{1,45})\]|([A-Za-z0-9._-]{1,253})):)?([0-9]{1,5})", text)
    if found is None or int(found[3]) > 65_535:
        raise ConfigError(f"`{text[:80]}` is no place for metrics", hint=HINT)
    return Place(found[1] or found[2] or LOOPBACK, int(found[3]))


@asynccontextmanager
async def metrics_served(place: Place | None, text: Text) -> AsyncIterator[str]:
    """Serve `text` while the block runs; its address, empty for no place. Raises EnvironmentUnfit for a place that
    cannot be had."""
    if place is None:
        yield ""
        return
    page = _Page(text)
    try:
        server = await asyncio.start_server(page.on_client, place.host, place.port, limit=HEAD_BYTES_MAX)
    except OSError as error:
        message = f"cannot serve metrics at {place}: {error.strerror or error}"
        raise EnvironmentUnfit(message, hint=f"end what uses it, or choose another: {HINT}") from None
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://{Place(place.host, port)}/metrics"
    finally:
        server.close()
        await page.close()


class _Page:
    """Answers clients."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._clients: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        clients = list(self._clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.current_task()
        assert client is not None
        self._clients.add(client)
        try:
            async with asyncio.timeout(CLIENT_S):
                writer.write(await self._reply(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.CancelledError):
            pass  # it fell silent, hung up, or the program ends
        finally:
            writer.transport.abort()
            self._clients.discard(client)

    async def _reply(self, reader: asyncio.StreamReader) -> bytes:
        """What to say; nothing, to one too many and to one that says too much or too little."""
        if len(self._clients) > CLIENTS_MAX:
            return b""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return b""
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "not a request\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET\n", allow="GET, HEAD")
        if words[1].split(b"?", 1)[0] != b"/metrics":
            return _response("404 Not Found", "only /metrics\n")
        return _response("200 OK", await self._text(), kind=CONTENT_TYPE, is_short=words[0] == b"HEAD")


def _response(status: str, body: str, *, kind: str = "text/plain", allow: str = "", is_short: bool = False) -> bytes:
    data = body.encode()
    head = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(data)}", "Connection: close"]
    head += ["X-Content-Type-Options: nosniff", *([f"Allow: {allow}"] if allow else []), "", ""]
    return "\r\n".join(head).encode() + (b"" if is_short else data)
