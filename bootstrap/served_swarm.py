"""A live swarm as the source of a served run: a client that only reads. It listens nowhere, claims and says nothing.

The chain of a module comes from its leader, else from a seed node's archive; blobs come from whoever should hold them.
Trust is that of a volunteer who joins: it starts at the address, and reaches the bytes through signatures and digests.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import SwarmError, Unreachable
from dipaco_p2p.node.calls import GetServing
from dipaco_p2p.node.node import Reader, open_reader
from dipaco_p2p.node.reading import ask, fetch_chain, open_connection
from dipaco_p2p.node.shardings import learn_shardings
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.transfer import fetch
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId

from .best import Best, read_serving
from .serving import NEWEST_HINT, ServedRun

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_swarm(text: str, *, expected: str | None) -> AsyncIterator[ServedRun]:
    """The run that `text` leads to, under an identity that is forgotten afterwards. Raises as joining does."""
    async with open_connection(text, expected=expected) as connection:
        yield await read_swarm(
            connection.swarm, connection.host, connection.clock, folder=connection.folder, expected=connection.run
        )


async def read_swarm(swarm: Swarm, host: PeerId, clock: Clock, *, folder: Path, expected: str | None) -> ServedRun:
    """The newest stage of the run that `host` names; what is fetched is kept in `folder`."""
    run = (await fetch_stages(swarm, host, expected=expected))[-1]
    scoped = ScopedSwarm(swarm, run.id)
    node = open_reader(run, scoped, clock, Store(folder))
    await node.watch.read_peers()
    await learn_shardings(node)
    return ServedRun(run, LiveSwarm(node, host=host))


class LiveSwarm:
    """The peers of a run as a source; `host` is the one whose address was given."""

    def __init__(self, node: Reader, *, host: PeerId) -> None:
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
            self._chains[module] = await fetch_chain(self._node, module)
            self._authors |= {version.digest: version.author for version in self._chains[module]}
        return self._chains[module]

    async def best(self) -> dict[PathId, Best]:
        """Only the coordinator is asked: it judges the rounds, and nothing but the connection signs its answer."""
        node, author = self._node, self._node.run.manifest.author
        try:
            reply = await ask(node, author, GetServing())
        except SwarmError as error:
            log.info("%s of %s gave nothing: %s", GetServing.METHOD, author, error)
            message = "the coordinator, which judges the rounds, does not answer"
            raise Unreachable(message, hint=NEWEST_HINT) from None
        return read_serving({"rounds": reply.rounds, "losses": reply.losses}, node.run)

    def evaluations(self) -> list[dict[str, Any]]:
        return []

    def _holders(self, ref: BlobRef) -> list[PeerId]:
        """Who may have it: seed nodes keep everything, a snapshot's author and its module's leader the newest."""
        author = self._authors.get(ref.digest)
        leaders = [self._node.watch.leader(module) for module in self._chains]
        likely = [*self._node.watch.seeds(), author, *leaders, self._host]
        return list(dict.fromkeys(peer for peer in likely if peer is not None))
