"""What another peer keeps of a module, asked over the swarm: any owner, the seed's archive, or a trainer that follows.

A leader shows its grant with every call, so that whoever still follows an older one learns of it before it answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..errors import SwarmError
from ..protocol.documents import Contribution, ModuleVersion, Sealed
from ..protocol.signing import PeerId
from ..protocol.versions import Branch
from ..swarm.calls import Request
from ..topology import ModuleId
from .calls import (
    ChainRequest,
    Follow,
    Forward,
    GetBranch,
    GetChain,
    GetOpen,
    KeepContribution,
    KeepVersion,
    TellFinal,
)
from .items import read_items
from .node import CALL_TIMEOUT_S, CONTROL_TIMEOUT_S, Member
from .transfer import send

TRIES = 2
R = TypeVar("R")


class RemoteLedger:
    """The ledger of `module` at `peer`. Every method raises SwarmError, Refused or IntegrityError."""

    def __init__(self, node: Member, peer: PeerId, module: ModuleId) -> None:
        self.peer = peer
        self._node = node
        self.module = module

    async def branch(self) -> Branch:
        """The end of its chain; its word."""
        return await self._ask(GetBranch(module=self.module))

    async def chain(self, *, after: int, until: int | None = None) -> list[Sealed[ModuleVersion]]:
        """All versions that follow `after`, up to `until`."""
        found: list[Sealed[ModuleVersion]] = []
        while until is None or after + len(found) < until:
            page = await self.page(after=after + len(found))
            if not page:
                break
            found += page
        return found if until is None else found[: max(until - after, 0)]

    async def page(self, *, after: int) -> list[Sealed[ModuleVersion]]:
        """The first few versions that follow `after`."""
        return read_items(ModuleVersion, await self._ask(GetChain(module=self.module, after=after)))

    async def meet(
        self, ours: Sequence[Sealed[ModuleVersion]], *, until: int | None
    ) -> tuple[int, list[Sealed[ModuleVersion]]]:
        """The newest version that is the same here and there, and what follows it there, up to `until`."""
        theirs = (await self.branch()).version
        end = theirs if until is None else min(theirs, until)
        common, step = min(len(ours), end), 1
        while common:
            page = await self.page(after=common - 1)
            if page and page[0].document.digest == ours[common - 1].document.digest:
                break
            common, step = max(common - step, 0), 2 * step
        chain = await self.chain(after=common, until=end)
        for sealed in list(chain):
            if len(ours) > common and ours[common].document.digest == sealed.document.digest:
                common += 1
                chain.pop(0)
        return common, chain

    async def kept(self) -> list[Sealed[Contribution]]:
        """The contributions that are open or not final yet."""
        found: list[Sealed[Contribution]] = []
        while True:
            after = found[-1].id if found else ""
            page = read_items(Contribution, await self._ask(GetOpen(module=self.module, after=after)))
            if not page:
                return found
            found += page

    async def keep(self, sealed: Sealed[Contribution], payload: bytes) -> None:
        """Have it keep a contribution of the module that we lead."""
        await send(self._node, self.peer, payload, digest=sealed.document.payload.digest)
        sharding = self._node.run.sharding(sealed.document.sharding)
        await self._ask(KeepContribution(module=self.module, contribution=sealed, sharding=sharding))

    async def cosign(self, sealed: Sealed[ModuleVersion], *, final: int, final_signature: str) -> str:
        """Have it make our new version again, and keep it; its cosignature.

        `final` is the newest final version, and `final_signature` what the coordinator cosigned it with.
        """
        request = KeepVersion(module=self.module, version=sealed, final=final, final_signature=final_signature)
        return (await self._ask(request, timeout_s=CALL_TIMEOUT_S)).cosignature

    async def tell_final(self, final: int, signature: str) -> int:
        """Tell it the newest final version; the newest of which it then knows."""
        return (await self._ask(TellFinal(module=self.module, final=final, final_signature=signature))).final

    async def follow(self) -> None:
        """Have it take over our chain, as a new mirror."""
        await self._ask(Follow(module=self.module), timeout_s=CALL_TIMEOUT_S)

    async def forward(self, sealed: Sealed[Contribution], payload: bytes) -> None:
        """Submit a contribution once more, to the leader: its branch has lost, or its leader is gone."""
        await send(self._node, self.peer, payload, digest=sealed.document.payload.digest)
        sharding = self._node.run.sharding(sealed.document.sharding)
        request = Forward(module=self.module, contribution=sealed, sharding=sharding)
        await self._ask(request, timeout_s=CALL_TIMEOUT_S)

    async def _ask(self, request: ChainRequest[R], *, timeout_s: float = CONTROL_TIMEOUT_S) -> R:
        """Ask, and once more if the answer is lost: much depends on it, and every call is idempotent."""
        mandate = self._node.mandates.newest(self.module)
        shown = replace(request, grant=mandate[-1]) if mandate else request
        for _ in range(TRIES - 1):
            with contextlib.suppress(SwarmError):
                return await self._call(shown, timeout_s)
        return await self._call(shown, timeout_s)

    async def _call(self, request: Request[R], timeout_s: float) -> R:
        node = self._node
        return await request.call(node.swarm, self.peer, timeout_s=timeout_s, addresses=node.watch.addresses(self.peer))
