"""The final loss of a small grid with each codec, on the same start, text and batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.lost_work.cases import ROUND_STEPS, WIDTH, LossJob
from benchmarks.lost_work.training import Start, perplexity, prepare
from benchmarks.methods.data import Data
from benchmarks.methods.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How outer gradients and updates travel, and the outer step that goes with it."""

    name: str
    codec: str
    down: str = "int8"
    feedback: bool = True
    decay: float = 1.0
    lr: float = 0.7
    momentum: float = 0.9
    rule: str = "sqrt"


REFERENCE = Setting(name="float32 both ways", codec="fp32")
SHORT = (
    REFERENCE,
    Setting(name="int8 up, int8 down", codec="int8"),
    Setting(name="int4 up, int8 down", codec="int4"),
    Setting(name="int4 up, int4 down", codec="int4", down="int4"),
    Setting(name="int4 up without feedback, int4 down", codec="int4", down="int4", feedback=False),
    Setting(name="top64 up, int4 down", codec="top64", down="int4"),
)
LONG = (
    REFERENCE,
    Setting(name="int4 up, int4 down", codec="int4", down="int4"),
    Setting(name="top64 up, int4 down", codec="top64", down="int4"),
    Setting(name="top64, lr 1, momentum 0", codec="top64", down="int4", lr=1.0, momentum=0.0),
    Setting(name="top64, lr 1, momentum 0, decay 0.95", codec="top64", down="int4", lr=1.0, momentum=0.0, decay=0.95),
    Setting(name="top64, lr 1, momentum 0, decay 0.8", codec="top64", down="int4", lr=1.0, momentum=0.0, decay=0.8),
    Setting(name="top64, lr 1, momentum 0, decay 0.5", codec="top64", down="int4", lr=1.0, momentum=0.0, decay=0.5),
    Setting(name="top64, lr 0.7, momentum 0.5, decay 0.95", codec="top64", down="int4", momentum=0.5, decay=0.95),
)
"""The reference keeps its own outer step: what counts is the best that each can do."""


def start_of(data: Data, seed: int, *, rounds: int, fast: bool) -> Start:
    """What all settings of a seed have in common."""
    steps = rounds * ROUND_STEPS
    job = LossJob(method="compression", seed=seed, width=WIDTH, steps=steps, round_steps=ROUND_STEPS)
    return prepare(data, job, fast=fast)


def final_loss(
    data: Data, start: Start, setting: Setting, *, fast: bool, on_round: Callable[[int, float], None] | None = None
) -> float:
    """Nats per token after all rounds; `on_round` hears it after every tenth."""
    values = {name: getattr(setting, name) for name in ("codec", "down", "feedback", "decay", "lr", "momentum", "rule")}
    job = replace(start.job, **values)
    grid = Grid(job, start.warm, start.shards, fast=fast)
    chosen = start.router.assign(start.report)
    for number in range(job.rounds):
        grid.round(number, lambda report: True)
        if on_round is not None and (number + 1) % 10 == 0:
            on_round(number + 1, math.log(perplexity(grid, data, chosen)))
    return math.log(perplexity(grid, data, chosen))
