"""What a leader answers: contributions, the versions that follow, the open round, and "take this module over"."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from ..errors import Refused
from ..node.calls import (
    Contribute,
    Draw,
    Forward,
    GetDraw,
    GetOpenRound,
    GetReceipts,
    GetRejections,
    GetVersions,
    Receipted,
    Take,
)
from ..node.items import Page, items_reply
from ..node.node import Member
from ..node.shardings import learn_attached
from ..protocol.documents import Contribution, ModuleVersion, Receipt, Rejection, Sealed
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..protocol.versions import Known
from ..swarm.api import Reply
from ..swarm.calls import Done
from ..topology import ModuleId
from .leader import Leader
from .rejections import Rejections


class ModuleCalls:
    """The calls `module.*`, for the modules of which `owner_of` gives an owner; it raises Refused for others. `take` is
    told who hands a module over to us, and raises Refused if that peer may not."""

    def __init__(
        self,
        node: Member,
        owner_of: Callable[[ModuleId], Leader],
        take: Callable[[PeerId, ModuleId], Awaitable[None]],
        rejections: Rejections,
    ) -> None:
        self._node = node
        self._rejections = rejections
        self._owner_of = owner_of
        self._take = take

    def serve(self) -> None:
        """Answer from now on."""
        swarm = self._node.swarm
        Contribute.serve(swarm, self._on_contribute)
        Forward.serve(swarm, self._on_forward)
        GetVersions.serve(swarm, self._on_versions)
        GetOpenRound.serve(swarm, self._on_open_round)
        GetReceipts.serve(swarm, self._on_receipts)
        GetRejections.serve(swarm, self._on_rejections)
        GetDraw.serve(swarm, self._on_draw)
        Take.serve(swarm, self._on_take)

    async def _on_contribute(self, sender: PeerId, request: Contribute) -> Receipted:
        learn_attached(self._node, request.sharding)
        sealed = request.contribution
        owner = self._owner_of(sealed.document.module)
        with self._noting(sealed):
            self._node.invitations.learn(sender, request.invitations or ())
            return Receipted(receipt=await owner.contribute(sender, sealed))

    async def _on_forward(self, sender: PeerId, request: Forward) -> Receipted:
        """From whoever kept it: it is its author's word that counts, and that is signed."""
        learn_attached(self._node, request.sharding)
        sealed = request.contribution
        owner = self._owner_of(sealed.document.module)
        with self._noting(sealed):
            return Receipted(receipt=await owner.contribute(sealed.document.author, sealed, by=sender))

    @contextlib.contextmanager
    def _noting(self, sealed: Sealed[Contribution]) -> Iterator[None]:
        """Leave a note on what is refused."""
        try:
            yield
        except Refused as refused:
            self._rejections.note(sealed, refused.reason)
            raise

    async def _on_versions(self, sender: PeerId, request: GetVersions) -> Page[ModuleVersion]:
        known = Known(version=request.after, digest=request.digest or "", weight=request.weight or 0)
        return items_reply(await self._owner_of(request.module).versions_after(known, wait_s=request.wait_s))

    async def _on_open_round(self, sender: PeerId, request: GetOpenRound) -> Reply:
        return Reply({}, self._owner_of(request.module).open_round().to_bytes())

    async def _on_receipts(self, sender: PeerId, request: GetReceipts) -> Page[Receipt]:
        """For whoever keeps account: a receipt names who owes what to whom, and is no secret."""
        receipts = self._owner_of(request.module).receipts()
        return items_reply(receipts[name] for name in sorted(receipts) if name > request.after)

    async def _on_rejections(self, sender: PeerId, request: GetRejections) -> Page[Rejection]:
        """For whoever keeps account, as receipts are."""
        self._owner_of(request.module)  # only who leads has a word on this
        notes = self._rejections.of(request.module)
        return items_reply(notes[name] for name in sorted(notes) if name > request.after)

    async def _on_draw(self, sender: PeerId, request: GetDraw) -> Draw:
        return Draw(signature=self._owner_of(request.module).trials.draw(request.work))

    async def _on_take(self, sender: PeerId, request: Take) -> Done:
        """The leader leaves and names us; whoever grants terms still has to agree, unless it has done so itself."""
        if request.module in self._node.run.topology and self._node.presence.heartbeat.owns:
            grant = request.grant
            if grant is not None and not self._node.mandates.believes(request.module, grant):
                if sender in (grant.document.leader, grant.document.author):
                    await learn_mandate(self._node, request.module, sender)
            await self._take(sender, request.module)
        return Done()


async def learn_mandate(node: Member, module: ModuleId, sender: PeerId) -> None:
    """Let a caller that leads, or knows who does, show how; raises Refused if it does not."""
    try:
        await node.watch.mandate_news.learn(module, sender)
    except Refused as refused:  # its word, not ours
        raise Refused(f"no mandate for {module} was shown: {refused}", reason=Reason.NOT_LEADER) from None


def module_of_run(node: Member, module: ModuleId) -> ModuleId:
    """`module`, if it is one of this run; raises Refused."""
    if module not in node.run.topology:
        raise Refused(f"this run has no {module}", reason=Reason.WRONG_MODULE)
    return module
