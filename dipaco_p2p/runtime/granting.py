"""Where the grant of the next term comes from: the coordinator's seed node, or while it is away our last group.

The seed grants each term of a module once, and not while the last leader's head lives. That is what keeps a leader that
froze and woke from making a second chain. A group without a seed cannot be kept from it, but comes together again.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ..errors import IntegrityError, Refused, SwarmError
from ..protocol.documents import Grant, Sealed, unseal
from ..protocol.signing import PeerId
from ..topology import ModuleId
from .faults import reach
from .node import CONTROL_TIMEOUT_S, Node

log = logging.getLogger(__name__)


class Granting(Protocol):
    """How a peer comes to lead."""

    async def obtain(self, module: ModuleId, *, mirrors: tuple[PeerId, ...]) -> None:
        """Have a new term of `module` granted to us, with these mirrors; the node's mandates know it then.

        Raises DipacoError if nobody who may grants it.
        """


class Electing(Granting):
    """A volunteer's way: ask a seed node; if none answers, and nobody else's head lives, grant it ourselves as a member
    of the last group."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def obtain(self, module: ModuleId, *, mirrors: tuple[PeerId, ...]) -> None:
        mandates = self._node.watch.mandates
        for seed in self._node.watch.coordinators():
            try:
                await self._ask(seed, module, mirrors)
                return
            except SwarmError as error:
                log.info("no seed node grants %s: %s", module, error)
                if self._node.watch.leader(module) not in (None, self._node.peer):
                    raise  # somebody leads, perhaps that slow seed itself: whoever lives is not deposed
            except Refused:
                await self._catch_up(seed, module)
                raise
        mandates.grant_next(self._node.swarm.signer, module, leader=self._node.peer, mirrors=mirrors)
        reach("mandate: granted by a member")

    async def _ask(self, seed: PeerId, module: ModuleId, mirrors: tuple[PeerId, ...]) -> None:
        watch = self._node.watch
        header = {
            "module": str(module),
            "term": watch.mandates.term(module) + 1,
            "mirrors": list(mirrors),
            "mandate": [sealed.to_dict() for sealed in watch.mandates.newest(module)[-1:]],
        }
        addresses = watch.addresses(seed)
        reply = await self._node.swarm.call(
            seed, "archive.adopt", header, timeout_s=CONTROL_TIMEOUT_S, addresses=addresses
        )
        sealed: Sealed[Grant] = unseal(Grant, reply.header.get("grant"))
        if sealed.document.leader != self._node.peer or not watch.mandates.believes(module, sealed):
            raise IntegrityError("an archive that grants to another, or without the coordinator's signature")

    async def _catch_up(self, seed: PeerId, module: ModuleId) -> None:
        """It refused: perhaps it knows of a newer term."""
        try:
            await self._node.watch.learn_mandate(module, seed)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("the seed node does not say who leads %s: %s", module, error)
