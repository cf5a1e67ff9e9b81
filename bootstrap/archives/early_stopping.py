"""What the coordinator reads from a run's evaluations: its loss with early stopping, and when a round did damage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco_p2p.core.routing.evaluate import Evaluation
from dipaco_p2p.use.best_rounds import best_rounds, number_of

JUMP_NATS = 0.25
"""By which the routed loss may rise above the best round's before the coordinator is told to look: 28 % perplexity.
Honest outer steps overshoot by up to a third of that in a run's first rounds (docs/log.md, 2026-11-26)."""


def stopped_evaluation(rows: list[dict[str, Any]]) -> Evaluation | None:
    """All validation sequences, each path at its best round; None before anything was judged."""
    if not rows:
        return None
    by_version = {row["version"]: row for row in rows}
    found = [by_version[version]["paths"][path] for path, version in best_rounds(rows).items()]
    parts = [Evaluation(nats_total=row["loss"] * row["tokens"], tokens=row["tokens"]) for row in found if row["tokens"]]
    return total(parts)


def total(parts: list[Evaluation]) -> Evaluation:
    return Evaluation(
        nats_total=math.fsum(part.nats_total for part in parts), tokens=sum(part.tokens for part in parts)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A round that made the model worse than it ever ought to, seen from the best round before it."""

    version: int
    best: int
    nats: float
    """By which the routed loss rose."""
    modules: Mapping[str, float]
    """Those whose own loss rose by more than JUMP_NATS, the worst first, and by how much."""


def jump(rows: Sequence[Mapping[str, Any]]) -> Jump | None:
    """Whether the last of these evaluations jumped beyond JUMP_NATS and the one before it had not; None if not."""
    if len(rows) < 2:
        return None
    *before, last = rows
    best = min(before, key=_loss)
    if not _loss(last) - _loss(best) > JUMP_NATS >= _loss(before[-1]) - _loss(best):
        return None
    rises = {module: number_of(loss) - number_of(best["modules"][module]) for module, loss in last["modules"].items()}
    worst = sorted((item for item in rises.items() if item[1] > JUMP_NATS), key=lambda item: -item[1])
    return Jump(version=last["version"], best=best["version"], nats=_loss(last) - _loss(best), modules=dict(worst))


def _loss(row: Mapping[str, Any]) -> float:
    return number_of(row["loss"])
