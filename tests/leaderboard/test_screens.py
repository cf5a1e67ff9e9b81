"""Screens of what a run can be like, wide and light, narrow and dark; `make screens` keeps them in docs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser_harness import axe_findings, looking, served, started_browser
from playwright.sync_api import Browser
from web_harness import FROZEN, SMALL

from benchmarks.leaderboard.synthetic import Shape, snapshot_of
from dipaco_p2p.protocol.signing import peer_of
from leaderboard.model import PathState, Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

LOOKS = {"wide": (1280, "light"), "narrow": (390, "dark")}
HEIGHT = 900
KEPT = "DIPACO_PICTURES"
"""A folder for the pictures, in the environment."""


def complete() -> Snapshot:
    whole = snapshot_of(1, Shape(rounds_done=Shape().rounds))
    return replace(whole, state="complete", paths=tuple(replace(row, state=PathState.DONE) for row in whole.paths))


def rolled_back() -> tuple[Snapshot, str]:
    [row] = [row for row in SMALL.versions if row.rollback is not None]
    return SMALL, f"/versions/{row.module}/{row.version}"


def many_paths() -> Snapshot:
    return snapshot_of(shape=Shape(widths=(16, 16), warmup_rounds=2, rounds=20, rounds_done=6, contributors=60))


def many_contributors() -> Snapshot:
    chance = random.Random(0)
    rows = [replace(each, peer=peer_of(chance.randbytes(32))) for each in SMALL.contributors * 1_112]
    return replace(SMALL, contributors=tuple(replace(each, rank=rank) for rank, each in enumerate(rows[:10_000], 1)))


SCREENS: dict[str, tuple[Callable[[], tuple[Snapshot, str]], str]] = {
    "running": (lambda: (SMALL, "/"), "Training"),
    "frozen": (lambda: (FROZEN, "/"), "Frozen by the coordinator"),
    "rolled-back": (rolled_back, "It has the parameters of that version"),
    "complete": (lambda: (complete(), "/"), "Training is complete"),
    "grid": (lambda: (many_paths(), "/"), "256 paths"),
    "paths": (lambda: (many_paths(), "/paths"), "All paths by loss"),
    "contributors": (lambda: (many_contributors(), "/contributors"), "Contributors, page 1 of 200"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as found:
        yield found


@pytest.mark.parametrize("name", SCREENS)
def test_a_run_like_that_fits_says_so_and_can_be_read_by_everybody(browser: Browser, tmp_path: Path, name: str) -> None:
    (make, said), folder = SCREENS[name], Path(os.environ.get(KEPT, tmp_path))
    snapshot, address = make()
    with served(snapshot) as site:
        for look, (width, scheme) in LOOKS.items():
            size = {"width": width, "height": HEIGHT}
            with looking(browser, site.address, viewport=size, color_scheme=scheme) as watched:
                watched.page.goto(f"{site.address}{address}")
                if name == "grid":
                    watched.page.locator("#grid").scroll_into_view_if_needed()
                watched.page.screenshot(path=folder / f"{name}-{look}.png")
                assert said in " ".join(watched.page.content().split())
                assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
                assert not axe_findings(watched.page)
                watched.check()
