"""What a leader answers: contributions, the versions that follow, the open round, and "take this module over"."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import ConfigError, Refused
from ..protocol.admission import Reason
from ..protocol.documents import Contribution, Grant, unseal
from ..protocol.signing import PeerId
from ..swarm.api import Reply
from ..topology import ModuleId
from .items import items_reply
from .node import Node
from .owner import ModuleOwner
from .shardings import learn_attached

WAIT_MAX_S = 10.0
"""Longest wait for a new version in one call; well below a call's own time limit."""


class ModuleCalls:
    """The calls `module.*`, for the modules of which `owner_of` gives an owner; it raises Refused for others."""

    def __init__(
        self,
        node: Node,
        owner_of: Callable[[ModuleId], ModuleOwner],
        take: Callable[[ModuleId], Awaitable[None]],
    ) -> None:
        self._node = node
        self._owner_of = owner_of
        self._take = take

    def serve(self) -> None:
        """Answer from now on."""
        for method, handler in {
            "module.contribute": self._on_contribute,
            "module.forward": self._on_forward,
            "module.next": self._on_next,
            "module.round": self._on_round,
            "module.take": self._on_take,
        }.items():
            self._node.swarm.serve(method, handler)

    async def _on_contribute(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        learn_attached(self._node, header.get("sharding"))
        sealed = unseal(Contribution, header.get("contribution"))
        receipt = await self._owner_of(sealed.document.module).contribute(sender, sealed)
        return Reply({"receipt": receipt.to_dict()})

    async def _on_forward(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """From whoever kept it: it is its author's word that counts, and that is signed."""
        learn_attached(self._node, header.get("sharding"))
        sealed = unseal(Contribution, header.get("contribution"))
        owner = self._owner_of(sealed.document.module)
        receipt = await owner.contribute(sealed.document.author, sealed, is_forwarded=True)
        return Reply({"receipt": receipt.to_dict()})

    async def _on_next(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        after, wait_s = header.get("after"), header.get("wait_s")
        if type(after) is not int or after < 0 or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= WAIT_MAX_S:
            raise Refused(f"`after` is {after!r} and `wait_s` is {wait_s!r}", reason=Reason.MALFORMED)
        owner = self._owner_of(module_in(header))
        return items_reply(await owner.versions_after(after, wait_s=float(wait_s)))

    async def _on_round(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({}, self._owner_of(module_in(header)).open_round().to_bytes())

    async def _on_take(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """The leader leaves and names us; whoever grants terms still has to agree, unless it has done so itself."""
        module, mandate = module_in(header), header.get("mandate")
        if module in self._node.run.topology and self._node.presence.heartbeat.owns:
            if isinstance(mandate, list) and mandate:
                self._node.watch.mandates.learn(module, [unseal(Grant, item) for item in mandate])
            await self._take(module)
        return Reply({})


async def learn_mandate(node: Node, module: ModuleId, sender: PeerId) -> None:
    """Let a caller that leads, or knows who does, show how; raises Refused if it does not."""
    try:
        await node.watch.learn_mandate(module, sender)
    except Refused as refused:  # its word, not ours
        raise Refused(f"no mandate for {module} was shown: {refused}", reason=Reason.NOT_LEADER) from None


def module_of_run(node: Node, header: dict[str, Any]) -> ModuleId:
    """The module of this run that a request is about; raises Refused."""
    module = module_in(header)
    if module not in node.run.topology:
        raise Refused(f"this run has no {module}", reason=Reason.WRONG_MODULE)
    return module


def module_in(header: dict[str, Any]) -> ModuleId:
    """The module that a request is about; raises Refused."""
    try:
        return ModuleId.parse(str(header.get("module")))
    except ConfigError as error:
        raise Refused(str(error), reason=Reason.MALFORMED) from None
