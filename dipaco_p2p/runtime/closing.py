"""The end of a round: a module's next version, made of what is admitted.

- Payloads are read from the disk. One that it has lost meanwhile is asked of whoever else keeps it, for a receipt names
  two holders; only if nobody gives it the contribution expires, is reported, and the version is made of the others.
- Contributions whose outer step is not finite make no version, under this leader or any other: the longest expires and
  is reported, until the others make one.
- Versions are made one at a time, of all modules that this peer leads and mirrors: what that takes in memory does not
  grow with how many rounds close at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..protocol.documents import Contribution, ModuleVersion, Sealed
from ..protocol.rounds import Entry, OpenRound, Round
from .faults import reach
from .intake import Intake
from .ledger import Ledger
from .mirror import Mirror
from .node import Node
from .payloads import PayloadLost
from .recompute import Made, StepNotFinite, made_and_kept

log = logging.getLogger(__name__)

PAYLOAD_LOST = "payload-lost"
NOT_FINITE = "not-finite"
TRIES = 3
RETRY_S = 0.5


async def make_next(
    node: Node, mirror: Mirror, ledger: Ledger, intake: Intake, make: Callable[[], Made]
) -> Made | None:
    """What `make` makes of what is admitted; None when nothing of that is left."""
    assert intake.admitted, "a round without contributions does not close"
    reach("owner: round closed, version not made")
    recovered: set[str] = set()
    while intake.admitted:
        try:
            async with node.averaging:
                return await made_and_kept(make, node.store)
        except PayloadLost as lost:
            log.warning("%s: a payload cannot be read any more: %s", ledger.module, lost)
            sealed = intake.admitted[lost.contribution].sealed
            # A disk that loses it again would do so for ever.
            if sealed.id in recovered or not await recover(node, mirror, ledger, sealed):
                intake.expel(sealed)
                mirror.expire(sealed, PAYLOAD_LOST)
            recovered.add(sealed.id)
        except StepNotFinite as error:
            longest = max(intake.admitted.values(), key=lambda item: (item.norm or 0.0, item.sealed.id))
            log.warning("%s; the longest of %d contributions expires", error, len(intake.admitted))
            intake.expel(longest.sealed)
            mirror.expire(longest.sealed, NOT_FINITE)
    return None


async def recover(node: Node, mirror: Mirror, ledger: Ledger, sealed: Sealed[Contribution]) -> bool:
    """Have a payload once more that this disk has lost; whether somebody gave it."""
    for _ in range(TRIES - 1):  # what has a receipt must not be lost with a message
        if not await mirror.recover(ledger, {sealed.id}):
            return True
        await node.clock.sleep(RETRY_S)
    return not await mirror.recover(ledger, {sealed.id})


def told_round(open_: Round, head: ModuleVersion, *, published: int, deadline_s: float) -> OpenRound:
    """What is in, of the version that trainers may see. If that is not the head, its round is closed, and the next
    version is not cosigned yet."""
    entries = open_.entries
    if published < head.version:
        counted = [share for share in head.shares if share.base_version == published]
        entries = frozenset(Entry(path=share.path, peer=share.peer) for share in counted)
    return OpenRound(version=published, entries=tuple(entries), deadline_s=deadline_s)


def told_version(version: ModuleVersion) -> dict[str, Any]:
    """What its leader's history says of a version."""
    return {
        "module": str(version.module),
        "version": version.version,
        "digest": version.digest,
        "contributions": [share.contribution for share in version.shares],
        "weights": [round(share.weight, 4) for share in version.shares],
        "term": version.term,
    } | ({} if version.rollback is None else {"rollback": version.rollback.decree.to})
