"""Which path a volunteer trains. Claims need no consensus: two peers on one path only waste some effort.

Theory. Everybody reads the claims of all paths. A volunteer takes a path with the fewest live claimants, writes its
claim, waits for others to do the same, and reads again. The claimants of a path are ranked by who came first; the
one of rank r moves on if some path has fewer than r claimants. The first of a path (rank 0) never moves, so a path
that is covered stays covered, and a path that loses its claimant is taken by a replica of another path or by the
next volunteer that comes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from enum import StrEnum

from ..topology import PathId
from .liveness import Claim
from .signing import PeerId

PathClaims = Mapping[PathId, Mapping[PeerId, Claim]]
"""The live claims of every path of the grid, uncovered paths included."""


class ClaimState(StrEnum):
    IDLE = "idle"
    SETTLING = "settling"
    HELD = "held"


class ClaimEvent(StrEnum):
    CHOSE = "chose"
    STAYED = "stayed"
    YIELDED = "yielded"
    EXPIRED = "expired"
    RELEASED = "released"


CLAIM_TRANSITIONS = {
    (ClaimState.IDLE, ClaimEvent.CHOSE): ClaimState.SETTLING,
    (ClaimState.SETTLING, ClaimEvent.STAYED): ClaimState.HELD,
    (ClaimState.SETTLING, ClaimEvent.YIELDED): ClaimState.IDLE,
    (ClaimState.SETTLING, ClaimEvent.RELEASED): ClaimState.IDLE,
    (ClaimState.HELD, ClaimEvent.YIELDED): ClaimState.IDLE,
    (ClaimState.HELD, ClaimEvent.EXPIRED): ClaimState.IDLE,
    (ClaimState.HELD, ClaimEvent.RELEASED): ClaimState.IDLE,
}


def choose_path(
    claims: PathClaims, rounds: Mapping[PathId, int], *, seed: int, preferred: PathId | None = None
) -> PathId:
    """A path for a volunteer without one: fewest claimants, least trained, least helped, then at random by `seed`.

    `rounds` is how far each path's modules are. A path is helped by every claim that shares a module with it, so that
    two volunteers on a 2x2 grid train all four modules. `preferred`, the path whose optimizer state this machine
    holds, wins among those with the fewest claimants. Random among equals, so that a crowd of newcomers spreads out.
    """
    fewest = min(len(peers) for peers in claims.values())
    candidates = [path for path, peers in sorted(claims.items()) if len(peers) == fewest]
    if preferred in candidates:
        return preferred
    need = {path: (rounds.get(path, 0), _help(path, claims)) for path in candidates}
    return random.Random(seed).choice([path for path in candidates if need[path] == min(need.values())])


def ranking(path: PathId, claims: Mapping[PeerId, Claim]) -> Sequence[PeerId]:
    """The claimants of one path, the one that stays first; ties by a hash, so that no peer always loses."""
    return sorted(claims, key=lambda peer: (claims[peer].since_s, _tie(path, peer), peer))


def should_yield(me: PeerId, path: PathId, claims: PathClaims) -> bool:
    """Whether `me`, a claimant of `path`, is needed more elsewhere."""
    order = ranking(path, claims.get(path, {}))
    if me not in order:
        return False
    fewest = min(len(peers) for other, peers in claims.items() if other != path) if len(claims) > 1 else len(order)
    return fewest < order.index(me)


def _help(path: PathId, claims: PathClaims) -> int:
    """How many claims train the modules of `path`, each module counted for itself."""
    return sum(len(peers) * len(set(path.modules()) & set(other.modules())) for other, peers in claims.items())


def _tie(path: PathId, peer: PeerId) -> str:
    return hashlib.sha256(f"{path}|{peer}".encode()).hexdigest()
