"""What a volunteer is told of the whole run, over its stages and over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stages_harness import Home, run_file
from tiny_run import signer
from torch import Tensor
from virtual_time import eventually

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.config import RoutingConfig
from dipaco_p2p.core.model import engine, inner
from dipaco_p2p.core.model.engine import AUTO, FAST
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.program.history import History, read_history
from dipaco_p2p.program.text import duration
from dipaco_p2p.swarm.api import SwarmStatistics
from peers.config import PeerConfig
from peers.path.training import ROUNDS_OF_PACE, Account
from peers.stages import Entrance, Parts, StageRunner, receipts_in
from peers.status import Status


class Watched:
    """One process of a volunteer, and what its screen was given."""

    def __init__(self, home: Home, number: int, *, engine: str = AUTO) -> None:
        self._home = home
        self._number = number
        self._engine = engine
        self.folder = home.homes / f"volunteer-{number}" / "runs"
        self.statuses: list[Status] = []
        """By stage."""

    async def take_part(self) -> None:
        swarm, home = self._home.network.join(signer(self._number)), self._home
        stages = await fetch_stages(swarm, home.coordinator, expected=None)
        config, parts = PeerConfig(home=self.folder.parent, engine=self._engine), Parts(show=self._show)
        entrance = Entrance(host=home.coordinator)
        runner = StageRunner(swarm, config, home.clock, entrance=entrance, device="cpu", parts=parts)
        await runner.take_part(stages)

    @asynccontextmanager
    async def _show(self, status: Status, history: History) -> AsyncIterator[None]:
        self.statuses.append(status)
        yield

    def events(self, ev: str) -> list[dict[str, Any]]:
        """Of all stages, in the order of time."""
        events = [event for path in self.folder.glob("*/history.jsonl") for event in read_history(path)]
        return sorted((event for event in events if event["ev"] == ev), key=lambda event: event["t"])

    def receipts(self) -> set[str]:
        """The contributions that have one, by the histories of all stages."""
        return {event["id"] for event in self.events("receipt")}


async def test_receipts_are_counted_over_stages_and_restarts(tmp_path: Path, corpus: Path) -> None:
    home = Home(tmp_path, run_file(corpus, routing=RoutingConfig(reshard_rounds=())))
    first, second, again = Watched(home, 1), Watched(home, 2), Watched(home, 1)
    home.start()
    await asyncio.gather(first.take_part(), second.take_part())
    warmup, grid = first.statuses
    assert (warmup.rounds, warmup.rounds_after, grid.rounds, grid.rounds_after) == (2, 3, 3, 0)
    assert 0 < warmup.receipts < grid.receipts == len(first.receipts())
    await eventually(home.is_over)
    home.network.kill(signer(1).peer)
    await again.take_part()
    assert [status.receipts for status in again.statuses] == [grid.receipts], "a new process begins with them"
    await home.close()


def quick(model: PathModel, tokens: Tensor) -> Tensor:
    """In place of the compiled loss."""
    return model.loss(tokens)


async def test_compiling_is_something_that_a_volunteer_does_once_in_all_stages(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(engine, "compiler", lambda: "g++")
    for module in (engine, inner):
        monkeypatch.setattr(module, "fast_loss", quick)
    home = Home(tmp_path, run_file(corpus, routing=RoutingConfig(reshard_rounds=())))
    both = [Watched(home, number, engine=FAST) for number in (1, 2)]
    home.start()
    await asyncio.gather(*(volunteer.take_part() for volunteer in both))
    for volunteer in both:
        said = [event["doing"] for event in volunteer.events("doing")]
        words = f"compiling: about {duration(engine.compiling_s('cpu'))}"
        assert said.count(words) == 1 and said[said.index(words) + 1] == "training"
        assert len(volunteer.events("engine")) == 2, "each stage's history says what it is trained with"
    await home.close()


def account(rounds: int, rounds_after: int = 0) -> tuple[Account, Status, ManualClock]:
    clock, status = ManualClock(), Status(rounds=rounds, rounds_after=rounds_after)
    node = SimpleNamespace(clock=clock, swarm=SimpleNamespace(statistics=SwarmStatistics))
    return Account(cast(Any, node), status), status, clock


async def test_the_time_left_is_that_of_the_whole_run_from_the_second_round_on() -> None:
    of_run, status, clock = account(rounds=10, rounds_after=20)
    of_run.begin(3)
    assert status.eta_s is None, "one beginning says nothing of the pace"
    await clock.advance(60.0)
    of_run.begin(3)
    assert status.eta_s is None, "nor does a second path in the same round"
    await clock.advance(40.0)
    of_run.begin(4)
    assert status.eta_s == (6 + 20) * 100.0
    await clock.advance(40.0)
    of_run.begin(2)
    of_run.begin(4)
    assert status.eta_s == (6 + 20) * 100.0
    await clock.advance(60.0)
    of_run.begin(6)
    assert status.eta_s == (4 + 20) * 200.0 / 3, "who leaves rounds to others knows what they took"


async def test_the_time_left_follows_the_pace_of_the_last_rounds() -> None:
    of_run, status, clock = account(rounds=100)
    of_run.begin(0)
    await clock.advance(1000.0)
    for round_number in range(1, ROUNDS_OF_PACE + 2):
        of_run.begin(round_number)
        await clock.advance(10.0)
    assert status.eta_s == (100 - ROUNDS_OF_PACE - 1) * 10.0


def test_a_receipt_that_a_history_has_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert receipts_in(path) == 0
    path.write_bytes(
        b'{"ev":"receipt","id":"a"}\n{"ev":"rec\xff\n{"ev":"receipt","id":"a"}\n{"ev":"receipt","id":"b"}\n'
    )
    assert receipts_in(path) == 2
