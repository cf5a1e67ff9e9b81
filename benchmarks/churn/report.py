"""What a churn benchmark showed: tables for people, JSON for everything else."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .bars import Bar
from .measure import Figures, median
from .options import Options

COLUMNS = 110
KEPT = {True: "kept", False: "MISSED", None: "not tried"}


def to_dict(options: Options, runs: dict[str, Figures], found: list[Bar], more: dict[str, Any]) -> dict[str, Any]:
    """Everything that was asked and measured."""
    return {
        "options": asdict(options),
        **more,
        "runs": {name: _run_dict(figures) for name, figures in runs.items()},
        "bars": [asdict(bar) for bar in found],
    }


def print_result(options: Options, runs: dict[str, Figures], found: list[Bar], more: dict[str, Any]) -> None:
    """The three tables."""
    console = Console(width=None if Console().is_terminal else COLUMNS)
    console.print(_runs_table(runs, more))
    console.print(_kills_table(runs["faults"], options.heartbeat_ttl_s))
    console.print(_bars_table(found))


def _run_dict(figures: Figures) -> dict[str, Any]:
    rates = {"goodput": figures.goodput, "tokens_per_s": figures.tokens_per_s}
    return asdict(figures) | rates | {"breaches": [str(breach) for breach in figures.breaches]}


def _runs_table(runs: dict[str, Figures], more: dict[str, Any]) -> Table:
    table = _table("The run under faults beside its twin")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    rows = {
        "seconds": [f"{run.seconds:.0f}" for run in runs.values()],
        "contributions counted per second": [f"{run.goodput:.3f}" for run in runs.values()],
        "tokens counted per second": [f"{run.tokens_per_s:,.0f}" for run in runs.values()],
        "median round, s": [f"{run.round_s:.1f}" for run in runs.values()],
        "rounds of every module": [str(run.versions) for run in runs.values()],
        "receipts": [str(run.receipts) for run in runs.values()],
        "  lost": [str(run.lost) for run in runs.values()],
        "  reported as expired": [str(run.expired) for run in runs.values()],
        "  kept for an open round": [str(run.kept) for run in runs.values()],
        "counted twice": [str(run.twice) for run in runs.values()],
        "processors in use": [f"{more['busy'][name]:.0%}" for name in runs],
        f"validation loss after {more['version']} rounds": [f"{more['loss'][name]:.4f}" for name in runs],
        "validation loss at its own end": [f"{more['last_loss'][name]:.4f}" for name in runs],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def _kills_table(faults: Figures, ttl_s: float) -> Table:
    table = _table(f"After each kill, in seconds (an expiry is {ttl_s:g} s)")
    for name in (
        "at",
        "victim",
        "path",
        "T_detect",
        "reassigned",
        "T_resume",
        "started",
        "T_back",
        "led, next version",
    ):
        table.add_column(name, justify="left" if name in ("victim", "path", "led, next version") else "right")
    for kill in faults.kills:
        led = ", ".join(f"{module} {_cell(gap)}" for module, gap in kill.led.items())
        times = [kill.detected_s, kill.reassigned_s, kill.resumed_s, kill.started_s, kill.back_s]
        table.add_row(f"{kill.at_s:.0f}", kill.victim, kill.path or "none", *map(_cell, times), led)
    if faults.kills:
        columns = [[getattr(kill, f"{name}_s") for kill in faults.kills] for name in MEDIANS]
        table.add_section()
        table.add_row("", "median", "", *(_cell(median(v for v in column if v is not None)) for column in columns), "")
    return table


MEDIANS = ("detected", "reassigned", "resumed", "started", "back")


def _bars_table(found: list[Bar]) -> Table:
    table = _table("What it must show")
    for name in ("", "measured", "wanted", ""):
        table.add_column(name)
    for bar in found:
        table.add_row(bar.name, bar.measured, bar.wanted, KEPT[bar.is_kept])
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
