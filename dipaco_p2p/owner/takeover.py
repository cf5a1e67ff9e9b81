"""What a new leader does before it leads: it gathers what the last group, and anybody else, has of the module.

Order that safety needs: it asks after its grant, which everybody who is asked sees. From then on they confirm nothing
to the last leader, so what has a receipt is among what they tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from ..errors import DipacoError, SwarmError
from ..node.ledger import RemoteLedger
from ..node.node import fetch
from ..protocol.documents import BlobRef
from ..protocol.signing import PeerId, short
from ..protocol.versions import Branch
from .chain import ModuleChain

log = logging.getLogger(__name__)

TRIES = 5
RETRY_S = 0.5
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
        for peer in sorted(found):
            await self._take_open(peer)
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

    async def _take_best(self, found: dict[PeerId, Branch]) -> None:
        """Follow the best branch; who lied about it, or went away, leaves us with the next one."""
        for peer in sorted(found, key=lambda peer: (found[peer].rank, peer)):
            if not found[peer].is_better(self._ledger.branch):
                continue
            try:
                await self._chain.follow(peer)
            except DipacoError as error:
                log.warning("%s: the branch of ...%s cannot be had: %s", self._chain.module, short(peer), error)

    async def _take_open(self, peer: PeerId) -> None:
        try:
            for sealed in await RemoteLedger(self._node, peer, self._chain.module).kept():
                is_here = sealed.id in self._ledger.kept or self._ledger.counted.get(sealed.id, 0)
                if sealed.document.module == self._chain.module and not is_here:
                    self._node.store.put(await self._fetch_patiently(sealed.document.payload, peer))
                    self._chain.add(sealed)
        except DipacoError as error:
            log.warning("%s: not all that ...%s keeps could be taken over: %s", self._chain.module, short(peer), error)

    async def _take_evidence(self) -> None:
        """Of the coordinator's archive alone: any other could have friends who say what nobody asked them for. What
        the last leader brought to us is on our disk."""
        for seed in self._node.watch.coordinators():
            try:
                said = await RemoteLedger(self._node, seed, self._chain.module).evidence()
                self._chain.evidence.keep(said)
            except DipacoError as error:
                log.warning("%s: what was said of refused work is not to be had: %s", self._chain.module, error)

    async def _fetch_patiently(self, ref: BlobRef, peer: PeerId) -> bytes:
        """What has a receipt must not be lost with a message."""
        for _ in range(TRIES - 1):
            with contextlib.suppress(SwarmError):
                return await fetch(self._node, ref, holders=[peer])
            await self._node.clock.sleep(RETRY_S)
        return await fetch(self._node, ref, holders=[peer])
