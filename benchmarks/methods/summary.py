"""From finished tasks to the figures that tables and claims are made of. Plain dicts, as in summary.json.

Losses are nats per token of the report split; `tune` only decided the outer learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from .data import PARTS, Data
from .jobs import Job
from .plan import (
    ABLATIONS,
    DENSE_OUTER,
    DILOCO,
    KMEANS,
    LIKE,
    METHODS,
    RANDOM,
    TINY,
    has_outer_step,
    job,
    needed,
)
from .store import Results

Summary = dict[str, Any]


def chosen_lrs(
    methods: Sequence[str], results: Results, *, seeds: Sequence[int], lrs: Sequence[float]
) -> dict[str, float]:
    """The outer learning rate of each method with the least mean loss over the seeds on the tune split."""
    chosen = {}
    for method in needed(methods):
        tried = {lr: tune_loss(method, results, seeds=seeds, lr=lr) for lr in lrs} if method not in LIKE else {}
        known = {lr: loss for lr, loss in tried.items() if loss is not None}
        if known:
            chosen[method] = min(known, key=known.__getitem__)
        elif METHODS[method].get("outer") == "none":
            chosen[method] = 1.0
    return chosen | {method: chosen[LIKE[method]] for method in methods if LIKE.get(method) in chosen}


def tune_loss(method: str, results: Results, *, seeds: Sequence[int], lr: float) -> float | None:
    """Mean over the seeds; None unless all are there."""
    found = [results.get(("train", job(method, seed=seed, lr=lr).key)) for seed in seeds]
    losses = [line["result"]["tune"]["loss"] for line in found if line is not None]
    return fmean(losses) if len(losses) == len(seeds) else None


def summarise_experiment(
    results: Results,
    data: Data,
    chosen: Mapping[str, float],
    *,
    seeds: Sequence[int],
    lrs: Sequence[float],
    settings: Mapping[str, object],
) -> Summary:
    """Everything that is shown."""
    methods = {
        method: _method(method, results, lr=chosen[method], seeds=seeds, lrs=lrs)
        for method in METHODS
        if method in chosen
    }
    base = chosen.get(KMEANS, math.nan)
    ablations = {name: _seeds((job(name, seed=seed, lr=base) for seed in seeds), results) for name in ABLATIONS}
    summary: Summary = {
        "settings": dict(settings),
        "seeds": list(seeds),
        "corpus": _corpus(data),
        "methods": {name: found for name, found in methods.items() if found["seeds"]},
        "ablations": {name: found for name, found in ablations.items() if found},
    }
    return summary | {"bars": bars(summary), "beats_dense": beats(summary, KMEANS, DENSE_OUTER)}


DIVERGED_NATS = 100.0
"""A loss that no run has which learned anything: an even guess costs 7."""


def loss(summary: Summary, name: str, seed: int, routed: str = "once") -> float | None:
    """Of a method or an ablation, routed once as it was trained, or as scoring tried; None if it was not run."""
    found = summary["methods"].get(name, {}).get("seeds", {}) or summary["ablations"].get(name, {})
    figures = found.get(str(seed))
    if figures is None:
        return None
    evaluated = figures["report"] if routed == "once" else figures.get("routed", {}).get(routed)
    return None if evaluated is None else float(evaluated["loss"])


def gaps(summary: Summary, name: str, control: str, *, routed: str = "once") -> list[float]:
    """Relative difference of perplexity to `control` (routed once), per seed: -0.05 is 5 % better."""
    pairs = [(loss(summary, name, seed, routed), loss(summary, control, seed)) for seed in summary["seeds"]]
    return [gap(one, other) for one, other in pairs if one is not None and other is not None]


def gap(one: float, other: float) -> float:
    """Relative difference of the perplexities of two losses in nats; infinite where the first run diverged."""
    return math.exp(one - other) - 1 if one - other < DIVERGED_NATS else math.inf


def beats(summary: Summary, name: str, control: str) -> bool | None:
    """Whether `name` is better in all seeds; None if not all were run."""
    found = gaps(summary, name, control)
    return all(gap < 0 for gap in found) if found and len(found) == len(summary["seeds"]) else None


def bars(summary: Summary) -> list[dict[str, Any]]:
    """What the method has to show on text of several domains, and what it did: by k-means, and by tiny models if they
    were run."""
    shown = [name for name in (KMEANS, TINY) if name == KMEANS or name in summary["methods"]]
    controls = ((DENSE_OUTER, 0.12), (DILOCO, 0.02), (RANDOM, 0.03))
    wanted = [(name, "once", control, margin) for name in shown for control, margin in controls]
    wanted.append((KMEANS, "every 64", KMEANS, 0.01))
    found = []
    for name, routed, control, margin in wanted:
        values = gaps(summary, name, control, routed=routed)
        met = bool(values) and all(value <= -margin for value in values)
        found.append(
            {"method": name, "routed": routed, "control": control, "margin": margin, "gaps": values, "met": met}
        )
    return found


def _method(method: str, results: Results, *, lr: float, seeds: Sequence[int], lrs: Sequence[float]) -> dict[str, Any]:
    jobs = [job(method, seed=seed, lr=lr) for seed in seeds]
    tried = {str(other): tune_loss(method, results, seeds=seeds, lr=other) for other in lrs}
    first = jobs[0]
    return {
        "lr": lr if has_outer_step(method) else None,
        "tuned": {other: value for other, value in tried.items() if value is not None and has_outer_step(method)},
        "like": LIKE.get(method),
        "path_steps": first.path_steps,
        "seeds": _seeds(jobs, results),
    }


def _seeds(jobs: Iterable[Job], results: Results) -> dict[str, Any]:
    """By seed: what training gave, and scoring if it was done."""
    found = {}
    for one in jobs:
        trained, scored = results.get(("train", one.key)), results.get(("score", one.key))
        if trained is not None:
            extra = {} if scored is None else {name: scored["result"][name] for name in ("routed", "starvation")}
            found[str(one.seed)] = trained["result"] | extra
    return found


def _corpus(data: Data) -> dict[str, Any]:
    parts = {name: getattr(data, name) for name in PARTS}
    return {
        "domains": list(data.domains),
        "sequences": {name: len(part) for name, part in parts.items()},
        "documents": {name: len(set(part.documents.tolist())) for name, part in parts.items()},
    }
