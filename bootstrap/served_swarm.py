"""A live swarm as the source of a served run: a client that only reads. It listens nowhere, claims and says nothing.

The chain of a module comes from its leader, else from a seed node's archive; blobs come from whoever should hold them.
Trust is that of a volunteer who joins: it starts at the address, and reaches the bytes through signatures and digests.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dipaco_p2p.clock import Clock, SystemClock
from dipaco_p2p.errors import IntegrityError, Refused, SwarmError, Unreachable
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, Sealed
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import check_chain
from dipaco_p2p.runtime.history import History
from dipaco_p2p.runtime.items import read_items
from dipaco_p2p.runtime.join import fetch_stages
from dipaco_p2p.runtime.node import CALL_TIMEOUT_S, Node
from dipaco_p2p.runtime.presence import Presence
from dipaco_p2p.runtime.shardings import learn_shardings
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.runtime.transfer import fetch
from dipaco_p2p.runtime.watch import Watch
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId

from .best import METHOD, Best, read_serving
from .serving import NEWEST_HINT, ServedRun

CONNECT_TIMEOUT_S = 15.0
TTL_MAX_S = 3600.0

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_swarm(address: str, *, expected: str | None) -> AsyncIterator[ServedRun]:
    """The run at `address`, under an identity that is forgotten afterwards. Raises as joining does."""
    from dipaco_p2p.swarm.libp2p import open_libp2p

    with tempfile.TemporaryDirectory(prefix="dipaco-") as folder:
        clock = SystemClock()
        swarm = await open_libp2p(
            Path(folder) / "identity.key",
            initial_peers=[address],
            client_mode=True,
            ttl_max_s=TTL_MAX_S,
            clock=clock,
        )
        try:
            host = await swarm.connect(address, timeout_s=CONNECT_TIMEOUT_S)
            yield await read_swarm(swarm, host, clock, folder=Path(folder), expected=expected)
        finally:
            await swarm.close()


async def read_swarm(swarm: Swarm, host: PeerId, clock: Clock, *, folder: Path, expected: str | None) -> ServedRun:
    """The newest stage of the run that `host` names; what is fetched is kept in `folder`."""
    run = (await fetch_stages(swarm, host, expected=expected))[-1]
    scoped = ScopedSwarm(swarm, run.id)
    node = Node(
        run=run,
        swarm=scoped,
        store=Store(folder),
        clock=clock,
        watch=Watch(run, scoped, clock),
        presence=Presence(run, scoped, clock, Heartbeat(owns=False)),  # never put out
        history=History(None, clock),
    )
    await node.watch.read_peers()
    await learn_shardings(node)
    return ServedRun(run, LiveSwarm(node, host=host))


class LiveSwarm:
    """The peers of a run as a source; `host` is the one whose address was given."""

    def __init__(self, node: Node, *, host: PeerId) -> None:
        self._node = node
        self._host = host
        self._chains: dict[ModuleId, list[ModuleVersion]] = {}
        self._authors: dict[str, PeerId] = {}
        """Digest of a snapshot to who published it."""

    async def blob(self, ref: BlobRef) -> bytes:
        return await fetch(self._node, ref, holders=self._holders(ref), keep=True)

    async def chain(self, module: ModuleId) -> list[ModuleVersion]:
        """Asked for once: whatever is published later, a text is written with the versions that it began with."""
        if module not in self._chains:
            self._chains[module] = await self._fetch_chain(module)
            self._authors |= {version.digest: version.author for version in self._chains[module]}
        return self._chains[module]

    async def best(self) -> dict[PathId, Best]:
        """Only the coordinator is asked: it judges the rounds, and nothing but the connection signs its answer."""
        node, author = self._node, self._node.run.manifest.author
        addresses = node.watch.addresses(author)
        try:
            reply = await node.swarm.call(author, METHOD, {}, timeout_s=CALL_TIMEOUT_S, addresses=addresses)
        except SwarmError as error:
            log.info("%s of %s gave nothing: %s", METHOD, author, error)
            message = "the coordinator, which judges the rounds, does not answer"
            raise Unreachable(message, hint=NEWEST_HINT) from None
        return read_serving(reply.header, node.run)

    def evaluations(self) -> list[dict[str, Any]]:
        return []

    async def _fetch_chain(self, module: ModuleId) -> list[ModuleVersion]:
        await self._node.watch.read_heads(module)
        problem: SwarmError | Refused | IntegrityError = Unreachable(
            f"nobody alive knows {module}", hint="check that the coordinator or a volunteer of this run is up"
        )
        for peer, method in self._tellers(module):
            try:
                found = await self._pages(peer, method, module)
                check_chain(found, self._node.run.manifest, module)
                return [sealed.document for sealed in found]
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("%s of %s gave nothing: %s", method, module, error)
                problem = error
        raise problem

    async def _pages(self, peer: PeerId, method: str, module: ModuleId) -> list[Sealed[ModuleVersion]]:
        found: list[Sealed[ModuleVersion]] = []
        while True:
            header = {"module": str(module), "after": len(found), "wait_s": 0.0}
            addresses = self._node.watch.addresses(peer)
            reply = await self._node.swarm.call(peer, method, header, timeout_s=CALL_TIMEOUT_S, addresses=addresses)
            page = read_items(ModuleVersion, reply)
            if len(found) + len(page) > self._node.run.config.rounds.rounds:
                raise IntegrityError(f"more versions of {module} than the run has rounds")
            found += page
            if not page:
                return found

    def _tellers(self, module: ModuleId) -> Iterator[tuple[PeerId, str]]:
        leader = self._node.watch.leader(module)
        if leader is not None:
            yield leader, "module.next"
        for seed in self._node.watch.seeds():
            yield seed, "mirror.chain"
        grant = self._node.watch.mandates.grant(module)
        for peer in grant.mirrors if grant is not None else ():
            yield peer, "mirror.chain"

    def _holders(self, ref: BlobRef) -> list[PeerId]:
        """Who may have it: seed nodes keep everything, a snapshot's author and its module's leader the newest."""
        author = self._authors.get(ref.digest)
        leaders = [self._node.watch.leader(module) for module in self._chains]
        likely = [*self._node.watch.seeds(), author, *leaders, self._host]
        return list(dict.fromkeys(peer for peer in likely if peer is not None))
