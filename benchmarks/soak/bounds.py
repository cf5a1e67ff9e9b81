"""How much each measure may rise over a soak, and what came of it; docs/churn.md gives the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.chaos.schedule import SEED_NODE

from .slope import Bound, Trend, series, trend

MIB = 1024 * 1024

BOUNDS = {
    "memory_bytes": Bound(rise=24 * MIB, share=0.08),
    "open_files": Bound(rise=16, share=0.25),
    "sockets": Bound(rise=16, share=0.25),
    "threads": Bound(rise=8, share=0.25),
    "processes": Bound(rise=0.5),
    "shared_memory_files": Bound(rise=0.5),
    "daemon_sockets": Bound(rise=0.5),
    "blob_bytes": Bound(rise=2 * MIB, share=0.25),
    "kept_bytes": Bound(rise=MIB / 2, per_round=48 * 1024),
    "heartbeats": Bound(rise=1.0),
    "claims": Bound(rise=2.0),
    "heads": Bound(rise=4.0),
}
"""By the first word of a measure. Of every round a volunteer keeps one version a module, and lines in its history."""
SEEDS = {
    "blob_bytes": Bound(rise=4 * MIB, per_round=8 * MIB),
    "kept_bytes": Bound(rise=MIB, per_round=256 * 1024),
}
"""The seed node is the archive: it keeps all versions and contributions."""


def bound_of(measure: str) -> Bound:
    """The bound of a measure, which names its member after a blank."""
    name, _, member = measure.partition(" ")
    return SEEDS[name] if member == SEED_NODE and name in SEEDS else BOUNDS[name]


def trends(samples: Sequence[tuple[float, Mapping[str, float]]], *, rounds_per_s: float, warm_up: float) -> list[Trend]:
    """What every measure did after the first share `warm_up` of the time."""
    found = []
    for measure, points in sorted(series(samples, warm_up=warm_up).items()):
        rounds = rounds_per_s * (points[-1][0] - points[0][0])
        found.append(trend(measure, points, bound_of(measure), rounds=rounds))
    return found
