"""The answers of a coordinator for people: a panel and tables on a terminal, plain lines everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dipaco_p2p.program.text import duration, printable, size

PANEL_COLUMNS = 78
UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: its head, and what a row has in it."""

    head: str
    cell: Callable[[dict[str, Any]], str]
    is_number: bool = False


# -- status


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values, in the order in which somebody asks for them."""
    found = [
        ("state", str(report["state"])),
        ("run", f"{report['run']}, {report['stage']}" if report["run"] else "being prepared"),
        ("round", _round(report)),
        ("perplexity", _judged(report)),
        ("volunteers", f"{report['volunteers_alive']} alive, {report['volunteers_training']} train"),
        ("paths", f"{report['paths_covered']} of {report['paths']} have a volunteer"),
        ("modules", f"{report['modules_led']} of {report['modules']} have a leader"),
        ("speed", f"{report['tokens_per_s']:,.0f} tokens/s"),
        ("counted", f"{report['contributions_counted']} contributions in {report['versions_archived']} versions"),
        ("line", f"{size(report['bytes_up'])} up, {size(report['bytes_down'])} down since the start"),
        ("disk", f"{size(report['disk_used_bytes'])} used, {size(report['disk_free_bytes'])} free"),
        ("program", f"version {report['version']}, process {report['pid']}, for {duration(report['running_s'])}"),
        ("folder", report["folder"]),
    ]
    return [(name, printable(value)) for name, value in found]


def lines(report: dict[str, Any]) -> Iterable[str]:
    return (f"{name}: {value}" for name, value in rows(report))


def panel(report: dict[str, Any], *, columns: int) -> RenderableType:
    """As wide as the terminal, and no wider than the panel of a volunteer."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(report):
        table.add_row(name, Text(value))
    return Panel(table, title="dipaco-bootstrap", width=min(columns, PANEL_COLUMNS))


def show(report: dict[str, Any], console: Console) -> None:
    """Print it once."""
    if console.is_terminal:
        console.print(panel(report, columns=console.width))
    else:
        print("\n".join(lines(report)), flush=True)


def _round(report: dict[str, Any]) -> str:
    if report["round"] is None:
        return UNKNOWN
    return f"{report['round']} of {report['rounds']}, for {duration(report['round_age_s'])}"


def _judged(report: dict[str, Any]) -> str:
    if report["judged_perplexity"] is None:
        return UNKNOWN
    return f"{report['judged_perplexity']:.1f} after round {report['judged_round']}"


# -- lists


PEERS = (
    Column(head="peer", cell=lambda row: _short(row["peer"])),
    Column(head="role", cell=lambda row: row["role"]),
    Column(head="path", cell=lambda row: row["path"] or UNKNOWN),
    Column(head="round", cell=lambda row: str(row["round"]), is_number=True),
    Column(head="doing", cell=lambda row: row["doing"]),
    Column(head="tokens/s", cell=lambda row: f"{row['tokens_per_s']:,.0f}", is_number=True),
    Column(head="heard", cell=lambda row: _ago(row["heartbeat_age_s"]), is_number=True),
    Column(head="reachable", cell=lambda row: "yes" if row["is_reachable"] else "no"),
    Column(head="leads", cell=lambda row: ", ".join(row["leads"]) or UNKNOWN),
)
PATHS = (
    Column(head="path", cell=lambda row: row["path"]),
    Column(head="covered", cell=lambda row: "yes" if row["is_covered"] else "NO"),
    Column(head="round", cell=lambda row: str(row["round"]), is_number=True),
    Column(head="loss", cell=lambda row: UNKNOWN if row["judged_loss"] is None else f"{row['judged_loss']:.4f}"),
    Column(head="claimants", cell=lambda row: _claimants(row)),
)
MODULES = (
    Column(head="module", cell=lambda row: row["module"]),
    Column(head="newest", cell=lambda row: str(row["newest"]), is_number=True),
    Column(head="final", cell=lambda row: str(row["final"]), is_number=True),
    Column(head="behind", cell=lambda row: str(row["behind"]), is_number=True),
    Column(head="leader", cell=lambda row: _leader(row)),
    Column(head="term", cell=lambda row: str(row["term"]), is_number=True),
    Column(head="mirrors", cell=lambda row: ", ".join(map(_short, row["mirrors"])) or UNKNOWN),
)


def show_list(found: list[dict[str, Any]], columns: tuple[Column, ...], console: Console, *, left_out: int) -> None:
    """A table, in columns that only spaces keep apart; on a terminal too narrow for that a block for each row."""
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


def _drawn(cells: list[list[str]], columns: tuple[Column, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.head, overflow="fold", justify="right" if column.is_number else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _blocks(cells: list[list[str]], columns: tuple[Column, ...]) -> Table:
    """Each row as names and values, below one another, with an empty line between two rows."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, row in enumerate(cells):
        if number:
            table.add_row("", "")
        for column, cell in zip(columns, row, strict=True):
            table.add_row(column.head, Text(cell))
    return table


def _aligned(cells: list[list[str]], columns: tuple[Column, ...]) -> list[str]:
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    kept = list(zip(columns, widths, strict=True))
    return ["  ".join(_padded(text, *how) for text, how in zip(row, kept, strict=True)).rstrip() for row in cells]


def _padded(text: str, column: Column, width: int) -> str:
    return text.rjust(width) if column.is_number else text.ljust(width)


def _short(peer: str) -> str:
    return f"...{peer[-6:]}"


def _ago(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _claimants(row: dict[str, Any]) -> str:
    words = [_short(each["peer"]) + ("" if each["is_alive"] else " (silent)") for each in row["claimants"]]
    return ", ".join(words + ([f"and {row['claimants_left_out']} more"] if row["claimants_left_out"] else [])) or "none"


def _leader(row: dict[str, Any]) -> str:
    return f"none for {duration(row['leaderless_s'])}" if row["leader"] is None else _short(row["leader"])
