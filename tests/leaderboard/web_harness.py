"""A site in memory: one Snapshot that a test can put another one in place of, and a clock that it moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from starlette.testclient import TestClient

from benchmarks.leaderboard.synthetic import Shape, snapshot_of
from dipaco_p2p.clock import ManualClock
from leaderboard.model import DecreeRow, Snapshot, VersionRow
from leaderboard.web.app import make_app

SMALL = snapshot_of(1)
LONGER = snapshot_of(2, Shape(rounds=30, rounds_done=25, contributors=60, shares=8))
"""Lists of several pages."""
FREEZE = DecreeRow(number=8, at_s=SMALL.taken_s - 1_230, act="freeze", reason="the disk of a leader is full")
UNFREEZE = next(row for row in SMALL.decrees if row.act == "unfreeze")
FROZEN = replace(
    SMALL,
    state="frozen",
    decrees=(*(replace(row, ended_by=8) if row is UNFREEZE else row for row in SMALL.decrees), FREEZE),
)
"""Frozen once before, and again now."""
PAGES = ("/", "/versions", "/modules", "/paths", "/contributors", "/decrees", "/run", "/api")


@dataclass(slots=True)
class Held:
    """What the site shows."""

    snapshot: Snapshot | None
    clock: ManualClock


@contextmanager
def site(snapshot: Snapshot | None = SMALL, *, age_s: float = 1.0) -> Iterator[tuple[TestClient, Held]]:
    """A client of a site whose Snapshot is `age_s` seconds old."""
    held = Held(snapshot, ManualClock(snapshot.taken_s + age_s if snapshot else 0.0))
    with TestClient(make_app(lambda: held.snapshot, clock=held.clock)) as client:
        yield client, held


def pages_of(snapshot: Snapshot) -> list[str]:
    """One address of each kind of page."""
    row, peer = newest_judged(snapshot), snapshot.contributors[0].peer
    ones = (
        f"/versions/{row.module}/{row.version}",
        f"/lineage/{row.module}/{row.version}",
        f"/modules/{row.module}",
        f"/contributors/{peer}",
    )
    return [*PAGES, *ones]


def newest_judged(snapshot: Snapshot) -> VersionRow:
    """The newest version with both losses."""
    return max((row for row in snapshot.versions if row.loss_before is not None), key=lambda row: row.version)


def with_version(snapshot: Snapshot, row: VersionRow, **changed: object) -> Snapshot:
    """The same with one version changed."""
    made = replace(row, **changed)  # type: ignore[arg-type] # the fields of the caller
    return replace(snapshot, versions=tuple(made if each is row else each for each in snapshot.versions))
