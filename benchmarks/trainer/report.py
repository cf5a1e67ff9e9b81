"""Measurements in turns, their medians, the tables and the JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dipaco_p2p.config import InnerConfig, ModelConfig
from dipaco_p2p.core.shards import batch

from .loops import FAST, PLAIN, Loop, loops, noise
from .rounds import whole_rounds
from .utilisation import Utilisation, utilisation

WANTED = {"volunteer, exact": 1.0, "volunteer, fast": 2.5}
"""Times the plain loop's speed."""
ROUNDS_WANTED = 0.95
UTILISATION_WANTED = 0.5
BATCHES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    steps: int
    runs: int
    threads: int
    rounds: int
    device: str
    is_quick: bool


def run(wish: Wish, *, json_file: Path | None) -> dict[str, object]:
    """Measure, print, and write."""
    torch.set_num_threads(wish.threads)
    model, inner, console = ModelConfig(), InnerConfig(), Console()
    found = loops(model, inner, is_quick=wish.is_quick, device=wish.device)
    for name, loop in found.items():  # caches, allocator, compiling
        began_s = time.perf_counter()
        loop(0, 3)
        console.print(f"{name}: the first three steps took {time.perf_counter() - began_s:.1f} s")
    steps_s = measure(found, steps=wish.steps, runs=wish.runs)
    tokens, one_batch_s = inner.batch * model.context, batch_s(model, inner)
    title = f"{wish.steps} steps on {wish.device}, medians of {wish.runs}, {wish.threads} thread(s)"
    console.print(table(steps_s, tokens=tokens, title=title))
    quickest_s = min(map(statistics.median, steps_s.values()))
    console.print(
        f"assembling a batch: {1e6 * one_batch_s:.0f} us, {one_batch_s / quickest_s:.2%} of the quickest step"
    )
    figures: dict[str, object] = {
        "device": wish.device,
        "tokens_a_step": tokens,
        "seconds_a_step": steps_s,
        "seconds_a_batch": one_batch_s,
    }
    if wish.rounds:
        figures["whole_rounds"] = _rounds(wish, console, has_fast=FAST in found)
    if torch.device(wish.device).type == "cuda":
        figures["utilisation"] = _utilisation(wish, console)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def measure(found: Mapping[str, Loop], *, steps: int, runs: int) -> dict[str, list[float]]:
    """All loops in turns, so that what disturbs one disturbs all."""
    steps_s: dict[str, list[float]] = {name: [] for name in found}
    for number in range(runs):
        for name, loop in found.items():
            began_s = time.perf_counter()
            loop(3 + number * steps, steps)
            steps_s[name].append((time.perf_counter() - began_s) / steps)
    return steps_s


def batch_s(model: ModelConfig, inner: InnerConfig) -> float:
    """Seconds that it takes to assemble a batch, over some epochs."""
    shard, began_s = noise(model), time.perf_counter()
    for step in range(BATCHES):
        batch(shard, seed=1, step=step, size=inner.batch)
    return (time.perf_counter() - began_s) / BATCHES


def ratios(steps_s: Mapping[str, list[float]]) -> dict[str, float]:
    """How many times as quick as the plain loop: the median of the ratios within each run."""
    return {
        name: statistics.median(plain / own for plain, own in zip(steps_s[PLAIN], values, strict=True))
        for name, values in steps_s.items()
    }


def table(steps_s: Mapping[str, list[float]], *, tokens: int, title: str) -> Table:
    """A row for each loop."""
    found = Table("loop", "ms a step", "tokens/s", "of the plain loop", "wanted", title=title)
    for name, ratio in ratios(steps_s).items():
        step_s = statistics.median(steps_s[name])
        wanted = f"{WANTED[name]:.1f}" if name in WANTED else ""
        found.add_row(name, f"{1000 * step_s:.1f}", f"{tokens / step_s:,.0f}", f"{ratio:.2f}", wanted)
    return found


def _rounds(wish: Wish, console: Console, *, has_fast: bool) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name, fast in (("exact", False), ("fast", True)):
        if has_fast or not fast:
            steps = wish.steps if wish.is_quick else None
            own = whole_rounds(rounds=wish.rounds, runs=wish.runs, device=wish.device, fast=fast, steps=steps)
            figures[name] = own
            told = f"{own['rounds']} rounds of {own['steps_a_round']} steps"
            console.print(f"{name}: {own['median']:.3f} of the bare steps' speed over {told}; wanted {ROUNDS_WANTED}")
    return figures


def _utilisation(wish: Wish, console: Console) -> dict[str, object]:
    own = utilisation(wish.device, steps=wish.steps)
    console.print(utilisation_table(own))
    return asdict(own) | {"of_peak": own.of_peak, "of_nominal": own.of_nominal}


def utilisation_table(own: Utilisation) -> Table:
    """One device, top down."""
    nominal = "not known" if own.nominal is None else f"{own.nominal / 1e12:.0f} TFLOP/s: {own.of_nominal:.1%} of it"
    found = Table("what", "value", title=f"model FLOPs utilisation on {own.device}")
    found.add_row("parameters", f"{own.parameters:,}")
    found.add_row("trained with", own.setup)
    found.add_row("a step", f"{1000 * own.step_s:.1f} ms, {own.tokens_per_s:,.0f} tokens/s")
    found.add_row("products a token", f"{own.flops_per_token / 1e6:.0f} MFLOP")
    found.add_row("most memory", f"{own.memory_bytes / 2**30:.1f} GiB")
    found.add_row("peak, nominal", nominal)
    found.add_row("peak, measured", f"{own.peak / 1e12:.0f} TFLOP/s: {own.of_peak:.1%} of it")
    found.add_row("wanted", f"{UTILISATION_WANTED:.0%}")
    return found
