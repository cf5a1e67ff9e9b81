"""A volunteer and the coordinator's decrees: it rests while all is frozen, goes on, and leaves when it is banned."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World
from tiny_run import SEED_NUMBER, signer, tiny_config
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.topology import ModuleId


def decree(world: World, act: str, **values: Any) -> None:
    reason = "" if act == "unfreeze" else "a test"
    decrees = world.seed.node.decrees
    decrees.issue(signer(SEED_NUMBER), act, at_s=world.clock.now_s(), reason=reason, **values)


def heads(world: World) -> list[int]:
    return [ledger.head.version for ledger in world.seed.archive.ledgers.values()]


def counted(world: World) -> set[str]:
    chains = [ledger.versions for ledger in world.seed.archive.ledgers.values()]
    return {share.contribution for chain in chains for sealed in chain for share in sealed.document.shares}


async def test_while_frozen_nobody_trains_and_the_run_goes_on_to_its_end_afterwards(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=6)) as world:
        volunteers = [world.join(number) for number in (1, 2, 3, 4)]
        await eventually(lambda: min(heads(world)) >= 1)
        decree(world, "freeze")
        await eventually(lambda: all("frozen" in volunteer.status.doing for volunteer in volunteers))
        assert volunteers[0].status.doing == "frozen by the coordinator: a test"
        await asyncio.sleep(world.run.config.liveness.heartbeat_ttl_s)
        reached, rounds = heads(world), [len(volunteer.said("round")) for volunteer in volunteers]
        await asyncio.sleep(10 * world.run.config.rounds.deadline_s)
        assert heads(world) == reached and max(reached) < 6
        assert [len(volunteer.said("round")) for volunteer in volunteers] == rounds
        decree(world, "unfreeze")
        for volunteer in volunteers:
            await volunteer.done()
        assert heads(world) == [6] * len(reached)
        receipts = {event["id"] for volunteer in volunteers for event in volunteer.said("receipt")}
        chains = [ledger.versions for ledger in world.seed.archive.ledgers.values()]
        assert receipts == {share.contribution for chain in chains for one in chain for share in one.document.shares}
        assert not any(volunteer.said("stalled") or volunteer.said("expired") for volunteer in volunteers)


async def test_a_frozen_volunteer_stops_when_it_is_told_to(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=40, min_paths=1)) as world:
        only = world.join(1)
        await eventually(lambda: len(only.said("round")) >= 2)
        decree(world, "freeze")
        await eventually(lambda: "frozen" in only.status.doing)
        only.volunteer.stop()
        await only.done()
        assert not only.status.is_complete


async def test_a_banned_volunteer_ends_with_the_reason_and_the_others_go_on_with_its_path(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=8)) as world:
        volunteers = [world.join(number) for number in (1, 2, 3, 4)]
        await eventually(lambda: min(heads(world)) >= 1)
        banned, *others = volunteers
        decree(world, "ban", peer=banned.peer)
        with pytest.raises(Refused, match="has banned this volunteer: a test") as caught:
            await banned.done()
        assert (caught.value.reason, caught.value.exit_code) == (Reason.BANNED, 7)
        for other in others:
            await other.done()
        assert set(heads(world)) == {8}
        receipts = {event["id"] for event in banned.said("receipt")}
        chains = [ledger.versions for ledger in world.seed.archive.ledgers.values()]
        assert receipts <= {share.contribution for chain in chains for one in chain for share in one.document.shares}


async def test_trainers_go_on_from_a_rollback_and_what_they_had_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with World(tmp_path, config=tiny_config(rounds=8)) as world:
        volunteers = [world.join(number) for number in (1, 2, 3, 4)]
        await eventually(lambda: min(heads(world)) >= 3)
        module = ModuleId(1, 0)
        after = world.seed.archive.ledgers[module].head.version
        decree(world, "rollback", stage=world.run.id, module=module, to=1, after=after)
        for volunteer in volunteers:
            await volunteer.done()
        chain = [sealed.document for sealed in world.seed.archive.ledgers[module].versions]
        [undone] = [version for version in chain if version.rollback is not None]
        assert undone.digest == chain[0].digest and undone.version > after
        assert set(heads(world)) == {8}
        reasons = {event["reason"] for volunteer in volunteers for event in volunteer.said("refused")}
        assert reasons <= {Reason.ROLLED_BACK}
