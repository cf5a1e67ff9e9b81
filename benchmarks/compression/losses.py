"""The final loss of a small grid with each codec, on the same start, text and batches."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

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
    goes_on: bool = True
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
    Setting(name="top128 up, int4 down", codec="top128", down="int4"),
)
SHORT_ROUNDS = replace(REFERENCE, name="float32, momentum 0.8", momentum=0.8)
"""Rounds of few steps want a shorter memory than the default's."""
_TOP = Setting(name="top128, lr 0.8, momentum 0.7", codec="top128", down="int4", lr=0.8, momentum=0.7)
LONG = (
    REFERENCE,
    SHORT_ROUNDS,
    Setting(name="int4 up, int4 down", codec="int4", down="int4"),
    _TOP,
    replace(_TOP, name="top128, lr 1, momentum 0.5", lr=1.0, momentum=0.5),
    replace(_TOP, name="top128, lr 1, momentum 0", lr=1.0, momentum=0.0),
    replace(
        _TOP,
        name="top128, begun at the versions, lr 1, momentum 0, decay 0.95",
        goes_on=False,
        lr=1.0,
        momentum=0.0,
        decay=0.95,
    ),
)
"""Float32 has outer steps of its own: what counts is the best that each can do."""


def start_of(data: Data, seed: int, *, rounds: int, steps: int = ROUND_STEPS, fast: bool) -> Start:
    """What all settings of a seed have in common; `steps` is how many inner steps a round has."""
    job = LossJob(method="compression", seed=seed, width=WIDTH, steps=rounds * steps, round_steps=steps)
    return prepare(data, job, fast=fast)


def due(rounds: int, times: int) -> set[int]:
    """After which rounds the loss is taken."""
    return {rounds * (time + 1) // times for time in range(times)} - {0}


def curve(data: Data, start: Start, setting: Setting, *, fast: bool, times: int = 1) -> dict[int, float]:
    """Nats per token by the number of rounds, so many `times` in the run; the last is after all of them."""
    values = asdict(setting)
    del values["name"]
    job = replace(start.job, **values)
    grid = Grid(job, start.warm, start.shards, fast=fast)
    chosen = start.router.assign(start.report)
    found, wanted = {}, due(job.rounds, times)
    for number in range(job.rounds):
        grid.round(number, lambda report: True)
        if number + 1 in wanted:
            found[number + 1] = math.log(perplexity(grid, data, chosen))
    return found
