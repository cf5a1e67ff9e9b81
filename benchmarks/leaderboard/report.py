"""The table of all pages, and whether the promises hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leaderboard.model import Snapshot
from leaderboard.web.site import STATIC

from .loading import load_cost
from .measure import Newest, PageCost, first_content_ms, memory_bytes, page_cost, served
from .synthetic import LARGE, snapshot_of

OVERVIEW_MS_MAX = 200.0
CONTENT_MS_MAX = 1_000.0
WEIGHT_BYTES_MAX = 300_000
MEMORY_ROUNDS = 6
GROWTH_BYTES_MAX = 8 * 2**20
"""Between two visits of all pages; what one visit holds itself is far more."""


def run(*, seed: int, repeats: int, browser: Path | None, load: int = 0, json_file: Path | None) -> int:
    """Measure, print and judge; gives the exit code: 1 if a promise is broken."""
    console = Console()
    newest = Newest(snapshot_of(seed, LARGE))
    console.print(said_of(newest.snapshot))
    with served(newest) as port:
        costs = [page_cost(port, newest, page, repeats=repeats) for page in pages_of(newest.snapshot)]
        content_ms = first_content_ms(port, browser, repeats=repeats)
        held = memory_bytes(port, newest, [cost.page for cost in costs], MEMORY_ROUNDS)
    promises = promises_of(costs, content_ms, held)
    console.print(table_of(costs))
    for name, (figure, holds) in promises.items():
        console.print(f"{'holds' if holds else 'BROKEN'}: {name}: {figure}")
    loading = load_cost(seed, load) if load else None
    if loading is not None:
        console.print(
            f"{loading.versions:,} versions with {loading.shares:,} shares from the tables: {loading.again_s:.1f} s;"
            f" every signature checked again: {loading.first_s:.1f} s"
        )
    if json_file is not None:
        found = {
            "pages": [asdict(cost) for cost in costs],
            "first_content_ms": content_ms,
            "held_bytes": held,
            "loading": asdict(loading) if loading is not None else None,
        }
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(holds for _, holds in promises.values()) else 1


def said_of(snapshot: Snapshot) -> str:
    """How large the run is."""
    counts = (snapshot.versions, snapshot.contributors, snapshot.paths)
    return "{:,} versions, {:,} contributors, {:,} paths".format(*map(len, counts))


def pages_of(snapshot: Snapshot) -> list[str]:
    """One of each kind."""
    row, peer = snapshot.versions[-2], snapshot.contributors[0].peer
    lists = ["/", "/versions", "/versions?sort=after&mark=verified", "/modules", "/paths", "/contributors", "/run"]
    ones = [f"/versions/{row.digest}", f"/lineage/{row.digest}", f"/modules/{row.module}", f"/contributors/{peer}"]
    return [*lists, *ones, "/api/v1/versions.json", "/api/v1/contributions.csv", "/metrics"]


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


def table_of(costs: list[PageCost]) -> Table:
    """All pages."""
    table = Table("page", title="What a page costs")
    for name in ("first ms", "new ms", "again ms", "kB", "kB gzip"):
        table.add_column(name, justify="right")
    for cost in costs:
        times = (f"{each:.1f}" for each in (cost.first_ms, cost.new_ms, cost.again_ms))
        sizes = (f"{each / 1e3:.1f}" for each in (cost.body_bytes, cost.gzip_bytes))
        table.add_row(cost.page[:44], *times, *sizes)
    return table
