"""`python -m benchmarks.trainer`: tokens a second of a volunteer's inner loop, beside one as anybody would write it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.report import JsonFile, median_ratio, run_benchmark, seconds_of, show, table, write_json
from dipaco_p2p.config import InnerConfig, ModelConfig
from peers.config import torch_device

from .loops import FAST, PLAIN, Loop, loops
from .rounds import whole_rounds

WANTED = {"volunteer, exact": 1.0, "volunteer, fast": 2.5}
"""Times the plain loop's speed."""
ROUNDS_WANTED = 0.95


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
    steps, runs = (3, 2) if quick else (steps, runs)
    own_device, model, inner = torch_device(device), ModelConfig(), InnerConfig()
    torch.set_num_threads(threads)
    found = loops(model, inner, is_quick=quick, device=own_device)
    for name, loop in found.items():  # caches, allocator, compiling
        show(f"{name}: the first three steps took {seconds_of(partial(loop, 0, 3)):.1f} s")
    steps_s = measure(found, steps=steps, runs=runs)
    tokens = inner.batch * model.context
    title = f"{steps} steps on {own_device}, medians of {runs}, {threads} thread(s)"
    show(speed_table(steps_s, tokens=tokens, title=title))
    figures: dict[str, object] = {"device": own_device, "tokens_a_step": tokens, "seconds_a_step": steps_s}
    if rounds:
        wish = {"rounds": rounds, "runs": runs, "device": own_device, "steps": steps if quick else None}
        figures["whole_rounds"] = _rounds(wish, has_fast=FAST in found)
    write_json(json_file, figures)


def measure(found: Mapping[str, Loop], *, steps: int, runs: int) -> dict[str, list[float]]:
    """All loops in turns, so that what disturbs one disturbs all."""
    steps_s: dict[str, list[float]] = {name: [] for name in found}
    for number in range(runs):
        for name, loop in found.items():
            steps_s[name].append(seconds_of(partial(loop, 3 + number * steps, steps)) / steps)
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


def _rounds(wish: Mapping[str, Any], *, has_fast: bool) -> dict[str, object]:
    """`wish` is for `whole_rounds`."""
    figures: dict[str, object] = {}
    for name, fast in (("exact", False), ("fast", True)):
        if has_fast or not fast:
            figures[name] = own = whole_rounds(fast=fast, **wish)
            told = f"{own['rounds']} rounds of {own['steps_a_round']} steps"
            show(f"{name}: {own['median']:.3f} of the bare steps' speed over {told}; wanted {ROUNDS_WANTED}")
    return figures


if __name__ == "__main__":
    run_benchmark(main)
