"""What a keeper of chains answers: leaders that hand something in, and whoever wants to take a module over."""

from __future__ import annotations

from typing import Any

from ..errors import IntegrityError, Refused, SwarmError
from ..node.items import items_reply
from ..node.shardings import learn_attached
from ..protocol.admission import Reason
from ..protocol.documents import Contribution, Grant, ModuleVersion, unseal
from ..protocol.signing import PeerId
from ..swarm.api import Reply
from ..topology import ModuleId
from .chain import Chains
from .module_calls import learn_mandate, module_of_run


class MirrorCalls:
    """The calls `mirror.*` and `module.mandate`."""

    def __init__(self, chains: Chains) -> None:
        self._node = chains.node
        self._chains = chains

    def serve(self) -> None:
        """Answer from now on."""
        for method, handler in {
            "module.mandate": self._on_mandate,
            "mirror.state": self._on_state,
            "mirror.chain": self._on_chain,
            "mirror.open": self._on_open,
            "mirror.contribution": self._on_contribution,
            "mirror.version": self._on_version,
            "mirror.final": self._on_final,
            "mirror.follow": self._on_follow,
        }.items():
            self._node.swarm.serve(method, handler)

    def serve_reading(self) -> None:
        """Answer what changes nothing, for a stage that is over."""
        for method, handler in {"module.mandate": self._on_mandate, "mirror.chain": self._on_chain}.items():
            self._node.swarm.serve(method, handler)

    async def _on_mandate(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return items_reply(self._node.mandates.newest(self._module(header)))

    async def _on_state(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        module = self._module(header)
        await self._see(module, sender, header)
        branch = self._chains[module].ledger.branch
        return Reply(
            {"final": branch.final, "version": branch.version, "weight": branch.weight, "digest": branch.digest}
        )

    async def _on_chain(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return items_reply(self._chains[self._module(header)].ledger.versions[whole(header, "after") :])

    async def _on_open(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        module, after = self._module(header), str(header.get("after", ""))
        await self._see(module, sender, header)
        kept = self._chains[module].ledger.kept
        return items_reply(kept[name] for name in sorted(kept) if name > after)

    async def _on_contribution(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        module = self._module(header)
        await self._see(module, sender, header)
        learn_attached(self._node, header.get("sharding"))
        sealed = unseal(Contribution, header.get("contribution"))
        require_same(sealed.document.module, module)
        self._chains[module].keep_contribution(sender, sealed)
        return Reply({})

    async def _on_version(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        module = self._module(header)
        await self._see(module, sender, header)
        sealed = unseal(ModuleVersion, header.get("version"))
        require_same(sealed.document.module, module)
        signature = await self._chains[module].keep_version(sender, sealed)
        self._chains[module].note_final(whole(header, "final"), str(header.get("final_signature")))
        return Reply({"cosignature": signature})

    async def _on_final(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        module = self._module(header)
        self._chains[module].note_final(whole(header, "final"), str(header.get("final_signature")))
        return Reply({"final": self._chains[module].ledger.final})

    async def _on_follow(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        module = self._module(header)
        await self._see(module, sender, header)
        try:
            await self._chains[module].welcome(sender)
        except (SwarmError, IntegrityError) as error:  # the caller may be gone by now
            raise Refused(f"your chain of {module} is not to be had: {error}", reason="busy") from None
        return Reply({})

    async def _see(self, module: ModuleId, sender: PeerId, header: dict[str, Any]) -> None:
        """Look at the grant that a leader shows: from then on we answer it, and no earlier one."""
        if header.get("grant") is not None:
            grant = unseal(Grant, header["grant"])
            is_known = grant.document.module == module and self._node.mandates.believes(module, grant)
            if not is_known and grant.document.leader == sender:
                await learn_mandate(self._node, module, sender)

    def _module(self, header: dict[str, Any]) -> ModuleId:
        return module_of_run(self._node, header)


def require_same(found: ModuleId, module: ModuleId) -> None:
    """Raise Refused unless a document is of the module that the request names."""
    if found != module:
        raise Refused(f"a document of {found} in a request about {module}", reason=Reason.WRONG_MODULE)


def whole(header: dict[str, Any], name: str) -> int:
    """A whole number of a request; raises Refused."""
    value = header.get(name)
    if type(value) is not int or value < 0:
        raise Refused(f"`{name}` is {value!r}", reason=Reason.MALFORMED)
    return value
