"""What is lost in a case, and by which rule the owners go on.

Rule 1: a path's contribution to all its modules is lost, late or here together, by the lot of the draw: the same in all
cases of a draw with the same share.
Rule 2: a late contribution comes with the next round's, and what is late in the last round never comes.
Rule 3: everything else is as in a run: the same weights, average, outer step and compression (benchmarks/methods).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.methods.grid import Arrived, Contribution, Grid, WarmStart
from benchmarks.methods.jobs import GRIDS, Job
from dipaco_p2p.config import InnerConfig, ModelConfig
from dipaco_p2p.core.compress import compress
from dipaco_p2p.core.inner import StepReport
from dipaco_p2p.core.outer import outer_step
from dipaco_p2p.core.shards import Shard
from dipaco_p2p.topology import ModuleId

CONTEXT = 128
WIDTH = 32
VOCAB_SIZE = 1024
ROUNDS = 6
ROUND_STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of losing work."""

    name: str
    lost: float = 0.0
    """Share of the contributions that do not come in time."""
    is_late: bool = False
    """What does not come in time comes with the next round, instead of never."""
    late_weight: float = 1.0
    """What a late contribution weighs, of what it would have weighed in time."""
    untrained: bool = False
    """One path is never trained; which, goes with the draw."""
    zero: bool = False
    """What is missing counts as an outer gradient of zeros, with its weight; else it is left out."""
    momentum: bool = False
    """A module for which nothing came takes a step of its momentum; else it stays as it is."""


CASES = (
    Case(name="clean"),
    Case(name="30 % lost, left out", lost=0.3),
    Case(name="30 % lost, counts as zero", lost=0.3, zero=True),
    Case(name="30 % a round late, used; left out meanwhile", lost=0.3, is_late=True),
    Case(name="30 % a round late, a quarter used; left out meanwhile", lost=0.3, is_late=True, late_weight=0.25),
    Case(name="30 % a round late, used; zero meanwhile", lost=0.3, is_late=True, zero=True),
    Case(name="60 % lost, left out; nothing came: no step", lost=0.6),
    Case(name="60 % lost, left out; nothing came: momentum", lost=0.6, momentum=True),
    Case(name="60 % lost, counts as zero; nothing came: no step", lost=0.6, zero=True),
    Case(name="one path never trained, left out", untrained=True),
    Case(name="one path never trained, counts as zero", untrained=True, zero=True),
)
"""A late contribution that is refused is one that is lost: the same lots, the same result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossJob(Job):
    """A 2x2 grid that trains in seconds."""

    context: int = CONTEXT

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=VOCAB_SIZE,
            width=self.width,
            heads=2,
            ffn_width=3 * self.width,
            context=self.context,
            levels=GRIDS[self.grid],
        )

    @property
    def inner(self) -> InnerConfig:
        return InnerConfig(steps=self.round_steps)


def job_of(draw: int, *, rounds: int = ROUNDS) -> LossJob:
    """Of a draw: its start, its batches, its lots."""
    return LossJob(method="lost work", seed=draw, width=WIDTH, steps=rounds * ROUND_STEPS, round_steps=ROUND_STEPS)


class LossyGrid(Grid):
    """A grid whose contributions do not all arrive."""

    def __init__(self, job: Job, start: WarmStart, shards: Sequence[Shard], *, case: Case, fast: bool) -> None:
        super().__init__(job, start, shards, fast=fast)
        self._case = case
        self._late: Arrived = {}

    def round(self, number: int, on_step: Callable[[StepReport], bool]) -> None:
        """Train every path, lose what the case loses, step the modules."""
        made = self.train(number, on_step)
        missing = missing_paths(self._case, self.job.seed, number, self.topology.path_count)
        names = {str(self.topology.path(place)) for place in missing}
        here: Arrived = {}
        for module, found in made.items():
            here[module] = self._late.get(module, []) + [c for c in found if c.share.path not in names]
            if self._case.zero and here[module]:
                here[module] += [nothing(c) for c in found if c.share.path in names]
        if self._case.is_late:
            self._late = {
                module: [weighed(c, self._case.late_weight) for c in found if c.share.path in names]
                for module, found in made.items()
            }
        self.step(here, number)
        if self._case.momentum:
            for module in (module for module, found in here.items() if not found):
                self._coast(module)

    def _coast(self, module: ModuleId) -> None:
        state = self.states[module]
        zeros = np.zeros_like(state.params)
        self.states[module] = outer_step(state, zeros, lr=self.job.lr, momentum=self.job.momentum)[0]


def missing_paths(case: Case, draw: int, number: int, paths: int) -> list[int]:
    """The paths, by number, whose contributions of a round do not come in time."""
    lots = np.random.default_rng([draw, 91, number]).random(paths)
    lost = [place for place in range(paths) if lots[place] < case.lost]
    return sorted({*lost, untrained_path(draw, paths)}) if case.untrained else lost


def untrained_path(draw: int, paths: int) -> int:
    """The path that is never trained in the cases that have one."""
    return draw % paths


def weighed(contribution: Contribution, weight: float) -> Contribution:
    """The same outer gradient with a part of its weight: as if fewer tokens had been trained for it."""
    share = contribution.share
    return replace(contribution, share=replace(share, tokens=max(1, round(weight * share.tokens))))


def nothing(contribution: Contribution) -> Contribution:
    """The same share of the average, and an outer gradient of zeros."""
    gradient = contribution.gradient
    assert hasattr(gradient, "size")
    return replace(contribution, gradient=compress(np.zeros(gradient.size, dtype=np.float32))[0])
