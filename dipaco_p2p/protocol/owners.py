"""Who should own a module: a leader and its mirrors, by rendezvous hashing; current members keep their seats.

- A newcomer fills a gap, it does not displace: moving a module costs more than an uneven spread.
- Of a group whose leader is gone a mirror takes over, since it has everything: first one whose work the last versions
  of any module count, since any stranger may have become a mirror, but it has not worked. Then come others who did.
- The seed node comes next: it leads while nobody who has worked does, so in the first round of a run, and hands over
  when one asks. It is never named as a mirror, since its archive keeps everything anyway.
- Strangers come last, mirrors before others: whoever leads can stop a module for a while, and has to earn it. While the
  seed node lives it grants them nothing (bootstrap/coordinator/terms.py).
- Among equals those that can be dialled directly come before those behind relays, which carry a module's bytes twice.
- Every peer computes the same from the same view; who really leads is settled by the term (grants.py).

Source: rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..topology import ModuleId
from .documents import Grant, ModuleVersion, Sealed
from .liveness import Heartbeat
from .signing import PeerId

AHEAD_MAX = 4
"""Rounds of a path that a leader may count alone before any other module of the path has a version."""


def rank(module: ModuleId, peers: Iterable[PeerId]) -> list[PeerId]:
    """The peers from the first choice for `module` to the last. Adding or removing a peer moves no other."""
    return sorted(peers, key=lambda peer: hashlib.sha256(f"{module}|{peer}".encode()).digest(), reverse=True)


def successors(
    module: ModuleId,
    heartbeats: Mapping[PeerId, Heartbeat],
    *,
    incumbent: PeerId | None,
    group: Collection[PeerId],
    workers: Collection[PeerId] = (),
) -> Sequence[PeerId]:
    """The live peers that should lead `module`, the first choice first; each waits a while for those before it.

    `incumbent` leads now, as far as its living head says; `group` owned the module last; the last versions of any
    module count work of `workers`.
    """
    volunteers = _volunteers(heartbeats)
    if incumbent in volunteers:
        return [incumbent]
    order = rank(module, volunteers)
    order.sort(key=lambda peer: (peer not in workers, heartbeats[peer].is_relayed, peer not in group))
    able = [peer for peer, beat in heartbeats.items() if beat.owns and peer not in volunteers]
    seeds = [incumbent] if incumbent in able else rank(module, able)
    known = len(volunteers.intersection(workers))
    return [*order[:known], *seeds, *order[known:]]


def mirrors(
    module: ModuleId,
    heartbeats: Mapping[PeerId, Heartbeat],
    *,
    leader: PeerId,
    present: Sequence[PeerId],
    owners: int,
    workers: Collection[PeerId] = (),
) -> tuple[PeerId, ...]:
    """The mirrors of a group of `owners` led by `leader`: those of `present` that live, then the next in rank, first
    of `workers`: a member can grant itself the next term, and a key that comes first in rank is quickly made."""
    volunteers = _volunteers(heartbeats) - {leader}
    kept = [peer for peer in present if peer in volunteers]
    others = rank(module, volunteers - set(kept))
    others.sort(key=lambda peer: (peer not in workers, heartbeats[peer].is_relayed))
    return (*kept, *others)[: owners - 1]


def absent(grant: Grant | None, *, coordinator: PeerId) -> Sequence[PeerId]:
    """Who may be there though none of the able ones is seen to live: the last group's mirrors, then the coordinator."""
    return (*(grant.mirrors if grant is not None else ()), coordinator)


def _volunteers(heartbeats: Mapping[PeerId, Heartbeat]) -> set[PeerId]:
    return {peer for peer, beat in heartbeats.items() if beat.owns and beat.role == "volunteer"}


def runs_ahead(versions: Sequence[Sealed[ModuleVersion]], leader: PeerId, reached: Callable[[ModuleId], int]) -> bool:
    """Whether `leader` makes the newest of these `versions` of its own work alone, and has counted more rounds of its
    paths than there can have been. `reached` tells the newest version of another module.

    A round of a path goes into all its modules, and each counts a peer's work on one base once: so a module counts no
    more rounds of a path than its other modules have versions, but for a few that these have lost. Whoever closes
    rounds without waiting for others would soon have made the last version of the run.
    """
    last = [sealed.document for sealed in versions[-AHEAD_MAX:]]
    shares = [share for version in last for share in version.shares]
    if len(last) < AHEAD_MAX or {leader} != {version.author for version in last} | {share.peer for share in shares}:
        return False
    for path in {share.path for share in shares}:
        rounds = sum((share.peer, share.path) == (leader, path) for one in versions for share in one.document.shares)
        others = [reached(module) for module in path.modules() if module != last[0].module]
        if not others or rounds <= max(others) + AHEAD_MAX:
            return False
    return True
