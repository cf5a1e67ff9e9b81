"""A volunteer's decisions: which path, when to start, when to wait, when to go."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runtime_harness import World
from tiny_run import tiny_config
from virtual_time import eventually, play


def doings(events: list[dict[str, str]]) -> list[str]:
    return [event["doing"] for event in events]


def test_volunteers_spread_over_the_paths(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            for number in (1, 2, 3, 4):
                world.join(number)
            await eventually(lambda: all(volunteer.said("receipt") for volunteer in world.volunteers))
            assert len({volunteer.said("claimed")[-1]["path"] for volunteer in world.volunteers}) == 4

    play(scenario)


def test_nobody_trains_before_enough_paths_are_claimed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(min_paths=2)) as world:
            first = world.join(1)
            await asyncio.sleep(30.0)
            assert doings(first.said("doing"))[-1] == "waiting"
            assert "2 paths to be claimed; 1 are" in first.said("doing")[-1]["waits_for"]
            assert first.ownership.modules == [] and not first.said("round")
            world.join(2)
            for volunteer in world.volunteers:
                await volunteer.done()
            assert all(volunteer.said("left")[0]["complete"] for volunteer in world.volunteers)

    play(scenario)


def test_one_volunteer_alone_finishes_path_after_path(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(min_paths=1)) as world:
            alone = world.join(1)
            await alone.done()
            assert alone.said("left")[0]["complete"]
            heads = [ledger.head.version for ledger in world.seed.archive.ledgers.values()]
            assert heads == [2] * 5
            assert len({event["path"] for event in alone.said("claimed")}) >= 2

    play(scenario)


def test_a_replica_goes_where_nobody_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(rounds=40)) as world:
            for number in (1, 2, 3, 4, 5):
                world.join(number)
            await eventually(lambda: all(volunteer.said("receipt") for volunteer in world.volunteers))
            paths = {volunteer.number: volunteer.status.path for volunteer in world.volunteers}
            twins = [v for v in world.volunteers if list(paths.values()).count(paths[v.number]) == 2]
            single = next(v for v in world.volunteers if v not in twins)
            assert len(twins) == 2
            abandoned = paths[single.number]
            await world.kill(single)
            others = [volunteer for volunteer in world.volunteers if volunteer is not single]
            await eventually(lambda: abandoned in {volunteer.status.path for volunteer in others})
            mover = next(volunteer for volunteer in others if volunteer.status.path == abandoned)
            assert mover in twins and str(paths[mover.number]) in {e["path"] for e in mover.said("released")}

    play(scenario)


def test_a_stop_while_waiting_is_obeyed_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            waiting = world.join(1)
            await eventually(lambda: bool(waiting.said("claimed")))
            await asyncio.sleep(1.0)
            began_s = world.clock.now_s()
            waiting.volunteer.stop()
            waiting.volunteer.stop()  # once is enough, twice does no harm
            await waiting.done()
            assert world.clock.now_s() - began_s < 1.0
            assert waiting.said("released") and waiting.said("left")
            await world.seed.node.watch.refresh()
            assert waiting.peer not in world.seed.node.watch.heartbeats

    play(scenario)


def test_a_volunteer_that_comes_back_goes_on_from_the_states_on_its_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(rounds=40, min_paths=1)) as world:
            first = world.join(1)
            await eventually(lambda: len(first.said("round")) >= 6)
            trained = {event["path"] for event in first.said("round")}
            await world.kill(first)
            await asyncio.sleep(2 * world.run.config.liveness.heartbeat_ttl_s)
            again = world.join(1)
            await eventually(lambda: len(again.said("round")) >= 4)
            states = {event["path"]: event["source"] for event in again.said("state")}
            assert set(states) <= trained and set(states.values()) == {"ours"}
            assert not again.said("refused"), "nothing is trained again that was in already"

    play(scenario)


def test_a_volunteer_whose_seed_is_away_rotates_only_to_paths_that_it_has(tmp_path: Path) -> None:
    """Its own round must not wait for a shard that nobody can give."""

    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(rounds=40)) as world:
            for number in (1, 2, 3, 4):
                world.join(number)
            await eventually(lambda: sum(len(volunteer.ownership.modules) for volunteer in world.volunteers) == 5)
            await eventually(lambda: all(len(volunteer.said("round")) > 2 for volunteer in world.volunteers))
            await world.kill_seed()
            victim = next(volunteer for volunteer in world.volunteers if not volunteer.ownership.modules)
            await world.kill(victim)
            survivors = [volunteer for volunteer in world.volunteers if volunteer is not victim]
            before = {volunteer.number: len(volunteer.said("round")) for volunteer in survivors}
            await eventually(lambda: all(len(v.said("round")) >= before[v.number] + 2 for v in survivors), limit_s=300)

    play(scenario)


def test_a_newcomer_waits_for_an_absent_seed_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(min_paths=1)) as world:
            await world.kill_seed()
            newcomer = world.join(1)
            await eventually(lambda: "the seed node" in [event["waits_for"] for event in newcomer.said("doing")])
            assert newcomer.task is not None and not newcomer.task.done()
            world.start_seed()
            await newcomer.done()
            assert newcomer.said("left")[0]["complete"]

    play(scenario)


def test_a_volunteer_of_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, config=tiny_config(min_paths=1)) as world:
            await world.join(1).done()
            late = world.join(2)
            await late.done()
            assert late.said("left")[0]["complete"] and not late.said("receipt")

    play(scenario, limit_s=3600)
