"""The stage before the one that is open, after a restart: what it came to is still told, and nothing of it changes.

A collector that was away at the end of the warm-up, or whoever measures or verifies it, needs no folder for that. It is
over: nobody leads it, nothing is taken, and only what anybody may read is answered. No heartbeat says that we are
there: who finds a seed node in a stage expects that it grants terms.
"""

from __future__ import annotations

import logging

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.node import open_member
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.transfer import serve_store
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.owner.mirror_calls import MirrorCalls
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm

from .checks import Checks
from .records import PublicRecords

log = logging.getLogger(__name__)


def serve_earlier(run: Run, swarm: Swarm, store: Store, *, clock: Clock) -> None:
    """Answer from now on. A damaged archive is not served: the open stage does without it."""
    scoped = ScopedSwarm(swarm, run.id)
    node = open_member(run, scoped, clock, store)
    try:
        archive = SeedArchive(run, store)
    except IntegrityError as error:
        log.warning("the archive of the %s is not served: %s", run.manifest.stage, error)
        return
    records = PublicRecords(store, archive)
    serve_store(scoped, store)
    MirrorCalls(ArchiveChains(node, archive)).serve_reading()
    records.serve(scoped)
    Checks(run, store, archive, judged=records.judgement, is_alive=lambda peer: False).serve(scoped, is_open=False)
