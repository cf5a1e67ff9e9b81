"""Bringing one outer gradient to the leader of its module, through whatever happens to that leader.

A push is idempotent: the same contribution gets the same place, so after a lost answer it is simply sent again. It
ends with a receipt, with a reason why the leader does not want it, or when the leader took nothing of it for longer
than a round waits: one that answers `busy` for ever, or nobody who leads, must not hold a volunteer and its path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dipaco_p2p.errors import IntegrityError, Refused, SwarmError, Unreachable
from dipaco_p2p.node.calls import Contribute
from dipaco_p2p.node.node import CALL_TIMEOUT_S, Member
from dipaco_p2p.node.transfer import send
from dipaco_p2p.protocol.documents import Contribution, Receipt, Sealed, seal
from dipaco_p2p.protocol.reasons import PASSING, Reason
from dipaco_p2p.protocol.rounds import PATIENCE
from dipaco_p2p.protocol.signing import PeerId, short

log = logging.getLogger(__name__)

RETRY_S = 0.5
TRIES_MIN = 6
"""Calls to a leader that may be lost, one after the other, before a push is given up, however short the deadline."""
GIVEN_UP = 3
"""Times of that in which no byte more arrives, whatever the leader answers."""
BEHIND_TTLS = 3.0
"""Lives of a heartbeat in which a leader may find the branch that we trained from, when it has only just taken over."""


async def push(
    node: Member, contribution: Contribution, payload: bytes, *, on_progress: Callable[[], None] = lambda: None
) -> Sealed[Receipt]:
    """Push until there is a receipt; raises Refused with the reason if there will be none, and Unreachable when the
    leader took nothing for `PATIENCE` deadlines of the run (and the time of `TRIES_MIN` lost calls), or no byte more
    arrived for `GIVEN_UP` times as long: a leader may take the same bytes for ever, and give no receipt.

    `on_progress` is told of every part that arrived. A new try alone is no progress.
    """
    sealed = seal(node.swarm.signer, contribution)
    behind_until_s = node.clock.now_s() + BEHIND_TTLS * node.run.config.liveness.heartbeat_ttl_s
    patience_s = max(PATIENCE * node.run.config.rounds.deadline_s, TRIES_MIN * CALL_TIMEOUT_S)
    took_s = more_s = node.clock.now_s()
    leader: PeerId | None = None
    arrived_bytes: dict[PeerId | None, int] = {}

    def arrived(done: int, size: int) -> None:
        nonlocal took_s, more_s
        took_s = node.clock.now_s()
        if done > arrived_bytes.get(leader, -1):  # a new leader begins at zero
            arrived_bytes[leader], more_s = done, took_s
            on_progress()

    while True:
        leader, now_s = node.watch.leader(contribution.module), node.clock.now_s()
        if node.decrees.is_frozen:  # nothing may get on now, and that is nobody's fault
            took_s = more_s = now_s
            on_progress()
        elif now_s - took_s >= patience_s or now_s - more_s >= GIVEN_UP * patience_s:
            raise Unreachable(f"{contribution.module} gave no receipt for a contribution in {now_s - more_s:.0f} s")
        elif leader is not None:
            try:
                return await _push_once(node, leader, sealed, payload, arrived)
            except Refused as refused:
                is_patient = _is_behind(node, contribution) and node.clock.now_s() < behind_until_s
                if refused.reason not in PASSING and not (refused.reason == Reason.UNKNOWN_BASE and is_patient):
                    raise
                log.info("%s: %s said %s", contribution.module, short(leader), refused)
            except (SwarmError, IntegrityError) as error:
                log.info("%s: %s did not take it: %s", contribution.module, short(leader), error)
        await node.clock.sleep(RETRY_S)
        await node.watch.read_heads(contribution.module)


def _is_behind(node: Member, contribution: Contribution) -> bool:
    """Whether the leader has not even the version that we trained from."""
    return node.watch.reached(contribution.module) < contribution.base_version


async def _push_once(
    node: Member, leader: PeerId, sealed: Sealed[Contribution], payload: bytes, on_progress: Callable[[int, int], None]
) -> Sealed[Receipt]:
    digest = sealed.document.payload.digest
    await send(node, leader, payload, digest=digest, on_progress=on_progress)
    request = Contribute(contribution=sealed, sharding=node.run.sharding(sealed.document.sharding))
    addresses = node.watch.addresses(leader)
    receipt = (await request.call(node.swarm, leader, timeout_s=CALL_TIMEOUT_S, addresses=addresses)).receipt
    if receipt.document.contribution != sealed.id or receipt.document.author != leader:
        raise IntegrityError("the receipt is for another contribution, or from another peer")
    return receipt
