"""How much an owner keeps of what the coordinator has not signed.

Until a version is final its owners keep all that it was made of, so that the coordinator can make it again when it
returns. This grows by every round of its absence. Before it fills a disk, the owner takes no further work: training of
the module waits for the coordinator, no program ends, and what has a receipt stays.
"""

from __future__ import annotations

from ..errors import Refused
from ..node.ledger import KEPT_MAX, Ledger
from ..node.node import Member
from ..node.run import Run
from ..program import files
from ..protocol.reasons import Reason
from ..topology import ModuleId

UNSIGNED_MAX = KEPT_MAX * 3 // 4
"""Contributions to a module that are not final: who takes it over must be able to list them."""
RESERVE_PATHS = 8
"""What stays free, in parameters of a path: a training state, two of a module's outer states, and a version."""


def require_room(node: Member, ledger: Ledger) -> None:
    """Raise Refused for further work on a module whose versions wait for a signature, once these take all the room."""
    unsigned = ledger.head.version - ledger.final
    if unsigned <= node.run.config.rounds.unsigned_usual:
        return
    wanted = RESERVE_PATHS * path_bytes_max(node.run)
    if len(ledger.spent) >= UNSIGNED_MAX or files.disk.free_bytes(node.store.folder, wanted=wanted) < wanted:
        raise Refused(
            f"{unsigned} versions of {ledger.module} wait for the coordinator, and this owner has no room for more",
            reason=Reason.BUSY,
        )


def path_bytes_max(run: Run) -> int:
    """The parameters of a path: the modules of a level have the same layout."""
    return sum(run.snapshot_bytes_max(ModuleId(level, 0)) for level in range(len(run.topology.widths)))
