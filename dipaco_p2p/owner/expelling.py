"""While the coordinator is away, the leader of a module gathers its owners' votes against a forger, and its next
version shows them (protocol/expulsion.py). Once the coordinator has admitted such a peer by a later decree, a version
shows that.

An owner votes for what its own copy of the chain says, and only while it does not see the coordinator either: who is
banned is the coordinator's to say.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..errors import DipacoError, IntegrityError, Refused
from ..node.calls import GetVote
from ..node.node import ask
from ..protocol.decrees import ADMIT, ShownDecree
from ..protocol.expulsion import (
    Charge,
    Expulsion,
    Vote,
    check_charge,
    needed,
)
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from .chain import ModuleChain
from .version import check_expels, check_readmits

log = logging.getLogger(__name__)

VOTE_S = 5.0
"""For an owner to answer."""


def vote_on(chain: ModuleChain, charge: Charge) -> Vote:
    """Ours, as an owner; raises Refused unless we see what it is about, and that the coordinator is away."""
    node, standings = chain.node, chain.ledger.standings
    if node.watch.coordinators():
        raise Refused("the coordinator is there: whom to ban, it says itself", reason=Reason.OTHER)
    if charge.decrees != node.decrees.count:
        raise Refused(f"{node.decrees.count} decrees are known here, not {charge.decrees}", reason=Reason.OTHER)
    if node.peer not in _owners(chain):
        raise Refused(f"no owner of {chain.module} in full standing is here", reason=Reason.OTHER)
    try:
        check_charge(charge, standings)
    except IntegrityError as error:
        raise Refused(str(error), reason=Reason.OTHER) from None
    return Vote.sign(node.swarm.signer, charge)


class Expelling:
    """Of one module, while this peer leads it."""

    def __init__(self, chain: ModuleChain) -> None:
        self._node = chain.node
        self._chain = chain
        self._next_s = 0.0
        self._expulsion: Expulsion | None = None
        """For the next version."""

    async def gather(self) -> None:
        """Ask the owners now and then, if a forger waits and the coordinator is away."""
        node, standings = self._node, self._chain.ledger.standings
        now_s, owners = node.clock.now_s(), _owners(self._chain)
        forgers = [peer for peer in standings.waiting if not standings.of(peer).is_expelled]
        if now_s < self._next_s or not forgers or not needed(len(owners)) or node.watch.coordinators():
            return
        self._next_s = now_s + node.run.config.liveness.heartbeat_ttl_s
        charge = Charge(
            run=node.run.id,
            module=self._chain.module,
            peer=forgers[0],
            found=standings.last_found("forged", forgers[0]),
            decrees=node.decrees.count,
        )
        votes = [vote for vote in await asyncio.gather(*(self._vote(peer, charge) for peer in owners)) if vote]
        if len(votes) >= needed(len(owners)):
            by_owner = tuple(sorted(votes, key=lambda vote: vote.owner)[: needed(len(owners))])
            self._expulsion = Expulsion(peer=charge.peer, found=charge.found, decrees=charge.decrees, votes=by_owner)

    def shown(self) -> dict[str, Any]:
        """What the next version says of this, by the names of its fields; what holds no more is left out."""
        ledger, run = self._chain.ledger, self._node.run
        expels, readmits = self._expulsion, self._readmission()
        try:
            if expels is not None:
                check_expels(run, ledger.module, expels, ledger.standings)
        except IntegrityError as error:  # the chain went on meanwhile
            log.info("%s: ...%s is not expelled: %s", ledger.module, short(expels.peer) if expels else "", error)
            expels = self._expulsion = None
        return {"expels": expels, "readmits": readmits}

    def _readmission(self) -> ShownDecree | None:
        """Of the first whom a decree admits that the owners did not know."""
        standings, run = self._chain.ledger.standings, self._node.run
        for sealed in self._node.decrees.log:
            shown = ShownDecree(decree=sealed.document, signature=sealed.signature)
            peer = sealed.document.peer
            if sealed.document.act == ADMIT and peer is not None and standings.expelled(peer) is not None:
                try:
                    check_readmits(run, shown, standings)
                except IntegrityError:  # the owners knew it
                    continue
                return shown
        return None

    async def _vote(self, owner: PeerId, charge: Charge) -> Vote | None:
        """What this owner answers; None if it does not vote for it."""
        node = self._node
        request = GetVote(module=charge.module, peer=charge.peer, found=charge.found, decrees=charge.decrees)
        try:
            if owner == node.peer:
                return vote_on(self._chain, charge)
            vote = Vote(owner=owner, signature=(await ask(node, owner, request, timeout_s=VOTE_S)).signature)
        except DipacoError as error:
            log.info("%s: ...%s does not vote: %s", charge.module, short(owner), error)
            return None
        return vote if vote.is_for(charge) else None


def _owners(chain: ModuleChain) -> frozenset[PeerId]:
    run = chain.node.run
    return chain.ledger.standings.owners(run.config.audited, coordinator=run.manifest.author)
