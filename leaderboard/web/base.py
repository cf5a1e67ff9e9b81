"""The site below a path, as a proxy puts it there: `/board/versions` and `/versions` are the same page.

Some proxies pass the whole path on, others take the prefix away; either is understood. Links on pages begin with the
prefix, since only the reader's side of the proxy knows nothing else (Starlette's `root_path`).
"""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class Base:
    """The layer."""

    def __init__(self, app: ASGIApp, base: str) -> None:
        """`base` as `/board`, checked (places.py); empty for none."""
        self._app = app
        self._base = base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._base:
            if scope["path"] == self._base:
                await RedirectResponse(f"{self._base}/", 308)(scope, receive, send)
                return
            path = scope["path"]
            if not path.startswith(f"{self._base}/"):
                path = f"{self._base}{path}"
            scope = {**scope, "path": path, "root_path": self._base}
        await self._app(scope, receive, send)
