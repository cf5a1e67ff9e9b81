"""The final loss of a small grid whose rounds begin from an estimate, on the same start, text and batches.

Every path trains round r + 1 from an estimate of version r + 1, made from version r and its own outer gradient; what
these steps did is averaged with the others' and steps version r + 1, as in peers/path/ahead.py. (N,) are flat vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.lost_work.cases import ROUND_STEPS, WIDTH, LossJob
from benchmarks.lost_work.training import Start, perplexity, prepare
from benchmarks.methods.data import Data
from benchmarks.methods.grid import Arrived, Grid, WarmStart
from benchmarks.methods.jobs import Job
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.outer import weights
from dipaco_p2p.core.overlap import Course
from dipaco_p2p.core.shards import Shard
from dipaco_p2p.topology import ModuleId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """What a path knows of one module when its inner steps have ended."""

    course: Course
    own: Floats
    """Its fresh outer gradient."""
    others: Floats | None
    """What the last average had of all others; None in the first round."""
    weight: float
    """What its own last outer gradient weighed in that average."""
    job: Job

    def ahead(self, gradient: Floats) -> Floats:
        """The next version, if that is the average."""
        return self.course.ahead(gradient, lr=self.job.lr, momentum=self.job.momentum)


Estimate = Callable[[Known], Floats]

OFF = "off"
ESTIMATES: dict[str, Estimate | None] = {
    OFF: None,
    "on: the outer step with the own gradient": lambda known: known.ahead(known.own),
    "others' last gradients, own fresh one": lambda known: known.ahead(
        known.own if known.others is None else known.others + known.own * known.weight
    ),
    "own gradient, no momentum": lambda known: known.course.params - known.own * known.job.lr,
    "own parameters": lambda known: known.course.params - known.own,
    "the version before, as it is": lambda known: known.course.params,
}
"""The second is what a run does; the third is the eager update of arXiv 2502.12996."""


class OverlappedGrid(Grid):
    """A grid whose paths do not wait for each other's outer gradients."""

    def __init__(self, job: Job, start: WarmStart, shards: Sequence[Shard], *, estimate: Estimate, fast: bool) -> None:
        assert job.replicas == 1, job.replicas
        super().__init__(job, start, shards, fast=fast)
        self._estimate = estimate
        self._courses = {module: Course.begin(state.params) for module, state in self.states.items()}
        self._others: dict[tuple[int, ModuleId], tuple[Floats, float]] = {}
        self._starts: dict[int, list[Floats]] = {}

    def starts(self, number: int) -> list[Floats]:
        return self._starts.get(number) or self.flats(number)

    def step(self, arrived: Arrived, number: int) -> None:
        """Estimate for every path where its next round begins, then step the modules."""
        for place, [worker] in enumerate(self._workers):
            modules = zip(worker.path.modules(), worker.own, strict=True)
            self._starts[place] = [self._estimate(self._known(place, module, own)) for module, own in modules]
        super().step(arrived, number)
        for module, contributions in arrived.items():
            self._follow(module, weights([c.share for c in contributions], tokens_full=1))

    def _known(self, place: int, module: ModuleId, own: Floats) -> Known:
        others, weight = self._others.get((place, module), (None, 1.0))
        return Known(course=self._courses[module], own=own, others=others, weight=weight, job=self.job)

    def _follow(self, module: ModuleId, alphas: Sequence[float]) -> None:
        before, momentum = self._courses[module], self.job.momentum
        after = before.follow(self.states[module].params, lr=self.job.lr, momentum=momentum)
        average = after.momentum - before.momentum * momentum
        length = 1 / math.sqrt(math.fsum(alpha * alpha for alpha in alphas)) if self.job.rule == "sqrt" else 1.0
        places = map(self.topology.number, self.topology.paths_through(module))
        for place, alpha in zip(places, alphas, strict=True):
            own = self._workers[place][0].own[module.level]
            self._others[place, module] = (average - own * (alpha * length), alpha * length)
        self._courses[module] = after


def start_of(data: Data, seed: int, *, rounds: int, fast: bool) -> Start:
    """What all estimates of a seed have in common, with the codecs that a run file has by default."""
    steps = rounds * ROUND_STEPS
    job = LossJob(
        method="overlap", seed=seed, width=WIDTH, steps=steps, round_steps=ROUND_STEPS, codec="int4", down="int4"
    )
    return prepare(data, job, fast=fast)


def final_loss(data: Data, start: Start, estimate: Estimate | None, *, fast: bool) -> float:
    """Nats per token after all rounds; None waits for the versions themselves."""
    job = start.job
    if estimate is None:
        grid = Grid(job, start.warm, start.shards, fast=fast)
    else:
        grid = OverlappedGrid(job, start.warm, start.shards, estimate=estimate, fast=fast)
    for number in range(job.rounds):
        grid.round(number, lambda report: True)
    return math.log(perplexity(grid, data, start.router.assign(start.report)))
