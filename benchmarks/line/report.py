"""The whole benchmark: play, print the table, write the JSON."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dipaco_p2p.core.layout import module_layout

from .experiment import LineRound, Wish, play
from .network import require_root

MB = 1e6
GOAL_S = 15.0
"""Of the traffic of one round, for a path of 150M parameters."""
ROWS = (
    ("payload, MB", "payload_bytes", MB),
    ("up the line, MB", "up_bytes", MB),
    ("down the line, MB", "down_bytes", MB),
    ("push, s", "push_s", 1.0),
    ("pull, s", "pull_s", 1.0),
    (f"traffic: push and pull, s (goal: {GOAL_S:g})", "traffic_s", 1.0),
    ("neither: the owner averages, s", "wait_s", 1.0),
    ("in all, s", "total_s", 1.0),
)


async def run(wishes: Sequence[Wish], *, folder: Path | None, json_file: Path | None) -> None:
    """One line after the other. Raises DipacoError, and EnvironmentUnfit without root."""
    require_root()
    console, found = Console(), dict[str, list[LineRound]]()
    for wish in wishes:
        work = Path(tempfile.mkdtemp(prefix="line-", dir=folder))
        try:
            found[wish.codec] = await play(wish, work, console.print)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    values = sum(module_layout(wishes[0].model, level).size for level in range(len(wishes[0].model.levels)))
    line = f"{wishes[0].up_mbit:g} Mbit/s up, {wishes[0].down_mbit:g} Mbit/s down"
    title = f"A round of {values / MB:.1f} M parameters in two modules, {line}, medians of {wishes[0].rounds}"
    console.print(line_table(found, title=title))
    ttl_s = wishes[0].config.liveness.heartbeat_ttl_s
    for codec, rounds in found.items():
        console.print(f"{codec}: {verdict(rounds, ttl_s=ttl_s)}")
    if json_file is not None:
        rows = {codec: [asdict(played) for played in rounds] for codec, rounds in found.items()}
        figures = {"values": values, "up_mbit": wishes[0].up_mbit, "down_mbit": wishes[0].down_mbit, "rounds": rows}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def line_table(found: Mapping[str, Sequence[LineRound]], *, title: str) -> Table:
    """A row for each figure, a column for each codec of the uplink."""
    table = Table("", *found, title=title)
    for name, what, unit in ROWS:
        table.add_row(name, *(f"{_median(rounds, what) / unit:.1f}" for rounds in found.values()))
    table.add_row("greatest gap of heartbeats, s", *(f"{_gap_s(rounds):.1f}" for rounds in found.values()))
    return table


def verdict(rounds: Sequence[LineRound], *, ttl_s: float) -> str:
    """Whether the goal is met, and whether heartbeats came in time."""
    traffic_s, gap_s = _median(rounds, "traffic_s"), _gap_s(rounds)
    missed = sum(played.missed for played in rounds)
    goal = f"{'within' if traffic_s <= GOAL_S else 'beyond'} the goal of {GOAL_S:g} s"
    on_time = "on time" if gap_s <= ttl_s and not missed else f"late, {missed} looks saw none"
    return f"traffic {traffic_s:.1f} s, {goal}; greatest gap between heartbeats {gap_s:.1f} s of {ttl_s:g} s, {on_time}"


def _gap_s(rounds: Sequence[LineRound]) -> float:
    return max(played.gap_s for played in rounds)


def _median(rounds: Sequence[LineRound], what: str) -> float:
    return statistics.median(float(getattr(played, what)) for played in rounds)
