"""Contributions that this peer lacks and other holders keep: a receipt names two disks, and one may have lost it."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ..errors import DipacoError
from ..node.ledger import RemoteLedger
from ..protocol.documents import Contribution, Sealed
from ..protocol.signing import short
from .chain import ModuleChain

log = logging.getLogger(__name__)

TRIES, RETRY_S = 3, 0.5


async def recover(chain: ModuleChain, contributions: Collection[str]) -> set[str]:
    """Look for contributions that we lack, or whose payload: others of the group kept them. What nobody gave."""
    lacking = {id_ for id_ in contributions if not chain.keeps(id_)}
    for peer in sorted(chain.node.watch.heartbeats) if lacking else ():
        if peer == chain.node.peer or not lacking:
            continue
        try:
            kept = await RemoteLedger(chain.node, peer, chain.module).kept()
        except DipacoError as error:
            log.info("%s: ...%s does not say what it keeps: %s", chain.module, short(peer), error)
            continue
        await chain.copy([sealed for sealed in kept if sealed.id in lacking], peer)
        lacking = {id_ for id_ in lacking if not chain.keeps(id_)}
    return lacking


async def recover_payload(chain: ModuleChain, sealed: Sealed[Contribution]) -> bool:
    """Have a payload once more that this disk has lost; whether somebody gave it."""
    for _ in range(TRIES - 1):  # what has a receipt must not be lost with a message
        if not await recover(chain, {sealed.id}):
            return True
        await chain.node.clock.sleep(RETRY_S)
    return not await recover(chain, {sealed.id})
