"""`python -m benchmarks.line`: one round's traffic of a path of 150M parameters on a home line. Needs root."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.report import MB, Disks, JsonFile, require_codecs, run_benchmark, show, table, write_json
from dipaco_p2p.config import CompressionConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.program.console import run_program

from .experiment import PATH_150M, QUICK_PATH, LineRound, Wish, play
from .network import require_root

QUICK_MBIT = 4.0
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


def main(
    codec: Annotated[list[str] | None, typer.Option(help="Of the uplink; default: the run file's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds with each codec.")] = 3,
    up_mbit: Annotated[float, typer.Option(min=0.1, help="What the line carries up.")] = 20.0,
    down_mbit: Annotated[float, typer.Option(min=0.1, help="What the line carries down.")] = 100.0,
    quick: Annotated[bool, typer.Option("--quick", help="A small path on a slower line: for trying.")] = False,
    folder: Disks = None,
    json_file: JsonFile = None,
) -> None:
    """Push both modules of a path over a line in network namespaces, and pull their next versions."""
    wishes = [
        Wish(
            model=QUICK_PATH if quick else PATH_150M,
            codec=name,
            rounds=1 if quick else rounds,
            up_mbit=min(up_mbit, QUICK_MBIT) if quick else up_mbit,
            down_mbit=min(down_mbit, QUICK_MBIT) if quick else down_mbit,
        )
        for name in require_codecs(codec or (), default=(CompressionConfig().uplink,))
    ]
    raise typer.Exit(run_program(lambda: run(wishes, folder=folder, json_file=json_file)))


async def run(wishes: Sequence[Wish], *, folder: Path | None, json_file: Path | None) -> None:
    """One line after the other. Raises DipacoError, and EnvironmentUnfit without root."""
    require_root()
    found = dict[str, list[LineRound]]()
    for wish in wishes:
        work = Path(tempfile.mkdtemp(prefix="line-", dir=folder))
        try:
            found[wish.codec] = await play(wish, work, show)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    first = wishes[0]
    values = sum(module_layout(first.model, level).size for level in range(len(first.model.levels)))
    line = f"{first.up_mbit:g} Mbit/s up, {first.down_mbit:g} Mbit/s down"
    title = f"A round of {values / MB:.1f} M parameters in two modules, {line}, medians of {first.rounds}"
    ttl_s = first.config.liveness.heartbeat_ttl_s
    show(line_table(found, title=title), *(f"{name}: {verdict(rounds, ttl_s=ttl_s)}" for name, rounds in found.items()))
    rows = {codec: [asdict(played) for played in rounds] for codec, rounds in found.items()}
    figures = {"values": values, "up_mbit": first.up_mbit, "down_mbit": first.down_mbit, "rounds": rows}
    write_json(json_file, figures)


def line_table(found: Mapping[str, Sequence[LineRound]], *, title: str) -> Table:
    """A row for each figure, a column for each codec of the uplink."""
    rows = [(name, *(f"{_median(rounds, what) / unit:.1f}" for rounds in found.values())) for name, what, unit in ROWS]
    gaps = ("greatest gap of heartbeats, s", *(f"{_gap_s(rounds):.1f}" for rounds in found.values()))
    return table(title, ("", *found), [*rows, gaps])


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


if __name__ == "__main__":
    run_benchmark(main)
