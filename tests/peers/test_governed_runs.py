"""Whole runs under a governor, in one process and in virtual time: who pauses holds nobody up, limits end cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from stages_harness import Home, run_file
from tiny_run import signer
from virtual_time import BASE_S, eventually

from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.program.history import read_history
from dipaco_p2p.swarm.memory import MemorySwarm
from dipaco_p2p.use.folder import GRID
from peers.config import PeerConfig
from peers.governor.governor import Senses, governed
from peers.preferences.keys import Limits, When
from peers.preferences.schedule import Span
from peers.stages import Entrance, StageRunner

QUIET = Senses(on_battery=lambda: False, idle_min=lambda: None)
ALWAYS, UNLIMITED = When(), Limits()
START = datetime.fromtimestamp(BASE_S, UTC)


def span(*, from_min: int, minutes: int) -> Span:
    """A span of every day that begins so many minutes after the test."""
    begin = START + timedelta(minutes=from_min)
    first = begin.hour * 60 + begin.minute
    return Span(from_min=first, to_min=(first + minutes) % 1440)


async def join(home: Home, number: int, *, when: When = ALWAYS, limits: Limits = UNLIMITED) -> None:
    swarm: MemorySwarm = home.network.join(signer(number))
    stages = await fetch_stages(swarm, home.coordinator, expected=None)
    config = PeerConfig(home=home.homes / f"volunteer-{number}", when=when, limits=limits)
    config.home.mkdir(parents=True)

    runner = StageRunner(swarm, config, home.clock, entrance=Entrance(host=home.coordinator), device="cpu")
    async with governed(runner, config, swarm, home.clock, device="cpu", senses=QUIET, zone=UTC):
        await runner.take_part(stages)


def events(home: Home, number: int, name: str) -> list[dict[str, object]]:
    folder = home.homes / f"volunteer-{number}" / "runs"
    found = [event for path in folder.glob("*/history.jsonl") for event in read_history(path)]
    return sorted((event for event in found if event["ev"] == name), key=lambda event: event["t"])


@asynccontextmanager
async def begun(folder: Path, corpus: Path) -> AsyncIterator[Home]:
    """A run whose coordinator is there."""
    home = Home(folder, run_file(corpus))
    try:
        home.start()
        yield home
    finally:
        await home.close()


async def test_a_run_that_needs_somebody_waits_until_its_schedule_opens(tmp_path: Path, corpus: Path) -> None:
    later = When(schedule=(span(from_min=3, minutes=600),))
    async with begun(tmp_path, corpus) as home:
        both = [asyncio.create_task(join(home, 1)), asyncio.create_task(join(home, 2, when=later))]
        await eventually(lambda: any("2 paths" in str(event["waits_for"]) for event in events(home, 1, "doing")))
        assert not events(home, 2, "claimed"), "it claimed a path though it may not train"
        assert "schedule until" in str(events(home, 2, "paused")[0]["detail"])
        await asyncio.gather(*both)
        opened_s = (START + timedelta(minutes=3)).replace(second=0, microsecond=0).timestamp()
        claimed_s = float(str(events(home, 2, "claimed")[0]["t"]))
        assert opened_s <= claimed_s < opened_s + 5.0
        assert all(events(home, number, "left")[-1]["complete"] for number in (1, 2))


async def test_who_pauses_to_the_end_of_a_run_holds_nobody_up_and_sees_later_that_it_is_over(
    tmp_path: Path, corpus: Path
) -> None:
    later = When(schedule=(span(from_min=5, minutes=60),))
    async with begun(tmp_path, corpus) as home:
        await asyncio.gather(join(home, 1), join(home, 2), join(home, 3, when=later))
        assert not events(home, 3, "claimed") and events(home, 3, "left")[-1]["complete"]


async def test_a_month_that_is_used_up_ends_the_volunteer_in_good_order(tmp_path: Path, corpus: Path) -> None:
    async with begun(tmp_path, corpus) as home:
        with pytest.raises(EnvironmentUnfit, match="of this month"):
            await join(home, 1, limits=Limits(month_gb=1e-5))
        assert events(home, 1, "left") and (home.homes / "volunteer-1" / "month.json").exists()
        await asyncio.gather(join(home, 2), join(home, 3))
        assert set(home.heads(GRID).values()) == {3}, "the others finish without it"


async def test_a_home_that_may_not_grow_ends_the_volunteer_with_the_limit_in_its_words(
    tmp_path: Path, corpus: Path
) -> None:
    async with begun(tmp_path, corpus) as home:
        with pytest.raises(EnvironmentUnfit, match="`disk_gb`"):
            await join(home, 1, limits=Limits(disk_gb=0.0001))


async def test_whoever_has_no_room_for_a_ticket_dials_all_the_same(tmp_path: Path, corpus: Path) -> None:
    dialled = []

    async def dial() -> None:
        dialled.append(home.clock.now_s())

    def name(run: Run, seeds: Sequence[str], volunteers: Sequence[str]) -> None:
        raise EnvironmentUnfit("the disk is full")

    async with begun(tmp_path, corpus) as home:
        swarm = home.network.join(signer(1))
        stages = await fetch_stages(swarm, home.coordinator, expected=None)
        entrance = Entrance(host=home.coordinator, dial=dial, name=name)
        runner = StageRunner(
            swarm, PeerConfig(home=home.homes / "volunteer-1"), home.clock, entrance=entrance, device="cpu"
        )
        taking_part = asyncio.create_task(runner.take_part(stages))
        await eventually(lambda: bool(events(home, 1, "joined")))
        await home.die()
        await eventually(lambda: len(dialled) > 1)
        runner.stop()
        await taking_part
