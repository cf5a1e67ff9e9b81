"""What a volunteer sees: a live panel on a terminal, below what has happened; plain lines everywhere else."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from dipaco_p2p.program.control.show import pairs, panel_width
from dipaco_p2p.program.history import History
from dipaco_p2p.program.text import duration, size
from dipaco_p2p.words import printable

from .status import Status, in_rows

REFRESH_S = 0.25
STATE_SOURCES = {
    "start": "{path} begins with the inner state of the stage's start",
    "ours": "{path} continues from its inner state on this machine",
    "fetched": "{path} continues from its inner state, fetched from ...{peer}",
    "older": "{path} continues from an older inner state: no live peer gave the newest",
    "lost": "{path} begins with the inner state of the stage's start: no live peer gave its own",
    "dropped": "{path} starts over: the inner state that was fetched is of no use",
}
"""By where the inner state of a path was found (path/kept.py)."""
IN_PANEL = frozenset({"doing", "limited", "fetched"})
"""Events that the panel shows until the next of their kind, or that come with each round of each module: as lines they
would push away those that are to stay."""
MOST_OF_IT = 0.95
"""Of the squared norm of its outer gradients: a round that sent so much needs no word about it."""
STEPS_LINE_S = 10.0
"""A plain line about training at most this often."""


@asynccontextmanager
async def show(status: Status, history: History, *, console: Console | None = None) -> AsyncIterator[None]:
    """Show `status` while the block runs; on the error stream without a `console`."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        history.listen(partial(_note_curves, status))
        history.listen(partial(_print_above, console))
        task = asyncio.create_task(_live(status, console))
    else:
        history.listen(_print_event)
        task = asyncio.create_task(_lines(status))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if console.is_terminal and (words := closing(status)):
        console.print(words)


def closing(status: Status) -> str:
    """The last line that a volunteer sees; none after the warm-up: what is waited for then is said (stages.py)."""
    if status.is_complete and not status.is_last_stage:
        return ""
    end = "The run is complete." if status.is_complete else "The same command goes on where this one stopped."
    return f"Thank you: {status.receipts} receipts in this run. {end}"


def panel(status: Status, *, columns: int) -> Panel:
    """The whole picture, on a terminal of so many columns: what it does, whom it waits for, loss, speed, last receipt,
    time left."""
    table = pairs()
    for name, value in in_rows(status.figures()).items():
        table.add_row(name, Text(value))
    if status.limited:
        table.add_row("limits", Text(status.limited))
    if status.unwritten:
        table.add_row("curves", Text(status.unwritten))
    total = max(status.rounds * status.steps, 1)
    progress = ProgressBar(total=total, completed=min(status.round * status.steps + status.step, total))
    title = f"dipaco-peer  {status.run}  ...{status.peer[-6:]}"
    subtitle = "Ctrl-C finishes cleanly, twice leaves at once"
    return Panel(Group(table, Text(), progress), title=title, subtitle=subtitle, width=panel_width(columns))


def _note_curves(status: Status, event: Mapping[str, Any]) -> None:
    if event["ev"] == "curves_stopped":
        status.unwritten = f"to {event['to']} have stopped: {event['detail']}"


def _print_above(console: Console, event: Mapping[str, Any]) -> None:
    """A line above the panel, which stays when the panel is drawn again."""
    if event["ev"] not in IN_PANEL and (words := words_for(event)):
        console.print(Text(_line(words)))


async def _live(status: Status, console: Console) -> None:
    def now() -> Panel:
        return panel(status, columns=console.width)  # which may have changed

    with Live(now(), console=console, auto_refresh=False, redirect_stderr=False) as live:
        try:
            while True:
                live.update(now(), refresh=True)
                await asyncio.sleep(REFRESH_S)
        finally:
            live.update(now(), refresh=True)


async def _lines(status: Status) -> None:
    while True:
        await asyncio.sleep(STEPS_LINE_S)
        if status.doing == "training" and status.loss is not None:
            _print(
                f"round {status.round} step {status.step}/{status.steps}  loss {status.loss:.3f}  "
                f"{status.tokens_per_s:,.0f} tokens/s  left {duration(status.eta_s)}"
            )


def _print_event(event: Mapping[str, Any]) -> None:
    if words := words_for(event):
        _print(words)


def words_for(event: Mapping[str, Any]) -> str:
    """An event of the history in a line for people; nothing for one that concerns nobody."""
    words: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "doing": lambda e: e["doing"] + (f" for {e['waits_for']}" if e["waits_for"] else ""),
        "joined": lambda e: "takes part in the " + ("warm-up" if e["stage"] == "warmup" else e["stage"]),
        "claimed": lambda e: f"moved from {e['before']} to {e['path']}" if e.get("before") else f"claimed {e['path']}",
        "engine": lambda e: f"training in {e['detail']}",
        "stalled": lambda e: f"no progress for {e['silent_s']:.0f} s: {e['path']} is given up until training resumes",
        "limited": lambda e: f"limits: {e['detail']}",
        "released": lambda e: f"released {e['path']}",
        "receipt": lambda e: f"receipt for {e['module']} from version {e['base']}: {e['id'][:8]}",
        "unanswered": lambda e: f"not taken: {e['detail']}; {e['path']} will be trained again",
        "refused": lambda e: f"refused: {e['module']}: {e['reason']}: {e['detail']}",
        "round": lambda e: (
            f"round {e['round']} of {e['path']} done: loss {e['loss']:.3f}, {e['seconds']:.1f} s"
            + (f", cut short after {e['steps']} steps" if e["is_cut"] else "")
            + (f", sent {e['captured']:.0%} of its work" if e.get("captured", 1.0) < MOST_OF_IT else "")
        ),
        "state": lambda e: STATE_SOURCES[e["source"]].format(path=e["path"], peer=e["peer"][-6:]),
        "failed": lambda e: f"{e['path']} cannot be trained here: {e['detail']}",
        "ahead_dropped": lambda e: f"{e['path']}: steps taken ahead are dropped: {e['detail']}",
        "scored": lambda e: f"scored {e['path']} for sharding {e['sharding']}",
        "checked": lambda e: (
            f"evaluated {e['path']} at round {e['version']}: {e['loss']:.4f}, published {e['said']:.4f}"
            + ("" if e["agrees"] else ": THEY DIFFER")
        ),
        "resharded": lambda e: f"{e['path']} continues on its shard of sharding {e['sharding']}",
        "sat_out": lambda e: f"left round {e['round']} of {e['path']} to others: more train it than a version counts",
        "leads": lambda e: f"leads {e['module']} from version {e['version']}, term {e['term']}",
        "handed_over": lambda e: f"handed {e['module']} over to ...{e['to'][-6:]}",
        "deposed": lambda e: f"no longer leads {e['module']}: term {e['term']} is over",
        "fetched": lambda e: f"fetched {e['module']} version {e['version']} in {e['seconds']:.1f} s: {_sources(e)}",
        "gave_up": lambda e: f"dropped the versions of {e['module']} after {e['after']}: another branch goes on",
        "version": lambda e: f"made {e['module']} version {e['version']} {e['digest'][:8]}",
        "curves_stopped": lambda e: f"curves to {e['to']} have stopped: {e['detail']}; training goes on",
        "paused": lambda e: f"paused for {e['detail']}",
        "resumed": lambda e: "goes on",
        "left": lambda e: "left" + (f": the {_ended(e)} is complete" if e["complete"] else ""),
    }
    return words[event["ev"]](event) if event["ev"] in words else ""


def _sources(event: Mapping[str, Any]) -> str:
    """Where the bytes of a version came from."""
    told = {"trainers": "from_trainers", "owners": "from_owners", "the coordinator": "from_seeds"}
    return ", ".join(f"{size(event[key])} from {who}" for who, key in told.items() if event[key])


def _ended(event: Mapping[str, Any]) -> str:
    """What a stage that is complete was, in one word; a program from before there were stages did not say."""
    stage = str(event.get("stage", "stage"))
    return {"stage": "stage", "warmup": "warm-up"}.get(stage, stage if event.get("grows") else "run")


def _print(text: str) -> None:
    tell(_line(text))


def _line(text: str) -> str:
    """With the time of day; some words are other peers', such as why they refuse."""
    return f"{time.strftime('%H:%M:%S')} {printable(text)}"


def tell(text: str) -> None:
    """Say something that is not a result: on the error stream, at once."""
    print(text, file=sys.stderr, flush=True)
