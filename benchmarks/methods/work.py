"""What a worker process does: warm up, train a job, score its paths. Every task is a function of the folder's files.

Scoring shows what the paths of a finished job can do under every way to route: once, by better routers, again every W
tokens. All paths score the router split, on which routers are fitted, and the report split, which its figures are of.

n sequences, J windows, P paths, D width.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dipaco_p2p.config import PREFIX_TOKENS, InnerConfig
from dipaco_p2p.core.arrays import Array, Floats
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, load_modules
from dipaco_p2p.core.routing.balance import balance_bias, match_bias, starvation
from dipaco_p2p.core.routing.discriminative import best_path, fit_logistic
from dipaco_p2p.core.routing.evaluate import (
    WINDOW,
    counted_tokens,
    held,
    losses,
    oracle_once,
    routed_once,
    summarise,
    window_nats,
    window_starts,
)
from dipaco_p2p.core.routing.evaluate import rerouted as rerouted_nats
from dipaco_p2p.core.routing.features import features, token_features
from dipaco_p2p.core.routing.router import Doubles, Paths
from dipaco_p2p.core.routing.unigram import fit_on_best
from dipaco_p2p.errors import Diverged

from .comparisons import OverlappedGrid
from .data import PARTS, Data, Ints, Part
from .every_step import EveryStep
from .grid import Grid, WarmStart, untrained_path
from .jobs import SIZES, STEPS, WARMUP_STEPS, Job, path_model
from .repair import RepairedGrid
from .routing import Routes, first_routes, rerouted, router_features, shards
from .store import Folder, load_model, load_warm, save_model, save_warm

HOLDOUT_SEQUENCES = 32
FIT_SEQUENCES = 200
"""Training sequences that the loss on training text is measured on."""
BOOTSTRAP_SEED = 0

EVERY = (128, 64, 32, 16)
"""W: tokens between two choices of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job, and what of it is to be done: `warmup` (of its seed and width), `train` or `score`."""

    kind: str
    job: Job

    @property
    def steps(self) -> int:
        """Inner steps, for progress bars."""
        return {"warmup": WARMUP_STEPS, "train": self.job.path_steps, "score": 0}[self.kind]


class Bench:
    """The files that tasks read, each read once by a process."""

    def __init__(self, folder: Folder, *, fast: bool, device: str = "cpu") -> None:
        self.folder = folder
        self.fast = fast
        self.device = device
        self.warm = functools.lru_cache(maxsize=2)(lambda seed, width: load_warm(folder.warm(seed, width)))

    @functools.cached_property
    def data(self) -> Data:
        return Data.load(self.folder.data)

    @functools.cached_property
    def tokens(self) -> dict[str, Ints]:
        """The sequences (n, T) of each part."""
        return {part: getattr(self.data, part).tokens for part in PARTS}

    def first_routes(self, job: Job) -> Routes:
        """Those that the job's first shards are cut by."""
        return first_routes(job, self.warm(job.seed, job.width)[1], self.tokens)

    def router_features(self, job: Job) -> Mapping[str, Floats]:
        """What the job's routers look at, of each part."""
        return router_features(job, self.warm(job.seed, job.width)[1], self.tokens)


def warm_up(bench: Bench, job: Job) -> dict[str, Any]:
    """Train the one-path model that all jobs of this seed and width start from, and route by it."""
    model, began_s = job.one_path, time.perf_counter()
    start = initial_modules(model, seed=job.seed)
    inner, total_steps = InnerConfig(batch=SIZES[job.size].warmup_batch), WARMUP_STEPS + STEPS
    loop = InnerLoop(inner, total_steps, model, device=bench.device, seed=job.seed, fast=bench.fast)
    result = loop.run(
        [start[level] for level in range(len(model.levels))],
        Shard(tokens=bench.data.train.tokens),
        first_step=0,
        steps=WARMUP_STEPS,
    )
    frozen = PathModel(model).to(bench.device)
    load_modules(frozen, result.flats)
    routed = {part: features(frozen, rows[:, :PREFIX_TOKENS]) for part, rows in bench.tokens.items()}
    tensors: dict[str, Floats] = {}
    for level, flat in enumerate(result.flats):
        tensors |= module_layout(model, level).split(flat)
    path = bench.folder.warm(job.seed, job.width)
    save_warm(path, WarmStart(tensors=tensors, optimizer=loop.state_bytes()), routed)
    nats = losses(frozen, bench.data.report.tokens)
    return {"report": evaluation(nats, bench.data.report), "wall_s": time.perf_counter() - began_s}


def train(bench: Bench, job: Job) -> dict[str, Any]:
    """All rounds of a job: its curve and losses, and its modules as a file. A job that diverges has infinite losses."""
    began_s = time.perf_counter()
    try:
        return _trained(bench, job)
    except Diverged:
        lost = {"loss": math.inf, "low": None, "high": None, "bits_per_byte": math.inf}
        found = {"report": lost, "tune": lost, "training_text": math.inf, "parameters": _parameters(job)}
        return found | {"curve": [], "agreement": {}, "sent": [], "wall_s": time.perf_counter() - began_s}


def _trained(bench: Bench, job: Job) -> dict[str, Any]:
    began_s = time.perf_counter()
    start, _ = bench.warm(job.seed, job.width)
    data, routes = bench.data, bench.first_routes(job)
    (cut, holdouts), first = _cut(job, routes, data.train), routes.router
    grid: Grid | EveryStep
    if job.outer == "every step":
        grid = EveryStep(job, start, cut, fast=bench.fast)
    else:
        kind = OverlappedGrid if job.estimate else RepairedGrid if job.forged else Grid
        grid = kind(job, start, cut, fast=bench.fast, device=bench.device)
    best: dict[int, tuple[float, list[Floats]]] = {}
    curve, moved = [], []
    for number in range(job.rounds):
        if number in job.reshard:
            nats = np.stack(
                [_nats(job, grid.flats(p), data.router, bench.device) for p in range(job.model.path_count)], axis=1
            )
            before, routes = routes, rerouted(job, bench.router_features(job), nats, first)
            moved.append(float((before.once("train") != routes.once("train")).mean()))
            cut, holdouts = _cut(job, routes, data.train)
            grid.shards, best = cut, {}
        grid.round(number)
        if job.early_stop:
            _keep_best(job, grid, holdouts, best)
        if (number + 1) * job.points % job.rounds < job.points and number + 1 < job.rounds:
            nats = routed_nats(job, grid.flats, data.report, routes.once("report"), device=bench.device)
            curve.append([(number + 1) * job.round_steps, _mean(nats, data.report)])
    paths = [best[p][1] if best else grid.flats(p) for p in range(job.model.path_count)]
    result = _result(bench, job, paths, routes, cut)
    if job.untrained:
        result["elsewhere"] = _elsewhere(bench, job, paths, routes)
    save_model(bench.folder.model(job), paths, routes.once("report"), routes.router)
    return result | {
        "curve": [*curve, [job.rounds * job.round_steps, result["report"]["loss"]]],
        "agreement": {str(count): float(np.mean(values)) for count, values in grid.agreement.items()},
        "moved": moved,
        "sent": [asdict(each) for each in grid.sent],
        "wall_s": time.perf_counter() - began_s,
    }


def routed_nats(
    job: Job, flats: Callable[[int], Sequence[Floats]], part: Part, chosen: Ints, *, device: str = "cpu"
) -> Doubles:
    """Nats (n,) of each sequence under the path that `chosen` (n,) gives it."""
    nats = np.zeros(len(part))
    for number in np.unique(chosen).tolist():
        rows = np.flatnonzero(chosen == number)
        nats[rows] = _nats(job, flats(number), part.rows(rows), device)
    return nats


def evaluation(nats: Doubles, part: Part) -> dict[str, float | None]:
    """Loss in nats per token with its 95 % interval, and bits per byte."""
    tokens = counted_tokens(part.tokens.shape[1])
    found = summarise(nats, tokens=tokens, bytes=part.bytes, documents=part.documents, seed=BOOTSTRAP_SEED)
    return {"loss": found.loss, "low": found.low, "high": found.high, "bits_per_byte": found.bits_per_byte}


def _cut(job: Job, routes: Routes, train_part: Part) -> tuple[list[Shard], list[Shard]]:
    """The shards, and what early stopping looks at: none without it."""
    whole = shards(job, routes, train_part)
    if not job.early_stop:
        return whole, []
    kept, held = [], []
    for number, shard in enumerate(whole):
        drawn = np.random.default_rng([job.seed, number]).permutation(len(shard.tokens))
        count = min(HOLDOUT_SEQUENCES, len(drawn) // 4)
        held.append(Shard(tokens=shard.tokens[drawn[:count]]))
        kept.append(Shard(tokens=shard.tokens[np.sort(drawn[count:])]))
    return kept, held


def _keep_best(
    job: Job, grid: Grid | EveryStep, holdouts: Iterable[Shard], best: dict[int, tuple[float, list[Floats]]]
) -> None:
    model = PathModel(job.model)
    for number, shard in enumerate(holdouts):
        flats = grid.flats(number)
        load_modules(model, flats)
        loss = float(losses(model, shard.tokens).mean())
        if number not in best or loss < best[number][0]:
            best[number] = (loss, flats)


def _result(
    bench: Bench, job: Job, paths: Sequence[Sequence[Floats]], routes: Routes, cut: Sequence[Shard]
) -> dict[str, Any]:
    data, device = bench.data, bench.device
    report = routed_nats(job, paths.__getitem__, data.report, routes.once("report"), device=device)
    tune = routed_nats(job, paths.__getitem__, data.tune, routes.once("tune"), device=device)
    of_domain = {
        name: _mean(report[data.report.domains == place], data.report)
        for place, name in enumerate(data.domains)
        if (data.report.domains == place).any()
    }
    return {
        "tune": {"loss": _mean(tune, data.tune)},
        "report": evaluation(report, data.report),
        "domains": of_domain,
        "training_text": _training_loss(job, paths, cut, device),
        "parameters": _parameters(job),
        "path_steps": job.path_steps,
        "shards": [len(shard.tokens) for shard in cut],
    }


def _elsewhere(bench: Bench, job: Job, paths: Sequence[Sequence[Floats]], routes: Routes) -> dict[str, float]:
    """The loss if what is routed to the path that is never trained goes to its next best path."""
    assert routes.router is not None, job
    report = bench.data.report
    best, second = routes.router.top(bench.router_features(job)["report"], 2).T
    chosen = np.where(best == untrained_path(job), second, best)
    return {"loss": _mean(routed_nats(job, paths.__getitem__, report, chosen, device=bench.device), report)}


def _training_loss(job: Job, paths: Sequence[Sequence[Floats]], cut: Sequence[Shard], device: str) -> float:
    """Nats per token of some sequences of each path's own shard."""
    count = max(1, FIT_SEQUENCES // len(cut))
    model, nats, sequences = PathModel(job.model).to(device), 0.0, 0
    for flats, shard in zip(paths, cut, strict=True):
        load_modules(model, flats)
        rows = shard.tokens[np.random.default_rng(job.seed).permutation(len(shard.tokens))[:count]]
        nats, sequences = nats + float(losses(model, rows).sum()), sequences + len(rows)
    return nats / (sequences * counted_tokens(job.model.context))


def _parameters(job: Job) -> int:
    topology = job.model.topology
    return sum(module_layout(job.model, module.level).size for module in topology.modules())


def _nats(job: Job, flats: Sequence[Floats], part: Part, device: str) -> Doubles:
    model = PathModel(job.model).to(device)
    load_modules(model, flats)
    return losses(model, part.tokens)


def _mean(nats: Doubles, part: Part) -> float:
    return float(nats.mean() / counted_tokens(part.tokens.shape[1]))


def score(bench: Bench, job: Job) -> dict[str, Any]:
    """Losses by way of routing, and how the routers starve rare paths."""
    began_s = time.perf_counter()
    data = bench.data
    paths, assigned, _ = load_model(bench.folder.model(job), job)
    fitted_on, table = score_table(job, paths, data.router), score_table(job, paths, data.report)
    nats = {"once": routed_once(table, assigned), "oracle once": oracle_once(table)}
    nats["all paths read along, every 64"] = rerouted_nats(table, held(_seen_best(table, assigned), every=64))
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
    config = path_model(job.width)
    frozen = PathModel(config)
    load_modules(frozen, bench.warm(job.seed, job.width)[0].flats(config))
    starts = window_starts(data.report.tokens.shape[1])
    points = token_features(frozen, data.router.tokens, at=starts)
    seen = token_features(frozen, data.report.tokens, at=starts)
    nats = {}
    choices = _choices(job, points, best_path(_ahead(fitted_on, None)), seen)
    for every in EVERY:
        nats[f"every {every}"] = rerouted_nats(table, held(choices, every=every))
        if every == 64:
            short = _choices(job, points, best_path(_ahead(fitted_on, every)), seen)
            nats[f"every {every}, looking {every} ahead"] = rerouted_nats(table, held(short, every=every))
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
