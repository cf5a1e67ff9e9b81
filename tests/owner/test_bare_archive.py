"""A light archive with parameters where it needs them alone: versions are final without, and no module is stuck."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from group_harness import MODULE, OTHER_PATH, PATH, Group, contribute, deaf, lighten, make_versions, of_group, sees
from runtime_harness import World
from tiny_run import SEED_NUMBER, signer
from virtual_time import eventually

from bootstrap.archives.verify import verify_run
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner.retention import Retention, Thinned, read_thinned

BARE = Retention(rounds=1, remade=0.0, measured=0.0)


@asynccontextmanager
async def bare_group(
    folder: Path, *, retention: Retention = BARE, rounds: int = 30
) -> AsyncIterator[tuple[World, Group, Member]]:
    async with of_group(folder, rounds=rounds) as (world, group, author):
        await lighten(world, group, retention)
        yield world, group, author


async def archived(world: World, version: int) -> None:
    await eventually(lambda: world.seed.archive.ledgers[MODULE].final == version)


def here(world: World) -> list[int]:
    """Of which versions the archive has the parameters."""
    store, ledger = world.seed.node.store, world.seed.archive.ledgers[MODULE]
    return [one.document.version for one in ledger.versions if store.size(one.document.digest) is not None]


async def test_versions_are_final_without_their_parameters(tmp_path: Path) -> None:
    async with bare_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 4, seed=1)
        await archived(world, 4)
        assert here(world) == []
        assert read_thinned(world.seed.node.store, MODULE) == Thinned(contributions=4, versions=4)
        [report] = [
            one for one in verify_run(world.run, world.seed.node.store, world.seed.archive) if one.module == MODULE
        ]
        assert (report.versions, report.signed, report.problem) == (4, 4, "")


async def test_those_of_every_so_many_versions_and_of_the_last_come_and_stay(tmp_path: Path) -> None:
    retention = Retention(rounds=1, snapshots=2, remade=0.0, measured=0.0)
    async with bare_group(tmp_path, retention=retention, rounds=7) as (world, group, author):
        await make_versions(world, group.leader, author, 7, seed=1)
        await archived(world, 7)
        assert here(world) == [2, 4, 6, 7]
        assert world.seed.archive.thinning.of(MODULE).snapshots == (2, 4, 6, 7)
        state = world.seed.archive.ledgers[MODULE].head.state
        assert state is not None and world.seed.node.store.size(state.digest) is not None, "a grid that grows needs it"


async def test_with_few_volunteers_the_archive_has_them_all(tmp_path: Path) -> None:
    async with bare_group(tmp_path) as (world, group, author):
        await group.kill(group.mirrors[-1])
        await eventually(lambda: len(world.seed.node.watch.volunteers()) < 3)
        await make_versions(world, group.leader, author, 3, seed=1)
        await archived(world, 3)
        assert 3 in here(world)


async def test_what_has_no_quorum_is_made_again_from_parameters_that_are_fetched_for_it(tmp_path: Path) -> None:
    async with bare_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await archived(world, 2)
        assert here(world) == []
        for mirror in group.mirrors:
            deaf(mirror, "mirror.version")
        await make_versions(world, group.leader, author, 1, seed=2)
        await archived(world, 3)
        assert 3 in here(world), "it was made here"


async def test_what_was_fetched_to_make_a_version_is_dropped_again(tmp_path: Path) -> None:
    retention = Retention(rounds=1, remade=1 - 1e-9, measured=0.0)
    async with bare_group(tmp_path, retention=retention) as (world, group, author):
        await make_versions(world, group.leader, author, 6, seed=1)
        await archived(world, 6)
        store, ledger = world.seed.node.store, world.seed.archive.ledgers[MODULE]
        old = [sealed.document for sealed in ledger.versions[: -retention.versions(world.run.config)]]
        assert old and 6 in here(world)
        named = {ref.digest for one in old for ref in (one.snapshot, one.update, one.state) if ref is not None}
        assert [name for name in named if store.size(name) is not None] == []


async def test_who_follows_the_archives_chain_has_the_parameters_from_an_owner(tmp_path: Path) -> None:
    """The archive's chain is the best that anybody tells, and it has none of them."""
    async with bare_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await archived(world, 2)
        newcomer = group.join(53)
        await newcomer.node.watch.refresh()
        assert here(world) == []
        await newcomer.chain.follow(world.seed.node.peer)
        assert newcomer.ledger.head.version == 2
        assert newcomer.node.store.size(newcomer.ledger.head.digest) is not None


# -- what must not be stuck


async def back(world: World, group: Group, retention: Retention = BARE) -> None:
    world.start_seed().archive.thinning.retention = retention
    world.seed.node.presence.note(light=True)
    await world.seed.node.presence.beat()
    await eventually(lambda: all(member.node.watch.seeds() for member in group.members))


@pytest.mark.parametrize("away", [2, 6])
@pytest.mark.parametrize("snapshots", [0, 4])
async def test_an_archive_that_was_away_goes_on(tmp_path: Path, snapshots: int, away: int) -> None:
    """Owners have dropped the parameters of what it missed, also of the fourth version, which it is to have."""
    retention = replace(BARE, snapshots=snapshots)
    async with bare_group(tmp_path, retention=retention) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await archived(world, 2)
        await group.seed_away()
        await make_versions(world, group.leader, author, away, seed=2)
        await back(world, group, retention)
        await archived(world, 2 + away)
        assert not snapshots or 4 in here(world)
        assert not any(event for member in group.members for event in member.said("gave_up"))


async def test_what_a_group_made_that_granted_itself_the_term_becomes_final(tmp_path: Path) -> None:
    """It has no quorum, so the archive makes it again: of the parameters of the last version that was final."""
    async with bare_group(tmp_path) as (world, group, author):
        fourth = group.join(54)
        await fourth.node.watch.refresh()
        await make_versions(world, group.leader, author, 2, seed=1)
        await archived(world, 2)
        await group.seed_away()
        await group.kill(group.leader)
        await eventually(lambda: len(group.leading) == 1)
        await group.formed()
        await sees(author, group.leader)
        await make_versions(world, group.leader, author, 6, seed=2)
        await back(world, group)
        await archived(world, 8)


async def test_with_few_volunteers_left_what_was_made_while_it_was_away_becomes_final(tmp_path: Path) -> None:
    async with bare_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await archived(world, 2)
        await group.seed_away()
        await make_versions(world, group.leader, author, 6, seed=2)
        await group.kill(group.mirrors[-1])
        await back(world, group)
        await archived(world, 8)


async def test_parameters_that_a_former_owner_alone_has_are_found_when_it_is_back(tmp_path: Path) -> None:
    """Others led the module by then, from an earlier version, and asked the newest owners alone: all that they made was
    in vain (seed 321 at e1aa52e)."""
    async with bare_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 3, seed=1)
        await archived(world, 3)
        former = group.leader.number
        for member in list(group.members):
            await group.kill(member)
        for number in (77, 78, 79):
            group.join(number)
        await group.formed()
        assert not any(member.ledger.head.version for member in group.members)
        leader = group.leader
        for path in (PATH, OTHER_PATH):
            await contribute(world, leader, author, seed=9, path=path)
        await eventually(lambda: leader.ledger.head.version == 1)
        group.join(former)
        await eventually(lambda: leader.leads and leader.ledger.final == 3)
        await make_versions(world, leader, author, 1, seed=2)
        await archived(world, 4)


async def test_a_module_whose_newest_parameters_are_lost_is_rolled_back(tmp_path: Path) -> None:
    """All who had them are gone for good; the archive has those of the fourth version."""
    async with bare_group(tmp_path, retention=replace(BARE, snapshots=2)) as (world, group, author):
        await make_versions(world, group.leader, author, 5, seed=1)
        await archived(world, 5)
        assert here(world) == [2, 4]
        for member in list(group.members):
            await group.kill(member)
        for number in (77, 78, 79):
            group.join(number)
        order = {"stage": world.run.id, "module": MODULE, "to": 4, "after": 5}
        coordinator = signer(SEED_NUMBER)
        world.seed.node.decrees.issue(coordinator, "rollback", at_s=0.0, reason="its parameters are lost", **order)
        await world.seed.node.presence.say()
        await archived(world, 6)
        ledger = world.seed.archive.ledgers[MODULE]
        assert ledger.head.rollback is not None and ledger.head.digest == ledger.at(4).digest
        [report] = [
            one for one in verify_run(world.run, world.seed.node.store, world.seed.archive) if one.module == MODULE
        ]
        assert not report.problem
