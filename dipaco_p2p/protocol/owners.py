"""Who leads a module. Rendezvous hashing ranks the live peers; a leader that lives is kept.

- A newcomer fills a gap, it does not displace: moving a module costs more than an uneven spread.
- The seed node is the owner of last resort: it leads only while no volunteer can, and hands over when one comes.
- Every peer computes the same successor from the same view; who really leads is settled by the term
  (versions.py), which the archive grants to one peer only.

Source: rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from ..topology import ModuleId
from .liveness import Heartbeat
from .signing import PeerId


def rank(module: ModuleId, peers: Iterable[PeerId]) -> Sequence[PeerId]:
    """The peers from the first choice for `module` to the last. Adding or removing a peer moves no other."""
    return sorted(peers, key=lambda peer: hashlib.sha256(f"{module}|{peer}".encode()).digest(), reverse=True)


def leader(module: ModuleId, heartbeats: Mapping[PeerId, Heartbeat], *, incumbent: PeerId | None) -> PeerId | None:
    """The peer that should lead `module` now; None when nobody alive can.

    `incumbent` is the leader of the newest term, whether it lives or not.
    """
    able = {peer: beat for peer, beat in heartbeats.items() if beat.owns}
    volunteers = [peer for peer, beat in able.items() if beat.role == "volunteer"]
    if incumbent in volunteers:
        return incumbent
    if volunteers:
        return rank(module, volunteers)[0]
    if incumbent in able:
        return incumbent
    return rank(module, able)[0] if able else None
