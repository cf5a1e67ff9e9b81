"""The answer to `status` for people: a panel on a terminal, `name: value` lines everywhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dipaco_p2p.program.text import duration, printable, size

from ..display import PANEL_COLUMNS
from ..pausing import in_words


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values, in the order in which somebody asks for them."""
    found = [
        ("state", _state(report)),
        ("doing", report["doing"] + (f" for {report['waits_for']}" if report["waits_for"] else "")),
        ("run", f"{report['run']}, {report['stage']}" if report["run"] else "not found yet"),
        ("peer", f"...{report['peer'][-6:]}" if report["peer"] else "-"),
        ("path", report["path"] or "none"),
        ("modules", _modules(report["modules"])),
        ("leads", ", ".join(report["leads"]) or "no module"),
        ("round", _round(report)),
        ("loss", "-" if report["loss"] is None else f"{report['loss']:.3f} nats per token"),
        ("speed", f"{report['tokens_per_s']:,.0f} tokens/s"),
        ("receipts", str(report["receipts"])),
        ("last receipt", report["last_receipt"] or "-"),
        ("swarm", _swarm(report)),
        ("line", f"{size(report['bytes_up'])} up, {size(report['bytes_down'])} down since the start"),
        ("time left", duration(report["eta_s"])),
        ("program", f"version {report['version']}, process {report['pid']}, for {duration(report['running_s'])}"),
    ]
    return [(name, printable(value)) for name, value in found]


def lines(report: dict[str, Any]) -> Iterable[str]:
    return (f"{name}: {value}" for name, value in rows(report))


def panel(report: dict[str, Any], *, columns: int) -> RenderableType:
    """As wide as the terminal, and no wider than the panel of `join`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(report):
        table.add_row(name, Text(value))
    return Panel(table, title="dipaco-peer", width=min(columns, PANEL_COLUMNS))


def show(report: dict[str, Any], console: Console) -> None:
    """Print it once."""
    if console.is_terminal:
        console.print(panel(report, columns=console.width))
    else:
        print("\n".join(lines(report)), flush=True)


def _state(report: dict[str, Any]) -> str:
    if report["pauses"]:
        return f"{report['state']}: {in_words(report['pauses'])}"
    return str(report["state"]) + (": it leaves after this round" if report["state"] == "finishing" else "")


def _modules(modules: list[dict[str, Any]]) -> str:
    words = (f"{each['module']} version {each['version']}" for each in modules)
    return ", ".join(words) or "-"


def _round(report: dict[str, Any]) -> str:
    cut = ", cut short" if report["is_cut"] else ""
    return f"{report['round']} of {report['rounds']}, step {report['step']} of {report['steps']}{cut}"


def _swarm(report: dict[str, Any]) -> str:
    covered = f"{report['paths_covered']} of {report['paths']}"
    return f"{report['peers_alive']} peers alive, {report['peers_training']} train; {covered} paths have a volunteer"
