"""`python -m benchmarks.leaderboard`: how fast and how heavy the public site is with 10,000 versions."""

from __future__ import annotations

import gzip
import http.client
import shutil
import socket
import statistics
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from rich.table import Table

from benchmarks.report import JsonFile, run_benchmark, seconds_of, show, table, write_json
from dipaco_p2p.clock import Clock, SystemClock
from leaderboard.model import Snapshot
from leaderboard.web.app import make_app
from leaderboard.web.site import STATIC

from .synthetic import LARGE, snapshot_of

OVERVIEW_MS_MAX = 200.0
CONTENT_MS_MAX = 1_000.0
WEIGHT_BYTES_MAX = 300_000
MEMORY_ROUNDS = 6
GROWTH_BYTES_MAX = 8 * 2**20
"""Between two visits of all pages; what one visit holds itself is far more."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(
    repeats: Annotated[
        int, typer.Option(min=1, max=1_000, help="Requests of each page; the table shows the median.")
    ] = 9,
    contributors: Annotated[int, typer.Option(min=1, max=10_000, help="Peers whose work is in the versions.")] = 1_000,
    json_file: JsonFile = None,
) -> None:
    """Serve 10,000 versions, 1,000 contributors and 256 paths on this machine, and read every kind of page."""
    newest = Newest(snapshot_of(shape=replace(LARGE, contributors=contributors)))
    counts = (newest.snapshot.versions, newest.snapshot.contributors, newest.snapshot.paths)
    show("{:,} versions, {:,} contributors, {:,} paths".format(*map(len, counts)))
    with served(lambda: newest.snapshot, SystemClock()) as port:
        costs = [page_cost(port, newest, page, repeats=repeats) for page in pages_of(newest.snapshot)]
        content_ms = first_content_ms(port, repeats=repeats)
        held = memory_bytes(port, newest, [cost.page for cost in costs], MEMORY_ROUNDS)
    promises = promises_of(costs, content_ms, held)
    lines = (f"{'holds' if holds else 'BROKEN'}: {name}: {figure}" for name, (figure, holds) in promises.items())
    show(pages_table(costs), *lines)
    found = {"pages": [asdict(cost) for cost in costs], "first_content_ms": content_ms, "held_bytes": held}
    write_json(json_file, found)
    raise typer.Exit(0 if all(holds for _, holds in promises.values()) else 1)


def promises_of(costs: list[PageCost], content_ms: float | None, held: list[int]) -> dict[str, tuple[str, bool]]:
    """What is promised, the figure, and whether it holds."""
    overview = costs[0]
    own = sum(path.stat().st_size for path in STATIC.iterdir())
    heaviest = max((cost for cost in costs if not cost.page.startswith("/api/")), key=lambda cost: cost.body_bytes)
    weight = heaviest.body_bytes + own
    growth = max(held[2:]) - held[1]  # the first visit fills what stays
    content = "no browser was found" if content_ms is None else f"{content_ms:.0f} ms"
    return {
        "overview from the server below 200 ms": (f"{overview.first_ms:.0f} ms", overview.first_ms < OVERVIEW_MS_MAX),
        "first content in the browser below 1 s": (content, content_ms is None or content_ms < CONTENT_MS_MAX),
        "a page with its style and script below 300 kB": (
            f"{weight / 1e3:.0f} kB ({heaviest.page}), not compressed",
            weight < WEIGHT_BYTES_MAX,
        ),
        "memory bounded": (
            f"{held[-1] / 2**20:.0f} MiB beside the Snapshot, {growth / 2**20:+.1f} MiB from visit to visit",
            growth < GROWTH_BYTES_MAX,
        ),
    }


def pages_of(snapshot: Snapshot) -> list[str]:
    """One of each kind."""
    row, peer = snapshot.versions[-2], snapshot.contributors[0].peer
    lists = ["/", "/versions", "/versions?sort=after&mark=verified", "/modules", "/paths", "/contributors", "/run"]
    ones = [
        f"/versions/{row.module}/{row.version}",
        f"/lineage/{row.module}/{row.version}",
        f"/modules/{row.module}",
        f"/contributors/{peer}",
    ]
    return [*lists, *ones, "/api/v1/versions.json", "/api/v1/contributions.csv", "/metrics"]


def pages_table(costs: list[PageCost]) -> Table:
    """All pages."""
    rows = []
    for cost in costs:
        times = (f"{each:.1f}" for each in (cost.first_ms, cost.new_ms, cost.again_ms))
        sizes = (f"{each / 1e3:.1f}" for each in (cost.body_bytes, cost.gzip_bytes))
        rows.append((cost.page[:44], *times, *sizes))
    return table("What a page costs", ("page", "first ms", "new ms", "again ms", "kB", "kB gzip"), rows)


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
def served(newest: Callable[[], Snapshot | None], clock: Clock) -> Iterator[int]:
    """The port that the site is on."""
    app = make_app(newest, clock=clock)
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


def first_content_ms(port: int, *, repeats: int) -> float | None:
    """Median time from asking for the overview to its first content on the screen; None without a browser."""
    program = next((Path(found) for name in BROWSERS if (found := shutil.which(name))), None)
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
    return 1e3 * seconds_of(lambda: _get(port, page))


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


if __name__ == "__main__":
    run_benchmark(main)
