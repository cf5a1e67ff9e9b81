"""Where a leader puts what must survive it. The coordinator's seed node answers; leaders and successors ask.

An archive grants each term of a module to one peer only, and takes contributions and versions only from the peer of
the newest term: that is what keeps a leader that froze and woke from making a second chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import IntegrityError, Unreachable
from ..protocol.documents import Contribution, ModuleVersion, Sealed
from ..protocol.signing import PeerId
from ..swarm.api import Reply, Swarm
from ..swarm.blobs import send_blob
from ..topology import ModuleId
from .items import read_items
from .node import CALL_TIMEOUT_S
from .watch import Watch


class Archive(Protocol):
    """The durable copy of every chain."""

    async def adopt(self, module: ModuleId, *, term: int) -> str:
        """Become the leader of `term`, and get the grant; raises Refused if the module is somebody else's."""

    async def term(self, module: ModuleId) -> int:
        """The newest term that was granted."""

    async def chain(self, module: ModuleId, *, after: int) -> list[Sealed[ModuleVersion]]:
        """All versions that follow `after`."""

    async def open_contributions(self, module: ModuleId) -> list[Sealed[Contribution]]:
        """What has a receipt and is in no version yet."""

    async def keep_contribution(self, sealed: Sealed[Contribution], payload: bytes, *, term: int) -> PeerId:
        """Keep it on disk before its receipt; who has it now."""

    async def keep_version(self, sealed: Sealed[ModuleVersion], blobs: Sequence[bytes]) -> None:
        """Keep a version, with its update and state."""


class RemoteArchive:
    """The archive of a seed node, asked over the swarm. Raises Unreachable while no seed answers."""

    def __init__(self, swarm: Swarm, watch: Watch) -> None:
        self._swarm = swarm
        self._watch = watch

    async def adopt(self, module: ModuleId, *, term: int) -> str:
        grant = (await self._ask("archive.adopt", {"module": str(module), "term": term})).header.get("grant")
        if not isinstance(grant, str):
            raise IntegrityError("an archive that adopts without a grant")
        return grant

    async def term(self, module: ModuleId) -> int:
        term = (await self._ask("archive.term", {"module": str(module)})).header.get("term")
        if not isinstance(term, int):
            raise IntegrityError("an archive that answers no term")
        return term

    async def chain(self, module: ModuleId, *, after: int) -> list[Sealed[ModuleVersion]]:
        found: list[Sealed[ModuleVersion]] = []
        while True:
            header = {"module": str(module), "after": after + len(found)}
            page = read_items(ModuleVersion, await self._ask("archive.chain", header))
            found += page
            if not page:
                return found

    async def open_contributions(self, module: ModuleId) -> list[Sealed[Contribution]]:
        found: list[Sealed[Contribution]] = []
        while True:
            header = {"module": str(module), "after": found[-1].id if found else ""}
            page = read_items(Contribution, await self._ask("archive.open", header))
            found += page
            if not page:
                return found

    async def keep_contribution(self, sealed: Sealed[Contribution], payload: bytes, *, term: int) -> PeerId:
        seed = self._seed()
        await self._send(seed, payload)
        await self._ask("archive.contribution", {"contribution": sealed.to_dict(), "term": term}, seed=seed)
        return seed

    async def keep_version(self, sealed: Sealed[ModuleVersion], blobs: Sequence[bytes]) -> None:
        seed = self._seed()
        for blob in blobs:
            await self._send(seed, blob)
        await self._ask("archive.version", {"version": sealed.to_dict()}, seed=seed)

    def _seed(self) -> PeerId:
        seeds = self._watch.seeds()
        if not seeds:
            raise Unreachable("no seed node is alive")
        return seeds[0]

    async def _send(self, seed: PeerId, data: bytes) -> None:
        await send_blob(self._swarm, seed, data, timeout_s=CALL_TIMEOUT_S, addresses=self._watch.addresses(seed))

    async def _ask(self, method: str, header: dict[str, Any], *, seed: PeerId | None = None) -> Reply:
        peer = seed or self._seed()
        return await self._swarm.call(
            peer, method, header, timeout_s=CALL_TIMEOUT_S, addresses=self._watch.addresses(peer)
        )
