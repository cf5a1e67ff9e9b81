"""Variations of short runs of a 2x2 grid, each held against a reference with the same start, text and batches.

    lost-work           what missing and late contributions cost, and which rule for them is better (docs/lost_work.md)
    compression         codecs of outer gradients and updates
    compression-long    the same in long runs, where top128 belongs
    compression-mixed   top128 with int4 in the first or last rounds
    compression-curve   bytes against loss: every codec with the outer steps that suit it, what a round sends, and owes
    density             sparser outer gradients for the module that more paths share
    repair              forged work that is found after it counted: kept, rolled back, or rebuilt without it
    overlap             rounds that begin from an estimate of the next version
    muon                AdamW and Muon as inner optimizers, each with every inner rate and outer momentum of one grid

Every cost is over the reference of the same seed, so that what differs between seeds for other reasons cancels. With
`overlap` every path trains round r + 1 from an estimate of version r + 1, made from version r and its own outer
gradient; what these steps did is averaged with the others' and steps version r + 1, as in peers/path/ahead.py. (N,)
are flat vectors.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.report import spread, table
from dipaco_p2p.config import ADAMW
from dipaco_p2p.config import MUON as MUON_OPTIMIZER
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.outer.compress import Sent
from dipaco_p2p.core.outer.outer_step import Course, weights
from dipaco_p2p.topology import ModuleId

from .grid import Arrived, Grid, WarmStart
from .jobs import SIZES, Job
from .repair import KEPT, REBUILT, REFUSED, ROLLED_BACK
from .repair import ROUNDS as FORGED_ROUNDS

ELSEWHERE = "; its documents routed elsewhere"
CLEAN, OFF, OFF_SHORT = "clean", "off", "off, momentum 0.8"
FLOAT32, FLOAT32_SHORT = "float32 both ways", "float32, momentum 0.8"

Fields = Mapping[str, object]
Losses = Mapping[str, Sequence[float]]
"""Of each variation, the final loss of each seed in nats per token."""
Curves = Mapping[str, Sequence[Mapping[int, float]]]
"""Of each variation, the loss of each seed by the number of rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variations by name, as fields of a job, and what they are held against."""

    variations: Mapping[str, Fields]
    references: tuple[str, ...]
    """The best of them in a seed counts."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Two rules for the same loss."""
    seeds: int = 2
    rounds: int = 6
    steps: int = 30
    """Inner steps of a round."""
    points: int = 1
    """How often the loss is taken."""
    rivals: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Two groups of variations, of which each has its best: how long the second takes to the loss of the first."""

    def jobs(self, seeds: Sequence[int]) -> dict[str, list[Job]]:
        """Of every variation, the job of each seed."""
        found = {}
        for name, fields in self.variations.items():
            job = Job(method=name, seed=0, size="short", steps=self.rounds * self.steps, round_steps=self.steps)
            job = replace(job, points=self.points, **fields)  # type: ignore[arg-type]  # the fields are those of Job
            found[name] = [replace(job, seed=seed) for seed in seeds]
        return found


_LATE = "30 % a round late, used; left out meanwhile"
_QUARTER = "30 % a round late, a quarter used; left out meanwhile"
_LESS, _HALF = "30 % lost, left out", "60 % lost, left out; nothing came: no step"
_NEVER = "one path never trained, left out"
LOST_WORK = Comparison(
    variations={
        CLEAN: {},
        _LESS: {"drop": 0.3},
        "30 % lost, counts as zero": {"drop": 0.3, "zero": True},
        _LATE: {"drop": 0.3, "late": 1.0},
        _QUARTER: {"drop": 0.3, "late": 0.25},
        "30 % a round late, used; zero meanwhile": {"drop": 0.3, "late": 1.0, "zero": True},
        _HALF: {"drop": 0.6},
        "60 % lost, left out; nothing came: momentum": {"drop": 0.6, "coasts": True},
        "60 % lost, counts as zero; nothing came: no step": {"drop": 0.6, "zero": True},
        _NEVER: {"untrained": True},
        "one path never trained, counts as zero": {"untrained": True, "zero": True},
    },
    references=(CLEAN,),
    pairs=(
        (_LESS, "30 % lost, counts as zero"),
        (_HALF, "60 % lost, counts as zero; nothing came: no step"),
        (_NEVER, "one path never trained, counts as zero"),
        (_HALF, "60 % lost, left out; nothing came: momentum"),
        (_LATE, "30 % a round late, used; zero meanwhile"),
        (_LATE, _LESS),
        (_QUARTER, _LATE),
        (_QUARTER, _LESS),
        (_NEVER + ELSEWHERE, _NEVER),
    ),
    seeds=5,
)
"""A late contribution that is refused is one that is lost: the same lots, the same result."""

_FP32, _INT4, _TOP = {"codec": "fp32"}, {"codec": "int4", "down": "int4"}, {"codec": "top128", "down": "int4"}
COMPRESSION = Comparison(
    variations={
        FLOAT32: _FP32,
        "int8 up, int8 down": {"codec": "int8"},
        "int4 up, int8 down": {"codec": "int4"},
        "int4 up, int4 down": _INT4,
        "int4 up without feedback, int4 down": {**_INT4, "feedback": False},
        "top128 up, int4 down": _TOP,
    },
    references=(FLOAT32,),
)
_MEMORYLESS = {**_TOP, "lr": 1.0, "momentum": 0.0}
COMPRESSION_LONG = Comparison(
    variations={
        FLOAT32: _FP32,
        FLOAT32_SHORT: {**_FP32, "momentum": 0.8},  # rounds of few steps want a shorter memory than the default's
        "int4 up, int4 down": _INT4,
        "top128, lr 0.8, momentum 0.7": {**_TOP, "lr": 0.8, "momentum": 0.7},
        "top128, lr 1, momentum 0.5": {**_TOP, "lr": 1.0, "momentum": 0.5},
        "top128, lr 1, momentum 0": _MEMORYLESS,
        "top128, begun at the versions, lr 1, momentum 0, decay 0.95": {**_MEMORYLESS, "goes_on": False, "decay": 0.95},
    },
    references=(FLOAT32, FLOAT32_SHORT),
    rounds=60,
    points=10,
)
"""Float32 has outer steps of its own: what counts is the best that each can do."""


COMPRESSION_MIXED = Comparison(
    variations={
        FLOAT32: _FP32,
        FLOAT32_SHORT: {**_FP32, "momentum": 0.8},
        "int4 up, int4 down": _INT4,
        **{
            f"top128, int4 in the first {first} and last {last}, lr {lr:g}, momentum {momentum:g}": {
                **_TOP,
                "lr": lr,
                "momentum": momentum,
                "dense_first": first,
                "dense_last": last,
            }
            for first, last in ((0, 0), (6, 6), (12, 0), (0, 12))
            for lr, momentum in ((1.0, 0.5), (0.8, 0.7))
        },
    },
    references=(FLOAT32, FLOAT32_SHORT),
    rounds=60,
    points=10,
)
"""Of 60 rounds 12 in int4 make a run's contributions 30 times smaller than float32, top128 alone 108 times."""


_STEPS: Mapping[str, Fields] = {
    "momentum 0.8": {"momentum": 0.8},
    "lr 0.8, momentum 0.7": {"lr": 0.8, "momentum": 0.7},
    "lr 0.9, momentum 0.7": {"lr": 0.9, "momentum": 0.7},
}
_FLOAT32_STEPS = {f"float32, {name}": {**_FP32, **step} for name, step in _STEPS.items()}
_TERNARY = {"codec": "ternary640", "down": "int4", **_STEPS["lr 0.9, momentum 0.7"]}
COMPRESSION_CURVE = Comparison(
    variations={
        FLOAT32: _FP32,
        **_FLOAT32_STEPS,
        "int4 both ways": _INT4,
        "int4 both ways, momentum 0.8": {**_INT4, "momentum": 0.8},
        "int2 up, int4 down, momentum 0.8": {"codec": "int2", "down": "int4", "momentum": 0.8},
        "int2 up, int4 down": {"codec": "int2", "down": "int4"},
        "int2 both ways": {"codec": "int2", "down": "int2"},
        **{
            f"{codec}, {name}": {"codec": codec, "down": "int4", **step}
            for codec in ("ternary640", "ternary320", "ternary160")
            for name, step in _STEPS.items()
        },
        "ternary640 by tensor, lr 0.9, momentum 0.7": {**_TERNARY, "by_tensor": True},
        "ternary640, int4 in the last 2, lr 0.8, momentum 0.7": {
            **_TERNARY,
            **_STEPS["lr 0.8, momentum 0.7"],
            "dense_last": 2,
        },
        **{
            f"ternary640, updates of the gradient in {down}, lr 0.9, momentum 0.7": {
                **_TERNARY,
                "down": down,
                "down_of": "gradient",
            }
            for down in ("fp32", "ternary640")
        },
    },
    references=(FLOAT32, *_FLOAT32_STEPS),
    rounds=60,
    points=10,
)
"""Bytes against loss. Of a run of `COMPRESSION_LONG`'s length, which has `top128`."""

_SHARED = {**_TERNARY, **_STEPS["lr 0.8, momentum 0.7"], "grid": "2x2 shared embedding"}
DENSITY = Comparison(
    variations={
        f"{trunk} in the trunk, {rest} in the other modules": {**_SHARED, "codecs": (trunk, rest, rest)}
        for trunk in ("ternary640", "ternary320")
        for rest in ("ternary640", "ternary320")
    },
    references=("ternary640 in the trunk, ternary640 in the other modules",),
    rounds=60,
)
"""Four paths share the trunk, two each other module."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """What a path knows of one module when its inner steps have ended."""

    course: Course
    own: Floats
    """Its fresh outer gradient."""
    others: Floats | None
    """The part of all others in the last average; None in the first round."""
    weight: float
    """The weight of its own last outer gradient in that average."""
    job: Job

    def ahead(self, gradient: Floats) -> Floats:
        """The next version, if that is the average."""
        return self.course.ahead(gradient, lr=self.job.lr, momentum=self.job.momentum)


_HALF = "on, with half the own gradient"
ESTIMATES: Mapping[str, Callable[[Known], Floats]] = {
    "on: the outer step with the own gradient": lambda known: known.ahead(known.own),
    "others' last gradients, own fresh one": lambda known: known.ahead(
        known.own if known.others is None else known.others + known.own * known.weight
    ),
    _HALF: lambda known: known.ahead(known.own * np.float32(0.5)),
    "halfway between the estimate and the own parameters": lambda known: (
        (known.ahead(known.own) + known.course.params - known.own) * np.float32(0.5)
    ),
    "own gradient, no momentum": lambda known: known.course.params - known.own * known.job.lr,
    "own parameters": lambda known: known.course.params - known.own,
    "the version before, as it is": lambda known: known.course.params,
}
"""The first is what a run does; the second is the eager update of arXiv 2502.12996."""

_ON = next(iter(ESTIMATES))
_ESTIMATED: dict[str, Fields] = {
    f"{name}, lr {lr:g}, momentum {momentum:g}": {**_INT4, "lr": lr, "momentum": momentum, "estimate": name}
    for name, steps in {
        **dict.fromkeys(ESTIMATES, ((0.7, 0.5),)),
        _HALF: ((0.7, 0.8), (0.7, 0.5)),
        _ON: ((0.7, 0.8), (0.7, 0.5), (0.6, 0.7), (0.5, 0.7), (0.4, 0.7), (0.3, 0.8)),
    }.items()
    for lr, momentum in steps
}
OVERLAP = Comparison(
    variations={OFF: _INT4, OFF_SHORT: {**_INT4, "momentum": 0.8}, **_ESTIMATED},
    references=(OFF, OFF_SHORT),
    rounds=60,
    points=10,
)
"""Steps from an estimate want a smaller outer step than those from a version."""

RATES, MOMENTA = (2.0, 4.0, 8.0, 16.0), (0.6, 0.3, 0.15)
"""Times the usual inner rate; and of the outer step: what MuLoCo (arXiv 2505.23725) takes for Muon, and less."""


def _tuned(optimizer: str) -> dict[str, Fields]:
    return {
        f"{optimizer}, inner rate x{rate:g}, outer momentum {momentum:g}": {
            **_INT4,
            "optimizer": optimizer,
            "inner_lr": rate,
            "momentum": momentum,
        }
        for rate in RATES
        for momentum in MOMENTA
    }


_ADAMW, _MUON = _tuned(ADAMW), _tuned(MUON_OPTIMIZER)
MUON = Comparison(
    variations=_ADAMW | _MUON,
    references=tuple(_ADAMW),
    rivals=(tuple(_ADAMW), tuple(_MUON)),
    rounds=20,
    points=10,
)

_SHORTER = {**_INT4, "momentum": 0.8}
REPAIR = Comparison(
    variations={CLEAN: _SHORTER}
    | {
        f"{factor:g} times the negative in {FORGED_ROUNDS} rounds, {repair}": {
            **_SHORTER,
            "forged": factor,
            "repair": repair,
        }
        for factor in (1.0, 3.0)
        for repair in (REFUSED, KEPT, ROLLED_BACK, REBUILT)
    },
    references=(CLEAN,),
    rounds=24,
    points=12,
)

COMPARISONS: Mapping[str, Comparison] = {
    "lost-work": LOST_WORK,
    "compression": COMPRESSION,
    "compression-long": COMPRESSION_LONG,
    "compression-mixed": COMPRESSION_MIXED,
    "compression-curve": COMPRESSION_CURVE,
    "density": DENSITY,
    "repair": REPAIR,
    "overlap": OVERLAP,
    "muon": MUON,
}


class OverlappedGrid(Grid):
    """A grid whose paths do not wait for each other's outer gradients."""

    def __init__(self, job: Job, start: WarmStart, shards: Sequence[Shard], *, fast: bool, device: str = "cpu") -> None:
        assert job.replicas == 1, job.replicas
        super().__init__(job, start, shards, fast=fast, device=device)
        self._estimate = ESTIMATES[job.estimate]
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


def curves_of(results: Mapping[str, Sequence[Mapping[str, Any]]], steps: int) -> dict[str, list[dict[int, float]]]:
    """The loss by the number of rounds, which have so many `steps`, of what training gave for each seed."""
    curves = {}
    for name, seeds in results.items():
        curves[name] = [{step // steps: float(loss) for step, loss in result["curve"]} for result in seeds]
        if "elsewhere" in seeds[0]:
            curves[name + ELSEWHERE] = [
                {max(curve): result["elsewhere"]["loss"]} for curve, result in zip(curves[name], seeds, strict=True)
            ]
    return curves


def tables(
    comparison: Comparison, curves: Curves, sent: Mapping[str, Sequence[Sent]] = MappingProxyType({})
) -> Iterator[Table]:
    """What each variation costs at the end, which rule of a pair is better, the costs by the number of rounds, and what
    its messages said, of the first seed."""
    losses = {name: [curve[max(curve)] for curve in found] for name, found in curves.items()}
    yield costs_table(comparison, losses)
    if comparison.pairs:
        yield pairs_table(comparison, losses)
    if comparison.points > 1:
        yield curve_table(comparison, curves)
        if any(sent.values()):
            yield sent_table(comparison, sent)
    if comparison.rivals is not None:
        yield rivals_table(comparison, comparison.rivals, curves)


def costs_table(comparison: Comparison, losses: Losses) -> Table:
    """The median over the seeds, and what each costs over the best reference in the same seed: in nats and in percent
    of perplexity."""
    best, rows = [min(of_one) for of_one in zip(*(losses[name] for name in comparison.references), strict=True)], []
    for name, values in losses.items():
        loss = statistics.median(values)
        nats = spread([value - reference for value, reference in zip(values, best, strict=True)])
        costs = [f"{cost:+.4f}" for cost in nats] + [f"{cost:+.1f}" for cost in spread(percents(best, values))]
        rows.append((name, f"{loss:.4f}", f"{math.exp(loss):.2f}", *costs))
    columns = ("", "loss", "perplexity", f"over {comparison.references[0]}", "from", "to", "over %", "from %", "to %")
    return table(f"After {comparison.rounds} rounds of {comparison.steps} steps", columns, rows)


def pairs_table(comparison: Comparison, losses: Losses) -> Table:
    """What the second rule of a pair costs over the first, and whether all seeds agree."""
    rows = []
    for first, second in comparison.pairs:
        costs = percents(losses[first], losses[second])
        worse = f"{sum(cost > 0 for cost in costs)} of {len(costs)}"
        rows.append((first, second, *(f"{value:+.1f}" for value in spread(costs)), worse))
    columns = ("rule", "instead", "costs %", "from %", "to %", "worse in")
    return table("Two rules for the same loss", columns, rows, left=("instead",))


def curve_table(comparison: Comparison, curves: Curves) -> Table:
    """The median over the seeds of what each costs over the reference that is best at the end of the same seed."""
    candidates = zip(*(curves[name] for name in comparison.references), strict=True)
    best = [min(of_one, key=lambda one: one[max(one)]) for of_one in candidates]
    rounds, rows = list(best[0]), []
    for name, found in curves.items():
        costs = [
            statistics.median(one[number] - other[number] for one, other in zip(found, best, strict=True))
            for number in rounds
        ]
        rows.append((name, *(f"{cost:+.3f}" for cost in costs)))
    title = f"Over {comparison.references[0]}, by rounds of {comparison.steps} steps"
    return table(title, ("", *map(str, rounds)), rows)


def sent_table(comparison: Comparison, sent: Mapping[str, Sequence[Sent]]) -> Table:
    """What a round captures of the squared length of what it was to send, and what it owes after that, over an outer
    gradient, in percent."""
    rounds = [(place + 1) * comparison.rounds // comparison.points for place in range(comparison.points)]
    rows = [
        (name, *(f"{found[each - 1].captured:.0%}, {found[each - 1].owed:.0%}" for each in rounds))
        for name, found in sent.items()
        if found
    ]
    return table("Captured, and owed, by rounds", ("", *map(str, rounds)), rows)


def rivals_table(comparison: Comparison, rivals: tuple[Sequence[str], Sequence[str]], curves: Curves) -> Table:
    """For each seed the best of either group, and the tokens of a path until the second has the last loss of the first.
    Both are on their way along a cosine then, so an earlier end would have suited the quicker one better."""
    size, rows = SIZES["short"], []
    tokens = comparison.steps * Job(method="", seed=0).batch * size.context
    for seed in range(len(next(iter(curves.values())))):
        (first, goal), (second, curve) = (_best(group, curves, seed) for group in rivals)
        loss, rounds = goal[max(goal)], max(goal)
        reached = rounds_to(loss, curve)
        share = f"{reached * tokens:,.0f}, {reached / rounds:.0%}" if math.isfinite(reached) else "not reached"
        rows.append(
            (str(seed), first, f"{loss:.4f}", f"{rounds * tokens:,}", second, f"{curve[max(curve)]:.4f}", share)
        )
    columns = ("seed", "best", "loss", "tokens", "rival", "its loss", "tokens to the same")
    return table("Tokens of a path to the same loss", columns, rows, left=("best", "rival"))


def _best(names: Sequence[str], curves: Curves, seed: int) -> tuple[str, Mapping[int, float]]:
    found = {name: curves[name][seed] for name in names}
    name = min(found, key=lambda each: found[each][max(found[each])])
    return name, found[name]


def rounds_to(loss: float, curve: Mapping[int, float]) -> float:
    """Rounds until a curve is first as low as `loss`, on straight lines between its points; infinity: never."""
    points = sorted(curve.items())
    if points[0][1] <= loss:
        return float(points[0][0])
    for (before, high), (after, low) in itertools.pairwise(points):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return math.inf


def percents(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """How much greater the perplexity is of each loss in `after` than of its one in `before`, in percent."""
    return [100 * math.expm1(new - old) for old, new in zip(before, after, strict=True)]
