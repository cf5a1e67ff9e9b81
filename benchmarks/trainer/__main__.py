"""`python -m benchmarks.trainer`: tokens a second of a volunteer's inner loop, beside one as anybody would write it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from benchmarks.report import JsonFile, median_ratio, run_benchmark, show, table, write_json
from dipaco_p2p.config import InnerConfig, ModelConfig
from peers.config import torch_device

from .loops import FAST, PLAIN, Loop, loops
from .rounds import whole_rounds

WANTED = {"volunteer, exact": 1.0, "volunteer, fast": 2.5}
"""Times the plain loop's speed."""
ROUNDS_WANTED = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    steps: int
    runs: int
    threads: int
    rounds: int
    device: str
    is_quick: bool


def main(
    steps: Annotated[int, typer.Option(min=1, help="Inner steps in each measurement.")] = 20,
    runs: Annotated[int, typer.Option(min=1, help="Measurements of each loop, one after the other in turns.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(min=0, help="Also compare this many whole rounds with bare steps.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Three steps, two runs, no compiling: for trying.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Train the default path with each loop in turns; medians, and ratios to the plain loop in float32."""
    wish = Wish(
        steps=3 if quick else steps,
        runs=2 if quick else runs,
        threads=threads,
        rounds=rounds,
        device=torch_device(device),
        is_quick=quick,
    )
    run(wish, json_file=json_file)


def run(wish: Wish, *, json_file: Path | None) -> dict[str, object]:
    """Measure, print, and write."""
    torch.set_num_threads(wish.threads)
    model, inner = ModelConfig(), InnerConfig()
    found = loops(model, inner, is_quick=wish.is_quick, device=wish.device)
    for name, loop in found.items():  # caches, allocator, compiling
        began_s = time.perf_counter()
        loop(0, 3)
        show(f"{name}: the first three steps took {time.perf_counter() - began_s:.1f} s")
    steps_s = measure(found, steps=wish.steps, runs=wish.runs)
    tokens = inner.batch * model.context
    title = f"{wish.steps} steps on {wish.device}, medians of {wish.runs}, {wish.threads} thread(s)"
    show(speed_table(steps_s, tokens=tokens, title=title))
    figures: dict[str, object] = {"device": wish.device, "tokens_a_step": tokens, "seconds_a_step": steps_s}
    if wish.rounds:
        figures["whole_rounds"] = _rounds(wish, has_fast=FAST in found)
    write_json(json_file, figures)
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


def ratios(steps_s: Mapping[str, list[float]]) -> dict[str, float]:
    """How many times as quick as the plain loop: the median of the ratios within each run."""
    return {name: median_ratio(steps_s[PLAIN], values) for name, values in steps_s.items()}


def speed_table(steps_s: Mapping[str, list[float]], *, tokens: int, title: str) -> Table:
    """A row for each loop."""
    rows = []
    for name, ratio in ratios(steps_s).items():
        step_s = statistics.median(steps_s[name])
        wanted = f"{WANTED[name]:.1f}" if name in WANTED else ""
        rows.append((name, f"{1000 * step_s:.1f}", f"{tokens / step_s:,.0f}", f"{ratio:.2f}", wanted))
    return table(title, ("loop", "ms a step", "tokens/s", "of the plain loop", "wanted"), rows)


def _rounds(wish: Wish, *, has_fast: bool) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name, fast in (("exact", False), ("fast", True)):
        if has_fast or not fast:
            steps = wish.steps if wish.is_quick else None
            own = whole_rounds(rounds=wish.rounds, runs=wish.runs, device=wish.device, fast=fast, steps=steps)
            figures[name] = own
            told = f"{own['rounds']} rounds of {own['steps_a_round']} steps"
            show(f"{name}: {own['median']:.3f} of the bare steps' speed over {told}; wanted {ROUNDS_WANTED}")
    return figures


if __name__ == "__main__":
    run_benchmark(main)
