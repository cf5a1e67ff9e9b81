"""Which path a volunteer trains. Claims need no consensus: two peers on one path only waste some effort.

Theory. In a small swarm everybody reads the claims of all paths; in a larger one a volunteer reads those of its own,
and knows of the others what summaries tell (summaries.py). A volunteer takes a path with the fewest live claimants,
writes its claim, waits for others to do the same, and reads again. The claimants of a path are ranked by who came
first.

- *More volunteers than paths.* The one of rank r moves on if some path has fewer than r claimants. The first of a path
  (rank 0) never has to, so a path that is covered stays covered, and a path that loses its claimant is taken by a
  replica of another path or by the next volunteer that comes.
- *Fewer: rotation.* Who has brought its path into the open round, and sees a path that nobody claims and that is
  missing there, gives its claim up and takes that one. So few volunteers train all paths, from the same versions.

Both lead to the choice that `choose_path` makes, so that nobody moves twice for one reason.

- *More claimants than a version has places for* (run.py, `places`). Averages of averages on the way would be somebody's
  word, where now everybody makes each version again from what was contributed. So in each round some of them train,
  drawn by a hash, and the others wait for the next one: their steps would be refused. In a grid whose paths have so
  many volunteers one more replica of a path gains little, and more paths would gain more.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Container, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from ..topology import PathId
from .liveness import Claim
from .rounds import PathClaims, Standing
from .signing import PeerId

PathCounts = Mapping[PathId, int]
"""How many claim each path."""
NOTHING_TOLD: PathCounts = MappingProxyType({})
DRAWN = 0.75
"""Of the places that a version has for a path: late work wants some, and those who look at the claims at one moment do
not all see the same."""


class ClaimState(StrEnum):
    IDLE = "idle"
    SETTLING = "settling"
    HELD = "held"


class ClaimEvent(StrEnum):
    CHOSE = "chose"
    STAYED = "stayed"
    YIELDED = "yielded"
    ROTATED = "rotated"
    EXPIRED = "expired"
    RELEASED = "released"


CLAIM_TRANSITIONS = {
    (ClaimState.IDLE, ClaimEvent.CHOSE): ClaimState.SETTLING,
    (ClaimState.SETTLING, ClaimEvent.STAYED): ClaimState.HELD,
    (ClaimState.SETTLING, ClaimEvent.YIELDED): ClaimState.IDLE,
    (ClaimState.SETTLING, ClaimEvent.RELEASED): ClaimState.IDLE,
    (ClaimState.HELD, ClaimEvent.YIELDED): ClaimState.IDLE,
    (ClaimState.HELD, ClaimEvent.ROTATED): ClaimState.IDLE,
    (ClaimState.HELD, ClaimEvent.EXPIRED): ClaimState.IDLE,
    (ClaimState.HELD, ClaimEvent.RELEASED): ClaimState.IDLE,
}


def choose_path(
    claims: PathClaims, standings: Mapping[PathId, Standing], *, seed: int, held: Container[PathId] = ()
) -> PathId:
    """A path for a volunteer without one, of all in `claims`; equal ones at random by `seed`. In this order:

    1. fewest claimants; 2. can be trained now; 3. least trained; 4. its inner state is on this machine (`held`), so
    that two volunteers over four paths keep their own two; 5. least helped: every claim helps the paths that share a
    module with it, so that two volunteers on a 2x2 grid begin with all four modules.
    """

    def need(path: PathId) -> tuple[int, bool, int, bool, int]:
        how_far = standings.get(path, Standing())
        return len(claims[path]), not how_far.is_due, how_far.progress, path not in held, _help(path, claims)

    needs = {path: need(path) for path in sorted(claims)}
    greatest = min(needs.values())
    return random.Random(seed).choice([path for path in needs if needs[path] == greatest])


def taking_part(claims: PathClaims) -> frozenset[PeerId]:
    """Who trains a path. Who is alive but not among them leads, mirrors, stands by, or hangs."""
    return frozenset(peer for peers in claims.values() for peer in peers)


def ranking(path: PathId, claims: Mapping[PeerId, Claim]) -> Sequence[PeerId]:
    """The claimants of one path, the one that stays first; ties by a hash, so that no peer always loses."""
    return sorted(claims, key=lambda peer: (claims[peer].since_s, _tie(path, peer), peer))


def replicas(path: PathId, claims: PathClaims, told: PathCounts = NOTHING_TOLD) -> Sequence[PeerId]:
    """The claimants of `path` that stay, in their ranking: who trains a part of its shard, and which."""
    return [peer for peer in ranking(path, claims.get(path, {})) if not should_yield(peer, path, claims, told)]


def places_drawn(places: int) -> int:
    """How many claimants of a path train it in a round, where a version has so many places for it."""
    return max(1, int(DRAWN * places))


def drawn(path: PathId, claims: Collection[PeerId], *, round_number: int, places: int) -> frozenset[PeerId]:
    """Which of its claimants train `path` in this round: all, or `places` of them by chance, others in each round."""
    if len(claims) <= places:
        return frozenset(claims)
    return frozenset(sorted(claims, key=lambda peer: _tie(path, peer, round_number))[:places])


def should_yield(me: PeerId, path: PathId, claims: PathClaims, told: PathCounts = NOTHING_TOLD) -> bool:
    """Whether `me`, a claimant of `path`, is one too many there. `told` are the claimants of paths whose claims were
    not read, as the leaders of their modules tell (summaries.py)."""
    order = ranking(path, claims.get(path, {}))
    if me not in order:
        return False
    others = [len(peers) for other, peers in claims.items() if other != path]
    others += [count for other, count in told.items() if other != path]
    return min(others, default=len(order)) < order.index(me)


def should_rotate(path: PathId, mine: Standing, claims: PathClaims, standings: Mapping[PathId, Standing]) -> bool:
    """Whether a claimant of `path`, which stands as in `mine`, is needed more on a path that nobody claims.

    It goes to one that can be trained and is less far; while it waits, to one that is equally far as well. A path of
    which `standings` says nothing is left alone: its modules' leaders do not answer.
    """
    uncovered = [standings.get(other) for other, peers in claims.items() if not peers and other != path]
    limit = mine.progress if mine.is_due else mine.progress + 1
    return any(other is not None and other.is_due and other.progress < limit for other in uncovered)


def _help(path: PathId, claims: PathClaims) -> int:
    """How many claims train the modules of `path`, each module counted for itself."""
    return sum(len(peers) * len(set(path.modules()) & set(other.modules())) for other, peers in claims.items())


def _tie(path: PathId, peer: PeerId, *more: int) -> str:
    return hashlib.sha256("|".join(map(str, (path, peer, *more))).encode()).hexdigest()
