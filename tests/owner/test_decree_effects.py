"""What decrees do to owners: bans, freezes and rollbacks, also across takeovers and while the coordinator is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from group_harness import (
    MODULE,
    OTHER_PATH,
    PATH,
    Group,
    GroupMember,
    contribute,
    counted,
    document,
    make_versions,
    of_group,
    push,
    require_safe,
    require_verified,
    seed_back,
)
from runtime_harness import World, offer
from tiny_run import SEED_NUMBER, gradient_bytes, signer
from virtual_time import eventually

from dipaco_p2p.errors import BlobMissing, Refused
from dipaco_p2p.node.authority import Mandates
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner import rollback
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.protocol.decrees import Rebuilt
from dipaco_p2p.protocol.documents import BlobRef, Sealed, seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId


async def decree(world: World, group: Group, act: str, **values: object) -> None:
    """Issued by the coordinator, and known to all members."""
    decrees = world.seed.node.decrees
    reason = "" if act == "unfreeze" else "a test"
    decrees.issue(signer(SEED_NUMBER), act, at_s=world.clock.now_s(), reason=reason, **values)
    await eventually(lambda: all(each.node.decrees.count == decrees.count for each in group.members))


async def roll_back(world: World, group: Group, *, to: int) -> None:
    after = world.seed.archive.ledgers[MODULE].head.version
    await decree(world, group, "rollback", stage=world.run.id, module=MODULE, to=to, after=after)


async def refusal(world: World, leader: GroupMember, author: Member, *, seed: int = 0, path: PathId = PATH) -> Refused:
    with pytest.raises(Refused) as caught:
        await contribute(world, leader, author, seed=seed, path=path)
    return caught.value


# -- bans


async def test_the_banned_are_refused_and_what_had_a_receipt_counts(tmp_path: Path) -> None:
    """Also after a takeover: the next leader was not there when the receipt was given."""
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        receipt = await contribute(world, leader, author)
        await decree(world, group, "ban", peer=author.peer)
        refused = await refusal(world, leader, author, seed=5, path=OTHER_PATH)
        assert (refused.reason, "a test" in str(refused)) == (Reason.BANNED, True)
        again = await contribute(world, leader, author)
        assert again.document.contribution == receipt.document.contribution, "a receipt is told again"
        await group.kill(leader)
        await eventually(lambda: len(group.leading) == 1 and group.leader.ledger.head.version == 1)
        assert counted(group.leader) == [receipt.document.contribution]
        await decree(world, group, "admit", peer=author.peer)
        await make_versions(world, group.leader, author, seed=3)
        await require_safe(world, group, versions=2)


@pytest.mark.parametrize("with_seed", [True, False])
async def test_a_banned_leader_is_replaced_and_loses_nothing_that_has_a_receipt(
    tmp_path: Path, with_seed: bool
) -> None:
    """It is honest, alive and does not go: nobody obeys it, and it gets no new term, from anybody."""
    async with of_group(tmp_path) as (world, group, author):
        leader, others = group.leader, group.mirrors
        receipt, before = await contribute(world, leader, author), leader.node.mandates.newest(MODULE)
        decrees = world.seed.node.decrees
        decrees.issue(signer(SEED_NUMBER), "ban", at_s=0.0, reason="a test", peer=leader.peer)
        await eventually(lambda: all(each.node.decrees.count == 1 for each in others))
        if not with_seed:
            await world.kill_seed()
        await eventually(lambda: any(other.leads for other in others))
        [successor] = [other for other in others if other.leads]
        await eventually(lambda: successor.ledger.head.version == 1)
        assert counted(successor) == [receipt.document.contribution]
        with pytest.raises(Refused) as caught:
            await RemoteLedger(leader.node, successor.peer, MODULE).follow()
        assert caught.value.reason == Reason.BANNED
        if with_seed:
            with pytest.raises(Refused) as caught:
                await world.seed.terms.grant(leader.peer, MODULE, term=world.seed.term(MODULE) + 1, mirrors=())
            assert caught.value.reason == Reason.BANNED
        own = Mandates(world.run)  # it never heard of its successor's
        own.learn(MODULE, before)
        for _ in range(5):
            own.grant_next(leader.node.swarm.signer, MODULE, leader=leader.peer, mirrors=())
        successor.node.mandates.learn(MODULE, own.newest(MODULE))
        assert successor.leads, "a term that the banned one grants itself deposes nobody"
        group.members.remove(leader)
        await leader.die(world)


async def test_who_led_before_the_banned_one_leads_again_in_a_new_term_only(tmp_path: Path) -> None:
    async with of_group(tmp_path, numbers=(50, 51)) as (world, group, author):
        first = group.leader
        first.freeze()
        await eventually(lambda: any(member.leads for member in group.members if member is not first))
        [second] = [member for member in group.members if member is not first]
        await make_versions(world, second, author)
        term = second.ledger.head.term
        first.thaw()
        await eventually(lambda: first.ledger.head == second.ledger.head)
        decrees = world.seed.node.decrees
        decrees.issue(signer(SEED_NUMBER), "ban", at_s=0.0, reason="a test", peer=second.peer)
        await eventually(lambda: first.leads and first.node.decrees.count == 1)
        await make_versions(world, first, author, seed=9)
        assert first.ledger.head.term > term
        group.members.remove(second)
        await second.die(world)


# -- freezes


async def test_while_frozen_there_are_no_receipts_and_no_versions_and_afterwards_nothing_is_lost(
    tmp_path: Path,
) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, deadline_s = group.leader, world.run.config.rounds.deadline_s
        receipt = await contribute(world, leader, author)
        await decree(world, group, "freeze")
        payload = gradient_bytes(world.run, MODULE, seed=9)
        waiting = seal(author.swarm.signer, document(world, leader.ledger, author, payload, path=OTHER_PATH))
        with pytest.raises(Refused) as caught:
            await offer(author, leader.peer, waiting, payload)
        assert (caught.value.reason, "a test" in str(caught.value)) == (Reason.FROZEN, True)
        await asyncio.sleep(5 * deadline_s)
        assert [member.ledger.head.version for member in group.members] == [0, 0, 0]
        await decree(world, group, "unfreeze")
        late = await push(author, group.leader, waiting, payload)  # it has its time: the deadline counts anew
        await eventually(lambda: group.leader.ledger.head.version == 1)
        assert set(counted(group.leader)) == {receipt.document.contribution, late.document.contribution}
        await require_safe(world, group, versions=1)


# -- rollbacks


async def undone(group: Group, *, to: int, version: int) -> None:
    await eventually(lambda: group.leader.ledger.head.version == version)
    chain = group.leader.ledger
    assert chain.head.digest == chain.at(to).digest and chain.head.rollback is not None


@pytest.mark.parametrize("to", [0, 1])
async def test_a_rollback_is_a_version_with_earlier_parameters_that_anybody_can_make_again(
    tmp_path: Path, to: int
) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 3)
        reader = Follower(author, MODULE)
        await author.watch.refresh()
        await reader.sync()
        await roll_back(world, group, to=to)
        await undone(group, to=to, version=4)
        await reader.sync(after=3)
        assert reader.version == group.leader.ledger.head
        await make_versions(world, group.leader, author, 2, seed=5)
        await reader.sync(after=5)
        assert (reader.version.version, group.leader.ledger.due(group.leader.node.decrees)) == (6, None)
        await require_safe(world, group, versions=6)


async def test_what_began_before_a_rollback_expires_with_a_reason_everywhere(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2)
        receipt = await contribute(world, group.leader, author, seed=70)
        payload = gradient_bytes(world.run, MODULE, seed=71)
        before: Sealed = seal(
            author.swarm.signer, document(world, group.leader.ledger, author, payload, path=OTHER_PATH)
        )
        await roll_back(world, group, to=1)
        await undone(group, to=1, version=3)
        with pytest.raises(Refused) as caught:
            await offer(author, group.leader.peer, before, payload)
        assert caught.value.reason == Reason.ROLLED_BACK
        told = [(event["id"], event["reason"]) for event in group.leader.said("expired")]
        assert told == [(receipt.document.contribution, Reason.ROLLED_BACK)]
        await make_versions(world, group.leader, author, seed=8)
        await require_safe(world, group, versions=4)
        await eventually(lambda: not any(member.ledger.open for member in group.members))
        assert receipt.document.contribution not in counted(group.leader)


async def test_a_rollback_is_carried_out_while_frozen_and_by_the_next_leader_if_the_last_one_dies(
    tmp_path: Path,
) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2)
        await decree(world, group, "freeze")
        leader = group.leader
        leader.freeze()
        decrees = world.seed.node.decrees
        decrees.issue(
            signer(SEED_NUMBER),
            "rollback",
            at_s=0.0,
            reason="a test",
            stage=world.run.id,
            module=MODULE,
            to=1,
            after=2,
        )
        others = [member for member in group.members if member is not leader]
        await eventually(lambda: any(other.leads and other.ledger.head.version == 3 for other in others))
        leader.thaw()
        await group.formed()
        await undone(group, to=1, version=3)
        await decree(world, group, "unfreeze")
        await make_versions(world, group.leader, author, seed=4)
        await require_safe(world, group, versions=4)


async def test_of_two_rollbacks_the_newest_is_carried_out_and_the_coordinator_may_be_away(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 3)
        decrees = world.seed.node.decrees
        for to in (2, 1):
            values = {"stage": world.run.id, "module": MODULE, "to": to, "after": 3}
            decrees.issue(signer(SEED_NUMBER), "rollback", at_s=0.0, reason="a test", **values)
        await eventually(lambda: any(member.node.decrees.count == 2 for member in group.members))
        await world.kill_seed()
        await undone(group, to=1, version=4)
        await eventually(lambda: all(member.ledger.head.version == 4 for member in group.members))
        await seed_back(world, group)
        await require_safe(world, group, versions=4)
        require_verified(world, versions=4)


async def test_a_rollback_to_more_bytes_than_a_module_can_have_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Attack: the coordinator decrees it, and gives bytes for as long as a thin line would take for 2^40 of them, which
    is a year. The volunteer that led the module held them all in memory."""
    asked: list[int] = []

    async def fetch(node: Member, ref: BlobRef, *, holders: Sequence[PeerId]) -> bytes:
        asked.append(ref.size)
        raise BlobMissing("not yet")

    monkeypatch.setattr(rollback, "fetch_kept", fetch)
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        most, where = world.run.snapshot_bytes_max(MODULE), {"stage": world.run.id, "module": MODULE}
        for snapshot, state in ((2**40, 2 * most), (most, 2**40), (most, 2 * most)):
            refs = (BlobRef(digest="ab" * 32, size=size) for size in (snapshot, state))
            rebuilt = Rebuilt(without=(author.peer,), snapshot=next(refs), state=next(refs))
            await decree(world, group, "rollback", to=0, after=1, rebuilt=rebuilt, **where)
            caplog.clear()  # what was said of the decree before
            await eventually(lambda: f"{MODULE} cannot go back yet" in caplog.text)
        assert set(asked) == {most}
