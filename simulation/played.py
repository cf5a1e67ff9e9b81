"""What came of the seeds that were played at one state of the code: kept on disk, so that a range that was stopped is
continued, and nothing is played twice.

    build/simulation/<digest of the code and of the wish>.jsonl     one line per seed

Rule: a seed names a run of one state of the code, so any change to a Python file of the programs or of the simulation,
or to a version that numbers depend on, begins a new record.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from .checks import Broken
from .runner import Result, Wish

REPO = Path(__file__).parents[1]
CODE = ("dipaco_p2p", "peers", "bootstrap", "simulation")
FOLDER = Path("build") / "simulation"


def state_of_the_code(wish: Wish) -> str:
    """A digest of all that a run depends on but its seed."""
    found = hashlib.sha256(f"{platform.python_version()} {np.__version__} {wish!r}".encode())
    for path in sorted(path for folder in CODE for path in (REPO / folder).rglob("*.py")):
        found.update(str(path.relative_to(REPO)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


class Played:
    """The results of one state of the code and one wish, in memory and on disk."""

    def __init__(self, folder: Path, wish: Wish) -> None:
        """Read what was played before. A line that was cut short when the process died is played again."""
        self.path = folder / f"{state_of_the_code(wish)[:16]}.jsonl"
        self.results: dict[int, Result] = {}
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                if (result := _read(line)) is not None:
                    self.results[result.seed] = result

    def add(self, result: Result) -> None:
        """Keep one more result."""
        self.results[result.seed] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(file.seek(0, 2) - 1, 0))
            is_cut = file.read() not in (b"", b"\n")
            file.write(b"\n" * is_cut + json.dumps(_plain(result)).encode() + b"\n")

    def of(self, seeds: Sequence[int]) -> list[Result]:
        """What is known of these seeds, in their order."""
        return [self.results[seed] for seed in seeds if seed in self.results]


def _plain(result: Result) -> dict[str, Any]:
    """As JSON has it. `asdict` would make each Counter anew, from pairs, and count these."""
    counters = {"faults": dict(result.faults), "points": dict(result.points)}
    return asdict(replace(result, faults=Counter(), points=Counter())) | counters


def _read(line: bytes) -> Result | None:
    try:
        values = json.loads(line)
        broken = tuple(Broken(**each) for each in values.pop("broken"))
        faults, points = Counter(values.pop("faults")), Counter(values.pop("points"))
        return Result(**values, broken=broken, faults=faults, points=points)
    except (ValueError, TypeError, KeyError):
        return None
