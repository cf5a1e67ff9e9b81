"""What a leader answers: contributions, the versions that follow, the open round, and "take this module over"."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from ..canonical import is_digest
from ..errors import ConfigError, Refused
from ..node.items import items_reply
from ..node.node import Member
from ..node.shardings import learn_attached
from ..protocol.admission import Reason, judge_decreed
from ..protocol.documents import Contribution, Grant, Sealed, unseal
from ..protocol.signing import PeerId
from ..protocol.versions import Known
from ..swarm.api import Reply
from ..topology import ModuleId
from .leader import Leader
from .rejections import Rejections

WAIT_MAX_S = 10.0
"""Longest wait for a new version in one call; well below a call's own time limit."""
TOLD_MAX = 200
"""Characters of a refusal that quotes what was sent."""


class ModuleCalls:
    """The calls `module.*`, for the modules of which `owner_of` gives an owner; it raises Refused for others."""

    def __init__(
        self,
        node: Member,
        owner_of: Callable[[ModuleId], Leader],
        take: Callable[[ModuleId], Awaitable[None]],
        rejections: Rejections,
    ) -> None:
        self._node = node
        self._rejections = rejections
        self._owner_of = owner_of
        self._take = take

    def serve(self) -> None:
        """Answer from now on."""
        for method, handler in {
            "module.contribute": self._on_contribute,
            "module.forward": self._on_forward,
            "module.next": self._on_next,
            "module.round": self._on_round,
            "module.receipts": self._on_receipts,
            "module.rejections": self._on_rejections,
            "module.take": self._on_take,
        }.items():
            self._node.swarm.serve(method, handler)

    async def _on_contribute(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        learn_attached(self._node, header.get("sharding"))
        sealed = unseal(Contribution, header.get("contribution"))
        owner = self._owner_of(sealed.document.module)
        with self._noting(sealed):
            self._require_decreed(owner, sealed)
            receipt = await owner.contribute(sender, sealed)
        return Reply({"receipt": receipt.to_dict()})

    async def _on_forward(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """From whoever kept it: it is its author's word that counts, and that is signed."""
        learn_attached(self._node, header.get("sharding"))
        sealed = unseal(Contribution, header.get("contribution"))
        owner = self._owner_of(sealed.document.module)
        known = self._node.mandates.peers(owner.module)
        with self._noting(sealed):  # who owned the module keeps what has a receipt, which a ban does not take back
            self._require_decreed(owner, sealed, is_promised=sender in known)
            receipt = await owner.contribute(sealed.document.author, sealed, is_forwarded=True)
        return Reply({"receipt": receipt.to_dict()})

    def _require_decreed(self, owner: Leader, sealed: Sealed[Contribution], *, is_promised: bool = False) -> None:
        """Raise Refused for a new one whose author is banned, and for any while the run is frozen."""
        verdict = judge_decreed(sealed.document.author, self._node.decrees.state)
        is_excused = owner.has(sealed.id) or (is_promised and verdict.reason is Reason.BANNED)
        if verdict.reason is not None and not is_excused:
            raise Refused(verdict.detail, reason=verdict.reason)

    @contextlib.contextmanager
    def _noting(self, sealed: Sealed[Contribution]) -> Iterator[None]:
        """Leave a note on what is refused."""
        try:
            yield
        except Refused as refused:
            self._rejections.note(sealed, refused.reason)
            raise

    async def _on_next(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        wait_s = header.get("wait_s")
        if not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= WAIT_MAX_S:
            raise Refused(f"`wait_s` is {wait_s!r}", reason=Reason.MALFORMED)
        owner = self._owner_of(module_in(header))
        return items_reply(await owner.versions_after(_known_in(header), wait_s=float(wait_s)))

    async def _on_round(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({}, self._owner_of(module_in(header)).open_round().to_bytes())

    async def _on_receipts(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """For whoever keeps account: a receipt names who owes what to whom, and is no secret."""
        after = str(header.get("after", ""))
        receipts = self._owner_of(module_in(header)).receipts()
        return items_reply(receipts[name] for name in sorted(receipts) if name > after)

    async def _on_rejections(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """For whoever keeps account, as receipts are."""
        module, after = module_in(header), str(header.get("after", ""))
        self._owner_of(module)  # only who leads has a word on this
        notes = self._rejections.of(module)
        return items_reply(notes[name] for name in sorted(notes) if name > after)

    async def _on_take(self, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        """The leader leaves and names us; whoever grants terms still has to agree, unless it has done so itself."""
        module, mandate = module_in(header), header.get("mandate")
        if module in self._node.run.topology and self._node.presence.heartbeat.owns:
            if isinstance(mandate, list) and mandate:
                self._node.mandates.learn(module, [unseal(Grant, item) for item in mandate])
            await self._take(module)
        return Reply({})


def _known_in(header: dict[str, Any]) -> Known:
    """The version that the caller has; raises Refused."""
    after, digest, weight = header.get("after"), header.get("digest", ""), header.get("weight", 0)
    if type(after) is not int or after < 0 or type(weight) is not int or not (digest == "" or is_digest(digest)):
        told = f"`after` is {after!r}, `digest` is {digest!r} and `weight` is {weight!r}"
        raise Refused(told[:TOLD_MAX], reason=Reason.MALFORMED)
    return Known(version=after, digest=digest, weight=weight)


async def learn_mandate(node: Member, module: ModuleId, sender: PeerId) -> None:
    """Let a caller that leads, or knows who does, show how; raises Refused if it does not."""
    try:
        await node.watch.learn_mandate(module, sender)
    except Refused as refused:  # its word, not ours
        raise Refused(f"no mandate for {module} was shown: {refused}", reason=Reason.NOT_LEADER) from None


def module_of_run(node: Member, header: dict[str, Any]) -> ModuleId:
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
