"""Volunteers that rest, go on, and finish, in whole swarms of the real programs: what others see, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenes import Scene, scene
from virtual_time import eventually

from simulation.actors import away_s, some
from simulation.checks import broken
from simulation.faults import FAULTS
from simulation.outcome import simulate
from simulation.plan import make_plan
from simulation.world import World


def test_who_rests_lets_go_of_all_and_others_take_it_up(tmp_path: Path) -> None:
    async def script(world: Scene) -> None:
        sleeper, *others = world.volunteers

        def has_handed_in() -> bool:  # else it may have no time left to hand its modules over
            versions = (event.facts["version"] for event in world.events if event.ev == "archived")
            return bool(world.said(sleeper, "receipt")) and list(versions).count(1) == len(world.run.topology.modules())

        await eventually(has_handed_in)
        path = world.said(sleeper, "claimed")[-1].facts["path"]
        rested_s = await world.rest(sleeper)
        assert world.said(sleeper, "released")[-1].t_s >= world.said(sleeper, "claimed")[-1].t_s
        led = {event.facts["module"] for event in world.said(sleeper, "leads")}
        assert led <= {event.facts["module"] for event in world.said(sleeper, "handed_over")}

        def trained() -> set[object]:
            said = (event for other in others for event in world.said(other, "round", since_s=rested_s))
            return {event.facts["path"] for event in said}

        await eventually(lambda: path in trained())
        since = [event.ev for event in world.events if event.who == sleeper.name and event.t_s > rested_s]
        assert since == [], "it did something while it rested"
        sleeper.tell(lambda tour: tour.resume("user"))
        resumed_s = world.now_s
        await eventually(lambda: bool(world.said(sleeper, "receipt", since_s=resumed_s)), limit_s=60)
        await world.is_over()

    scene(tmp_path, script)


def test_a_rest_ends_inner_steps_within_one_and_hands_in_what_was_done(tmp_path: Path) -> None:
    async def script(world: Scene) -> None:
        sleeper = world.volunteers[0]
        await eventually(lambda: len(world.said(sleeper, "round")) == 3)  # the first modules change hands
        tour = sleeper._tour
        assert tour is not None and tour.status is not None
        status = tour.status
        await eventually(lambda: status.doing == "training" and status.step == 3)
        asked_s = world.now_s
        await world.rest(sleeper)
        cut = world.said(sleeper, "round")[-1]
        assert cut.facts["steps"] == 4 and cut.t_s - asked_s < 2.5, "a step takes half a second, a push some calls"
        assert len(world.said(sleeper, "receipt", since_s=asked_s)) == 2, "both modules of the path have it"
        sleeper.tell(lambda tour: tour.resume("user"))
        await world.is_over()

    world = scene(tmp_path, script, rounds=6)
    assert all(event.facts["complete"] for event in world.said(world.volunteers[0], "left")[-1:])


def test_a_rest_lasts_while_one_reason_is_left_and_ends_by_the_clock(tmp_path: Path) -> None:
    async def script(world: Scene) -> None:
        sleeper = world.volunteers[0]
        await eventually(lambda: bool(world.said(sleeper, "receipt")))
        tour = sleeper._tour
        assert tour is not None
        now_s = sleeper.clock.now_s()
        sleeper.tell(lambda tour: tour.pause("battery"))
        await world.rest(sleeper, until_s=now_s + 50)
        assert dict(tour.pauses) == {"battery": None, "user": now_s + 50}
        sleeper.tell(lambda tour: tour.resume("battery"))
        await eventually(lambda: bool(world.said(sleeper, "resumed")))
        assert 50 <= sleeper.clock.now_s() - now_s < 52 and dict(tour.pauses) == {}
        resumed_s = world.now_s
        await eventually(lambda: bool(world.said(sleeper, "claimed", since_s=resumed_s)))

    scene(tmp_path, script, rounds=60)


def test_a_rest_and_its_end_in_one_breath_cost_a_round_and_no_more(tmp_path: Path) -> None:
    async def script(world: Scene) -> None:
        sleeper = world.volunteers[0]
        for _ in range(2):
            receipts = len(world.said(sleeper, "receipt"))
            await eventually(lambda receipts=receipts: len(world.said(sleeper, "receipt")) > receipts)  # type: ignore[misc]
            sleeper.tell(lambda tour: tour.pause("schedule"))
            sleeper.tell(lambda tour: tour.resume("schedule"))
        await world.is_over()

    scene(tmp_path, script, rounds=6)


def test_who_finishes_does_all_steps_of_its_round_and_has_its_receipts(tmp_path: Path) -> None:
    async def script(world: Scene) -> None:
        worker = world.volunteers[0]
        await eventually(lambda: bool(world.said(worker, "receipt")))
        tour = worker._tour
        assert tour is not None and tour.status is not None
        status = tour.status
        await eventually(lambda: status.doing == "training" and status.step == 2)
        asked_s = world.now_s
        worker.tell(lambda tour: tour.finish())
        await eventually(lambda: not worker.is_up)
        last = world.said(worker, "round")[-1]
        assert last.t_s > asked_s and last.facts["steps"] == world.plan.config.inner.steps
        assert len(world.said(worker, "receipt", since_s=asked_s)) == 2
        assert world.said(worker, "left")[-1].facts["complete"] is False and worker.errors == []

    scene(tmp_path, script, rounds=60)


def test_who_rests_can_be_stopped_and_finishes_at_once(tmp_path: Path) -> None:
    async def script(world: Scene) -> None:
        first, second, _ = world.volunteers
        await eventually(lambda: bool(world.said(first, "receipt")) and bool(world.said(second, "receipt")))
        await world.rest(first)
        await world.rest(second)
        first.tell(lambda tour: tour.stop())
        second.tell(lambda tour: tour.finish())
        await eventually(lambda: not first.is_up and not second.is_up, limit_s=2)

    scene(tmp_path, script, rounds=60)


async def _rest(world: World, chance: Any) -> None:
    """A volunteer rests, shorter or longer than a heartbeat lives, also beyond the faults."""
    sleeper = some(world, chance)
    until_s = sleeper.clock.now_s() + away_s(world, chance)
    sleeper.tell(lambda tour: tour.pause("user", until_s=until_s))


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2, 3, 4))
def test_no_promise_is_broken_by_rests_among_faults(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setitem(FAULTS, "rest", _rest)
    plan = make_plan(seed, ("rest", "rest", "crash", "partition", "freeze"))
    outcome, _ = simulate(plan)
    assert [event for event in outcome.events if event.ev == "paused"]
    assert list(map(str, broken(outcome))) == []
