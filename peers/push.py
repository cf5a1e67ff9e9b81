"""Bringing one outer gradient to the leader of its module, through whatever happens to that leader.

A push is idempotent: the same contribution gets the same place, so after a lost answer it is simply sent again. It
ends with a receipt, or with a reason why the leader does not want it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dipaco_p2p.errors import IntegrityError, Refused, SwarmError
from dipaco_p2p.protocol.admission import PASSING, Reason
from dipaco_p2p.protocol.documents import Contribution, Receipt, Sealed, seal, unseal
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.runtime.node import CALL_TIMEOUT_S, Node
from dipaco_p2p.runtime.shardings import attached
from dipaco_p2p.runtime.transfer import send

log = logging.getLogger(__name__)

RETRY_S = 0.5
BEHIND_TTLS = 3.0
"""Lives of a heartbeat in which a leader may find the branch that we trained from, when it has only just taken over."""


async def push(
    node: Node, contribution: Contribution, payload: bytes, *, on_progress: Callable[[], None] = lambda: None
) -> Sealed[Receipt]:
    """Push until there is a receipt; raises Refused with the reason if there will be none.

    `on_progress` is told of every part that arrived, and of every new try.
    """
    sealed = seal(node.swarm.signer, contribution)
    behind_until_s = node.clock.now_s() + BEHIND_TTLS * node.run.config.liveness.heartbeat_ttl_s
    while True:
        on_progress()
        leader = node.watch.leader(contribution.module)
        if leader is not None and not node.watch.decrees.is_frozen:
            try:
                return await _push_once(node, leader, sealed, payload, on_progress)
            except Refused as refused:
                is_patient = _is_behind(node, contribution) and node.clock.now_s() < behind_until_s
                if refused.reason not in PASSING and not (refused.reason == Reason.UNKNOWN_BASE and is_patient):
                    raise
                log.info("%s: %s said %s", contribution.module, short(leader), refused)
            except (SwarmError, IntegrityError) as error:
                log.info("%s: %s did not take it: %s", contribution.module, short(leader), error)
        await node.clock.sleep(RETRY_S)
        await node.watch.read_heads(contribution.module)


def _is_behind(node: Node, contribution: Contribution) -> bool:
    """Whether the leader has not even the version that we trained from."""
    return node.watch.reached(contribution.module) < contribution.base_version


async def _push_once(
    node: Node, leader: PeerId, sealed: Sealed[Contribution], payload: bytes, on_progress: Callable[[], None]
) -> Sealed[Receipt]:
    digest = sealed.document.payload.digest
    await send(node, leader, payload, digest=digest, on_progress=lambda done, size: on_progress())
    reply = await node.swarm.call(
        leader,
        "module.contribute",
        {"contribution": sealed.to_dict()} | attached(node, sealed.document.sharding),
        timeout_s=CALL_TIMEOUT_S,
        addresses=node.watch.addresses(leader),
    )
    receipt = unseal(Receipt, reply.header.get("receipt"))
    if receipt.document.contribution != sealed.id or receipt.document.author != leader:
        raise IntegrityError("the receipt is for another contribution, or from another peer")
    return receipt
