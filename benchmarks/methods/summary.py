"""From finished tasks to the figures that tables and claims are made of. Plain dicts, as in summary.json.

Losses are nats per token of the report split; `tune` only decided the learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .data import PARTS, Data
from .jobs import Job
from .plan import (
    ABLATIONS,
    DENSE_OUTER,
    DILOCO,
    INNER_RATES,
    KMEANS,
    LIKE,
    METHODS,
    OUTER_RATES,
    RANDOM,
    TINY,
    TUNING_SEED,
    Rates,
    changed,
    has_outer_step,
    job,
    needed,
    neighbours,
)
from .store import Results

Summary = dict[str, Any]


def chosen_rates(methods: Sequence[str], results: Results) -> dict[str, Rates]:
    """Those of each method with the least loss on the tune split, or of the method that it is tuned like."""
    found = {method: losses for method in needed(methods) if (losses := tune_losses(method, results))}
    chosen = {method: min(losses, key=losses.__getitem__) for method, losses in found.items()}
    return chosen | {method: chosen[LIKE[method]] for method in methods if LIKE.get(method) in chosen}


def untried(methods: Sequence[str], results: Results) -> list[Job]:
    """The jobs of the neighbours of each method's best rates that were not tried yet."""
    jobs = []
    for method, best in chosen_rates(methods, results).items():
        if known := tune_losses(method, results):  # others are tuned like a method that has them
            further = [rates for rates in neighbours(method, best) if rates not in known]
            jobs += [job(method, seed=TUNING_SEED, rates=rates) for rates in further]
    return jobs


def tune_losses(method: str, results: Results) -> dict[Rates, float]:
    """Of each pair of rates that was tried; empty for a method that takes over those of another."""
    if method in LIKE:
        return {}
    outers = OUTER_RATES if has_outer_step(method) else (1.0,)
    everything = (Rates(inner, outer) for inner in INNER_RATES for outer in outers)
    lines = {rates: results.get(("train", job(method, seed=TUNING_SEED, rates=rates).key)) for rates in everything}
    return {rates: float(line["result"]["tune"]["loss"]) for rates, line in lines.items() if line is not None}


def summarise_experiment(
    results: Results,
    data: Data,
    chosen: Mapping[str, Rates],
    *,
    seeds: Sequence[int],
    settings: Mapping[str, object],
) -> Summary:
    """Everything that is shown."""
    methods = {
        method: _method(method, results, rates=chosen[method], seeds=seeds) for method in METHODS if method in chosen
    }
    ablations = {
        name: _seeds((job(name, seed=seed, rates=chosen[changed(name)]) for seed in seeds), results)
        for name in ABLATIONS
        if changed(name) in chosen
    }
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


def _method(method: str, results: Results, *, rates: Rates, seeds: Sequence[int]) -> dict[str, Any]:
    jobs = [job(method, seed=seed, rates=rates) for seed in seeds]
    return {
        "inner_lr": rates.inner,
        "lr": rates.outer if has_outer_step(method) else None,
        "tuned": [[*tuned, loss] for tuned, loss in tune_losses(method, results).items()],
        "like": LIKE.get(method),
        "path_steps": jobs[0].path_steps,
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
