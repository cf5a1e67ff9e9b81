"""The two tables, and the JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.lost_work.training import read_text
from benchmarks.methods.data import Data

from .losses import LONG, REFERENCE, SHORT, Setting, final_loss, start_of
from .speed import Speed, speeds

Losses = Mapping[str, Sequence[float]]
"""Of each setting, the final loss of each seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    corpus: Path | None
    values: int
    seeds: int
    rounds: int
    long_rounds: int
    fast: bool


def run(wish: Wish, *, json_file: Path | None) -> dict[str, object]:
    """Measure, print, and write; raises CorpusError."""
    console = Console()
    found = speeds(wish.values)
    console.print(speed_table(found, wish.values))
    figures: dict[str, object] = {"values": wish.values, "codecs": [asdict(speed) for speed in found]}
    data = read_text(wish.corpus)
    for rounds, settings in ((wish.rounds, SHORT), (wish.long_rounds, LONG)):
        if rounds:
            losses = _train(data, settings, wish, rounds=rounds, console=console)
            console.print(loss_table(losses, rounds))
            figures[f"losses after {rounds} rounds"] = losses
        if json_file is not None:
            json_file.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def _train(
    data: Data, settings: Sequence[Setting], wish: Wish, *, rounds: int, console: Console
) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {setting.name: [] for setting in settings}
    for seed in range(wish.seeds):
        start = start_of(data, seed, rounds=rounds, fast=wish.fast)
        for setting in settings:
            loss = final_loss(data, start, setting, fast=wish.fast)
            losses[setting.name].append(loss)
            console.print(f"seed {seed}, {rounds} rounds, {setting.name}: {loss:.4f}")
    return losses


def speed_table(found: Sequence[Speed], count: int) -> Table:
    """Bytes and megabytes a second."""
    table = Table("codec", "bytes", "smaller", "encode MB/s", "decode MB/s", title=f"{count:,} values, one thread")
    for speed in found:
        figures = (f"{speed.bytes:,}", f"{speed.ratio:.1f}x", f"{speed.encode_mb_s:.0f}", f"{speed.decode_mb_s:.0f}")
        table.add_row(speed.codec, *figures)
    return table


def loss_table(losses: Losses, rounds: int) -> Table:
    """The median over the seeds, and what each costs over float32 in the same seed."""
    table = Table("", "final loss", "over float32", "from", "to", title=f"After {rounds} rounds")
    for name, values in losses.items():
        costs = [value - reference for value, reference in zip(values, losses[REFERENCE.name], strict=True)]
        figures = (statistics.median(costs), min(costs), max(costs))
        table.add_row(name, f"{statistics.median(values):.4f}", *(f"{cost:+.4f}" for cost in figures))
    return table
