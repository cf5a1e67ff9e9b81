"""The leaderboard as a program: what fails leaves nothing, and fails before the work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bootstrap.demo import DemoConfig, run_demo
from bootstrap.processes import ERRORS_BYTES_MAX, PublicPage
from bootstrap.runfile import LeaderboardConfig
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.doorplate import Doorplate
from leaderboard.program import rebuild_tables


def test_a_rebuild_that_fails_leaves_no_database(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prepared run"):
        rebuild_tables(tmp_path / "nothing", tmp_path / "new.sqlite")
    assert list(tmp_path.iterdir()) == []


PLATE = Doorplate(run="a" * 64, address="/ip4/127.0.0.1/tcp/1", peer="12D3KooW", ticket="")


class _Started:
    """In place of processes: what would have been started."""

    def __init__(self) -> None:
        self.arguments: tuple[str, ...] = ()
        self.log = Path()

    async def start(self, name: str, program: str, *arguments: str, log: Path, output: int) -> None:
        log.parent.mkdir(exist_ok=True)
        self.arguments, self.log = arguments, log


@pytest.mark.parametrize("verbose", [False, True])
def test_a_verbose_coordinator_has_a_verbose_page_whose_errors_are_appended_to_in_bounds(
    tmp_path: Path, verbose: bool
) -> None:
    page, started = PublicPage(LeaderboardConfig(base="/board"), tmp_path, verbose=verbose), _Started()
    page._children = started  # type: ignore[assignment] # stands in for it
    for size in (10, ERRORS_BYTES_MAX + 1, 10):
        asyncio.run(page._start(PLATE))
        with started.log.open("ab") as file:
            file.write(b"x" * size)
    assert ("--verbose" in started.arguments) is verbose and "/board" in started.arguments
    assert started.log.stat().st_size == 10 and len(list(started.log.parent.iterdir())) == 2


def test_a_demo_that_could_not_leave_its_page_says_so_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not a page")
    config = DemoConfig(peers=1, grid="2x2", rounds=2, steps=1, kills=0, corpus="found", seed=0)
    with pytest.raises(ConfigError, match="holds something else"):
        asyncio.run(run_demo(config, folder=None, json_file=None, export=tmp_path))
