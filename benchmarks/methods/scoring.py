"""What the paths of a finished job can do under every way to route: once, by better routers, again every W tokens.

All paths score the router split, on which routers are fitted, and the report split, which every figure here is of.
n sequences, J windows, P paths, D width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dipaco_p2p.core.arrays import Array, Floats
from dipaco_p2p.core.discriminative import balance_bias, best_path, fit_logistic, match_bias, starvation
from dipaco_p2p.core.evaluate import held, oracle_once, rerouted, routed_once
from dipaco_p2p.core.features import token_features
from dipaco_p2p.core.model import PathModel, load_modules
from dipaco_p2p.core.router import Doubles, Paths
from dipaco_p2p.core.scores import WINDOW, window_nats, window_starts
from dipaco_p2p.core.tiny import fit_on_best

from .data import Data, Part
from .jobs import Job
from .store import load_model, save_arrays
from .work import Bench, OnProgress, evaluation, start_model

EVERY = (128, 64, 32, 16)
"""W: tokens between two choices of a path."""


def score(bench: Bench, job: Job, on_progress: OnProgress) -> dict[str, Any]:
    """Losses by way of routing, and how the routers starve rare paths."""
    began_s = time.perf_counter()
    data = bench.data
    paths, assigned, _ = load_model(bench.folder.model(job), job)
    fitted_on, table = score_table(job, paths, data.router), score_table(job, paths, data.report)
    save_arrays(bench.folder.table(job), report=table.astype(np.float32), assigned=assigned)
    nats = {"once": routed_once(table, assigned), "oracle once": oracle_once(table)}
    nats["all paths read along, every 64"] = rerouted(table, held(_seen_best(table, assigned), every=64))
    document, starved = _document_routers(bench, job, fitted_on, table)
    nats |= document | _token_routers(bench, job, fitted_on, table, data)
    return {
        "routed": {name: evaluation(values, data.report) for name, values in nats.items()},
        "starvation": starved,
        "wall_s": time.perf_counter() - began_s,
    }


def score_table(job: Job, paths: Sequence[Sequence[Floats]], part: Part) -> Doubles:
    """Nats (n, J, P)."""
    model, columns = PathModel(job.model), []
    for flats in paths:
        load_modules(model, flats)
        columns.append(window_nats(model, part.tokens))
    return np.stack(columns, axis=2)


def _document_routers(
    bench: Bench, job: Job, fitted_on: Doubles, table: Doubles
) -> tuple[dict[str, Doubles], dict[str, Any]]:
    """Routers of the first 32 tokens that were fitted on who was best: plain, and with two kinds of bias."""
    vectors = bench.router_features(job)
    labels, count = best_path(fitted_on.sum(axis=1)), job.model.path_count
    first = bench.first_routes(job).router if job.routing == "tiny" else None  # others do not need it
    plain = fit_on_best(vectors["router"], labels, first, width=job.model.width, path_count=count, seed=job.seed)
    histogram = np.bincount(labels, minlength=count)
    kinds = {
        "plain": plain,
        "matched": match_bias(plain, vectors["router"], histogram),
        "balanced": balance_bias(plain, vectors["router"]),
    }
    starved = {}
    for name, router in kinds.items():
        found = starvation(router.assign(vectors["router"]), histogram)
        starved[name] = {"distance": found.distance, "starved": len(found.starved), "empty": len(found.empty)}
    nats = {
        f"once, likelihood router ({name})": routed_once(table, router.assign(vectors["report"]))
        for name, router in kinds.items()
    }
    return nats, starved


def _token_routers(bench: Bench, job: Job, fitted_on: Doubles, table: Doubles, data: Data) -> dict[str, Doubles]:
    """One router for all W, which looks ahead to the end of the sequence, and one per W that looks W tokens ahead."""
    frozen = start_model(job.width, bench.warm(job.seed, job.width)[0])
    starts = window_starts(data.report.tokens.shape[1])
    points = token_features(frozen, data.router.tokens, at=starts)
    seen = token_features(frozen, data.report.tokens, at=starts)
    nats = {}
    choices = _choices(job, points, best_path(_ahead(fitted_on, None)), seen)
    for every in EVERY:
        nats[f"every {every}"] = rerouted(table, held(choices, every=every))
        if every == 64:
            short = _choices(job, points, best_path(_ahead(fitted_on, every)), seen)
            nats[f"every {every}, looking {every} ahead"] = rerouted(table, held(short, every=every))
    nats["once, token router"] = routed_once(table, choices[:, 0])
    return nats


def _choices(job: Job, points: Floats, labels: Paths, seen: Floats) -> Paths:
    """The path (n, J) that a router fitted on points (m, J, 2D) and labels (m * J,) takes at each window of `seen`."""
    width = points.shape[2]
    router = fit_logistic(points.reshape(-1, width), labels, path_count=job.model.path_count, seed=job.seed)
    return router.assign(seen.reshape(-1, width)).reshape(seen.shape[:2])


def _ahead(table: Doubles, tokens: int | None) -> Doubles:
    """Nats (n * J, P) from each window on, for so many tokens, or to the end."""
    sums = np.cumsum(table[:, ::-1], axis=1)[:, ::-1]
    if tokens is not None:
        windows = tokens // WINDOW
        beyond = np.zeros_like(sums)
        beyond[:, :-windows] = sums[:, windows:]
        sums = sums - beyond
    return sums.reshape(-1, table.shape[2])


def _seen_best(table: Doubles, assigned: Array) -> Paths:
    """The path (n, J) that predicted everything before each window best; at first the assigned one."""
    before = np.cumsum(table, axis=1) - table
    choices = best_path(before.reshape(-1, table.shape[2])).reshape(table.shape[:2])
    choices[:, 0] = assigned
    return choices
