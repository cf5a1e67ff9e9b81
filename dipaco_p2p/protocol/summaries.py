"""What the leader of a module tells of the paths through it: how many claim each, how far it is, and how old that is.

Theory. Who looks for a path would have to read the claims of all of them: a key for each path, and a record for each
volunteer. The leader of a module reads the claims of its paths anyway, so its head (liveness.py) tells how many there
are. All modules of one level tell of all paths, so one read for each of them is enough.

A summary is one peer's word, and nothing rests on it:

- Whoever chooses a path reads its claims before it stays, and nobody leaves a path before it has read the claims of the
  one that it is told nobody trains. A lie costs a read, and the path counts as it was read from then on.
- Which level is read is drawn for each try, and of two leaders that tell of one path the fewer claimants count: a
  leader that hides its paths hides them from some, for a while.
- Whoever waits reads the claims of a path by chance at each look. So where a leader hides that a path has nobody, and
  no other tells of it, somebody soon sees it.
- What is older than two lives of a record counts for nothing.

    head.paths   "3.12.4 0.11.2"    of each path, in the order of the grid: claimants, round, age in seconds
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..topology import PathId
from .rounds import Standing
from .signing import VALUES_MAX

PATHS_TOLD_MAX = 512
"""Paths that one head tells of: a record has 8 KiB. A level whose modules have more paths tells nothing."""
CLAIMANTS_MAX = 9999
AGE_MAX_S = 999
MOVERS = 4
"""So many may leave their paths at once for each claimant that is missing elsewhere."""
COUNT_BASE = 8.0
"""A path with one claimant more than another is drawn so much less often."""
PROGRESS_BASE = 2.0
PROGRESS_STEPS_MAX = 4
HELD_FACTOR = 4.0
"""A path whose inner state is here is drawn so much more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSummary:
    """What is told of one path."""

    claimants: int
    round: int
    """How far the path is, as far as the leader's own module goes: its version, or one more if the path is in."""
    age_s: float


def write_summaries(summaries: Sequence[PathSummary]) -> str:
    """Of the paths through a module in order; empty for more than a head can tell of."""
    if len(summaries) > PATHS_TOLD_MAX:
        return ""
    return " ".join(
        f"{min(one.claimants, CLAIMANTS_MAX)}.{one.round}.{min(round(one.age_s), AGE_MAX_S)}" for one in summaries
    )


def read_summaries(text: str, paths: Sequence[PathId]) -> dict[PathId, PathSummary]:
    """The inverse, of the `paths` through a module; nothing for a text that is not about just these."""
    parts = text.split(" ")
    if len(parts) != len(paths) or len(paths) > PATHS_TOLD_MAX:
        return {}
    found = {}
    for path, part in zip(paths, parts, strict=True):
        numbers = part.split(".")
        if len(numbers) != 3 or not all(
            number.isascii() and number.isdigit() and len(number) < 17 for number in numbers
        ):
            return {}
        claimants, round_, age_s = map(int, numbers)
        if claimants > CLAIMANTS_MAX or round_ > VALUES_MAX:
            return {}
        found[path] = PathSummary(claimants=claimants, round=round_, age_s=float(age_s))
    return found


def merged(one: PathSummary | None, other: PathSummary) -> PathSummary:
    """What two leaders tell of one path: the greater need, which costs a read to check, and the least progress."""
    if one is None:
        return other
    fewest = min(one, other, key=lambda summary: summary.claimants)
    return replace(fewest, round=min(one.round, other.round))


class Need(NamedTuple):
    """How much a path needs somebody."""

    claimants: int
    is_due: bool
    """Whether it can be trained now."""
    progress: int


def path_needs(counts: Mapping[PathId, int], standings: Mapping[PathId, Standing]) -> dict[PathId, Need]:
    """Of paths with so many claimants; one of which nothing more is known has not begun."""
    found = {path: (count, standings.get(path, Standing())) for path, count in counts.items()}
    return {path: Need(count, how_far.is_due, how_far.progress) for path, (count, how_far) in found.items()}


def draw_path(needs: Mapping[PathId, Need], *, seed: int, held: frozenset[PathId] = frozenset()) -> PathId:
    """One of these paths, by chance.

    The weight of a path falls with its claimants first, then with its progress. It never is nothing, so that a path of
    which a leader lies is drawn by somebody; and many that draw at one moment spread out.
    """
    fewest = min(claimants for claimants, _, _ in needs.values())
    least = min(progress for _, _, progress in needs.values())

    def weight(path: PathId) -> float:
        claimants, is_due, progress = needs[path]
        steps = min(progress - least, PROGRESS_STEPS_MAX)
        chance = COUNT_BASE ** (fewest - claimants) * PROGRESS_BASE**-steps * (1.0 if is_due else 0.5)
        return max(chance * (HELD_FACTOR if path in held else 1.0), 1e-6)

    order = sorted(needs)
    return random.Random(seed).choices(order, weights=list(map(weight, order)))[0]


def share_moving(rank: int, counts: Mapping[PathId, int]) -> float:
    """Of the claimants of this rank that see the same gap, the share that moves now: a few for each claimant that is
    missing, or all would run to one path. Each draws for itself."""
    missing = sum(max(0, rank - count) for count in counts.values())
    movers = sum(max(0, count - rank) for count in counts.values())
    return min(1.0, MOVERS * missing / max(movers, 1))
