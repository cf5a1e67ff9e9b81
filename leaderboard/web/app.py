"""The server: an address becomes a page, a document or metrics, made from the newest Snapshot and kept a while.

Nothing here asks the swarm or the tables: a request costs the drawing of one page, and the same request again nothing
until there is a newer Snapshot.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.metrics import CONTENT_TYPE, Metric, counter, exposition, gauge, one

from ..model import Mark, Snapshot
from .api import API_TABLES, csv_document, json_document, pages_of, rows_of, schema_document
from .book import Book
from .links import Links
from .query import QUERY_BYTES_MAX, page_of
from .site import STATIC, Site, empty_page, is_stale
from .text import word

POLL_S = 10.0
"""How often an open page asks whether there is something newer."""
KEPT_BYTES_MAX = 32 * 2**20
"""Of answers that are kept."""
RETRY_AFTER_S = 5

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

HTML = "text/html; charset=utf-8"
JSON = "application/json"
CSV = "text/csv; charset=utf-8"
DIGESTS = ("versions", "lineage")
"""Pages that were called by the digest of their version once; of several versions it was the first."""
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


class _Pages:
    """The endpoints: the newest Book, and the answers made from it that still hold; safe from several threads."""

    def __init__(self, newest: Callable[[], Snapshot | None], clock: Clock, links: Links) -> None:
        self._newest = newest
        self._clock = clock
        self._links = links
        self._lock = threading.Lock()
        self._book: Book | None = None
        self._kept: OrderedDict[tuple[str, bool], Answer] = OrderedDict()
        self._bytes = 0

    def _now(self) -> tuple[Book | None, float]:
        """The newest Book, and the time in seconds."""
        snapshot, now_s = self._newest(), self._clock.now_s()
        with self._lock:
            if snapshot is not None and (self._book is None or self._book.snapshot is not snapshot):
                self._book, self._bytes = Book(snapshot), 0
                self._kept.clear()
            return self._book if snapshot is not None else None, now_s

    def _answer(self, request: Request, book: Book, now_s: float, make: Callable[[], Answer]) -> Answer:
        """What was made for this address before, else a new answer."""
        key = f"{request.url.path}?{request.url.query}", is_stale(book.snapshot, now_s)
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

    def page(self, request: Request) -> Response:
        book, now_s = self._now()
        if book is None:
            return _answered(request, Answer.of(empty_page(self._links, poll_s=RETRY_AFTER_S), HTML))
        name, key = (request.path_params.get(part, "") for part in ("name", "key"))
        if name in DIGESTS and key in book.by_digest:
            return RedirectResponse(self._links.one(name, book.address(book.by_digest[key][0])), 302)

        def make() -> Answer:
            site = Site(book, self._links, now_s=now_s, poll_s=POLL_S)
            text = site.page(asked=request.query_params, **request.path_params)
            if text is None:
                raise HTTPException(404)
            return Answer.of(text, HTML)

        return _answered(request, self._answer(request, book, now_s, make))

    def document(self, request: Request) -> Response:
        """One page of a table, as JSON or CSV."""
        book, now_s = self._now()
        name, form = request.path_params["name"], request.path_params["form"]
        if name not in API_TABLES or form not in {"json", "csv"}:
            raise HTTPException(404)
        if book is None:
            return _nothing_yet()
        table, page = API_TABLES[name], page_of(request.query_params)

        def make() -> Answer:
            rows = rows_of(table, book)
            if page > pages_of(rows):
                raise HTTPException(404)
            following = f"{name}.{form}?page={page + 1}" if page < pages_of(rows) else None
            if form == "csv":
                return Answer.of(csv_document(table, rows, page=page), CSV, following)
            return Answer.of(json_document(table, book, rows, page=page, next_page=following), JSON, following)

        answer = self._answer(request, book, now_s, make)
        response = _answered(request, answer)
        response.headers["Access-Control-Allow-Origin"] = "*"  # public figures, for anybody's page
        if answer.following:
            response.headers["Link"] = f'<{answer.following}>; rel="next"'
        return response

    def metrics(self, request: Request) -> Response:
        book, _ = self._now()
        return _nothing_yet() if book is None else _answered(request, Answer.of(metrics_text(book), CONTENT_TYPE))

    def health(self, request: Request) -> Response:
        """200 while the figures are of now; 503 while they are old, or there are none."""
        book, now_s = self._now()
        state = "empty" if book is None else "stale" if is_stale(book.snapshot, now_s) else "ok"
        return _json({"state": state}, 200 if state == "ok" else 503)

    def problem(self, request: Request, error: Exception) -> Response:
        """What cannot be shown, in the form that was asked for; nothing of the question is repeated."""
        status, message = 400, str(error)
        if isinstance(error, HTTPException):
            status, message = error.status_code, NOT_HERE if error.status_code == 404 else message
        elif isinstance(error, ConfigError):
            message = f"{error}. {error.hint}".strip()
        book, now_s = self._now()
        if book is None or request.url.path.startswith(f"{self._links.root}api/v1/"):
            return _json({"error": message}, status)
        title = "Not found" if status == 404 else "Invalid request"
        text = Site(book, self._links, now_s=now_s).problem(title, message)
        return Response(text, status, {"Cache-Control": "no-store"}, HTML)


def make_app(newest: Callable[[], Snapshot | None], *, clock: Clock, base: str = "") -> Starlette:
    """The whole site; `newest` is asked at every request, and gives None before there is anything. `base` is where a
    proxy puts it."""
    pages = _Pages(newest, clock, Links(f"{base}/"))
    places = {
        "/api/v1/schema.json": _schema,
        "/api/v1/{name}.{form}": pages.document,
        "/metrics": pages.metrics,
        "/healthz": pages.health,
        "/": pages.page,
        "/{name}": pages.page,
        "/{name}/{key:path}": pages.page,
    }
    routes = [Mount("/static", _Static(directory=STATIC))]
    layers = [
        Middleware(Guard),
        Middleware(Base, base=base),
        Middleware(GZipMiddleware, minimum_size=1_000, compresslevel=5),
    ]
    return Starlette(
        routes=routes + [Route(path, endpoint, methods=["GET"]) for path, endpoint in places.items()],
        middleware=layers,
        exception_handlers={HTTPException: pages.problem, ConfigError: pages.problem},
    )


class _Static(StaticFiles):
    """Our own few files; they may change with a new version of the program, so browsers ask."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type] # passed on as they came
        response.headers["Cache-Control"] = "no-cache"
        return response


def _schema(request: Request) -> Response:
    return _answered(request, Answer.of(schema_document(), "application/schema+json"))


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


class Guard:
    """Around the whole site: every answer carries `HEADERS`, and `app` sees only short requests that only read.

    A page takes nothing from elsewhere and runs only the scripts of this site, so a text that slips through all else
    still cannot do anything.
    """

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


class Base:
    """The site below a path, as a proxy puts it there: `/board/versions` and `/versions` are the same page.

    Some proxies pass the whole path on, others take the prefix away; either works. Links on pages begin with it,
    since only the reader's side of the proxy knows nothing else (Starlette's `root_path`).
    """

    def __init__(self, app: ASGIApp, base: str) -> None:
        """`base` as `/board`, checked (places.py); or empty."""
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


def metrics_text(book: Book) -> str:
    """All metrics; those without a value are left out. Labels may be words of peers."""
    return exposition(metrics(book), clean=word)


def metrics(book: Book) -> Iterator[Metric]:
    """What is told of the run."""
    snapshot, stage = book.snapshot, book.snapshot.run.stage
    info = {"run": snapshot.run.origin, "name": snapshot.run.name, "stage": stage.id, "stage_name": stage.name}
    yield gauge("run_info", "The run and its open stage; always 1.", [(1, info)])
    yield one("snapshot_timestamp_seconds", "When the figures were taken, Unix time.", snapshot.taken_s)
    yield one("swarm_heard_timestamp_seconds", "When the swarm last answered, Unix time.", snapshot.heard_s)
    yield one("peers_alive", "Peers that said lately that they are alive.", snapshot.peers_alive)
    yield one("peers_training", "Peers that train.", snapshot.peers_training)
    yield one("peers_relayed", "Live peers that are dialled through relays.", snapshot.peers_relayed)
    yield one("paths", "Paths of the open stage.", stage.paths)
    yield one("paths_covered", "Paths that a live peer claims.", snapshot.paths_covered)
    yield one("rounds", "Rounds of the open stage.", stage.rounds)
    yield one("round", "The version that every module of the open stage has.", book.round)
    yield one("loss_nats", "Loss of the newest judged round.", snapshot.rounds[-1].loss if snapshot.rounds else None)
    yield one("best_loss_nats", "Loss of the best round.", book.best.loss if book.best else None)
    yield one("frozen", "1 while a decree of the coordinator has frozen the run.", int(book.freeze is not None))
    yield one("contributors", "Peers with a share in a version.", book.workers)
    yield counter("credit_tokens_total", "Credit of all contributors.", [(snapshot.credit_total, {})])
    marks = Counter(row.mark for row in snapshot.versions)
    yield gauge("versions", "Module versions, by who stands for them.", [(marks[m], {"mark": m}) for m in Mark])
    lost = Counter(row.kind for row in snapshot.losses)
    uncounted = [(lost[kind], {"kind": kind}) for kind in sorted(lost)]
    yield gauge("contributions_uncounted", "Contributions that no version counts.", uncounted)
    checks = Counter(row.agrees for row in snapshot.checks)
    said = [(checks[is_same], {"result": name}) for is_same, name in ((True, "agrees"), (False, "differs"))]
    yield gauge("loss_checks", "Losses measured again by others than the coordinator.", said)
    refused = [(number, {"reason": reason}) for reason, number in sorted(snapshot.refused.items())]
    yield counter("records_refused_total", "Records that were not believed, by reason.", refused)
    versions = [(float(row.version), {"module": str(row.module)}) for row in snapshot.modules]
    yield gauge("module_version", "The newest version of a module.", versions)
    losses = [(row.loss, {"module": str(row.module)}) for row in snapshot.modules if row.loss is not None]
    yield gauge("module_loss_nats", "Loss of a module's newest judged version.", losses)
