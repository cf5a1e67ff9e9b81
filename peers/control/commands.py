"""What the commands about a running volunteer do; cli.py has their words. What they print goes to the output, whatever
went wrong is an error of errors.py.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from dipaco_p2p.errors import NotRunning
from dipaco_p2p.program.control.client import ask, wait_end
from dipaco_p2p.program.text import printable, size

from . import keys, logs, places
from .bugreport import write_report
from .durations import read_duration
from .requests import Request
from .screen import lines, panel, rows, show

WATCH_S = 1.0
WATCH_PLAIN_S = 10.0
"""Between two looks; longer where no terminal shows only the last."""


def status(home: Path, *, is_json: bool, is_watched: bool) -> None:
    """Say what the volunteer does, once or until it ends."""
    if is_watched:
        _watch(home, is_json=is_json)
        return
    report = ask(home, Request(ask="status")).body
    if is_json:
        _print_json(report)
    else:
        show(report, Console())


def pause(home: Path, *, length: str | None) -> None:
    for_s = None if length is None else read_duration(length)
    report = ask(home, Request(ask="pause", for_s=for_s)).body
    _say(report, "the step that is going on ends, and what was trained is handed in")


def resume(home: Path) -> None:
    _say(ask(home, Request(ask="resume")).body, "")


def finish(home: Path, *, is_waited: bool) -> None:
    answered = ask(home, Request(ask="finish"))
    _say(answered.body, f"round {answered.body['round']} is done and handed in first")
    if is_waited:
        wait_end(answered.pid)
        print("it has ended")


def stop(home: Path, *, is_now: bool) -> None:
    """Returns when the process has ended, so that the next command finds the home free."""
    answered = ask(home, Request(ask="stop", now=is_now))
    print("it leaves at once" if is_now else "it hands in what was trained, and leaves", flush=True)
    wait_end(answered.pid)
    print("it has ended")


def show_logs(home: Path, *, count: int, is_followed: bool) -> None:
    path = logs.newest_log(home)
    found, place = logs.last_lines(path, count)
    for line in found:
        print(logs.clean(line))
    if is_followed:
        for line in logs.follow(home, path, place):
            print(logs.clean(line), flush=True)


def show_paths(home: Path, *, is_json: bool) -> None:
    if is_json:
        _print_json(places.plain(home))
        return
    for each in places.places(home):
        there = size(each.bytes) if each.is_there else "not there"
        print(printable(f"{each.what}: {each.path} ({there})"))


def show_identity(home: Path, *, is_json: bool) -> None:
    found = keys.plain(home)
    if is_json:
        _print_json(found)
    else:
        print(f"{found['peer']}\nin {found['file']}")


def export_identity(home: Path, target: Path, *, is_forced: bool) -> None:
    peer = keys.export_to(home, target, is_forced=is_forced)
    print(f"...{peer[-6:]} is in {target} now; whoever has that file is this volunteer")
    print(keys.ONCE_HINT)


def import_identity(source: Path, home: Path, *, is_forced: bool) -> None:
    peer = keys.import_from(source, home, is_forced=is_forced)
    print(f"the volunteer in {home} is ...{peer[-6:]} now")
    print(keys.ONCE_HINT)


def bug_report(home: Path, target: Path | None) -> None:
    target = target or Path(time.strftime("dipaco-bugreport-%Y%m%d-%H%M%S.tar.gz"))
    names = write_report(home, target)
    print(f"{target}: {', '.join(names)}")
    print("keys, addresses, names and folders were taken out; look at it before you send it")


def _watch(home: Path, *, is_json: bool) -> None:
    """Until the volunteer ends, which is raised as NotRunning, or Ctrl-C."""
    console = Console()
    report = ask(home, Request(ask="status")).body
    if not console.is_terminal or is_json:
        while True:
            _print_watched(report, is_json=is_json)
            time.sleep(WATCH_PLAIN_S)
            report = _again(home)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(panel(report, columns=console.width), refresh=True)
            time.sleep(WATCH_S)
            report = _again(home)


def _again(home: Path) -> dict[str, Any]:
    try:
        return ask(home, Request(ask="status")).body
    except NotRunning:
        raise NotRunning(f"the volunteer in `{home}` has ended", hint="its log: `dipaco-peer logs`") from None


def _print_watched(report: dict[str, Any], *, is_json: bool) -> None:
    if is_json:  # a document a line
        print(json.dumps(report), flush=True)
    else:
        print(*lines(report), "", sep="\n", flush=True)


def _say(report: dict[str, Any], more: str) -> None:
    """How it stands now, in a line."""
    state = dict(rows(report))["state"]
    print(state if not more or report["state"] in ("paused", "stopping") else f"{state}; {more}")


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
