"""What the commands about a running volunteer do; cli.py has their words. What they print goes to the output, whatever
went wrong is an error of errors.py.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError, NotRunning
from dipaco_p2p.program.control.client import ask, wait_end
from dipaco_p2p.program.control.show import UNKNOWN, Report, Screen, print_json, short_name, show_status
from dipaco_p2p.program.text import duration, size
from dipaco_p2p.protocol.names import name_words
from dipaco_p2p.words import printable

from ..status import in_rows, in_words
from . import home as at_home
from .bugreport import write_report
from .control import PAUSE_S_MAX, Request
from .logs import follow, last_told

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd])")
HINT = "write a number and its unit: 90s, 30m, 2h or 1d"
ENDED = "the volunteer has ended"


def read_duration(text: str) -> float:
    """Seconds; raises ConfigError for anything else, for nothing, and for more than a year."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"`{text[:40]}` is not a duration", hint=HINT)
    seconds = float(found[1]) * UNITS_S[found[2]]
    if not 0.0 < seconds <= PAUSE_S_MAX:
        raise ConfigError(f"`{text[:40]}` must be above 0 and at most {PAUSE_S_MAX / 86_400:g} days", hint=HINT)
    return seconds


def rows(report: Report) -> list[tuple[str, str]]:
    """Names and values, in the order in which somebody asks for them."""
    work, versions = in_rows(report), (f"{each['module']} version {each['version']}" for each in report["modules"])
    found = {
        "state": _state(report),
        "doing": work["doing"],
        "run": f"{report['run']}, {report['stage']}" if report["run"] else "not found yet",
        "peer": _peer(report),
        "path": work["path"],
        "modules": ", ".join(versions) or UNKNOWN,
        **work,
        "reached": _reached(report),
        "line": f"{size(report['bytes_up'])} up, {size(report['bytes_down'])} down since the start{_relayed(report)}",
        "program": f"version {report['version']}, process {report['pid']}, up {duration(report['running_s'])}",
    }
    return list(found.items())


REACHED = {
    "directly": "directly",
    "relay": "through a relay, or a hole in both routers",
    "none": "by nobody: it leads no module",
}


def _reached(report: Report) -> str:
    """How others dial it; unknown of a volunteer that was started before there were relays."""
    words = REACHED.get(report.get("reached") or "", UNKNOWN)
    direct, relayed = report.get("peers_direct", 0), report.get("peers_relayed", 0)
    if direct or relayed:
        words += f"; spoke with {direct} peers directly, {relayed} through a relay"
    if report.get("relay_slots") or report.get("relay_bytes"):
        words += f"; relays for {report['relay_slots']}, {size(report['relay_bytes'])} so far"
    return words


def _relayed(report: Report) -> str:
    relayed = report.get("bytes_relayed", 0)
    return f", {size(relayed)} of it through relays" if relayed else ""


def _peer(report: Report) -> str:
    """The id, and behind it what others show; a volunteer that was started before there were names says none."""
    if not report["peer"]:
        return UNKNOWN
    hidden = report.get("name_hidden")
    words = name_words(report.get("name", ""), report.get("team", ""))
    words = words if hidden is None else f"(the coordinator hides its name: {hidden})"
    return f"{short_name(report['peer'])} {words}".rstrip()


def _state(report: dict[str, Any]) -> str:
    if report["pauses"]:
        return f"{report['state']}: {in_words(report['pauses'])}"
    return str(report["state"]) + (": it leaves after this round" if report["state"] == "finishing" else "")


SCREEN = Screen(title="dipaco-peer", rows=rows)


def status(home: Path, *, is_json: bool, is_watched: bool) -> None:
    """Say what the volunteer does, once or until it ends."""
    ended = NotRunning(f"the volunteer in `{home}` has ended", hint="its log: `dipaco-peer logs`")

    def look() -> Report:
        return ask(home, Request(ask="status")).body

    show_status(SCREEN, look, is_json=is_json, is_watched=is_watched, ended=ended)


def pause(home: Path, *, length: str | None) -> None:
    for_s = None if length is None else read_duration(length)
    report = ask(home, Request(ask="pause", for_s=for_s)).body
    _say(report, "finishing this step and handing in your work")


def resume(home: Path) -> None:
    _say(ask(home, Request(ask="resume")).body, "")


def finish(home: Path, *, is_waited: bool) -> None:
    answered = ask(home, Request(ask="finish"))
    _say(answered.body, f"round {answered.body['round']} is finished and handed in first")
    if is_waited:
        wait_end(answered.pid)
        print(ENDED)


def stop(home: Path, *, is_now: bool) -> None:
    """Returns when the process has ended, so that the next command finds the home free."""
    answered = ask(home, Request(ask="stop", now=is_now))
    print("leaving at once" if is_now else "handing in your work, then leaving", flush=True)
    wait_end(answered.pid)
    print(ENDED)


def show_logs(home: Path, *, count: int, is_followed: bool) -> None:
    found, tails = last_told(home, count)
    for line in found:
        print(line, flush=is_followed)
    if is_followed:
        for line in follow(home, tails):
            print(line, flush=True)


def show_paths(home: Path, *, is_json: bool) -> None:
    if is_json:
        print_json(at_home.plain_places(home))
        return
    for each in at_home.places(home):
        there = size(each.bytes) if each.is_there else "not there"
        print(printable(f"{each.what}: {each.path} ({there})"))


def show_identity(home: Path, *, is_json: bool) -> None:
    found = at_home.plain_identity(home)
    if is_json:
        print_json(found)
    else:
        print(f"{found['peer']}\nin {found['file']}")


def export_identity(home: Path, target: Path, *, is_forced: bool) -> None:
    peer = at_home.export_to(home, target, is_forced=is_forced)
    print(f"wrote the key of ...{peer[-6:]} to {target}; anyone who has that file can act as this volunteer")
    print(at_home.ONCE_HINT)


def import_identity(source: Path, home: Path, *, is_forced: bool) -> None:
    peer = at_home.import_from(source, home, is_forced=is_forced)
    print(f"the volunteer in {home} is ...{peer[-6:]} now")
    print(at_home.ONCE_HINT)


def bug_report(home: Path, target: Path | None) -> None:
    target = target or Path(time.strftime("dipaco-bugreport-%Y%m%d-%H%M%S.tar.gz"))
    names = write_report(home, target)
    print(f"{target}: {', '.join(names)}")
    print("keys, addresses, names and folders were removed; look through it before you send it")


def _say(report: dict[str, Any], more: str) -> None:
    """How it stands now, in a line."""
    state = _state(report)
    print(state if not more or report["state"] in ("paused", "stopping") else f"{state}; {more}")
