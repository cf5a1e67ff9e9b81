"""How much an owner keeps of what the coordinator has not signed.

Until a version is final its owners keep all that it was made of, so that the coordinator can make it again when it
returns. This grows by every round of its absence. Before it fills a disk, the owner takes no further work: training of
the module waits for the coordinator, no program ends, and what has a receipt stays.

What judges refused stays as long, since the branch on which they did may lose. But keys are free, and nobody may stop a
module by work that is refused: of what strangers have sent and the chain has left behind an owner keeps so much and no
more, the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..errors import Refused
from ..node.ledger import KEPT_MAX, Ledger
from ..node.node import Member
from ..node.run import Run
from ..program import files
from ..protocol.documents import Contribution, Sealed
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..topology import ModuleId
from .final import left_behind

UNSIGNED_MAX = KEPT_MAX * 3 // 4
"""Contributions to a module that are not final: who takes it over must be able to list them."""
STRANGE_MAX = KEPT_MAX // 16
"""Contributions by strangers that a module's chain has left behind: most of the rest is for open rounds."""
RESERVE_PATHS = 8
"""What stays free, in parameters of a path: a training state, two of a module's outer states, and a version. Strangers'
work that is left behind may take as much."""


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


def surplus(
    run: Run, ledger: Ledger, *, lost: Collection[str], is_proven: Callable[[PeerId], bool]
) -> list[Sealed[Contribution]]:
    """The work of strangers, of peers that have not worked (`is_proven`), that our chain left behind without counting
    it, beyond what an owner keeps of such work: the oldest, and last what is `lost`, which a leader still has to
    answer for."""
    passed = left_behind(ledger, ledger.head.version, staleness=run.config.rounds.staleness)
    strange = [one for one in passed if not is_proven(one.document.author)]
    strange.sort(key=lambda one: (one.id not in lost, -one.document.base_version))
    room_bytes, found = RESERVE_PATHS * path_bytes_max(run), list[Sealed[Contribution]]()
    for number, one in enumerate(strange):
        room_bytes -= one.document.payload.size
        if number >= STRANGE_MAX or room_bytes < 0:
            found.append(one)
    return found


def path_bytes_max(run: Run) -> int:
    """The parameters of a path: the modules of a level have the same layout."""
    return sum(run.snapshot_bytes_max(ModuleId(level, 0)) for level in range(len(run.topology.widths)))
