"""How long a round of a module waits for the paths that are missing: learnt from when the others' work came.

Theory. The leader measures how long after a round opened a path's first contribution from its version came; if the
same peer brought another path in between, how long after that. This is what a volunteer needs for one path: modules,
inner steps, push. Of each path the median of its last rounds counts, and of the paths the upper median again:

    deadline = MULTIPLE * typical duration + the time in which a death is noticed and its path taken over

- Never above `deadline_s` of the run file, which also holds until half of the paths were seen: a leader that just took
  over knows nothing, and a swarm of slow machines needs the time.
- Never below the second term: the path of a peer that died must have time to be taken over, whatever was measured.
- A late contribution teaches like one in time, so that slow but honest machines are waited for as soon as they are
  half of the paths; where they are fewer, they are told the deadline and do fewer steps (peers/path/training.py).
- Who sends at once shortens the figure of one path, who is as late as it can lengthens one: medians of medians do not
  follow either, and further authors of a path that is in change nothing. A majority of hostile paths reaches the
  bounds above, and nothing beyond them.
- Rounds that this leader did not see open teach nothing: what waited for it would seem to have taken no time.

A value; every change makes a new one. Time is an argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..config import LivenessConfig, RoundsConfig
from ..topology import PathId
from .signing import PeerId

MULTIPLE = 2.0
"""Of the typical duration: a machine half as fast as the others is waited for."""
NOTICE_TTLS = 1.5
"""Lives of a heartbeat until a silent peer's claim has expired and somebody else has seen it."""
ROUNDS_REMEMBERED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When the paths of one module contributed in the last rounds."""

    paths: int
    """How many go through the module."""
    opened_s: Mapping[int, float] = field(default_factory=dict)
    """When this leader published each of the last versions, which is when its round opened."""
    brought_s: Mapping[tuple[int, PeerId], float] = field(default_factory=dict)
    """When a peer last brought a path into a round."""
    durations_s: Mapping[PathId, Mapping[int, float]] = field(default_factory=dict)
    """Of each path, by version, how long its first contribution took."""

    def opened(self, version: int, *, now_s: float) -> Arrivals:
        """This leader has published `version`: trainers may start from it now. Older rounds are forgotten."""
        oldest = version - ROUNDS_REMEMBERED
        durations = {
            path: {number: seconds for number, seconds in found.items() if number >= oldest}
            for path, found in self.durations_s.items()
        }
        return replace(
            self,
            opened_s={number: at_s for number, at_s in self.opened_s.items() if number > oldest} | {version: now_s},
            brought_s={key: at_s for key, at_s in self.brought_s.items() if key[0] > oldest},
            durations_s={path: found for path, found in durations.items() if found},
        )

    def arrived(self, path: PathId, peer: PeerId, *, base: int, now_s: float) -> Arrivals:
        """A contribution of `path` by `peer`, from version `base`, was admitted; late ones are told as well."""
        known = self.durations_s.get(path, {})
        if base not in self.opened_s or base in known:
            return self
        began_s = self.brought_s.get((base, peer), self.opened_s[base])
        return replace(
            self,
            brought_s={**self.brought_s, (base, peer): now_s},
            durations_s={**self.durations_s, path: {**known, base: max(0.0, now_s - began_s)}},
        )

    def typical_s(self) -> float | None:
        """How long one path takes a volunteer; None until half of the paths were seen."""
        if 2 * len(self.durations_s) < self.paths:
            return None
        return statistics.median_high(statistics.median_high(found.values()) for found in self.durations_s.values())

    def deadline_s(self, rounds: RoundsConfig, liveness: LivenessConfig) -> float:
        """How long the open round waits after the last path that came: `Round.tick` takes it."""
        typical_s = self.typical_s()
        if typical_s is None:
            return rounds.deadline_s
        return within_bounds(MULTIPLE * typical_s + notice_s(liveness), rounds, liveness)


def notice_s(liveness: LivenessConfig) -> float:
    """Seconds in which a death is noticed and the path claimed by another."""
    return NOTICE_TTLS * liveness.heartbeat_ttl_s + liveness.settle_s


def within_bounds(deadline_s: float, rounds: RoundsConfig, liveness: LivenessConfig) -> float:
    """The nearest deadline that a leader may have: what it tells is a hint, and may be a lie."""
    return min(rounds.deadline_s, max(notice_s(liveness), deadline_s))
