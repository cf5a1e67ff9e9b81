"""How much an owner keeps of what the coordinator has not signed.

Until a version is final its owners keep all that it was made of, so that the coordinator can make it again when it
returns. This grows by every round of its absence. Before it fills a disk, the owner takes no further work: training of
the module waits for the coordinator, no program ends, and what has a receipt stays.

What judges refused stays as long, since the branch on which they did may lose. But keys are free, and nobody may stop a
module by work that is refused: of what strangers have sent and the chain has left behind an owner keeps so much and no
more, the newest.

Of what may still count all strangers' work takes half of the room at most, and that of one address never more than it
leaves to others. Who finds none waits, as for a leader that is busy: a round's end makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

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


class Room:
    """What the disk has room for, of all modules that this peer keeps."""

    def __init__(
        self, node: Member, ledgers: Callable[[], Iterable[Ledger]], *, is_proven: Callable[[PeerId], bool]
    ) -> None:
        """`ledgers` gives those of all these modules, and `is_proven` says who has worked: all others are strangers."""
        self._node = node
        self._ledgers = ledgers
        self._is_proven = is_proven
        self._hosts: dict[str, str] = {}
        """Where strangers' open work came from, by contribution; not what an earlier process took."""

    def require_signed(self, ledger: Ledger) -> None:
        """Raise Refused for further work on a module whose versions wait for a signature, once these take all the
        room."""
        node, unsigned = self._node, ledger.head.version - ledger.final
        if unsigned <= node.run.config.rounds.unsigned_usual:
            return
        wanted = _reserve_bytes(node.run)
        if len(ledger.spent) >= UNSIGNED_MAX or files.disk.free_bytes(node.store.folder, wanted=wanted) < wanted:
            raise Refused(
                f"{unsigned} versions of {ledger.module} wait for the coordinator, and this owner has no room for more",
                reason=Reason.BUSY,
            )

    def require_share(
        self, sealed: Sealed[Contribution], *, host: str | None = None, is_counted: bool = False, coming_bytes: int = 0
    ) -> None:
        """Raise Refused for a stranger's work beyond strangers' share of the room: half of what they have and is free,
        but for the reserve. With the `host` that it comes from: also beyond what that host leaves to others. What a
        version counts may have all but the reserve. `coming_bytes` are on their way to this disk."""
        if self._is_proven(sealed.document.author):
            return
        held, size = self._held_bytes(), sealed.document.payload.size
        near = 0 if host is None else sum(held[id_] for id_ in held if self._hosts.get(id_, "") == host)
        wanted = _reserve_bytes(self._node.run) + coming_bytes + near + size
        wanted += 0 if is_counted else sum(held.values()) + near + size  # left to others
        if not self._is_free(wanted):
            raise Refused("no room for more work of peers that have not worked yet; try again", reason=Reason.BUSY)
        if host is not None:
            self._hosts = {id_: known for id_, known in self._hosts.items() if id_ in held} | {sealed.id: host}

    def _is_free(self, wanted_bytes: int) -> bool:
        """Uploads that nothing names give way for this, but only if it is enough: some are on their way to us."""
        folder, spare_bytes = self._node.store.folder, self._node.uploads.unnamed_bytes()
        if files.disk.free_bytes(folder, wanted=0) + spare_bytes < wanted_bytes:
            return False
        return files.disk.free_bytes(folder, wanted=wanted_bytes) >= wanted_bytes

    def _held_bytes(self) -> dict[str, int]:
        """Strangers' work that no version counts, by id."""
        work = [one for ledger in self._ledgers() for one in ledger.open.values()]
        return {one.id: one.document.payload.size for one in work if not self._is_proven(one.document.author)}


def surplus(
    run: Run, ledger: Ledger, *, lost: Collection[str], is_proven: Callable[[PeerId], bool]
) -> list[Sealed[Contribution]]:
    """The work of strangers, of peers that have not worked (`is_proven`), that our chain left behind without counting
    it, beyond what an owner keeps of such work: the oldest, and last what is `lost`, which a leader still has to
    answer for."""
    passed = left_behind(ledger, ledger.head.version, staleness=run.config.rounds.staleness)
    strange = [one for one in passed if not is_proven(one.document.author)]
    strange.sort(key=lambda one: (one.id not in lost, -one.document.base_version))
    room_bytes, found = _reserve_bytes(run), list[Sealed[Contribution]]()
    for number, one in enumerate(strange):
        room_bytes -= one.document.payload.size
        if number >= STRANGE_MAX or room_bytes < 0:
            found.append(one)
    return found


def _reserve_bytes(run: Run) -> int:
    return RESERVE_PATHS * path_bytes_max(run)


def path_bytes_max(run: Run) -> int:
    """The parameters of a path: the modules of a level have the same layout."""
    return sum(run.snapshot_bytes_max(ModuleId(level, 0)) for level in range(len(run.topology.widths)))
