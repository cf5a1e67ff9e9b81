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

from .losses import ESTIMATES, OFF, final_loss, start_of
from .share import ROUNDS, Lines, Share, share_of

ROUNDS_S = (60.0, 240.0, 600.0)
"""How long a round's inner steps take."""
QUICK_ROUNDS = 3

Losses = Mapping[str, Sequence[float]]
"""Of each estimate, the final loss of each seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    corpus: Path | None
    seeds: int
    rounds: int
    lines: Lines
    has_shares: bool
    is_quick: bool
    fast: bool


def run(wish: Wish, *, json_file: Path | None) -> dict[str, object]:
    """Measure, print, and write; raises CorpusError."""
    console, figures = Console(), dict[str, object]()
    if wish.has_shares:
        shares = _play(wish, console)
        console.print(share_table(shares, wish.lines))
        figures |= {**asdict(wish.lines), "shares": [asdict(share) for share in shares]}
        _write(json_file, figures)
    if wish.seeds:
        losses = _train(wish, console)
        console.print(loss_table(losses, wish.rounds))
        figures[f"losses after {wish.rounds} rounds"] = losses
        _write(json_file, figures)
    return figures


def _play(wish: Wish, console: Console) -> list[Share]:
    shares = []
    for round_s in ROUNDS_S[:1] if wish.is_quick else ROUNDS_S:
        for overlap in (False, True):
            rounds = QUICK_ROUNDS if wish.is_quick else ROUNDS
            shares.append(share_of(wish.lines, round_s=round_s, overlap=overlap, rounds=rounds))
            console.print(f"{round_s:g} s of inner steps, {'on' if overlap else 'off'}: {shares[-1].share:.1%}")
    return shares


def _write(json_file: Path | None, figures: Mapping[str, object]) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def _train(wish: Wish, console: Console) -> dict[str, list[float]]:
    data = read_text(wish.corpus)
    losses: dict[str, list[float]] = {name: [] for name in ESTIMATES}
    for seed in range(wish.seeds):
        start = start_of(data, seed, rounds=wish.rounds, fast=wish.fast)
        for name, estimate in ESTIMATES.items():
            losses[name].append(final_loss(data, start, estimate, fast=wish.fast))
            console.print(f"seed {seed}, {wish.rounds} rounds, {name}: {losses[name][-1]:.4f}")
    return losses


def share_table(shares: Sequence[Share], lines: Lines) -> Table:
    """Off and on, by the time that a round's inner steps take."""
    title = f"{lines.values:,} values a path, {lines.up_mbit:g} Mbit/s up and {lines.down_mbit:g} down"
    table = Table("inner steps, s", "share off", "share on", "round off, s", "round on, s", "faster", title=title)
    for off, on in zip(shares[::2], shares[1::2], strict=True):
        assert (off.round_s, off.overlap, on.overlap) == (on.round_s, False, True)
        figures = (f"{off.share:.1%}", f"{on.share:.1%}", f"{off.seconds:.1f}", f"{on.seconds:.1f}")
        table.add_row(f"{off.round_s:g}", *figures, f"{off.seconds / on.seconds:.2f}x")
    return table


def loss_table(losses: Losses, rounds: int) -> Table:
    """The median over the seeds, and what each costs over waiting in the same seed."""
    table = Table("next round begins from", "final loss", "over off", "from", "to", title=f"After {rounds} rounds")
    for name, values in losses.items():
        costs = [value - reference for value, reference in zip(values, losses[OFF], strict=True)]
        figures = (statistics.median(costs), min(costs), max(costs))
        table.add_row(name, f"{statistics.median(values):.4f}", *(f"{cost:+.4f}" for cost in figures))
    return table
