"""Does anything grow while a swarm runs? What its processes hold, from Linux's /proc, and a line through the samples.

A volunteer counts with its libp2p daemon. Memory is PSS (proportional set size): shared pages count once over all
processes, so the sum is what the machine really gives. On disk, blobs are counted apart from everything else: blobs are
pruned, chains and histories are kept. Shards and inner states do not count: a volunteer keeps those of every path that
it comes to, and the number of paths is bounded.

The line is the Theil-Sen estimator: the median of the slopes of all pairs of samples, which a few outliers (a round
that is being made, a peer that has just started again) do not move. A measure grows if the line rises over the samples
by more than its bound, which is an amount or a share of its level: a small count may double, and a large one wanders.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from benchmarks.processes import memory_bytes
from peers.governor.machine import PROC, descendants

from .schedule import SEED_NODE

SHARED_MEMORY = Path("/dev/shm")
SOCKET_FOLDER = Path("/tmp")
DIGEST = re.compile(r"[0-9a-f]{64}")
Sample = dict[str, float]
"""Measure, or measure and member as `memory_bytes volunteer-1`, to its value."""


def family(pid: int) -> list[int]:
    """A process and all its descendants; empty for one that has ended."""
    return [pid, *descendants(pid)] if (PROC / str(pid)).exists() else []


def open_files(pid: int) -> tuple[int, int]:
    """How many files it has open, and how many of them are sockets."""
    targets = []
    with contextlib.suppress(OSError):
        for link in (PROC / f"{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(str(link.readlink()))
    return len(targets), sum(target.startswith("socket:") for target in targets)


def threads(pid: int) -> int:
    """How many threads it has."""
    with contextlib.suppress(OSError):
        return len(list((PROC / f"{pid}/task").iterdir()))
    return 0


def disk_bytes(folder: Path) -> tuple[int, int]:
    """What the blobs under `folder` take that are not some path's, and all other files."""
    blobs = others = 0
    of_paths = _of_paths(folder)
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            size = path.stat().st_size if path.is_file() and path.name not in of_paths else 0
            blobs, others = (blobs + size, others) if "blobs" in path.parts else (blobs, others + size)
    return blobs, others


def _of_paths(folder: Path) -> set[str]:
    """The names of the shards and inner states."""
    names: set[str] = set()
    for pattern in ("manifest.json", "state-*.json"):
        for path in folder.rglob(f"documents/{pattern}"):
            with contextlib.suppress(OSError):
                names.update(DIGEST.findall(path.read_text()))
    return names


def take(pids: dict[str, int], homes: dict[str, Path], *, is_alone: bool = True) -> Sample:
    """Everything, by member; and what belongs to the machine, if nobody else on it starts peers."""
    sample: Sample = _of_machine() if is_alone else {}
    for name, root in pids.items():
        members = family(root)
        files = [open_files(member) for member in members]
        blobs, others = disk_bytes(homes[name])
        sample |= {
            f"memory_bytes {name}": float(sum(memory_bytes(pid, "Pss", file="smaps_rollup") for pid in members)),
            f"open_files {name}": float(sum(count for count, _ in files)),
            f"sockets {name}": float(sum(count for _, count in files)),
            f"threads {name}": float(sum(map(threads, members))),
            f"processes {name}": float(len(members)),
            f"blob_bytes {name}": float(blobs),
            f"kept_bytes {name}": float(others),
        }
    return sample


def _of_machine() -> Sample:
    """What a killed process leaves behind and nobody owns."""
    return {
        "shared_memory_files": float(len(list(SHARED_MEMORY.glob("*")))),
        "daemon_sockets": float(len(list(SOCKET_FOLDER.glob("hivemind-*.sock")))),
    }


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
