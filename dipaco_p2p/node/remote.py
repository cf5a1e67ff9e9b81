"""What another peer keeps of a module, asked over the swarm: any owner, the seed's archive, or a trainer that follows.

A leader shows its grant with every call, so that whoever still follows an older one learns of it before it answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ..errors import IntegrityError, SwarmError
from ..protocol.branches import Branch
from ..protocol.documents import Contribution, ModuleVersion, Sealed
from ..protocol.signing import PeerId
from ..swarm.api import Reply
from ..topology import ModuleId
from .items import read_items
from .node import CALL_TIMEOUT_S, CONTROL_TIMEOUT_S, Member
from .shardings import attached
from .transfer import send

TRIES = 2


class RemoteLedger:
    """The ledger of `module` at `peer`. Every method raises SwarmError, Refused or IntegrityError."""

    def __init__(self, node: Member, peer: PeerId, module: ModuleId) -> None:
        self.peer = peer
        self._node = node
        self.module = module

    async def branch(self) -> Branch:
        """The end of its chain; its word."""
        header = (await self._ask("mirror.state")).header
        final, version, weight, digest = (header.get(name) for name in ("final", "version", "weight", "digest"))
        if type(final) is int and type(version) is int and type(weight) is int and isinstance(digest, str):
            return Branch(final=final, version=version, weight=weight, digest=digest)
        raise IntegrityError("a state of a module that is none")

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
        return read_items(ModuleVersion, await self._ask("mirror.chain", after=after))

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
        while page := read_items(Contribution, await self._ask("mirror.open", after=found[-1].id if found else "")):
            found += page
        return found

    async def keep(self, sealed: Sealed[Contribution], payload: bytes) -> None:
        """Have it keep a contribution of the module that we lead."""
        await send(self._node, self.peer, payload, digest=sealed.document.payload.digest)
        sharding: dict[str, Any] = attached(self._node, sealed.document.sharding)
        await self._ask("mirror.contribution", contribution=sealed.to_dict(), **sharding)

    async def cosign(self, sealed: Sealed[ModuleVersion], *, final: int, final_signature: str) -> str:
        """Have it make our new version again, and keep it; its cosignature.

        `final` is the newest final version, and `final_signature` what the coordinator cosigned it with.
        """
        told: dict[str, Any] = {"final": final, "final_signature": final_signature}
        told |= {"version": sealed.to_dict()}
        signature = (await self._ask("mirror.version", timeout_s=CALL_TIMEOUT_S, **told)).header.get("cosignature")
        if not isinstance(signature, str):
            raise IntegrityError("a mirror that answers without a cosignature")
        return signature

    async def tell_final(self, final: int, signature: str) -> int:
        """Tell it the newest final version; the newest of which it then knows."""
        known = (await self._ask("mirror.final", final=final, final_signature=signature)).header.get("final")
        if type(known) is not int:
            raise IntegrityError("a mirror that does not say what is final")
        return known

    async def follow(self) -> None:
        """Have it take over our chain, as a new mirror."""
        await self._ask("mirror.follow", timeout_s=CALL_TIMEOUT_S)

    async def forward(self, sealed: Sealed[Contribution], payload: bytes) -> None:
        """Submit a contribution once more, to the leader: its branch has lost, or its leader is gone."""
        await send(self._node, self.peer, payload, digest=sealed.document.payload.digest)
        sharding: dict[str, Any] = attached(self._node, sealed.document.sharding)
        await self._ask("module.forward", timeout_s=CALL_TIMEOUT_S, contribution=sealed.to_dict(), **sharding)

    async def _ask(self, method: str, *, timeout_s: float = CONTROL_TIMEOUT_S, **values: Any) -> Reply:
        """Ask, and once more if the answer is lost: much depends on it, and every method is idempotent."""
        mandate = self._node.mandates.newest(self.module)
        shown = {"grant": mandate[-1].to_dict()} if mandate else {}
        header = {"module": str(self.module)} | shown | values
        for _ in range(TRIES - 1):
            with contextlib.suppress(SwarmError):
                return await self._call(method, header, timeout_s)
        return await self._call(method, header, timeout_s)

    async def _call(self, method: str, header: dict[str, Any], timeout_s: float) -> Reply:
        addresses = self._node.watch.addresses(self.peer)
        return await self._node.swarm.call(self.peer, method, header, timeout_s=timeout_s, addresses=addresses)
