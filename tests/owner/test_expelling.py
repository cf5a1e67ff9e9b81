"""Owners expel a forger while the coordinator is away, and the coordinator admits it again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_scene import AuditScene, audited_world
from judging_scene import GOOD, MODULE, OTHER_PATH
from tiny_run import SEED_NUMBER, signer
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.calls import GetVote
from dipaco_p2p.node.node import Member, ask
from dipaco_p2p.owner import mirror_calls
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.owner.expelling import Expelling, vote_on
from dipaco_p2p.protocol.decrees import ADMIT
from dipaco_p2p.protocol.expulsion import Charge, Vote
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import FORGERS_WAIT, Standing, Standings

NUMBERS = (50, 51, 52, 53, 54)


class OwnerScene(AuditScene):
    forger_: Member
    other: Member

    async def forged(self) -> None:
        """The next version finds a forger; all owners have the chain, and the coordinator is gone."""
        self.forger_, self.other = await self.forger(), await self.author(61)
        await self.push(self.forger_, GOOD)
        await eventually(lambda: bool(self.expired()))
        await self.push(self.other, GOOD, path=OTHER_PATH)
        await self.version(1)
        findings = self.findings(1)
        assert findings is not None and findings.forged == (self.forger_.swarm.peer,)

    async def alone(self) -> None:
        """The coordinator goes away, and everybody sees it; they all have the newest version."""
        await self.world.kill_seed()
        await eventually(lambda: not any(each.node.watch.seeds() for each in self.world.leaders))
        await self.told()

    async def told(self) -> None:
        for each in self.world.leaders[1:]:
            await each.node.watch.mandate_news.learn(MODULE, self.leader.peer)
            await each.chain.follow(self.leader.peer)

    async def next_version(self) -> None:
        number = self.owner.head.version + 1
        await self.push(self.other, GOOD, path=OTHER_PATH, to=self.world.leaders[1].peer)
        await self.version(number)

    def standing(self) -> Standing:
        return self.leader.chain.ledger.standings.of(self.forger_.swarm.peer)


Play = AbstractAsyncContextManager[OwnerScene]


@pytest.fixture
def owner_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """A module whose five owners live; who they are is not the question here (tests/protocol/test_expulsion.py)."""
    monkeypatch.setattr(Standing, "audit_chance", lambda self, audited: 1.0)
    peers = frozenset(signer(number).peer for number in NUMBERS)
    monkeypatch.setattr(Standings, "owners", lambda self, audited, coordinator: peers)
    return _owned(tmp_path)


@asynccontextmanager
async def _owned(folder: Path) -> AsyncIterator[OwnerScene]:
    async with audited_world(folder) as (world, auditors):
        leader = world.leader(NUMBERS[0])
        on = OwnerScene(world, leader, await leader.lead(MODULE))
        others = {world.leader(number).peer for number in NUMBERS[1:]}
        leader.chain.chains.is_proven = lambda peer: peer in others  # type: ignore[method-assign]
        await leader.node.watch.refresh()
        on.auditors = auditors
        await on.forged()
        yield on


async def test_owners_expel_a_forger_while_the_coordinator_is_away_and_a_later_decree_admits_it(
    owner_scene: Play,
) -> None:
    async with owner_scene as on:
        await on.alone()
        await eventually(lambda: on.owner._expelling._expulsion is not None)
        await on.next_version()
        expelled = on.owner.head.expels
        assert expelled is not None and (expelled.peer, expelled.found) == (on.forger_.swarm.peer, 1)
        assert len(expelled.votes) == 4 and on.standing().is_expelled
        for _ in range(FORGERS_WAIT):
            await on.next_version()
        assert not on.standing().waits
        with pytest.raises(Refused) as caught:
            await on.push(on.forger_, GOOD, to=on.world.leaders[1].peer)
        assert caught.value.reason == Reason.NOT_REPEATED
        seed = on.world.start_seed()
        decree = seed.node.decrees.issue(signer(SEED_NUMBER), ADMIT, at_s=0.0, reason="", peer=on.forger_.swarm.peer)
        on.leader.node.decrees.learn(decree)
        await on.next_version()
        assert on.owner.head.readmits is not None and not on.standing().is_out
        await on.next_version()
        assert (on.owner.head.expels, on.owner.head.readmits) == (None, None)
        await on.verified()


async def test_nobody_is_expelled_while_the_coordinator_is_there(
    owner_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owner_scene as on:
        monkeypatch.delattr(Expelling, "_vote")  # nobody is asked
        await on.told()
        await on.next_version()
        await on.next_version()
        assert on.owner.head.expels is None and on.owner._expelling._expulsion is None
        await refused(on, "the coordinator is there")


async def test_owners_vote_for_nothing_that_their_own_chain_does_not_show(owner_scene: Play) -> None:
    """Attack: a leader asks for votes against somebody who has forged nothing, or by decrees that nobody knows."""
    async with owner_scene as on:
        await on.alone()
        charge = Charge(run=on.run.id, module=MODULE, peer=on.forger_.swarm.peer, found=1)
        assert Vote(owner=on.world.leaders[1].peer, signature=await vote(on)).is_for(charge)
        await refused(on, "does not wait", peer=on.other.swarm.peer)
        await refused(on, "finds no forger", found=2)
        await refused(on, "0 decrees are known", decrees=1)


async def test_who_is_no_owner_does_not_vote(owner_scene: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner_scene as on:
        await on.alone()
        monkeypatch.setattr(Standings, "owners", lambda self, audited, coordinator: frozenset())
        await refused(on, "no owner")


@pytest.mark.parametrize("lives", [3, 4])
async def test_owners_who_are_not_there_have_not_voted(owner_scene: Play, lives: int) -> None:
    async with owner_scene as on:
        for each in on.world.leaders[lives:]:
            await each.die(on.world)
        del on.world.leaders[lives:]
        await on.alone()
        on.owner._expelling._next_s = 0.0
        await on.owner._expelling.gather()
        assert (on.owner._expelling._expulsion is not None) == (lives == 4)


async def test_an_owner_that_answers_rubbish_keeps_no_others_from_it(
    owner_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: its vote would make the whole version wrong."""

    def spoilt(chain: ModuleChain, charge: Charge) -> Vote:
        vote = vote_on(chain, charge)
        return replace(vote, signature="ab" * 64) if chain.node.peer == min(map(str, peers)) else vote

    peers = set[PeerId]()
    monkeypatch.setattr(mirror_calls, "vote_on", spoilt)
    async with owner_scene as on:
        peers.update(each.peer for each in on.world.leaders[1:])
        await on.alone()
        await eventually(lambda: on.owner._expelling._expulsion is not None)
        await on.next_version()
        expelled = on.owner.head.expels
        assert expelled is not None and min(map(str, peers)) not in {one.owner for one in expelled.votes}


async def vote(on: OwnerScene, *, peer: PeerId | None = None, found: int = 1, decrees: int = 0) -> str:
    """The second owner's."""
    peer = on.forger_.swarm.peer if peer is None else peer
    request = GetVote(module=MODULE, peer=peer, found=found, decrees=decrees)
    return (await ask(on.leader.node, on.world.leaders[1].peer, request)).signature


async def refused(on: OwnerScene, words: str, **changes: Any) -> None:
    with pytest.raises(Refused, match=words) as caught:
        await vote(on, **changes)
    assert caught.value.reason == Reason.OTHER
