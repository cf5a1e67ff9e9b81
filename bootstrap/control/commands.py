"""What the commands that look at a running coordinator do; cli.py has their words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dipaco_p2p.errors import ConfigError, NotRunning
from dipaco_p2p.program.control import show
from dipaco_p2p.program.control.client import ask, not_running
from dipaco_p2p.program.control.place import find_socket
from dipaco_p2p.program.control.show import show_status

from ..runfile import load_run_file, run_folder, runs_folder
from .requests import COORDINATOR, Request
from .screen import SCREEN

TIMEOUT_S = 20.0
"""For an answer: a coordinator that makes a version, or looks through a large folder, may take seconds."""
CHOICES_SHOWN_MAX = 8


def chosen_folder(given: Path | None) -> Path:
    """The run's folder that a user means: as named, that of a run file, else this one, else the only one where a
    coordinator runs among the user's. Raises ConfigError where there are several, NotRunning without any."""
    if given is not None:
        return run_folder(load_run_file(given)) if given.is_file() else given
    here = Path()
    if find_socket(here) is not None:
        return here
    known = runs_folder()
    running = sorted(each for each in known.glob("*/") if find_socket(each) is not None)
    if len(running) > 1:
        names = ", ".join(map(str, running[:CHOICES_SHOWN_MAX]))
        raise ConfigError(f"{len(running)} coordinators may run here", hint=f"name the folder of one: {names}")
    if not running:
        raise not_running(known, COORDINATOR)
    return running[0]


def status(given: Path | None, *, is_json: bool, is_watched: bool) -> None:
    """Say how the run stands, once or until the coordinator ends."""
    folder = chosen_folder(given)
    hint = f"its log: {folder / 'seed.log'}; the same `dipaco-bootstrap start` goes on"
    ended = NotRunning(f"the coordinator in `{folder}` has ended", hint=hint)
    show_status(SCREEN, lambda: asked(folder, "status"), is_json=is_json, is_watched=is_watched, ended=ended)


def show_list(given: Path | None, what: str, columns: Sequence[show.Column], *, is_json: bool) -> None:
    """One of the lists: `peers`, `paths`, `modules`."""
    report = asked(chosen_folder(given), what)
    if is_json:
        print_json(report)
    else:
        show.show_list(report[what], columns, Console(), left_out=report["left_out"])


def asked(folder: Path, what: str) -> dict[str, Any]:
    """The coordinator's answer; raises what it refuses with."""
    return ask(folder, Request(ask=what), timeout_s=TIMEOUT_S).body


def print_json(value: dict[str, Any]) -> None:
    """In ASCII: words of other peers are in it, and it may go to a terminal."""
    show.print_json(value, is_ascii=True)
