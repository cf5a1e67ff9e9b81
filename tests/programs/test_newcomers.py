"""Who joins a path that others train begins with the next round; the open one is its own if they cannot do it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runtime_harness import TinyVolunteer, World
from tiny_run import MODEL, tiny_config
from virtual_time import end, eventually, play

from dipaco_p2p.core.inner import InnerResult
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.topology import PathId
from peers.claiming import first_round
from peers.tenure import Tenure
from peers.trainer import PathTrainer

TRAIN_S = 8.0


async def meet(world: World, patch: pytest.MonkeyPatch) -> tuple[TinyVolunteer, TinyVolunteer]:
    """Who trains the only path, and who joins it in the middle of the third round."""
    honest = PathTrainer.train

    async def slow(trainer: PathTrainer, flats: Any, **changes: Any) -> InnerResult:
        await world.clock.sleep(TRAIN_S)
        return await honest(trainer, flats, **changes)

    patch.setattr(PathTrainer, "train", slow)
    first = world.join(1)
    await eventually(lambda: len(first.said("round")) == 2)
    await world.clock.sleep(TRAIN_S / 4)
    newcomer = world.join(2)
    await eventually(lambda: bool(newcomer.said("claimed")))
    assert newcomer.said("claimed")[0]["round"] == 3
    return first, newcomer


def world_of_one_path(folder: Path) -> World:
    return World(folder, config=replace(tiny_config(rounds=30, min_paths=1), model=MODEL.one_path()))


def first_round_of(newcomer: TinyVolunteer) -> int:
    return newcomer.said("round")[0]["round"]


def test_it_begins_with_the_next_round_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world_of_one_path(tmp_path) as world:
            first, newcomer = await meet(world, monkeypatch)
            await eventually(lambda: len(newcomer.said("round")) == 3)
            times = [event["t"] for event in first.said("round")]
            assert max(after - before for before, after in zip(times, times[1:], strict=False)) < TRAIN_S + 2.0
            assert first_round_of(newcomer) == 3

    play(scenario)


def test_it_stands_in_for_who_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world_of_one_path(tmp_path) as world:
            first, newcomer = await meet(world, monkeypatch)
            await world.kill(first)
            await eventually(lambda: bool(newcomer.said("round")))
            assert first_round_of(newcomer) == 2

    play(scenario)


def test_a_claim_without_work_keeps_it_for_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two that leave the round to each other, or to who only claims, would wait for ever."""

    async def scenario() -> None:
        async with world_of_one_path(tmp_path) as world:
            idle = world.peer(61)
            beating = asyncio.create_task(idle.presence.run())
            first, newcomer = await meet(world, monkeypatch)
            await idle.presence.claim(PathId((0, 0, 0)), since_s=0.0)
            await world.kill(first)
            deadline_s = world.run.config.rounds.deadline_s
            await eventually(lambda: bool(newcomer.said("round")), limit_s=deadline_s + 2 * TRAIN_S)
            assert first_round_of(newcomer) == 2
            assert idle.presence.has_claim
            await end(beating)

    play(scenario)


def test_a_path_is_not_trained_while_a_module_of_it_is_fetched_anew(tmp_path: Path) -> None:
    """A reader whose branch was given up is at genesis, and has no parameters yet: due, and nothing to train from."""

    async def scenario() -> None:
        async with world_of_one_path(tmp_path) as world:
            node, path = world.peer(61), PathId((0, 0, 0))
            readers = [Follower(node, module) for module in path.modules()]
            tenure = Tenure(cast(PathTrainer, SimpleNamespace(path=path)), readers, rounds=30)
            assert tenure.standing.is_due and not tenure.is_ready
            await asyncio.gather(*(reader.sync() for reader in readers))
            assert tenure.is_ready
            readers[1]._start_over()
            assert tenure.standing.is_due and not tenure.is_ready

    play(scenario)


@pytest.mark.parametrize(("progress", "others", "first"), [(0, 0, 0), (0, 3, 0), (4, 0, 4), (4, 1, 5)])
def test_the_first_round_that_waits_for_a_new_claimant(progress: int, others: int, first: int) -> None:
    assert first_round(progress, others=others) == first
