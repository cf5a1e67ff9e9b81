"""Which modules this peer leads: takes those that fall to it, and hands them over when it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, DipacoError, Refused, SwarmError
from ..protocol.admission import Reason
from ..protocol.documents import Contribution, unseal
from ..protocol.liveness import heartbeat_interval_s
from ..protocol.signing import PeerId, short
from ..swarm.api import Reply
from ..topology import ModuleId
from .archive import Archive
from .items import items_reply
from .node import CALL_TIMEOUT_S, Node
from .owner import ModuleOwner
from .shardings import learn_attached

log = logging.getLogger(__name__)

WAIT_MAX_S = 10.0
"""Longest wait for a new version in one call; well below a call's own time limit."""


class Ownership:
    """All the modules that this peer leads."""

    def __init__(self, node: Node, archive: Archive, *, may_take: Callable[[], bool] = lambda: True) -> None:
        self._node = node
        self._archive = archive
        self._may_take = may_take
        self._owners: dict[ModuleId, ModuleOwner] = {}
        self._tasks: dict[ModuleId, asyncio.Task[None]] = {}
        self._taking = asyncio.Lock()
        self._is_leaving = False
        node.swarm.serve("module.contribute", self._on_contribute)
        node.swarm.serve("module.next", self._on_next)
        node.swarm.serve("module.round", self._on_round)
        node.swarm.serve("module.take", self._on_take)

    @property
    def modules(self) -> list[ModuleId]:
        return sorted(self._owners)

    @property
    def is_complete(self) -> bool:
        """Whether nothing that we lead needs us any more."""
        return all(owner.is_complete for owner in self._owners.values())

    async def run(self) -> None:
        """Take modules that fall to us, drop those that others lead with a newer term; ends when cancelled."""
        while True:
            for module in self._node.run.topology.modules():
                await self._check(module)
            await self._node.clock.sleep(heartbeat_interval_s(self._node.run.config.liveness) / 2)

    async def leave(self) -> None:
        """Hand every module to its next leader; contributions with a receipt are in the archive already."""
        self._is_leaving = True
        for module in self.modules:
            await self.drop(module)
            await self._node.presence.resign(module)
            await self._pass_on(module)

    async def take(self, module: ModuleId) -> None:
        """Lead `module` from now on, in a new term; raises DipacoError if the archive does not let us."""
        async with self._taking:
            if module in self._owners or self._is_leaving:
                return
            term = await self._archive.term(module) + 1
            grant = await self._archive.adopt(module, term=term)
            owner = ModuleOwner(self._node, self._archive, module, term=term, grant=grant)
            await owner.start()
            self._owners[module] = owner
            self._tasks[module] = asyncio.create_task(owner.run(), name=f"owner of {module}")
            self._node.history.add("leads", module=str(module), term=term, version=owner.head.version)

    async def drop(self, module: ModuleId) -> None:
        """Lead `module` no more."""
        owner = self._owners.pop(module, None)
        if owner is not None:
            await owner.stop()
            task = self._tasks.pop(module)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # a failure was logged when it was noticed

    async def _check(self, module: ModuleId) -> None:
        watch, leading = self._node.watch, self._owners.get(module)
        if leading is not None:
            if self._is_over(leading):
                await self.drop(module)
                await self._node.presence.resign(module)
            return
        successor = watch.successor(module, incumbent=watch.leader(module))
        if not self._is_leaving and self._may_take() and successor == self._node.peer:
            try:
                await self.take(module)
            except DipacoError as error:
                log.info("cannot lead %s yet: %s", module, error)

    def _is_over(self, owner: ModuleOwner) -> bool:
        """Whether leading failed, or somebody else leads in a newer term: so says a head, or the archive."""
        task = self._tasks[owner.module]
        if task.done() and not task.cancelled() and task.exception() is not None:
            log.error("leading %s failed", owner.module, exc_info=task.exception())
            return True
        heads = self._node.watch.heads[owner.module]
        newer = any(head.term > owner.term for peer, head in heads.items() if peer != self._node.peer)
        return newer or not owner.is_leading

    async def _pass_on(self, module: ModuleId) -> None:
        """Tell the next leader at once, rather than let it find out."""
        self._node.watch.heads[module].pop(self._node.peer, None)
        self._node.watch.heartbeats.pop(self._node.peer, None)
        successor = self._node.watch.successor(module, incumbent=self._node.watch.leader(module))
        if successor is None or successor == self._node.peer:
            return
        try:
            await self._node.swarm.call(
                successor,
                "module.take",
                {"module": str(module)},
                timeout_s=CALL_TIMEOUT_S,
                addresses=self._node.watch.addresses(successor),
            )
            self._node.history.add("handed_over", module=str(module), to=successor)
        except (SwarmError, Refused) as error:
            log.info("%s did not take %s over: %s", short(successor), module, error)

    # -- what others ask

    async def _on_contribute(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        learn_attached(self._node, header.get("sharding"))
        sealed = unseal(Contribution, header.get("contribution"))
        receipt = await self._owner(sealed.document.module).contribute(sender, sealed)
        return Reply({"receipt": receipt.to_dict()})

    async def _on_next(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        after, wait_s = header.get("after"), header.get("wait_s")
        if type(after) is not int or after < 0 or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= WAIT_MAX_S:
            raise Refused(f"`after` is {after!r} and `wait_s` is {wait_s!r}", reason=Reason.MALFORMED)
        owner = self._owner(_module(header))
        return items_reply(await owner.versions_after(after, wait_s=float(wait_s)))

    async def _on_round(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({}, self._owner(_module(header)).open_round().to_bytes())

    async def _on_take(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """The leader leaves and names us; the archive still has to agree."""
        module = _module(header)
        if module in self._node.run.topology and self._node.presence.heartbeat.owns:
            await self.take(module)
        return Reply({})

    def _owner(self, module: ModuleId) -> ModuleOwner:
        if module not in self._owners:
            raise Refused(f"{module} is not led here", reason=Reason.NOT_LEADER)
        return self._owners[module]


def _module(header: dict[str, Any]) -> ModuleId:
    try:
        return ModuleId.parse(str(header.get("module")))
    except ConfigError as error:
        raise Refused(str(error), reason=Reason.MALFORMED) from None
