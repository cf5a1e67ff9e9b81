"""What a request costs: the first one after a new Snapshot, one that was answered before, bytes, memory, a browser."""

from __future__ import annotations

import gzip
import http.client
import shutil
import socket
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from dipaco_p2p.clock import SystemClock
from leaderboard.model import Snapshot
from leaderboard.web.app import make_app

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(slots=True)
class Newest:
    """What the site shows."""

    snapshot: Snapshot

    def renew(self) -> None:
        """The same figures as a Snapshot that the site has not seen: nothing that it kept holds any more."""
        self.snapshot = replace(self.snapshot, taken_s=self.snapshot.taken_s + 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCost:
    """Of one page."""

    page: str
    first_ms: float
    """The first request after a new Snapshot: its registers are made, and the page is drawn."""
    new_ms: float
    """A page that nobody asked for since then."""
    again_ms: float
    """One that somebody did."""
    body_bytes: int
    gzip_bytes: int


@contextmanager
def served(newest: Newest) -> Iterator[int]:
    """The port that the site is on."""
    app = make_app(lambda: newest.snapshot, clock=SystemClock())
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none", access_log=False))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


def page_cost(port: int, newest: Newest, page: str, *, repeats: int) -> PageCost:
    """Medians over `repeats` requests of each kind."""

    def first() -> float:
        newest.renew()
        return _timed_ms(port, page)

    def new() -> float:
        newest.renew()
        _timed_ms(port, "/versions?module=none")  # makes the registers
        return _timed_ms(port, page)

    body = _get(port, page)
    return PageCost(
        page=page,
        first_ms=_median(first, repeats),
        new_ms=_median(new, repeats),
        again_ms=_median(lambda: _timed_ms(port, page), repeats),
        body_bytes=len(body),
        gzip_bytes=len(gzip.compress(body, 5)),
    )


def memory_bytes(port: int, newest: Newest, pages: list[str], rounds: int) -> list[int]:
    """What Python holds after each of `rounds` visits of all pages with a new Snapshot each time."""
    found = []
    tracemalloc.start()
    try:
        for _ in range(rounds):
            newest.renew()
            for page in pages:
                _get(port, page)
            found.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return found


def first_content_ms(port: int, browser: Path | None, *, repeats: int) -> float | None:
    """Median time from asking for the overview to its first content on the screen; None without a browser."""
    program = browser or next((Path(found) for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        return None
    from playwright.sync_api import sync_playwright

    script = """() => new Promise((done) => new PerformanceObserver((list) => {
        const paint = list.getEntriesByName("first-contentful-paint")[0];
        if (paint) done(paint.startTime);
    }).observe({ type: "paint", buffered: true }))"""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        times = []
        for _ in range(repeats):
            page = started.new_page()  # with a cache of its own
            page.goto(f"http://127.0.0.1:{port}/")
            times.append(float(page.evaluate(script)))
            page.close()
        started.close()
    return statistics.median(times)


def _median(measure: Callable[[], float], repeats: int) -> float:
    return statistics.median(measure() for _ in range(repeats))


def _timed_ms(port: int, page: str) -> float:
    began_s = time.perf_counter()
    _get(port, page)
    return 1e3 * (time.perf_counter() - began_s)


def _get(port: int, page: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", page)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (page, answer.status)
        return body
    finally:
        connection.close()
