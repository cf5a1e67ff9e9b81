"""The answers of a running program for people: a panel and tables on a terminal, plain lines everywhere else.

The one file of `dipaco_p2p/` that draws. What it draws, each program says itself: rows of names and values, columns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...errors import NotRunning
from ...words import printable
from ..examination import Finding, Level, document, exit_code, told, worst

ECHO_COLUMNS = 2
"""Of a terminal, beyond the frame: the `^C` that it echoes needs them."""
WATCH_S = 1.0
WATCH_PLAIN_S = 10.0
"""Between two looks; longer where no terminal shows only the last."""
UNKNOWN = "-"

Report = dict[str, Any]
"""What a program answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """How one program's status is shown."""

    title: str
    rows: Callable[[Report], list[tuple[str, str]]]
    """Names and values, in the order in which somebody asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: its head, and what a row has in it."""

    head: str
    cell: Callable[[Report], str]
    is_number: bool = False


# -- status


def show_status(
    screen: Screen, look: Callable[[], Report], *, is_json: bool, is_watched: bool, ended: NotRunning
) -> None:
    """Ask once and print the answer; or ask until the program ends, which raises `ended`, or Ctrl-C."""
    report, console = look(), Console()
    if is_watched:
        _watch(screen, report, look, console, is_json=is_json, ended=ended)
    elif is_json:
        print_json(report)
    else:
        show(screen, report, console)


def show(screen: Screen, report: Report, console: Console) -> None:
    """Print it once."""
    if console.is_terminal:
        console.print(panel(screen, report, columns=console.width))
    else:
        print("\n".join(lines(screen, report)), flush=True)


def lines(screen: Screen, report: Report) -> list[str]:
    """`name: value`, one for each row."""
    return [f"{name}: {printable(value)}" for name, value in screen.rows(report)]


def panel(screen: Screen, report: Report, *, columns: int) -> Panel:
    """As wide as a terminal of so many columns."""
    table = pairs()
    for name, value in screen.rows(report):
        table.add_row(name, Text(printable(value)))
    return Panel(table, title=screen.title, width=panel_width(columns))


def panel_width(columns: int) -> int:
    """Of a panel on a terminal of so many columns."""
    return max(columns - ECHO_COLUMNS, 1)


def pairs() -> Table:
    """An empty table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def print_json(report: Report, *, is_ascii: bool = False) -> None:
    """As one document; `is_ascii` for words of other peers, which may go to a terminal."""
    print(json.dumps(report, indent=2, ensure_ascii=is_ascii))


def _watch(
    screen: Screen, report: Report, look: Callable[[], Report], console: Console, *, is_json: bool, ended: NotRunning
) -> None:
    def again() -> Report:
        try:
            return look()
        except NotRunning:
            raise ended from None

    if not console.is_terminal or is_json:
        while True:
            if is_json:  # a document a line
                print(json.dumps(report), flush=True)
            else:
                print(*lines(screen, report), "", sep="\n", flush=True)
            time.sleep(WATCH_PLAIN_S)
            report = again()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(panel(screen, report, columns=console.width), refresh=True)
            time.sleep(WATCH_S)
            report = again()


# -- lists


def show_list(found: list[Report], columns: Sequence[Column], console: Console, *, left_out: int) -> None:
    """A table whose columns are separated by spaces only; on a terminal too narrow for that, a block for each row."""
    cells = [[printable(column.cell(row)) for column in columns] for row in found]
    plain = _aligned([[column.head for column in columns], *cells], columns)
    if not console.is_terminal:
        print("\n".join(plain), flush=True)
    elif max(map(len, plain)) <= console.width:
        console.print(_drawn(cells, columns))
    else:
        console.print(_blocks(cells, columns))
    if left_out:
        print(f"and {left_out} more", flush=True)


def short_name(peer: str) -> str:
    """A peer in a table."""
    return f"...{peer[-6:]}"


def _drawn(cells: list[list[str]], columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.head, overflow="fold", justify="right" if column.is_number else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _blocks(cells: list[list[str]], columns: Sequence[Column]) -> Table:
    """Each row as names and values below one another, with an empty line between two rows."""
    table = pairs()
    for number, row in enumerate(cells):
        if number:
            table.add_row("", "")
        for column, cell in zip(columns, row, strict=True):
            table.add_row(column.head, Text(cell))
    return table


def _aligned(cells: list[list[str]], columns: Sequence[Column]) -> list[str]:
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    kept = list(zip(columns, widths, strict=True))
    return ["  ".join(_padded(text, *how) for text, how in zip(row, kept, strict=True)).rstrip() for row in cells]


def _padded(text: str, column: Column, width: int) -> str:
    return text.rjust(width) if column.is_number else text.ljust(width)


STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def show_findings(findings: Sequence[Finding], *, schema: str, verdicts: Mapping[Level, str], is_json: bool) -> int:
    """Print them on the standard output, for people with the verdict on the worst; the exit code."""
    if is_json:
        print(json.dumps(document(findings, schema=schema), indent=2))
        return exit_code(findings)
    console = Console(highlight=False, soft_wrap=True)
    for level, line in told(findings):
        console.print(Text.assemble((f"{level or '':<5}", STYLES[level] if level else ""), line))
    console.print(verdicts[worst(findings)])
    return exit_code(findings)
