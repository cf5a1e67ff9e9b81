"""Which jobs answer which question.

Every method is tried with the same inner learning rates, each with three outer ones, and then with the neighbours of
the best until none of them is better; `tune` decides, `report` is shown. Ablations change one thing of a tuned method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .jobs import Job


class Rates(NamedTuple):
    """Learning rates, which are tuned together."""

    inner: float
    """Times the usual inner learning rate."""
    outer: float
    """Of the outer step."""


INNER_RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
OUTER_RATES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
"""All that a search may come to."""
FIRST_INNER = (1.0, 2.0, 4.0, 8.0)
FIRST_OUTER, FIRST_OUTER_OF_MEANS = (0.5, 0.7, 1.0), (0.7, 1.0, 1.4)
"""Averages of replicas are shorter than rescaled ones, and want the greater outer rates."""
TUNING_SEED = 0
"""Rates are chosen with this seed alone, and used with all."""
MATCH_2X2 = 48
"""Width at which one path has as many parameters as the 2x2 grid of width 32; 72 as many as the 4x4 grid."""
MATCH_4X4 = 72

DENSE = "dense"
DENSE_OUTER = "dense + outer step"
RANDOM = "2x2 random routing"
DILOCO = "DiLoCo, 4 workers"
KMEANS = "2x2 k-means"
SHARED = "2x2 shared embedding"
SHARED_RANDOM = "2x2 shared embedding, random routing"
TINY = "2x2 tiny-model routing"
EVERY_STEP = "2x2 k-means, every step"

_ONE_PATH = {"grid": "1", "routing": "kmeans"}
_PLAIN = _ONE_PATH | {"outer": "none", "codec": "fp32"}
_DILOCO = _ONE_PATH | {"rule": "mean"}

MAIN: Mapping[str, Mapping[str, object]] = {
    DENSE: _PLAIN,
    DENSE_OUTER: _ONE_PATH,
    RANDOM: {"routing": "random"},
    DILOCO: _DILOCO | {"replicas": 4},
    KMEANS: {},
    SHARED: {"grid": "2x2 shared embedding"},
    SHARED_RANDOM: {"grid": "2x2 shared embedding", "routing": "random"},
}
"""The comparison that the exit code is about, with random routing, and with one embedding for all paths: what routing
gains without the grid's further parameters."""

FURTHER: Mapping[str, Mapping[str, object]] = {
    "dense, parameters of 2x2": _PLAIN | {"width": MATCH_2X2},
    "dense, parameters of 2x2 + outer step": _ONE_PATH | {"width": MATCH_2X2},
    "flat mixture of 4": {"grid": "flat 4"},
    TINY: {"routing": "tiny"},
    "2x2 k-means, not arranged": {"routing": "kmeans"},
    "2x2 product k-means": {"routing": "product"},
    "2x2 discriminative": {"reshard": (9,)},
    "2x2 private ends": {"grid": "2x2 private ends"},
    "2x2 shared trunk": {"grid": "2x2 shared trunk"},
    "2x2 overlap of 2": {"overlap": 2},
    "2x2 early stopping": {"early_stop": True},
    EVERY_STEP: {"outer": "every step"},
    "4x4 k-means": {"grid": "4x4"},
    "4x4 random routing": {"grid": "4x4", "routing": "random"},
    "DiLoCo, 16 workers": _DILOCO | {"replicas": 16},
    "4x4 product k-means": {"grid": "4x4", "routing": "product"},
    "4x4 discriminative": {"grid": "4x4", "reshard": (9,)},
    "4x4 private ends": {"grid": "4x4 private ends"},
    "4x4 overlap of 2": {"grid": "4x4", "overlap": 2},
    "4x4 k-means, every step": {"grid": "4x4", "outer": "every step"},
    "flat mixture of 16": {"grid": "flat 16"},
    "dense, parameters of 4x4 + outer step": _ONE_PATH | {"width": MATCH_4X4},
}
"""The other methods."""

METHODS = {**MAIN, **FURTHER}

_TUNED = (TINY, EVERY_STEP, "4x4 k-means", "4x4 random routing")
LIKE: Mapping[str, str] = {
    **{
        name: "4x4 k-means" if name.startswith("4x4") else KMEANS
        for name in FURTHER
        if name.startswith(("2x2", "4x4")) and name not in _TUNED
    },
    "4x4 k-means, every step": EVERY_STEP,
}
"""Methods that take over the rates of another, which differs from them in the routing only."""

_FIRST_BLOCKS = {"grid": "2x2 private ends"}
ABLATIONS: Mapping[str, Mapping[str, object]] = {
    "tiny-model routing, reading ahead": {"routing": "tiny whole"},
    "twice the steps": {"steps": 1440},
    "twice the steps, random routing": {"steps": 1440, "routing": "random"},
    "twice the steps, DiLoCo": {"steps": 1440, **_DILOCO, "replicas": 4},
    "width 64, half the steps": {"width": 64, "steps": 360},
    "width 64, half the steps, random routing": {"width": 64, "steps": 360, "routing": "random"},
    "width 64, half the steps, DiLoCo": {"width": 64, "steps": 360, **_DILOCO, "replicas": 4},
    "batches of 32": {"batch": 32},
    "batches of 32, tiny-model routing": {"batch": 32, "routing": "tiny"},
    "batches of 32, random routing": {"batch": 32, "routing": "random"},
    "batches of 32, dense + outer step": {"batch": 32, **_ONE_PATH},
    "batches of 32, DiLoCo": {"batch": 32, **_DILOCO, "replicas": 4},
    "rule mean": {"rule": "mean"},
    "rule rda": {"rule": "rda"},
    "weights equal": {"weighted": False},
    "unbalanced shards": {"routing": "unbalanced"},
    "unbalanced shards, weights equal": {"routing": "unbalanced", "weighted": False},
    "private ends without outer step": _FIRST_BLOCKS | {"outer": "shared"},
    "re-sharded once": {"reshard": (6,)},
    "re-sharded twice": {"reshard": (6, 10)},
    "re-sharded three times": {"reshard": (6, 10, 14)},
    "re-sharded, labels' histogram": {"reshard": (9,), "balance": "match"},
    "30 % lost": {"drop": 0.3},
    "50 % lost": {"drop": 0.5},
    "10 steps a round": {"round_steps": 10},
    "10 steps a round, tiny-model routing": {"round_steps": 10, "routing": "tiny"},
    "10 steps a round, DiLoCo": {"round_steps": 10, **_DILOCO, "replicas": 4},
    "20 steps a round": {"round_steps": 20},
    "120 steps a round": {"round_steps": 120},
    "fp32": {"codec": "fp32"},
    "int4": {"codec": "int4"},
    "int4 without feedback": {"codec": "int4", "feedback": False},
    "int2": {"codec": "int2"},
    "int2 without feedback": {"codec": "int2", "feedback": False},
    "top 3 %": {"codec": "top3"},
    "top 3 % without feedback": {"codec": "top3", "feedback": False},
    "each contribution alone": {"outer": "single"},
    "sign-flip attacker": {"attack": True},
    "sign-flip attacker, clipped": {"attack": True, "clip": True},
    "sign-flip attacker, clipped, rda": {"attack": True, "clip": True, "rule": "rda"},
    "5 % of the text": {"train_share": 0.05},
    "5 % of the text, early stopping": {"train_share": 0.05, "early_stop": True},
    "5 % of the text, overlap of 2": {"train_share": 0.05, "overlap": 2},
    "5 % of the text, flat mixture of 4": {"train_share": 0.05, "grid": "flat 4"},
    "5 % of the text, dense + outer step": {"train_share": 0.05, **_ONE_PATH},
    "4x4 k-means, 5 % of the text": {"train_share": 0.05, "grid": "4x4"},
}
"""One change each to `2x2 k-means`, or to a control of it, at the rates of what they change."""


def job(method: str, *, seed: int, rates: Rates) -> Job:
    """The job of a method or an ablation."""
    fields = METHODS[method] if method in METHODS else ABLATIONS[method]
    made = Job(method=method, seed=seed, lr=rates.outer, inner_lr=rates.inner)
    return replace(made, **fields)  # type: ignore[arg-type]  # the fields are those of Job


def changed(ablation: str) -> str:
    """The method that an ablation changes."""
    fields = ABLATIONS[ablation].items()
    return next(method for method in (DILOCO, DENSE_OUTER, RANDOM, KMEANS) if fields >= MAIN[method].items())


def tuning(methods: Iterable[str]) -> list[Job]:
    """What has to be trained before rates can be chosen."""
    tuned = [method for method in methods if method not in LIKE]
    return [job(method, seed=TUNING_SEED, rates=rates) for method in tuned for rates in tried_first(method)]


def tried_first(method: str) -> list[Rates]:
    """The grid that the search of a method begins with."""
    outers: Sequence[float] = (1.0,)
    if has_outer_step(method):
        outers = FIRST_OUTER_OF_MEANS if METHODS[method].get("rule") == "mean" else FIRST_OUTER
    return [Rates(inner, outer) for inner in FIRST_INNER for outer in outers]


def neighbours(method: str, rates: Rates) -> list[Rates]:
    """Those that one step up or down comes to."""
    found = [rates._replace(inner=inner) for inner in _beside(INNER_RATES, rates.inner)]
    if has_outer_step(method):
        found += [rates._replace(outer=outer) for outer in _beside(OUTER_RATES, rates.outer)]
    return found


def _beside(ladder: Sequence[float], value: float) -> Sequence[float]:
    place = ladder.index(value)
    return *ladder[max(0, place - 1) : place], *ladder[place + 1 : place + 2]


def needed(methods: Sequence[str]) -> list[str]:
    """`methods` and those whose rates they take over, in the order of tables."""
    wanted = {*methods, *(LIKE[method] for method in methods if method in LIKE)}
    return [method for method in METHODS if method in wanted]


def has_outer_step(method: str) -> bool:
    """Whether an outer learning rate is of any effect."""
    return METHODS[method].get("outer") not in ("none", "every step")


def is_scored(method: str) -> bool:
    """Whether there are several paths to choose from."""
    return METHODS[method].get("grid", "2x2") != "1"


def quick_rates(method: str) -> Rates:
    """For runs that do not tune."""
    return Rates(inner=1.0, outer=1.0 if METHODS[method].get("grid") == "1" else 0.7)
