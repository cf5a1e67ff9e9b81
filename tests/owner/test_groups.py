"""Owner groups by themselves: failover, refilling, partitions, leaving and restarts, with and without the seed node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from group_harness import (
    MODULE,
    OTHER_PATH,
    PATH,
    contribute,
    counted,
    expired,
    make_versions,
    of_group,
    require_safe,
    require_verified,
    seed_back,
    sees,
)
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.protocol.reasons import Reason

# -- a leader dies


@pytest.mark.parametrize("with_seed", [True, False])
async def test_a_mirror_takes_over_with_all_that_has_a_receipt(tmp_path: Path, with_seed: bool) -> None:
    async with of_group(tmp_path) as (world, group, author):
        if not with_seed:
            await group.seed_away()
        leader, mirrors = group.leader, group.mirrors
        term = leader.owner(MODULE).grant.term
        await make_versions(world, leader, author, 2)
        receipt = await contribute(world, leader, author, seed=7)
        await group.kill(leader)
        await eventually(lambda: len(group.leading) == 1)
        assert group.leader in mirrors
        await eventually(lambda: group.leader.ledger.head.version == 3)
        assert counted(group.leader).count(receipt.document.contribution) == 1
        assert group.leader.owner(MODULE).grant.term > term
        await make_versions(world, group.leader, author, seed=8)
        if not with_seed:
            await seed_back(world, group)
        await require_safe(world, group, versions=4)


async def test_readers_believe_a_mirror_that_granted_itself_the_next_term(tmp_path: Path) -> None:
    """One that knows the last mandate, and one that comes later and is shown all of it."""
    async with of_group(tmp_path) as (world, group, author):
        old = world.peer(70)
        await old.watch.refresh()
        await make_versions(world, group.leader, author)
        await group.seed_away()
        await group.kill(group.leader)
        await eventually(lambda: len(group.leading) == 1)
        new = world.peer(71)
        for node in (old, new):
            await sees(node, group.leader)
            reader = Follower(node, MODULE)
            assert node.mandates.newest(MODULE)[-1].document.author == group.leader.peer
            await reader.sync()
            assert reader.version == group.leader.ledger.head
        await make_versions(world, group.leader, author, seed=3)


async def test_two_leaders_may_die_one_after_the_other_while_the_seed_is_away(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        seen = []
        for number in range(2):
            await make_versions(world, group.leader, author, seed=number)
            seen.append((await contribute(world, group.leader, author, seed=90 + number)).document.contribution)
            if number == 0:
                await group.kill(group.leader)
                await eventually(lambda: len(group.leading) == 1 and group.leader.ledger.head.version >= 3)
        await group.kill(group.leader)
        await eventually(lambda: len(group.leading) == 1)
        await eventually(lambda: set(seen) <= set(counted(group.leader)))
        await sees(world.peer(71), group.leader)


async def test_the_group_is_refilled_in_a_new_term(tmp_path: Path) -> None:
    async with of_group(tmp_path, numbers=(50, 51, 52, 53)) as (world, group, author):
        leader = group.leader
        term = leader.owner(MODULE).grant.term
        await make_versions(world, leader, author)
        gone = group.mirrors[0]
        await group.kill(gone)
        await eventually(lambda: gone.peer not in leader.owner(MODULE).grant.mirrors)
        await group.formed()
        assert group.leader is leader and leader.owner(MODULE).grant.term > term
        assert gone not in group.mirrors and all(mirror.ledger.versions for mirror in group.mirrors)
        await make_versions(world, leader, author, seed=5)
        await group.formed()


async def test_a_newcomer_fills_a_gap_and_displaces_nobody(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, mirrors = group.leader, group.mirrors
        term = leader.owner(MODULE).grant.term
        newcomers = [group.join(number) for number in (53, 54, 55)]
        await expired(world)
        assert group.leader is leader and group.mirrors == mirrors
        assert leader.owner(MODULE).grant.term == term and not any(member.leads for member in newcomers)
        await group.kill(mirrors[0])
        await eventually(lambda: mirrors[0].peer not in leader.owner(MODULE).grant.mirrors)
        await group.formed()
        assert mirrors[1] in group.mirrors and group.leader is leader
        assert len(set(newcomers) & set(group.mirrors)) == 1


# -- frozen leaders


@pytest.mark.parametrize("with_seed", [True, False])
async def test_a_leader_that_froze_and_woke_steps_down(tmp_path: Path, with_seed: bool) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        if not with_seed:
            await group.seed_away()
        old = group.leader
        old.freeze()
        others = [member for member in group.members if member is not old]
        await eventually(lambda: any(member.leads for member in others))
        new = next(member for member in others if member.leads)
        await make_versions(world, new, author, seed=4)
        old.thaw()
        with pytest.raises(Refused) as caught:
            await contribute(world, old, author, seed=5)
        assert caught.value.reason in (Reason.NOT_LEADER, "no-mirror")
        await eventually(lambda: not old.leads)
        assert old.ledger.head.version <= 2 and group.leader is new
        await make_versions(world, new, author, seed=6)
        await group.formed()
        assert [sealed.document.version for sealed in old.ledger.versions] == [1, 2, 3]


async def test_what_a_frozen_leader_had_in_its_round_is_in_the_next_version_of_its_successor(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        old = group.leader
        receipt = await contribute(world, old, author, seed=5)
        old.freeze()
        await eventually(lambda: any(member.leads for member in group.members if member is not old))
        new = next(member for member in group.members if member.leads and member is not old)
        await eventually(lambda: receipt.document.contribution in counted(new))
        old.thaw()
        await eventually(lambda: group.leading == [new])
        await make_versions(world, new, author, seed=6)
        await group.formed()
        for member in group.members:
            assert counted(member).count(receipt.document.contribution) == 1


# -- leaving and restarts


async def test_a_leader_that_returns_after_its_successor_died_leads_in_a_newer_term(tmp_path: Path) -> None:
    """What it has on disk says that it leads, but a later term was given to one whose head has expired by now."""
    async with of_group(tmp_path, numbers=(50,)) as (world, group, author):
        first = group.leader
        await make_versions(world, first, author)
        await group.kill(first)
        successor = group.join(51)
        await eventually(lambda: successor.leads)
        await make_versions(world, successor, author, seed=5)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == 2)
        term = successor.owner(MODULE).grant.term
        await group.kill(successor)
        await expired(world)
        again = group.join(50)
        await eventually(lambda: again.leads and again.owner(MODULE).grant.term > term)
        await make_versions(world, again, author, seed=6)
        require_verified(world, versions=3)


async def test_a_mirror_has_what_the_first_version_is_made_from(tmp_path: Path) -> None:
    """The seed node and the leader are gone before there is any version."""
    async with of_group(tmp_path) as (world, group, author):
        await group.seed_away()
        receipt = await contribute(world, group.leader, author)
        await group.kill(group.leader)
        await eventually(lambda: len(group.leading) == 1 and group.leader.ledger.head.version == 1)
        assert counted(group.leader) == [receipt.document.contribution]


@pytest.mark.parametrize("with_seed", [True, False])
async def test_a_leader_that_leaves_hands_over_and_loses_nothing(tmp_path: Path, with_seed: bool) -> None:
    async with of_group(tmp_path) as (world, group, author):
        if not with_seed:
            await group.seed_away()
        leader, mirrors = group.leader, group.mirrors
        await make_versions(world, leader, author)
        receipt = await contribute(world, leader, author, seed=5)
        began_s = world.clock.now_s()
        await leader.ownership.leave()
        await leader.node.presence.leave()
        assert world.clock.now_s() - began_s < 1.0
        [successor] = leader.said("handed_over")
        assert successor["to"] in {mirror.peer for mirror in mirrors}
        await group.kill(leader)
        await eventually(lambda: len(group.leading) == 1)
        assert group.leader.peer == successor["to"]
        await eventually(lambda: receipt.document.contribution in counted(group.leader))
        await make_versions(world, group.leader, author, seed=6)
        if not with_seed:
            await seed_back(world, group)
        await require_safe(world, group, versions=3)


@pytest.mark.parametrize("with_seed", [True, False])
async def test_a_whole_group_goes_on_from_its_disks(tmp_path: Path, with_seed: bool) -> None:
    async with of_group(tmp_path) as (world, group, author):
        if not with_seed:
            await group.seed_away()
        await make_versions(world, group.leader, author, 2)
        receipt = await contribute(world, group.leader, author, seed=5)
        for member in list(group.members):
            await group.kill(member)
        await expired(world)
        for number in (50, 51, 52):
            group.join(number)
        await group.formed()
        await eventually(lambda: group.leader.ledger.head.version == 3)
        assert counted(group.leader).count(receipt.document.contribution) == 1
        await make_versions(world, group.leader, author, seed=6)
        await group.formed()
        if not with_seed:
            await seed_back(world, group)
        await require_safe(world, group, versions=4)


async def test_a_mirror_that_was_away_for_some_rounds_has_all_of_them_again(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        mirror = group.mirrors[0]
        await make_versions(world, group.leader, author)
        await group.kill(mirror)
        await make_versions(world, group.leader, author, 3, seed=5)
        again = group.join(mirror.number)
        await expired(world)
        assert again in group.mirrors
        await make_versions(world, group.leader, author, seed=6)
        await group.formed()
        assert again.ledger.head.version == 5
        assert again.peer in again.ledger.versions[-1].cosignatures


async def test_a_whole_group_that_is_lost_goes_on_from_what_a_trainer_kept(tmp_path: Path) -> None:
    """Not even the seed has the last versions: their outer state is gone, and the next version says so."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == 1)
        await group.seed_away()
        await make_versions(world, group.leader, author, 2, seed=3)
        newcomer = group.join(57)
        await eventually(lambda: group.leader.peer in newcomer.node.watch.heartbeats)
        reader = Follower(newcomer.node, MODULE, newcomer.chain)
        await reader.sync()
        assert newcomer.ledger.head.version == 3 and newcomer not in (group.leader, *group.mirrors)
        for member in list(group.members):
            if member is not newcomer:
                await group.kill(member)
        await expired(world)
        await seed_back(world, group)
        await eventually(lambda: newcomer.leads)
        assert newcomer.ledger.head.version == 3
        await make_versions(world, newcomer, author, 2, seed=6)
        chain = [sealed.document for sealed in newcomer.ledger.versions]
        assert [version.is_fresh for version in chain] == [False, False, False, True, False]
        # Nobody can show any more what versions 2 and 3 were made of, so they can never be final: after a while the
        # chain goes on from the last one that is, and says of what the others counted that it expired.
        await eventually(lambda: newcomer.ledger.head.version == newcomer.ledger.final == 1)
        await make_versions(world, newcomer, author, 2, seed=9)
        await require_safe(world, group, versions=3)


async def test_the_receipt_of_a_lost_round_is_kept_by_who_gave_it(tmp_path: Path) -> None:
    """Both paths of a round are in, its leader dies before it closes: the mirror closes it at once."""
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        receipts = [
            await contribute(world, leader, author, seed=number, path=path)
            for number, path in enumerate((PATH, OTHER_PATH))
        ]
        await group.kill(leader)
        await eventually(lambda: len(group.leading) == 1 and group.leader.ledger.head.version == 1)
        assert sorted(counted(group.leader)) == sorted(receipt.document.contribution for receipt in receipts)
        await asyncio.sleep(1.0)
        assert group.leader.ledger.head.version == 1
