"""The method at 20 million parameters a path: DiPaCo, two other routings, DiLoCo, and one dense path, all alike.

Each case trains one method, as benchmarks/methods does everywhere; rates are chosen for each at a tenth of the size.
`DIR/method/data.npz` may be brought along (collect.py); without it the text is what the machine has, which is little.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.methods.data import Data, prepare_data, split_sequences
from benchmarks.methods.jobs import SIZES, Job
from benchmarks.methods.store import Folder
from benchmarks.methods.work import Bench as Experiment
from benchmarks.methods.work import train, warm_up

from .book import Book
from .case import Bench, Case, Figures, Found, Part, number, table

BYTES_MAX = 64_000_000
BATCH = 128
STEPS, ROUND_STEPS = 600, 40
TUNE_STEPS = 240
INNER_RATES = (0.5, 1.0, 2.0)
"""Of the usual one."""
USUAL = {"inner_lr": 1.0, "lr": 0.7}

METHODS: Mapping[str, Mapping[str, object]] = {
    "DiPaCo": {},
    "DiLoCo": {"grid": "1", "routing": "kmeans", "rule": "mean", "lr": 1.0},
    "random routing": {"routing": "random"},
    "dense + outer step": {"grid": "1", "routing": "kmeans", "lr": 1.0},
    "tiny-model routing": {"routing": "tiny"},
}
OUTER_RATES: Mapping[str, tuple[float, ...]] = {"DiLoCo": (0.7, 1.4), "dense + outer step": (0.7, 1.4)}
"""Besides the usual one; averages of replicas are shorter than rescaled ones, and want the greater rates."""
ROUTED_OUTER_RATES = (0.5, 1.0)
GRIDS = {4: "2x2", 8: "2x4"}


def job_of(bench: Bench, method: str, *, paths: int, is_tuning: bool, **rates: float) -> Job:
    """One training run."""
    fields = dict(METHODS[method])
    if method == "DiLoCo":
        fields["replicas"] = paths
    elif "grid" not in fields:
        fields["grid"] = GRIDS[paths]
    job = Job(method=method, seed=0, **fields | rates)  # type: ignore[arg-type]  # the fields are those of Job
    if bench.is_small:
        return replace(job, size="tiny", width=16, batch=2, steps=2, round_steps=1)
    job = replace(job, batch=BATCH, round_steps=ROUND_STEPS)
    if is_tuning:
        return replace(job, size="2M", width=96, steps=TUNE_STEPS)
    return replace(job, size="20M", width=384, steps=STEPS)


def experiment(bench: Bench, job: Job) -> Experiment:
    """The folder of this job's size, with its text and its warm-up."""
    folder = Folder(bench.folder / "method" / job.size)
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.open({"size": job.size})
    if not folder.data.exists():
        data = bench.folder / "method" / "data.npz"
        if not data.exists():
            _text(bench).save(data)
        folder.data.symlink_to(data.resolve())
    own = Experiment(folder, fast=not bench.is_small, device=bench.device)
    if not folder.warm(job.seed, job.width).exists():
        warm_up(own, job)
    return own


def _text(bench: Bench) -> Data:
    if not bench.is_small:
        return prepare_data(["found"], bytes_max=BYTES_MAX, size=SIZES["20M"])
    generator, names = np.random.default_rng(0), ["low", "high"] * 120
    context = SIZES["tiny"].context
    arrays = [(generator.integers(0, 40, context) + 500 * (name == "high")).astype(np.int32) for name in names]
    return split_sequences(names, arrays, np.full(SIZES["tiny"].vocab_size, 2), context=context)


def _trained(bench: Bench, job: Job) -> Figures:
    own, began_s = experiment(bench, job), time.perf_counter()
    found = train(own, job)
    context, unique = job.model.context, own.data.train.tokens.size
    drawn = job.path_steps * job.batch * context
    return {
        "paths": job.replicas if job.grid == "1" else job.model.path_count,
        "inner_lr": job.inner_lr,
        "lr": job.lr,
        "seed": job.seed,
        "tune": found["tune"]["loss"],
        **{key: found["report"][key] for key in ("loss", "low", "high", "bits_per_byte")},
        "parameters": found["parameters"],
        "path_steps": job.path_steps,
        "unique_tokens": unique,
        "drawn_tokens": drawn,
        "epochs": drawn / unique,
        "tokens_per_s": drawn / (time.perf_counter() - began_s),
        "text": hashlib.sha256(own.data.train.tokens.tobytes()).hexdigest()[:12],
    }


def _tune(bench: Bench, *, method: str) -> Figures:
    """The inner rate at the usual outer one, then the outer rate at the best inner one."""
    usual = float(METHODS[method].get("lr", USUAL["lr"]))  # type: ignore[arg-type]
    tried: dict[tuple[float, float], float] = {}

    def attempt(inner_lr: float, lr: float) -> None:
        job = job_of(bench, method, paths=4, is_tuning=True, inner_lr=inner_lr, lr=lr)
        tried[inner_lr, lr] = number(_trained(bench, job), "tune")

    for inner_lr in INNER_RATES[: 2 if bench.is_small else None]:
        attempt(inner_lr, usual)
    inner_lr = min(tried, key=lambda rates: tried[rates])[0]
    for lr in OUTER_RATES.get(method, ROUTED_OUTER_RATES)[: 1 if bench.is_small else None]:
        attempt(inner_lr, lr)
    best = min(tried, key=lambda rates: tried[rates])
    return {"inner_lr": best[0], "lr": best[1], "tried": [[*rates, nats] for rates, nats in tried.items()]}


def _full(bench: Bench, *, method: str, paths: int) -> Figures:
    book = Book(bench.folder)
    book.read()
    tuned = book.found.get("method", {}).get(f"rates of {method}")
    rates = {name: number(tuned, name) for name in ("inner_lr", "lr")} if tuned else {}
    return _trained(bench, job_of(bench, method, paths=paths, is_tuning=False, **rates)) | {"is_tuned": bool(tuned)}


def _rows(found: Found) -> list[str]:
    rows: list[tuple[object, ...]] = [
        ("method", "workers", "nats (95 %)", "bits/byte", "inner, outer rate", "epochs", "tokens/s")
    ]
    for name, own in found.items():
        if "drawn_tokens" not in own:
            continue
        interval = "" if own["low"] is None else f" ({number(own, 'low'):.4f} to {number(own, 'high'):.4f})"
        rates = f"{own['inner_lr']:g}, {own['lr']:g}" + ("" if own["is_tuned"] else " (not tuned)")
        bits = "" if own["bits_per_byte"] is None else f"{number(own, 'bits_per_byte'):.4f}"
        rows.append((name, own["paths"], f"{number(own, 'loss'):.4f}{interval}", bits, rates,
                     f"{number(own, 'epochs'):.2f}", f"{number(own, 'tokens_per_s'):,.0f}"))  # fmt: skip
    texts = {(own["text"], own["unique_tokens"]) for own in found.values() if "text" in own}
    said = "; ".join(f"{tokens:,} unique tokens (digest {digest})" for digest, tokens in sorted(texts, key=str))
    lines = table(*rows) + [f"Text: {said or 'none yet'}. Rates are of the usual inner one, and of the outer step.", ""]
    tuned = [f"- {name}: {own['inner_lr']:g}, {own['lr']:g}" for name, own in found.items() if "tried" in own]
    return lines + (["Rates chosen at a tenth of the size:", "", *tuned, ""] if tuned else [])


CASES = (
    *(
        Case(
            name=f"rates of {method}",
            limit_s=240,
            ask=functools.partial(_tune, method=method),
            is_small_too=method == "DiPaCo",
        )
        for method in METHODS
    ),
    *(
        Case(
            name=method if method.startswith("dense") else f"{method}, {paths} paths",
            limit_s=240,
            ask=functools.partial(_full, method=method, paths=paths),
            is_small_too=paths == min(GRIDS),
        )
        for paths in GRIDS
        for method in METHODS
        if paths == min(GRIDS) or not method.startswith("dense")
    ),
)
PART = Part(name="method", about="What does the method give at 20M parameters a path?", cases=CASES, rows=_rows)
