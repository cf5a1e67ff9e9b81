"""The two tables, and the JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.lost_work.cases import ROUND_STEPS
from benchmarks.lost_work.training import read_text
from benchmarks.methods.data import Data

from .losses import LONG, REFERENCE, SHORT, SHORT_ROUNDS, Setting, curve, start_of
from .speed import Speed, speeds

TIMES = 10
"""How often in a long run the loss is taken."""

Losses = Mapping[str, Sequence[float]]
"""Of each setting, the final loss of each seed."""
Curves = Mapping[str, Sequence[Mapping[int, float]]]
"""Of each setting, the loss of each seed by the number of rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    corpus: Path | None
    values: int
    seeds: int
    rounds: int
    long_rounds: int
    steps: int
    """Inner steps of their rounds."""
    fast: bool


def run(wish: Wish, *, json_file: Path | None) -> dict[str, object]:
    """Measure, print, and write; raises CorpusError."""
    console = Console()
    found = speeds(wish.values)
    console.print(speed_table(found, wish.values))
    figures: dict[str, object] = {"values": wish.values, "codecs": [asdict(speed) for speed in found]}
    data = read_text(wish.corpus)
    for rounds, steps, settings, times in (
        (wish.rounds, ROUND_STEPS, SHORT, 1),
        (wish.long_rounds, wish.steps, LONG, TIMES),
    ):
        if rounds:
            curves = _train(data, settings, wish, rounds=rounds, steps=steps, times=times, console=console)
            losses = {name: [one[rounds] for one in found] for name, found in curves.items()}
            console.print(loss_table(losses, rounds))
            if times > 1:
                console.print(curve_table(curves, steps))
            figures[f"losses by rounds of {steps} steps"] = curves
        if json_file is not None:
            json_file.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def _train(
    data: Data, settings: Sequence[Setting], wish: Wish, *, rounds: int, steps: int, times: int, console: Console
) -> dict[str, list[dict[int, float]]]:
    curves: dict[str, list[dict[int, float]]] = {setting.name: [] for setting in settings}
    for seed in range(wish.seeds):
        start = start_of(data, seed, rounds=rounds, steps=steps, fast=wish.fast)
        for setting in settings:
            found = curve(data, start, setting, fast=wish.fast, times=times)
            curves[setting.name].append(found)
            console.print(f"seed {seed}, {rounds} rounds of {steps} steps, {setting.name}: {found[rounds]:.4f}")
    return curves


def speed_table(found: Sequence[Speed], count: int) -> Table:
    """Bytes and megabytes a second."""
    table = Table("codec", "bytes", "smaller", "encode MB/s", "decode MB/s", title=f"{count:,} values, one thread")
    for speed in found:
        figures = (f"{speed.bytes:,}", f"{speed.ratio:.1f}x", f"{speed.encode_mb_s:.0f}", f"{speed.decode_mb_s:.0f}")
        table.add_row(speed.codec, *figures)
    return table


def loss_table(losses: Losses, rounds: int) -> Table:
    """The median over the seeds, and what each costs over the best of float32 in the same seed."""
    table = Table("", "final loss", "over float32", "from", "to", title=f"After {rounds} rounds")
    best = [min(of_one) for of_one in zip(*(losses[name] for name in _references(losses)), strict=True)]
    for name, values in losses.items():
        costs = [value - reference for value, reference in zip(values, best, strict=True)]
        figures = (statistics.median(costs), min(costs), max(costs))
        table.add_row(name, f"{statistics.median(values):.4f}", *(f"{cost:+.4f}" for cost in figures))
    return table


def curve_table(curves: Curves, steps: int) -> Table:
    """The median over the seeds of what each costs over float32 in the same seed, by the number of rounds; over the
    float32 that is the best at the end."""
    rounds = list(curves[REFERENCE.name][0])
    candidates = zip(*(curves[name] for name in _references(curves)), strict=True)
    best = [min(of_one, key=lambda one: one[rounds[-1]]) for of_one in candidates]
    table = Table("", *map(str, rounds), title=f"Over float32, by rounds of {steps} steps")
    for name, found in curves.items():
        costs = [
            statistics.median(one[number] - other[number] for one, other in zip(found, best, strict=True))
            for number in rounds
        ]
        table.add_row(name, *(f"{cost:+.3f}" for cost in costs))
    return table


def _references(names: Iterable[str]) -> list[str]:
    """Those of float32."""
    return [name for name in names if name in (REFERENCE.name, SHORT_ROUNDS.name)]
