"""What the commands that look at a running coordinator do, and how its answers look; cli.py has their words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dipaco_p2p.errors import ConfigError, NotRunning
from dipaco_p2p.program.control import show
from dipaco_p2p.program.control.client import ask, not_running
from dipaco_p2p.program.control.place import find_socket
from dipaco_p2p.program.control.show import UNKNOWN, Column, Report, Screen, short_name, show_status
from dipaco_p2p.program.text import duration, size
from dipaco_p2p.protocol.names import name_words

from ..runfile import load_run_file, run_folder, runs_folder
from .requests import COORDINATOR, Request

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


def rows(report: Report) -> list[tuple[str, str]]:
    """Names and values, in the order in which somebody asks for them."""
    return [
        ("state", str(report["state"])),
        ("run", f"{report['run']}, {report['stage']}" if report["run"] else "being prepared"),
        ("round", _round(report)),
        ("perplexity", _judged(report)),
        ("volunteers", f"{report['volunteers_alive']} alive, {report['volunteers_training']} training"),
        ("reached", _reached(report)),
        ("paths", f"{report['paths_covered']} of {report['paths']} have a volunteer"),
        ("modules", f"{report['modules_led']} of {report['modules']} have a leader"),
        ("speed", f"{report['tokens_per_s']:,.0f} tokens/s"),
        ("counted", f"{report['contributions_counted']} contributions in {report['versions_archived']} versions"),
        ("line", f"{size(report['bytes_up'])} up, {size(report['bytes_down'])} down since the start"),
        ("disk", f"{size(report['disk_used_bytes'])} used, {size(report['disk_free_bytes'])} free"),
        (
            "program",
            f"version {report['version']}, process {report['pid']}, up {duration(report['running_s'])}",
        ),
        ("folder", report["folder"]),
    ]


SCREEN = Screen(title="dipaco-bootstrap", rows=rows)


def _reached(report: Report) -> str:
    """How volunteers are dialled; of a coordinator that was started before there were relays nothing is known."""
    if "volunteers_relayed" not in report:
        return UNKNOWN
    direct, relayed = report["volunteers_direct"], report["volunteers_relayed"]
    words = f"{direct} directly, {relayed} through relays, {report['volunteers_alive'] - direct - relayed} not at all"
    if report["relay_slots"] or report["relay_bytes"]:
        words += f"; {report['relay_slots']} through this machine, {size(report['relay_bytes'])} passed on"
    return words


def _round(report: Report) -> str:
    if report["round"] is None:
        return UNKNOWN
    words = f"{report['round']} of {report['rounds']}, for {duration(report['round_age_s'])}"
    if report.get("grows_to"):
        words += f"; then the grid grows to {'x'.join(map(str, report['grows_to']))}, for {report['rounds_after']} more"
    return words


def _is_reachable(row: Report) -> str:
    if row.get("is_relayed"):
        return "by relay"
    return "yes" if row["is_reachable"] else "no"


def _keeps(row: Report) -> str:
    """Of what it keeps for others, and how often it proved that."""
    if row.get("is_barred_keeper"):
        return "BARRED"
    return f"{row['keeps']:.0%}, {row['keeping_proofs']}" if row.get("keeps") else UNKNOWN


def _judged(report: Report) -> str:
    if report["judged_perplexity"] is None:
        return UNKNOWN
    words = f"{report['judged_perplexity']:.1f} after round {report['judged_round']}"
    texts = [UNKNOWN if each is None else f"{each:.1f}" for each in report.get("judged_texts", ())]
    if texts:  # a coordinator that was started before growths brought text does not say
        words += f"; the first text {texts[0]}, that of growths {', '.join(texts[1:])}"
    return words


# -- lists


PEERS = (
    Column(head="peer", cell=lambda row: short_name(row["peer"])),
    Column(head="role", cell=lambda row: row["role"]),
    Column(head="path", cell=lambda row: row["path"] or UNKNOWN),
    Column(head="round", cell=lambda row: str(row["round"]), is_number=True),
    Column(head="doing", cell=lambda row: row["doing"]),
    Column(head="tokens/s", cell=lambda row: f"{row['tokens_per_s']:,.0f}", is_number=True),
    Column(head="heard", cell=lambda row: duration(row["heartbeat_age_s"]), is_number=True),
    Column(head="reachable", cell=lambda row: _is_reachable(row)),
    Column(head="leads", cell=lambda row: ", ".join(row["leads"]) or UNKNOWN),
    Column(head="keeps", cell=lambda row: _keeps(row)),
    # The last one: letters may be wider than others, and of scripts that are read the other way. A coordinator that was
    # started before there were names tells none.
    Column(head="name", cell=lambda row: name_words(row.get("name", ""), row.get("team", "")) or UNKNOWN),
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
    Column(head="mirrors", cell=lambda row: ", ".join(map(short_name, row["mirrors"])) or UNKNOWN),
)


def _claimants(row: Report) -> str:
    words = [short_name(each["peer"]) + ("" if each["is_alive"] else " (silent)") for each in row["claimants"]]
    return ", ".join(words + ([f"and {row['claimants_left_out']} more"] if row["claimants_left_out"] else [])) or "none"


def _leader(row: Report) -> str:
    return f"none for {duration(row['leaderless_s'])}" if row["leader"] is None else short_name(row["leader"])
