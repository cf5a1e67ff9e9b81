"""Early stopping: the round that each path is served with, as the seed node found it and as others read it.

    {"rounds": {"P0-1": 7, ...}, "losses": {"P0-1": 3.42, ...}}

All paths are named, or none before a round was judged; losses (nats per token, on the validation part) where they are
known. A path is served whole: all its modules at its one round. What is trained is always the newest, and the routers
are those of the newest sharding. Source: DiPaCo (arXiv 2403.10616) section 2.7.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import IntegrityError
from ..node.run import Run
from ..topology import PathId

LOSS_MAX = 1e6
"""Nats per token; beyond that, or not a number, a loss says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """What one path is served with."""

    version: int
    """Of each of its modules."""
    loss: float | None = None
    """Nats per token on the validation sequences that were routed to the path; None where that is not known."""


def serving_header(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What to tell of the evaluator's rows."""
    paths = {row["version"]: row["paths"] for row in rows}
    rounds = best_rounds(rows)
    losses = {path: paths[version][path]["loss"] for path, version in rounds.items()}
    return {"rounds": rounds, "losses": {path: loss for path, loss in losses.items() if _is_loss(loss)}}


def read_serving(header: dict[str, Any], run: Run) -> dict[PathId, Best]:
    """The inverse, of anybody's `header`: all paths of `run`, or none. Raises IntegrityError."""
    rounds, losses = header.get("rounds"), header.get("losses", {})
    if not isinstance(rounds, dict) or not isinstance(losses, dict) or not header.keys() <= {"rounds", "losses"}:
        raise IntegrityError("the answer about which round each path is served with is malformed")
    if not rounds:
        return {}
    names = {str(path): path for path in run.topology.paths()}
    if rounds.keys() != names.keys() or not losses.keys() <= names.keys():
        raise IntegrityError(f"the rounds to serve paths with are not those of the paths of {run.name}")
    for name, version in rounds.items():
        if type(version) is not int or not 0 <= version <= run.config.rounds.rounds:
            raise IntegrityError(f"{name} cannot be served with round {_quoted(version)} of {run.config.rounds.rounds}")
        if name in losses and not _is_loss(losses[name]):
            raise IntegrityError(f"{name} cannot have a loss of {_quoted(losses[name])}")
    return {path: Best(version=rounds[name], loss=losses.get(name)) for name, path in names.items()}


def _is_loss(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LOSS_MAX


def _quoted(value: object) -> str:
    return f"`{value!r:.40}`"


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The judged rounds, in order of version; a line that was not written to its end is passed over."""
    if not path.exists():
        return []
    rows = [row for line in path.read_bytes().splitlines() if (row := _row(line)) is not None]
    return sorted({row["version"]: row for row in rows}.values(), key=lambda row: row["version"])


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "version" in row else None


def best_rounds(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Per path the round that it is served with: the best on the holdout since the last sharding; ties to the newer."""
    last = max((row["sharding"] for row in rows), default=0)
    best: dict[str, tuple[float, int]] = {}
    for row in sorted(rows, key=lambda row: int(row["version"])):
        if row["sharding"] == last:
            for path, found in row["paths"].items():
                loss = found["holdout_loss"]
                if path not in best or loss is None or number_of(loss) <= best[path][0]:
                    best[path] = (number_of(loss), row["version"])
    return {path: version for path, (_, version) in best.items()}


def number_of(loss: float | None) -> float:
    """What is no number, as of a path that diverged, is worse than any."""
    return math.inf if loss is None or math.isnan(loss) else loss
