"""A module's group in two halves that cannot reach each other: both go on, and come together without losing work."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from group_harness import (
    MODULE,
    Group,
    GroupMember,
    contribute,
    counted,
    document,
    expired,
    make_versions,
    of_group,
    require_safe,
    seed_back,
)
from leaders_harness import on_stage
from runtime_harness import World
from tiny_run import granted
from virtual_time import eventually

from dipaco_p2p.node.calls import GetBranch, GetOpen
from dipaco_p2p.node.items import Page, items_reply
from dipaco_p2p.node.ledger import head_record
from dipaco_p2p.node.node import CONTROL_TIMEOUT_S, Member
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.protocol.documents import Contribution, seal
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import Branch


def split(world: World, group: Group, author: Member) -> tuple[GroupMember, list[GroupMember], Member]:
    """The leader, with an author, apart from the others, with another author."""
    leader = group.leader
    others = [member for member in group.members if member is not leader]
    second = world.peer(61)
    rest = [member.peer for member in others] + [second.peer, world.seed.node.peer]
    world.network.partition([[leader.peer, author.peer], rest])
    return leader, others, second


async def both_lead(world: World, group: Group, author: Member) -> tuple[GroupMember, GroupMember, Member]:
    """As `split`, but of the others the one that leads by then."""
    leader, others, second = split(world, group, author)
    await eventually(lambda: any(member.leads for member in others))
    await second.watch.refresh()
    return leader, next(member for member in others if member.leads), second


def reported(group: Group) -> set[str]:
    """Contributions that somebody said will never count."""
    return {event["id"] for member in group.members for event in member.said("expired")}


async def accounted(group: Group, contributions: list[str]) -> None:
    """Each counts once, or else is reported."""
    await eventually(lambda: set(contributions) <= set(counted(group.leader)) | reported(group))
    assert len(counted(group.leader)) == len(set(counted(group.leader)))
    assert not set(counted(group.leader)) & reported(group) & set(contributions)


async def healed(world: World, group: Group) -> None:
    world.network.heal()
    await eventually(lambda: len(group.leading) == 1 and len(group.mirrors) == 2)


async def test_of_two_branches_the_longer_is_kept_and_the_other_ones_work_counts_once_or_is_reported(
    tmp_path: Path,
) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        await group.seed_away()
        leader, others, second = split(world, group, author)
        await expired(world)
        await eventually(lambda: any(member.leads for member in others))
        assert leader.leads, "both sides go on"
        other = next(member for member in others if member.leads)
        long = await make_versions(world, leader, author, 3, seed=5)
        await second.watch.refresh()
        short = await make_versions(world, other, second, 1, seed=6)
        late = (await contribute(world, other, second, seed=7)).document.contribution
        await healed(world, group)
        assert set(long) <= set(counted(group.leader))
        await make_versions(world, group.leader, author, seed=8)
        await accounted(group, [*short, late])
        assert not set(long) & reported(group)
        await group.formed()
        await seed_back(world, group)
        await require_safe(world, group, versions=group.leader.ledger.head.version)


async def test_the_work_of_a_short_partition_counts_once(tmp_path: Path) -> None:
    """One version each: the bases of what the losing branch counted are still young enough."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        leader, other, second = await both_lead(world, group, author)
        ids = await make_versions(world, leader, author, seed=5)
        ids += await make_versions(world, other, second, seed=6)
        await healed(world, group)
        await eventually(lambda: set(ids) <= set(counted(group.leader)))
        assert sorted(counted(group.leader)[2:]) == sorted(ids)


async def test_the_branch_with_the_seed_wins_however_short_it_is(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        leader, others, second = split(world, group, author)
        await eventually(lambda: any(member.leads for member in others))
        await eventually(lambda: not leader.node.watch.seeds() and len(leader.node.watch.heartbeats) == 1)
        other = next(member for member in others if member.leads)
        await second.watch.refresh()
        final = await make_versions(world, other, second, seed=6)
        await eventually(lambda: other.ledger.final == 2)
        lone = await make_versions(world, leader, author, 3, seed=5)
        await healed(world, group)
        assert set(final) <= set(counted(group.leader))
        assert [event["after"] for event in leader.said("gave_up")] == [1], "it may make version 2 again in its term"
        archive = world.seed.archive.ledgers[MODULE]
        assert archive.versions[1].document == group.leader.ledger.versions[1].document
        await make_versions(world, group.leader, author, seed=8)
        await accounted(group, lone)
        await require_safe(world, group, versions=group.leader.ledger.head.version)


async def test_after_healing_the_mirrors_have_the_branch_that_goes_on(tmp_path: Path) -> None:
    """Before another version is made: until then nobody else might have it."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        leader, other, second = await both_lead(world, group, author)
        await make_versions(world, other, second, seed=6)
        await make_versions(world, leader, author, 2, seed=5)
        await healed(world, group)
        await group.formed()
        assert {member.ledger.head.version for member in group.members} == {3}


async def test_a_reader_on_the_losing_side_comes_to_the_one_head(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        leader, other, second = await both_lead(world, group, author)
        reader = Follower(second, MODULE)
        await make_versions(world, other, second, seed=6)
        await reader.sync()
        assert reader.version.version == 2
        await make_versions(world, leader, author, 3, seed=5)
        await healed(world, group)
        await second.watch.refresh()
        await reader.sync(after=group.leader.ledger.head.version - 1)
        assert reader.version == group.leader.ledger.head


async def test_who_waits_on_the_losing_one_of_two_heads_of_one_number_comes_to_the_other(tmp_path: Path) -> None:
    """Before another version is made: if all trainers were on the other one, nobody would make it."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        leader, other, second = await both_lead(world, group, author)
        readers = [Follower(author, MODULE), Follower(second, MODULE)]
        await make_versions(world, leader, author, seed=5)
        await make_versions(world, other, second, seed=6)
        for reader in readers:
            await reader.sync()
        assert len({reader.version.digest for reader in readers}) == 2
        await healed(world, group)
        await eventually(lambda: len({member.ledger.head.digest for member in group.members}) == 1)
        head = group.leader.ledger.head
        [loser] = [reader for reader in readers if reader.version != head]
        await loser.sync(after=2)
        assert loser.version == head and head.version == 2


async def test_a_former_leader_that_says_it_has_a_better_branch_stops_no_round(tmp_path: Path) -> None:
    """Attack: whoever had led once said so in a head, and gave its open contributions a page at a time. The leader
    waited for them, for hours, with its module locked: no contribution was taken, and no round closed."""
    async with on_stage(tmp_path) as (world, first, second, author):
        former, pages = world.leader(70, has_worked=False), list[str]()
        grant = granted(world.run, MODULE, term=1, leader=former.peer)
        owner = await first.lead(MODULE)
        while owner.grant.term == 1:
            await first.ownership._granting.obtain(MODULE, mirrors=())
            await owner.renew()
        node, ledger = former.node, former.chain.ledger
        listed = {
            (sealed := seal(node.swarm.signer, document(world, ledger, node, bytes([number])))).id: sealed
            for number in range(60)
        }

        async def branch(sender: PeerId, request: GetBranch) -> Branch:
            return Branch(final=30, version=30, weight=2**40, digest="ab" * 32)

        async def open_(sender: PeerId, request: GetOpen) -> Page[Contribution]:
            pages.append(sender)
            await asyncio.sleep(CONTROL_TIMEOUT_S - 1)
            return items_reply(listed[name] for name in [name for name in sorted(listed) if name > request.after][:1])

        for kind, answer in ((GetBranch, branch), (GetOpen, open_)):
            former.swarm._dispatcher._handlers.pop(kind.METHOD, None)
            kind.serve(former.swarm, answer)  # type: ignore[attr-defined]
        first.node.mandates.learn(MODULE, [grant])
        head = replace(head_record(ledger, (grant,)), version=30, final=30)
        await node.presence.lead(MODULE, head)
        first.tasks.append(asyncio.create_task(first.ownership.run()))
        await eventually(lambda: first.peer in pages)
        began_s = world.clock.now_s()
        await make_versions(world, first, author, count=3)
        spent_s = world.clock.now_s() - began_s
        assert spent_s < 60.0
