"""What a soak showed, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .slope import Trend

COLUMNS = 110
MIB = 1024 * 1024


def print_trends(trends: Sequence[Trend], *, seconds: float, faults: int) -> None:
    """Every measure with its level and its rise; what grows is marked."""
    title = f"{seconds / 60:.1f} minutes, {faults} faults; rises are those of the line after the warm-up"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    for name in ("measure", "median", "highest", "rise", "allowed", ""):
        table.add_column(name, justify="left" if name in ("measure", "") else "right")
    for found in trends:
        figures = (found.level, found.highest, found.rise, found.allowed)
        cells = [_cell(found.measure, value) for value in figures]
        table.add_row(found.measure, *cells, "GROWS" if found.grows else "flat")
    Console(width=None if Console().is_terminal else COLUMNS).print(table)


def to_dict(trends: Sequence[Trend], samples: Sequence[tuple[float, Any]], **more: Any) -> dict[str, Any]:
    """The trends, and all samples behind them."""
    rows = [asdict(found) | {"grows": found.grows} for found in trends]
    began_s = samples[0][0]
    return more | {"trends": rows, "samples": [{"at_s": at_s - began_s, **sample} for at_s, sample in samples]}


def _cell(measure: str, value: float) -> str:
    if measure.split()[0].endswith("_bytes"):
        return f"{value / MIB:,.2f} MiB"
    return f"{value:,.1f}"
