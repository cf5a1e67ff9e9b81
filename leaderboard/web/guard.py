"""What every answer carries and every request keeps to, whoever answers: a layer around the whole site.

The site only reads: GET and HEAD, short addresses, no bodies. A page takes nothing from elsewhere and runs nothing but
the one script of this site, so that a text which slips through all else still cannot do anything.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .query import QUERY_BYTES_MAX

PATH_BYTES_MAX = 256
METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class Guard:
    """The layer; `app` sees only requests that are short and only read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (_refusal(scope) or self._app)(scope, receive, guarded)


def _refusal(scope: Scope) -> ASGIApp | None:
    if scope["method"] not in METHODS:
        return PlainTextResponse("this site only answers GET and HEAD\n", 405, {"Allow": ", ".join(METHODS)})
    raw_path = scope.get("raw_path") or scope["path"].encode()
    if len(raw_path) > PATH_BYTES_MAX or len(scope["query_string"]) > QUERY_BYTES_MAX:
        return PlainTextResponse("the address is too long\n", 414)
    return None
