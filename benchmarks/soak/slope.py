"""Does a measure grow? A line through its samples after the warm-up, and a bound on how much it may rise; pure.

The line is Theil's and Sen's: the median of the slopes of all pairs of samples, which a few outliers (a round that is
being made, a peer that was just started again) do not move. A measure grows if the line rises over the samples by more
than its bound, which is an amount or a share of its level: a small count may double, and a large one wanders.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

PAIRS_MAX = 400
"""Samples that the line goes through: of more, as many are taken at equal distances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """By how much a measure may rise while it is watched."""

    rise: float
    share: float = 0.0
    """Of its level: the greater of both counts."""
    per_round: float = 0.0
    """What is kept for good of every round, besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """What one measure did."""

    measure: str
    level: float
    """Its median."""
    rise: float
    """Of the line, over all samples."""
    allowed: float
    highest: float

    @property
    def grows(self) -> bool:
        return self.rise > self.allowed


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope; 0 for fewer than two points."""
    chosen = points[:: max(1, len(points) // PAIRS_MAX + 1)]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(chosen, 2) if x2 > x1]
    return statistics.median(slopes) if slopes else 0.0


def trend(measure: str, points: Sequence[tuple[float, float]], bound: Bound, *, rounds: float = 0.0) -> Trend:
    """What `points` (seconds, value) did, against `bound`; `rounds` went by meanwhile."""
    values = [value for _, value in points]
    level = statistics.median(values)
    seconds = points[-1][0] - points[0][0]
    return Trend(
        measure=measure,
        level=level,
        rise=slope(points) * seconds,
        allowed=max(bound.rise, bound.share * level) + bound.per_round * rounds,
        highest=max(values),
    )


def series(
    samples: Sequence[tuple[float, Mapping[str, float]]], *, warm_up: float
) -> dict[str, list[tuple[float, float]]]:
    """Each measure's points, without the first share `warm_up` of the time."""
    from_s = samples[0][0] + warm_up * (samples[-1][0] - samples[0][0])
    found: dict[str, list[tuple[float, float]]] = {}
    for at_s, sample in samples:
        if at_s >= from_s:
            for measure, value in sample.items():
                found.setdefault(measure, []).append((at_s, value))
    return found
