"""A swarm of peers that answer what a test tells them to, and a collector among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leaderboard_harness import COORDINATOR, LEADER, MODULE, Bench, page
from tiny_run import signer
from virtual_time import VirtualClock

from dipaco_p2p.node.neighbourhood import Neighbourhood
from dipaco_p2p.node.presence import Presence
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.protocol.documents import ModuleVersion, Sealed
from dipaco_p2p.protocol.liveness import Head, Heartbeat
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from leaderboard.collector import Collector
from leaderboard.database import Database
from leaderboard.model import Mark, Snapshot

Answer = Callable[[dict[str, Any]], Reply]


class Peer:
    """A peer that answers what a test tells it to."""

    def __init__(self, swarm: Swarm, signer_: Signer, heartbeat: Heartbeat) -> None:
        self.bench = swarm.bench
        self.swarm = swarm.network.join(signer_)
        self.scoped = ScopedSwarm(self.swarm, self.bench.run.id)
        near = Neighbourhood(self.bench.run, self.scoped, swarm.clock)
        self.presence = Presence(self.bench.run, self.scoped, swarm.clock, heartbeat, near)
        self.answers: dict[str, Answer] = {}

    def answer(self, method: str, answer: Answer) -> None:
        """From now on, in place of what was answered before."""

        async def handler(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            return self.answers[method](header)

        if method not in self.answers:
            self.scoped.serve(method, handler)
        self.answers[method] = answer

    def tell_chain(self, method: str, *versions: Any) -> None:
        """Documents of one module, or what is none: those after the one that is asked for."""

        def answer(header: dict[str, Any]) -> Reply:
            return Reply({}, page(*versions[header["after"] :] if header["module"] == str(MODULE) else ()))

        self.answer(method, answer)

    async def lead_with(self, *versions: Sealed[ModuleVersion]) -> None:
        """Lead with the last of these versions, and tell all of them."""
        self.tell_chain("module.next", *versions)
        await self.lead(versions[-1].document.version, versions[-1].document.digest)

    async def lead(self, version: int, digest: str) -> None:
        grant = self.bench.grant
        head = Head(
            version=version,
            digest=digest,
            weight=version,
            term=grant.document.term,
            mirrors=grant.document.mirrors,
            granted_by=grant.document.author,
            grant=grant.signature,
        )
        await self.presence.lead(MODULE, head)


class Swarm:
    """A coordinator that knows the run, and a collector."""

    def __init__(self, folder: Path, **run: Any) -> None:
        self.folder = folder
        self.bench = Bench(folder / "bench", **run)
        self.clock = VirtualClock()
        self.network = MemoryNetwork(0, self.clock)
        self.shown: list[Snapshot] = []
        self.seed = Peer(self, COORDINATOR, Heartbeat(role="seed", owns=True))
        Stages(self.seed.swarm).add(self.bench.run)
        self.reader = self.network.join(signer(150))
        self.database = Database.open(folder / "db.sqlite")
        self.collector = self.open()

    def open(self, **changes: Any) -> Collector:
        values: dict[str, Any] = {"expected": None, "on_snapshot": self.shown.append} | changes
        return Collector(self.reader, COORDINATOR.peer, self.clock, self.database, **values)

    async def begin(self) -> Peer:
        """A leader that tells the truth; the seed node is there as well."""
        await self.seed.presence.beat()
        leader = Peer(self, LEADER, Heartbeat(owns=True, addresses=("/ip4/203.0.113.7/tcp/1",)))
        await leader.presence.beat()
        return leader

    async def look(self) -> Snapshot:
        await self.collector.poll()
        snapshot = await self.collector.snapshot()
        assert snapshot is not None
        return snapshot


def shown(snapshot: Snapshot) -> list[tuple[int, Mark]]:
    return [(row.version, row.mark) for row in snapshot.versions if row.module == MODULE and row.version]
