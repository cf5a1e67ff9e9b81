"""What a new leader does before it leads: it gathers what the last group, and anybody else, has of the module.

Order that safety needs: it asks after its grant, which everybody who is asked sees. From then on they confirm nothing
to the last leader, so what has a receipt is among what they tell.

Whoever is asked may be hostile: any stranger may have been a mirror. While it makes us wait nobody leads, so everything
that one peer is asked for has a time limit. What is not had in time is not lost: its holders offer it to us once we
lead (leadership.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence

from ..errors import BlobMissing, DipacoError, Refused, SwarmError, Unreachable
from ..node.ledger import KEPT_MAX, RemoteLedger
from ..node.node import fetch
from ..program.tasks import in_time
from ..protocol.documents import BlobRef, Contribution, Sealed
from ..protocol.signing import PeerId, short
from ..protocol.versions import Branch
from .chain import ModuleChain
from .replication import LOST_TTLS
from .sources import PATIENCE_S, THIN_BYTES_S

log = logging.getLogger(__name__)

TRIES = 5
RETRY_S = 0.5
ASKED_AT_ONCE = 4
"""Holders that say what they keep: a list may be long."""
TRAINERS_ASKED_MAX = 32
"""Who train a module and are no neighbours, asked what they have of it."""


class Takeover:
    """One module's, by this peer."""

    def __init__(self, chain: ModuleChain) -> None:
        self._node = chain.node
        self._chain = chain
        self._ledger = chain.ledger

    async def gather(self, last_group: Collection[PeerId]) -> int:
        """Take over the best branch that anybody has, and the contributions that are open anywhere; the newest version
        that there should be.

        Asked after our grant, which everybody asked sees: from then on the last leader gets nothing confirmed by them.
        """
        watch = self._node.watch
        likely = {*last_group, *watch.seeds(), *watch.heads[self._chain.module]}
        found = await self._branches(likely)
        if not found or max(branch.version for branch in found.values()) < watch.seen[self._chain.module]:
            await self._meet_trainers()
            found |= await self._branches(watch.heartbeats.keys() - found.keys())
        await self._take_best(found)
        await self._take_open(await self._listed(found))
        await self._take_evidence()
        return max([watch.seen[self._chain.module], *self._bases()])

    async def _meet_trainers(self) -> None:
        """In a large swarm those who follow the module are seldom our neighbours."""
        watch, paths = self._node.watch, self._node.run.topology.paths_through(self._chain.module)
        if not watch.is_whole:
            await watch.read_claims(paths)
            training = sorted(peer for path in paths for peer in watch.claims[path])
            await watch.find(*training[:TRAINERS_ASKED_MAX])

    def _bases(self) -> list[int]:
        """What the open contributions were trained from: there are these versions, whether we have them or not."""
        return [sealed.document.base_version for sealed in self._ledger.open.values()]

    async def _branches(self, peers: Collection[PeerId]) -> dict[PeerId, Branch]:
        asked = sorted(peer for peer in peers if peer != self._node.peer and peer in self._node.watch.heartbeats)
        answers = await asyncio.gather(*map(self._branch_of, asked))
        return {peer: branch for peer, branch in zip(asked, answers, strict=True) if branch is not None}

    async def _branch_of(self, peer: PeerId) -> Branch | None:
        try:
            return await RemoteLedger(self._node, peer, self._chain.module).branch()
        except DipacoError as error:
            log.info("%s: ...%s did not say what it has: %s", self._chain.module, short(peer), error)
            return None

    async def take(self, peer: PeerId, branch: Branch) -> bool:
        """Go over to the branch of one peer if it is better than ours; whether ours is another one now. Raises
        DipacoError if nothing of it came."""
        before = self._ledger.branch
        if not branch.is_better(before):
            return False
        try:
            await self.follow(peer)
        except DipacoError as error:  # what came before it failed is our head now: the round goes on from there
            if self._ledger.branch == before:
                raise
            log.info("%s: only a part of the branch of ...%s came: %s", self._chain.module, short(peer), error)
            if before.is_better(self._ledger.branch):  # what we left for it our mirrors still have
                grant = self._node.mandates.grant(self._chain.module)
                await self._take_best(await self._branches(set(grant.group) - {peer} if grant is not None else ()))
        return True

    async def follow(self, peer: PeerId) -> None:
        """Take over the branch of one peer. Its parameters and outer state have the time that a thin line takes for
        them, and what came is kept for the next try. Raises DipacoError."""
        limit_s = LOST_TTLS * self._ttl_s + 3 * self._node.run.snapshot_bytes_max(self._chain.module) / THIN_BYTES_S
        await in_time(self._chain.follow(peer), self._node.clock, limit_s, what="its branch")

    async def _take_best(self, found: dict[PeerId, Branch]) -> None:
        """Follow the best branch; who lied about it, went away or trickles leaves us with the next one."""
        for peer in sorted(found, key=lambda peer: (found[peer].rank, peer)):
            try:
                await self.take(peer, found[peer])
            except DipacoError as error:
                log.warning("%s: the branch of ...%s cannot be had: %s", self._chain.module, short(peer), error)

    async def _listed(self, peers: Collection[PeerId]) -> dict[PeerId, list[Sealed[Contribution]]]:
        """What these keep and we lack, as far as they say it in time; who has worked comes first."""
        workers, gate = self._chain.chains.workers, asyncio.Semaphore(ASKED_AT_ONCE)
        order = sorted(peers, key=lambda peer: (peer not in workers, peer))
        listed: dict[PeerId, list[Sealed[Contribution]]] = {peer: [] for peer in order}

        async def ask(peer: PeerId) -> None:
            try:
                async with gate:
                    kept = await RemoteLedger(self._node, peer, self._chain.module).kept()
            except DipacoError as error:
                log.warning("%s: ...%s does not say what it keeps: %s", self._chain.module, short(peer), error)
                return
            left = max(KEPT_MAX - sum(map(len, listed.values())), 0)
            listed[peer] = [sealed for sealed in kept if self._may_take(peer, sealed)][:left]

        with contextlib.suppress(Unreachable):
            await in_time(asyncio.gather(*map(ask, order)), self._node.clock, LOST_TTLS * self._ttl_s, what="a list")
        return listed

    def _may_take(self, peer: PeerId, sealed: Sealed[Contribution]) -> bool:
        """Not of an author that nobody let in, as far as we know: until it shows how, its work stays where it is."""
        with contextlib.suppress(Refused):
            has_worked = self._chain.chains.is_proven
            self._node.invitations.require(sealed.document.author, has_worked, promised=peer)
            return not self._is_here(sealed)
        return False

    def _is_here(self, sealed: Sealed[Contribution]) -> bool:
        return sealed.id in self._ledger.kept or sealed.id in self._ledger.counted

    async def _take_open(self, listed: dict[PeerId, list[Sealed[Contribution]]]) -> None:
        """Of one holder after the other, and of all who keep the same at once. Whoever gave nothing in its time is not
        asked for more."""
        holders: dict[str, list[PeerId]] = defaultdict(list)
        for peer, kept in listed.items():
            for sealed in kept:
                holders[sealed.id].append(peer)
        in_vain, end_s = set[PeerId](), self._node.clock.now_s() + LOST_TTLS * self._ttl_s
        for sealed in itertools.chain(*listed.values()):
            asked = [peer for peer in holders[sealed.id] if peer not in in_vain]
            if not asked or self._is_here(sealed) or self._node.clock.now_s() >= end_s:
                continue
            try:
                self._chain.chains.room.require_share(sealed)
            except Refused as refused:  # who keeps it offers it later
                log.info("%s: %s is not taken over: %s", self._chain.module, sealed.id[:8], refused)
                continue
            try:
                self._node.store.put(await self._fetch_patiently(sealed.document.payload, asked, end_s))
                self._chain.add(sealed)
            except DipacoError as error:
                log.warning("%s: %s could not be taken over: %s", self._chain.module, sealed.id[:8], error)
                in_vain.update(asked)

    async def _take_evidence(self) -> None:
        """Of the coordinator's archive alone: any other could have friends who say what nobody asked them for. What
        the last leader brought to us is on our disk."""
        for seed in self._node.watch.coordinators():
            try:
                said = await RemoteLedger(self._node, seed, self._chain.module).evidence()
                self._chain.evidence.keep(said)
            except DipacoError as error:
                log.warning("%s: what was said of refused work is not to be had: %s", self._chain.module, error)

    async def _fetch_patiently(self, ref: BlobRef, holders: Sequence[PeerId], end_s: float) -> bytes:
        """What has a receipt must not be lost with a message. Each try begins with another holder, and goes on from
        what came before."""
        for number in range(TRIES):
            first, left_s = number % len(holders), end_s - self._node.clock.now_s()
            asked = [*holders[first:], *holders[:first]]
            limit_s = min(PATIENCE_S + ref.size / THIN_BYTES_S, left_s)
            with contextlib.suppress(SwarmError):
                return await in_time(
                    fetch(self._node, ref, holders=asked), self._node.clock, limit_s, what="its payload"
                )
            await self._node.clock.sleep(RETRY_S)
        raise BlobMissing("nobody gave its payload in time")

    @property
    def _ttl_s(self) -> float:
        return self._node.run.config.liveness.heartbeat_ttl_s
