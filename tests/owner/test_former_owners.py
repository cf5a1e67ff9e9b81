"""Who owns a module no more and keeps what it gave receipts for: not done before the coordinator says what counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from group_harness import MODULE, OTHER_PATH, contribute, document, of_group, push
from leaders_harness import on_stage
from runtime_harness import TinyLeader, World
from tiny_run import gradient_bytes
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.protocol.documents import Contribution, Sealed, seal
from dipaco_p2p.protocol.reasons import Reason


def promised(world: World, holder: TinyLeader, author: Member) -> Sealed[Contribution]:
    """A contribution that `holder` keeps, with a receipt of a leader before this one."""
    payload = gradient_bytes(world.run, MODULE, seed=70)
    sealed = seal(author.swarm.signer, document(world, holder.chain.ledger, author, payload))
    holder.node.store.put(payload)
    holder.chain.add(sealed)
    holder.chain.lost.add(sealed.id)
    return sealed


def refusing(reason: Reason) -> Callable[..., Any]:
    async def refuse(leader: Leader, sender: str, sealed: Sealed[Contribution], **how: Any) -> None:
        raise Refused("not by me", reason=reason)

    return refuse


def expired_at(holder: TinyLeader) -> list[Any]:
    return [event["reason"] for event in holder.events if event["ev"] == "expired"]


@pytest.mark.parametrize("reason", [Reason.NORM, Reason.WRONG_MODULE, Reason.UNKNOWN_METHOD, Reason.BUSY])
async def test_no_leader_settles_by_its_word_what_others_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Reason
) -> None:
    """Attack: a stranger that led refused what had receipts, and all who kept it forgot it, though it might count."""
    async with on_stage(tmp_path) as (world, first, holder, author):
        await first.lead(MODULE)
        await eventually(lambda: holder.node.watch.leader(MODULE) == first.peer)
        sealed = promised(world, holder, author)
        with monkeypatch.context() as hostile:
            hostile.setattr(Leader, "contribute", refusing(reason))
            await holder.ownership._resubmit(MODULE)
            assert holder.chain.lost == set(holder.chain.ledger.open) == {sealed.id} and not expired_at(holder)
        await first.die(world)
        await eventually(lambda: not holder.node.watch.heads[MODULE])
        await holder.lead(MODULE)
        ledger = world.seed.archive.ledgers[MODULE]
        await eventually(lambda: ledger.head.version == 1)
        assert [share.contribution for share in ledger.head.shares] == [sealed.id]


@pytest.mark.parametrize("reason", [Reason.NORM, Reason.WRONG_MODULE])
async def test_what_final_versions_left_behind_is_settled_whatever_the_leader_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Reason
) -> None:
    async with on_stage(tmp_path, staleness=0) as (world, first, holder, author):
        await first.lead(MODULE)
        promised(world, holder, author)
        other = world.peer(61)
        counted = promised(world, holder, other)
        await push(other, first, counted, gradient_bytes(world.run, MODULE, seed=70))
        await contribute(world, first, author, path=OTHER_PATH)
        await eventually(lambda: first.chain.ledger.final == 1)
        monkeypatch.setattr(Leader, "contribute", refusing(reason))
        await eventually(lambda: holder.node.watch.leader(MODULE) == first.peer)
        await holder.ownership._resubmit(MODULE)
        assert not holder.chain.lost and not holder.chain.ledger.kept
        assert expired_at(holder) == [reason if reason == Reason.NORM else Reason.STALE_BASE]


async def test_what_a_leader_gave_receipts_for_is_not_forgotten_when_it_follows_a_longer_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a partition a seed node led from an old version, and then took over newer ones that it had never seen. What
    it had given receipts for was too old there: it dropped that as if another leader had told its author."""
    async with on_stage(tmp_path, staleness=0) as (world, first, holder, author):
        await first.lead(MODULE)
        own = promised(world, holder, author)
        holder.chain.lost.clear()
        await contribute(world, first, world.peer(61), seed=71)
        await contribute(world, first, world.peer(62), seed=72, path=OTHER_PATH)
        await eventually(lambda: first.chain.ledger.final == 1)
        with monkeypatch.context() as leading:
            leading.setattr(holder.node.mandates, "leader", lambda module: holder.peer)
            await holder.chain.follow(first.peer)
        assert holder.chain.ledger.final == 1 and holder.chain.lost == {own.id}
        assert own.id in holder.chain.ledger.open and "left_behind" not in {event["ev"] for event in holder.events}


async def test_a_former_mirror_is_not_done_until_what_it_keeps_is_final_though_nobody_leads(tmp_path: Path) -> None:
    async with of_group(tmp_path, rounds=2) as (world, group, author):
        leader, former = group.leader, group.mirrors[0]
        world.seed.ownership._may_take = lambda: False
        world.network.partition([{world.seed.node.peer}])
        await contribute(world, leader, author, seed=1)
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: len(former.ledger.spent) == 2)
        former.freeze()
        group.join(53)
        world.network.heal()
        await eventually(lambda: len(group.leading) == 1 and former.peer not in group.leader.owner(MODULE).grant.group)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == 1)
        for member in [each for each in group.members if each is not former]:
            await group.kill(member)
        former.ownership._may_take = lambda: False
        former.thaw()
        assert len(former.ledger.kept) == 2 and former.ledger.final == 0
        former.node.watch.leader = lambda module: None  # type: ignore[method-assign]
        await eventually(lambda: not former.ledger.kept)
        assert former.ledger.final == 1
        assert former.ownership._is_settled(MODULE) and not former.chain.is_owner
