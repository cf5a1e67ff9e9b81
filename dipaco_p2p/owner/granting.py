"""How a peer comes to lead a module: by a term that the coordinator grants, or a member of the last group."""

from __future__ import annotations

import logging
from typing import Protocol

from ..errors import IntegrityError, Refused, SwarmError
from ..node.calls import Adopt
from ..node.node import CONTROL_TIMEOUT_S, Member, ask
from ..program.files import reach
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from ..topology import ModuleId

log = logging.getLogger(__name__)


class Granting(Protocol):
    """How a peer comes to lead."""

    async def obtain(self, module: ModuleId, *, mirrors: tuple[PeerId, ...]) -> None:
        """Have a new term of `module` granted to us, with these mirrors; the node's mandates know it then.

        Raises DipacoError if nobody who may grants it.
        """

    def look(self, module: ModuleId) -> None:
        """Note who leads it now; called at each look at the swarm."""
        return

    def takes_back(self, module: ModuleId) -> bool:
        """Whether we should lead though somebody else does."""
        return False


class Electing(Granting):
    """A volunteer's way: ask a seed node; if none answers, and nobody else's head lives, grant it ourselves as a member
    of the last group."""

    def __init__(self, node: Member) -> None:
        self._node = node

    async def obtain(self, module: ModuleId, *, mirrors: tuple[PeerId, ...]) -> None:
        mandates, watch, me = self._node.mandates, self._node.watch, self._node.peer
        problem: SwarmError | None = None
        for seed in watch.coordinators():
            try:
                await self._ask(seed, module, mirrors)
                return
            except SwarmError as error:
                log.info("no seed node grants %s: %s", module, error)
                problem = error
            except Refused:
                await self._catch_up(seed, module)
                raise
        await watch.read_heads(module)  # to ask took a while, and whoever told us to take it may be wrong
        leader, newest = watch.leader(module), mandates.grant(module)
        if leader not in (None, me) and (newest is None or newest.leader != me):
            # Perhaps that slow seed itself: whoever lives is not deposed. One that granted us the module gave it up.
            raise problem or Refused(f"{module} is led by ...{short(leader)}, which is alive", reason=Reason.NOT_LEADER)
        mandates.grant_next(self._node.swarm.signer, module, leader=me, mirrors=mirrors)
        reach("mandate: granted by a member")

    async def _ask(self, seed: PeerId, module: ModuleId, mirrors: tuple[PeerId, ...]) -> None:
        node = self._node
        request = Adopt(
            module=module,
            term=node.mandates.term(module) + 1,
            mirrors=mirrors,
            mandate=tuple(node.mandates.newest(module)[-1:]),
        )
        sealed = (await ask(node, seed, request, timeout_s=CONTROL_TIMEOUT_S)).grant
        if sealed.document.leader != self._node.peer or not node.mandates.believes(module, sealed):
            raise IntegrityError("an archive that grants to another, or without the coordinator's signature")

    async def _catch_up(self, seed: PeerId, module: ModuleId) -> None:
        """It refused: perhaps it knows of a newer term."""
        try:
            await self._node.watch.mandate_news.learn(module, seed)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("the seed node does not say who leads %s: %s", module, error)
