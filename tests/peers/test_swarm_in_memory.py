"""Whole runs over the network in memory: everything of the programs but their command lines and real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime_harness import TinyVolunteer, World
from tiny_run import tiny_config
from virtual_time import eventually

from bootstrap.archives.verify import verify_run
from dipaco_p2p.canonical import digest
from dipaco_p2p.core.model.layout import encode_module
from peers.status import Status


def receipts(volunteers: list[TinyVolunteer]) -> set[str]:
    return {event["id"] for volunteer in volunteers for event in volunteer.said("receipt")}


def counted(world: World) -> set[str]:
    return {id_ for ledger in world.seed.archive.ledgers.values() for id_ in ledger.counted}


def require_complete(world: World) -> None:
    """Every chain is at its last version and follows from its contributions, and no receipt was broken: the work
    counts, by another's contribution where two did the same and the other had committed to it first."""
    last = world.run.config.rounds.rounds
    reports = verify_run(world.run, world.seed.node.store, world.seed.archive)
    assert [(report.module, report.versions, report.problem) for report in reports] == [
        (module, last, "") for module in world.run.topology.modules()
    ]
    works = {
        (str(module), str(share.path), share.base_version)
        for module, ledger in world.seed.archive.ledgers.items()
        for sealed in ledger.versions
        for share in sealed.document.shares
    }
    for event in (event for volunteer in world.volunteers for event in volunteer.said("receipt")):
        assert event["id"] in counted(world) or (event["module"], event["path"], event["base"]) in works, event


async def test_four_volunteers_complete_a_run_that_verifies(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.join_all()
        await world.done()
        require_complete(world)
        # 4 paths, 3 modules on each, 2 rounds
        assert len(receipts(world.volunteers)) == 4 * 3 * 2 == len(counted(world))


async def test_everybody_holds_the_same_bits_of_every_module(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.join_all()
        await world.done()
        held = [reader for volunteer in world.volunteers for reader in volunteer.volunteer._readers.values()]
        assert len(held) >= 4 * 3
        for reader in held:
            assert reader.params is not None
            data = encode_module(reader.params, world.run.layout(reader.module))
            assert digest(data) == world.digests()[reader.module]


async def test_a_volunteer_that_leaves_hands_over_what_it_has(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=6, min_paths=1)) as world:
        first = world.join(1)
        await eventually(lambda: len(first.said("receipt")) >= 3 and len(first.ownership.modules) == 5)
        second = world.join(2)
        await eventually(lambda: bool(second.said("claimed")) and second.peer in first.node.watch.heartbeats)
        await eventually(lambda: second.peer in first.chains.workers)
        first.volunteer.stop()
        await first.done()
        assert first.said("left")[0]["complete"] is False
        assert len({event["module"] for event in first.said("handed_over")}) == 5
        assert len(second.ownership.modules) == 5
        await world.seed.node.watch.refresh()
        assert not any(first.peer in claims for claims in world.seed.node.watch.claims.values())
        assert first.said("released")
        await second.done()
        require_complete(world)


class StoppingStatus(Status):
    """Asks its volunteer to stop once so many steps of a round are done."""

    __slots__ = ("after_steps", "stop")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "step" and value == self.after_steps:
            self.stop()


@pytest.mark.parametrize(("steps", "after_steps", "is_worth_it"), [(4, 2, True), (30, 2, False)])
async def test_half_a_round_is_pushed_and_a_crumb_is_not(
    tmp_path: Path, steps: int, after_steps: int, is_worth_it: bool
) -> None:
    async with World(tmp_path, config=tiny_config(steps=steps, min_paths=1)) as world:
        status = object.__new__(StoppingStatus)
        status.after_steps = after_steps
        status.stop = lambda: leaver.volunteer.stop()
        Status.__init__(status)
        leaver = world.join(1, status=status)
        await leaver.done()
        assert [event["steps"] for event in leaver.said("round")] == [after_steps]
        assert len(leaver.said("receipt")) == (3 if is_worth_it else 0)
        other = world.join(2)
        await other.done()
        require_complete(world)
        partial = [
            share.tokens
            for ledger in world.seed.archive.ledgers.values()
            for sealed in ledger.versions
            for share in sealed.document.shares
            if share.peer == leaver.peer
        ]
        assert partial == [after_steps * 2 * 72] * (3 if is_worth_it else 0)


async def test_training_goes_on_while_the_seed_node_is_away(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=12)) as world:
        world.join_all()
        # Until then the seed node leads, as the owner of last resort.
        await eventually(lambda: sum(len(volunteer.ownership.modules) for volunteer in world.volunteers) == 5)
        await world.kill_seed()
        before = receipts(world.volunteers)
        await eventually(lambda: len(led_to(world, version=12)) == 5, limit_s=900)
        late = [event for v in world.volunteers for event in v.said("receipt") if event["id"] not in before]
        # The mirrors take its place: no work hangs on one disk.
        seed = world.seed.swarm.peer
        assert late and all(len(event["holders"]) == 2 and seed not in event["holders"] for event in late)
        assert not any(volunteer.task.done() for volunteer in world.volunteers if volunteer.task)
        world.start_seed()
        await world.done()
        require_complete(world)


def led_to(world: World, *, version: int) -> set[str]:
    """The modules of which a volunteer has made `version`."""
    made = [event for volunteer in world.volunteers for event in volunteer.said("version")]
    return {event["module"] for event in made if event["version"] == version}
