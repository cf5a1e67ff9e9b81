"""The server: an address becomes a page, a document or metrics, made from the newest Snapshot and kept a while.

Nothing here asks the swarm or the tables: a request costs the drawing of one page, and the same request again nothing
until there is a newer Snapshot.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.metrics import CONTENT_TYPE

from ..model import Snapshot
from .api import csv_document, json_document, pages_of, rows_of, schema_document
from .base import Base
from .book import Book
from .columns import TABLES
from .guard import Guard
from .links import Links
from .metrics import metrics_text
from .query import page_of
from .site import STATIC, Site, empty_page, is_stale

POLL_S = 10.0
"""How often an open page asks whether there is something newer."""
KEPT_BYTES_MAX = 32 * 2**20
"""Of answers that are kept."""
RETRY_AFTER_S = 5

HTML = "text/html; charset=utf-8"
JSON = "application/json"
CSV = "text/csv; charset=utf-8"
NOT_HERE = "There is no such page. It may have been one of another run."


@dataclass(frozen=True, slots=True)
class Answer:
    """A body with its name: the same bytes always have the same ETag."""

    body: bytes
    media_type: str
    etag: str
    following: str = ""
    """The address of the document after it, if there is one."""

    @classmethod
    def of(cls, text: str, media_type: str, following: str | None = None) -> Answer:
        body = text.encode()
        return cls(body, media_type, f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"', following or "")


class _Answers:
    """The newest Book, and the answers made from it that still hold; safe from several threads."""

    def __init__(self, newest: Callable[[], Snapshot | None], clock: Clock) -> None:
        self._newest = newest
        self._clock = clock
        self._lock = threading.Lock()
        self._book: Book | None = None
        self._kept: OrderedDict[tuple[str, bool], Answer] = OrderedDict()
        self._bytes = 0

    def now(self) -> tuple[Book | None, float]:
        """The newest Book, and the time in seconds."""
        snapshot, now_s = self._newest(), self._clock.now_s()
        with self._lock:
            if snapshot is not None and (self._book is None or self._book.snapshot is not snapshot):
                self._book, self._bytes = Book(snapshot), 0
                self._kept.clear()
            return self._book if snapshot is not None else None, now_s

    def answer(self, book: Book, key: tuple[str, bool], make: Callable[[], Answer]) -> Answer:
        """The kept one for `key`, else a new one."""
        with self._lock:
            found = self._kept.get(key) if self._book is book else None
        if found is not None:
            return found
        made = make()
        with self._lock:
            if self._book is book and key not in self._kept:
                self._kept[key] = made
                self._bytes += len(made.body)
                while self._bytes > KEPT_BYTES_MAX:
                    self._bytes -= len(self._kept.popitem(last=False)[1].body)
        return made


Draw = Callable[[Site, Request], str | None]


def make_app(
    newest: Callable[[], Snapshot | None], *, clock: Clock, poll_s: float = POLL_S, base: str = ""
) -> Starlette:
    """The whole site; `newest` is asked at every request, and gives None before there is anything.

    Pages ask again every `poll_s` seconds while somebody looks; 0: never. `base` is where a proxy puts it.
    """
    links = Links(f"{base}/")
    answers = _Answers(newest, clock)

    def page(path: str, draw: Draw) -> Route:
        def endpoint(request: Request) -> Response:
            return _page(answers, links, request, draw, poll_s)

        return Route(path, endpoint, methods=["GET"])

    def problem(request: Request, error: Exception) -> Response:
        return _problem(answers, links, request, error)

    routes = [
        *(page(path, draw) for path, draw in _PAGES.items()),
        Route("/api/v1/schema.json", _schema, methods=["GET"]),
        Route("/api/v1/{name}.{form}", lambda request: _document(answers, request), methods=["GET"]),
        Route("/metrics", lambda request: _metrics(answers, request), methods=["GET"]),
        Route("/healthz", lambda request: _health(answers), methods=["GET"]),
        Mount("/static", _Static(directory=STATIC)),
    ]
    layers = [
        Middleware(Guard),
        Middleware(Base, base=base),
        Middleware(GZipMiddleware, minimum_size=1_000, compresslevel=5),
    ]
    return Starlette(
        routes=routes, middleware=layers, exception_handlers={HTTPException: problem, ConfigError: problem}
    )


_PAGES: dict[str, Draw] = {
    "/": lambda site, request: site.overview(),
    "/versions": lambda site, request: site.versions(request.query_params),
    "/versions/{digest}": lambda site, request: site.version(request.path_params["digest"]),
    "/lineage/{digest}": lambda site, request: site.lineage(request.path_params["digest"]),
    "/modules": lambda site, request: site.modules(),
    "/modules/{name}": lambda site, request: site.module(request.path_params["name"], page_of(request.query_params)),
    "/paths": lambda site, request: site.paths(),
    "/contributors": lambda site, request: site.contributors(request.query_params),
    "/contributors/{peer}": lambda site, request: site.contributor(
        request.path_params["peer"], page_of(request.query_params)
    ),
    "/run": lambda site, request: site.run(),
    "/api": lambda site, request: site.api(),
}


class _Static(StaticFiles):
    """Our own few files; they may change with a new version of the program, so browsers ask."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type] # passed on as they came
        response.headers["Cache-Control"] = "no-cache"
        return response


def _page(answers: _Answers, links: Links, request: Request, draw: Draw, poll_s: float) -> Response:
    book, now_s = answers.now()
    if book is None:
        return _answered(request, Answer.of(empty_page(links, poll_s=min(poll_s, RETRY_AFTER_S)), HTML))

    def make() -> Answer:
        text = draw(Site(book, links, now_s=now_s, poll_s=poll_s), request)
        if text is None:
            raise HTTPException(404)
        return Answer.of(text, HTML)

    return _answered(request, answers.answer(book, _key(request, book, now_s), make))


def _document(answers: _Answers, request: Request) -> Response:
    """One page of a table, as JSON or CSV."""
    book, now_s = answers.now()
    name, form = request.path_params["name"], request.path_params["form"]
    if name not in TABLES or form not in {"json", "csv"}:
        raise HTTPException(404)
    if book is None:
        return _nothing_yet()
    table, page = TABLES[name], page_of(request.query_params)

    def make() -> Answer:
        rows = rows_of(table, book)
        if page > pages_of(rows):
            raise HTTPException(404)
        following = f"{name}.{form}?page={page + 1}" if page < pages_of(rows) else None
        if form == "csv":
            return Answer.of(csv_document(table, rows, page=page), CSV, following)
        return Answer.of(json_document(table, book, rows, page=page, next_page=following), JSON, following)

    answer = answers.answer(book, _key(request, book, now_s), make)
    response = _answered(request, answer)
    response.headers["Access-Control-Allow-Origin"] = "*"  # public figures, for anybody's page
    if answer.following:
        response.headers["Link"] = f'<{answer.following}>; rel="next"'
    return response


def _schema(request: Request) -> Response:
    return _answered(request, Answer.of(schema_document(), "application/schema+json"))


def _metrics(answers: _Answers, request: Request) -> Response:
    book, _ = answers.now()
    return _nothing_yet() if book is None else _answered(request, Answer.of(metrics_text(book), CONTENT_TYPE))


def _health(answers: _Answers) -> Response:
    """200 while the figures are of now; 503 while they are old, or there are none."""
    book, now_s = answers.now()
    state = "empty" if book is None else "stale" if is_stale(book.snapshot, now_s) else "ok"
    return _json({"state": state}, 200 if state == "ok" else 503)


def _key(request: Request, book: Book, now_s: float) -> tuple[str, bool]:
    return f"{request.url.path}?{request.url.query}", is_stale(book.snapshot, now_s)


def _answered(request: Request, answer: Answer) -> Response:
    """The answer, or that the reader has it."""
    headers = {"ETag": answer.etag, "Cache-Control": "no-cache"}
    asked = {each.strip() for each in request.headers.get("if-none-match", "").split(",")}
    if answer.etag in asked or answer.etag.removeprefix("W/") in asked:
        return Response(status_code=304, headers=headers)
    return Response(answer.body, media_type=answer.media_type, headers=headers)


def _nothing_yet() -> Response:
    return _json({"error": "nothing was collected yet"}, 503, {"Retry-After": str(RETRY_AFTER_S)})


def _json(value: dict[str, str], status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value) + "\n", status, {"Cache-Control": "no-store", **(headers or {})}, JSON)


def _problem(answers: _Answers, links: Links, request: Request, error: Exception) -> Response:
    """What cannot be shown, in the form that was asked for; nothing of the question is repeated."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    message = (
        NOT_HERE
        if status == 404
        else f"{error}. {error.hint}".strip()
        if isinstance(error, ConfigError)
        else str(error)
    )
    book, now_s = answers.now()
    if book is None or request.url.path.startswith(f"{links.root}api/v1/"):
        return _json({"error": message}, status)
    title = "Not found" if status == 404 else "That is no question"
    text = Site(book, links, now_s=now_s).problem(title, message)
    return Response(text, status, {"Cache-Control": "no-store"}, HTML)
