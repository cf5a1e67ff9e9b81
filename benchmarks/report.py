"""What every benchmark does with its figures: compare them within a turn, show them as a table, write them as JSON.

Speeds that are compared are measured in turns, so that what disturbs one disturbs the others. What counts is then the
median of the ratios within each turn, and not the ratio of the medians.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.console import print_error

COLUMNS = 110
"""Width of tables that go to a file."""
MB = 1e6

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Disks = Annotated[Path | None, typer.Option("--dir", help="Folder for the peers' disks; default: a temporary one.")]
Corpus = Annotated[str, typer.Option(help="`found`, or a file or folder of text, JSONL or Parquet.")]


def run_benchmark(main: Callable[..., None], *, epilog: str | None = None) -> None:
    """Run `main` as a command; its options and help are its parameters and docstring."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=epilog)(main)
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run the command that was typed. What cannot be had is one line and an exit code, as in the programs. SIGTERM
    lets the command end what it has started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except DipacoError as error:
        print_error(error)
        sys.exit(error.exit_code)


def require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise BadParameter for the first of the flag's `names` that is not among those that are `known`."""
    there = list(known)
    if unknown := next((name for name in names if name not in there), None):
        raise typer.BadParameter(f"no {kind} `{unknown}`; there are {', '.join(there)}")


def write_json(path: Path | None, figures: object) -> None:
    """Write `figures` to `path`, if there is one."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, default=str) + "\n", encoding="utf-8")


def seconds_of(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def median_ratio(values: Iterable[float], others: Iterable[float]) -> float:
    """The median of the ratios of `values` to `others` within each turn."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the least and the greatest."""
    return statistics.median(values), min(values), max(values)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[str] = ()) -> Table:
    """A plain table; the first column and those in `left` are aligned to the left, figures to the right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=min(len(title), COLUMNS))
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if not place or name in left else "right", no_wrap=not place)
    for row in rows:
        made.add_row(*row)
    return made


def show(*shown: Any) -> None:
    """Print tables and lines, on a terminal in its width."""
    console = Console(width=None if Console().is_terminal else COLUMNS)
    for each in shown:
        console.print(each)
