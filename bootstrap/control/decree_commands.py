"""What the commands that decree something do: they ask the coordinator that runs, or write into its folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError, NotRunning
from dipaco_p2p.program.control.client import ask
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.program.text import printable

from ..decreeing import Order, offline
from ..recovery.marker import require_caught_up
from .commands import TIMEOUT_S, chosen_folder, print_json
from .requests import Request

LOCKED_HINT = "its coordinator may be starting or ending: try again"


def decree(given: Path | None, order: Order) -> None:
    """Have it signed, and say so."""
    folder = chosen_folder(given)
    request = Request(ask=order.act, reason=order.reason, peer=order.peer, module=order.module, version=order.version)
    try:
        row = ask(folder, request, timeout_s=TIMEOUT_S).body
        print(told(row), flush=True)
    except NotRunning:
        _require_run(folder)
        with folder_lock(folder, hint=LOCKED_HINT):
            require_caught_up(folder)
            row = offline(folder).issue(order, at_s=time.time())
        print(told(row), "the coordinator does not run: peers hear of it when it is started again", sep="\n")


def show(given: Path | None, *, is_json: bool) -> None:
    """The log, the oldest first, and what holds."""
    folder = chosen_folder(given)
    try:
        found = ask(folder, Request(ask="decrees"), timeout_s=TIMEOUT_S).body
    except NotRunning:
        _require_run(folder)
        with folder_lock(folder, hint=LOCKED_HINT):
            found = offline(folder).listed()
    if is_json:
        print_json(found)
    else:
        print("\n".join(lines(found)), flush=True)


def lines(found: dict[str, Any]) -> list[str]:
    """For people."""
    rows = [f"{_when(row['at_s'])}  {told(row)}" for row in found["decrees"]]
    holds = [f"frozen: {printable(found['frozen'])}"] if found["frozen"] is not None else []
    if found["banned"]:
        holds.append("banned: " + ", ".join(f"...{each['peer'][-6:]}" for each in found["banned"]))
    return [*rows, f"{found['run']}: " + ("; ".join(holds) or "nobody is banned, nothing is frozen")]


def told(row: dict[str, Any]) -> str:
    """One decree in one line."""
    about = row["act"]
    if row["peer"] is not None:
        about += f" {row['peer']}"
    if row["module"] is not None:
        done = "not carried out yet" if row["version"] is None else f"done by version {row['version']}"
        about += f" {row['module']} from {row['after']} to {row['to']} ({done})"
    return f"decree {row['number']}: {about}" + (f": {printable(row['reason'])}" if row["reason"] else "")


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _require_run(folder: Path) -> None:
    """Before a lock would make the folder."""
    if not (folder / "identity.key").is_file():
        raise ConfigError(f"`{folder}` holds no run", hint="give the folder that `start --dir` was given")
