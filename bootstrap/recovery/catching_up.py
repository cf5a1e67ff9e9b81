"""A coordinator that came out of a backup learns what it signed after it, before it signs anything.

It signs one grant for a term, one version, one sharding and one decree of a number: who forgets what it signed could
sign another, and split the run for good. So it asks everybody alive for mandates, shardings, decrees and chains, and
waits two lives of a heartbeat from the first peer that it sees: whoever is in the swarm has said so by then.

What nobody alive knows is forgotten: a term of a leader that is away with its whole group and with all who ever saw it
lead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.remote import RemoteLedger
from dipaco_p2p.node.shardings import learn_shardings
from dipaco_p2p.owner.archive import ArchiveChains
from dipaco_p2p.protocol.branches import Branch
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.topology import ModuleId

from .filling import Filling
from .marker import drop_marker, read_marker, write_marker

log = logging.getLogger(__name__)

QUIET_HEARTBEATS = 2.0
QUIET_S_MIN = 5.0
ASKED_MAX = 64
FILL_AGAIN_S = 10.0


class CatchingUp:
    """Of the stage that is open; over at once in a folder that never came out of a backup."""

    def __init__(self, chains: ArchiveChains, root: Path, *, tell: Callable[[str], None]) -> None:
        node, archive = self._node, self._archive = chains.node, chains.archive
        self._chains = chains
        self._root = root
        self._tell = tell
        self._filling = Filling(node, archive)
        self._marker = read_marker(root)
        self.is_over = asyncio.Event()
        """From then on this coordinator may sign."""
        if self._marker is None or self._marker.is_caught_up:
            self.is_over.set()

    @property
    def is_going_on(self) -> bool:
        return not self.is_over.is_set()

    async def run(self) -> None:
        """Until all is known and everything is here."""
        if self._marker is None:
            return
        if self.is_going_on:
            self._tell("this folder came out of a backup: nothing is signed before the swarm told what followed")
            await self._learn_all()
            self._marker = replace(self._marker, is_caught_up=True)
            write_marker(self._root, self._marker)
            self._node.history.add("caught_up", versions=self._versions())
            self._tell(f"caught up with the swarm: {self._versions()} versions in the archive")
            self.is_over.set()
        await self._fill_all()

    async def _learn_all(self) -> None:
        clock, ttl_s = self._node.clock, self._node.run.config.liveness.heartbeat_ttl_s
        quiet_s, met_s = max(QUIET_HEARTBEATS * ttl_s, QUIET_S_MIN), None
        while met_s is None or clock.now_s() < met_s + quiet_s:
            await self._node.watch.refresh()
            others = self._others()
            if others and met_s is None:
                met_s = clock.now_s()
            await self.learn(others)
            await clock.sleep(ttl_s / 3)
        await self.learn(self._others())

    async def learn_once(self) -> None:
        """As far as it goes now: of a stage that is over."""
        await self.learn(self._others())
        await self._filling.fill()

    async def learn(self, others: list[PeerId]) -> None:
        """What these peers know: who leads, which shardings there are, which versions are final."""
        for peer in others:
            await self._node.watch.try_decrees(peer)
            await learn_shardings(self._node, of=[peer])
        await asyncio.gather(*(self._learn_module(module, others) for module in self._node.run.topology.modules()))
        await self._filling.copy_judgements()

    async def _learn_module(self, module: ModuleId, others: list[PeerId]) -> None:
        found: dict[PeerId, Branch] = {}
        for peer in others:
            try:
                await self._node.watch.learn_mandate(module, peer)
                found[peer] = await RemoteLedger(self._node, peer, module).branch()
            except DipacoError as error:
                log.info("%s: ...%s does not say what it knows: %s", module, short(peer), error)
        for peer in sorted(found, key=lambda peer: (found[peer].rank, peer)):
            try:
                await self._chains[module].catch_up(peer, until=found[peer].final)
            except DipacoError as error:
                log.info("%s: the chain of ...%s is not to be had: %s", module, short(peer), error)

    async def _fill_all(self) -> None:
        told = -1
        while missing := await self._filling.fill():
            if missing != told:
                self._tell(f"{missing} files of versions after the backup are missing; asking for them goes on")
                told = missing
            await self._node.clock.sleep(FILL_AGAIN_S)
        drop_marker(self._root)
        self._node.history.add("filled")
        self._tell("the archive is whole again")

    def _others(self) -> list[PeerId]:
        """Seed nodes first: they have most."""
        watch = self._node.watch
        found = dict.fromkeys([*watch.seeds(), *sorted(watch.heartbeats)])
        return [peer for peer in found if peer != self._node.peer][:ASKED_MAX]

    def _versions(self) -> int:
        return sum(len(ledger.versions) for ledger in self._archive.ledgers.values())
