"""`python -m benchmarks.light`: what comes to the coordinator's line for each round, with full and with light archives.

Real processes on this machine: a coordinator and volunteers, at two sizes of the model. The bytes are the coordinator's
own count (`dipaco-bootstrap status --json`), between the round in which volunteers lead every module and a later one.
Rounds last some seconds, so that volunteers can measure them in a tenth of their time. Judging is off: in so small a
swarm the judges would be too few, and the seed node would fetch most work to judge it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import Disks, JsonFile, run_benchmark, show, table, write_json
from benchmarks.swarm_faults.schedule import volunteers
from benchmarks.swarm_faults.swarm import LocalSwarm
from bootstrap.processes import command_of
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.console import run_program

WIDTHS = (64, 192)
ARCHIVES = ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0))
"""`remade` and `measured` of the run file."""
POLL_S = 0.5
LIMIT_S = 600.0
MB = 10**6
MODULES = 3
RUN = """\
[run]
name = "light"
[warmup]
rounds = 0
[model]
width = {width}
ffn_width = {width}
context = 128
vocab_size = 300
[[model.levels]]
modules = 1
embedding = true
head = true
blocks = 2
[[model.levels]]
modules = 2
blocks = 2
[inner]
steps = {steps}
batch = 2
[rounds]
rounds = 100000
min_paths = 2
deadline_s = 20.0
[liveness]
heartbeat_ttl_s = 15.0
[judging]
judges = 0
audited = 0
[corpus]
source = "found"
bytes_max = 300000
[archive]
rounds = 2
snapshots = 0
remade = {remade}
measured = {measured}
[leaderboard]
serve = false
[node]
host = "127.0.0.1"
port = {port}
"""


def run_text(*, width: int, remade: float = 1.0, measured: float = 1.0, steps: int = 20, port: int = 0) -> str:
    """A run file; port 0 is any."""
    return RUN.format(width=width, remade=remade, measured=measured, steps=steps, port=port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run; bytes are means over its measured rounds."""

    parameters: int
    remade: float
    measured: float
    rounds: int
    contributions: int
    """That the versions of one round count."""
    judged: int
    """Of the rounds but the last two, which may not be measured yet."""
    round_s: float
    in_bytes: float
    out_bytes: float


class Scene(LocalSwarm):
    """A run that never ends."""

    def status(self) -> dict[str, Any]:
        """As its coordinator tells it."""
        command = [*command_of("bootstrap.cli"), "status", str(self.folder), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DipacoError(f"the coordinator does not say how it stands: {done.stderr.strip()[-300:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def versions(self) -> list[dict[str, Any]]:
        """All that its archive has, those of each module in order."""
        paths = sorted(self.folder.glob("grid/documents/version-*.json"))
        return [json.loads(path.read_text())["document"] for path in paths]

    def newest(self) -> list[dict[str, Any]]:
        """Of each module; nothing before all have one."""
        found = {one["module"]: one for one in self.versions()}  # they come in order
        return list(found.values()) if len(found) == MODULES else []

    def is_led_by_volunteers(self) -> bool:
        """Whether the newest version of every module is theirs."""
        peer, newest = json.loads((self.folder / "address.json").read_text())["peer"], self.newest()
        return bool(newest) and all(one["author"] != peer and one["version"] > 3 for one in newest)

    def complete(self) -> int:
        """The newest version that all modules have; by names, since there may be thousands of documents."""
        numbers: dict[str, int] = {}
        for path in (self.folder / "grid" / "documents").glob("version-*.json"):
            module, _, number = path.stem.removeprefix("version-").rpartition("-")
            numbers[module] = max(numbers.get(module, 0), int(number))
        return min(numbers.values()) if len(numbers) == MODULES else 0

    def is_judged(self, version: int) -> bool:
        """Whether the coordinator has signed the losses of a round."""
        return (self.folder / "grid" / "documents" / f"judgement-{version:08d}.json").exists()

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not holds():
            self.require_up()
            if time.monotonic() > until_s:
                raise DipacoError(f"{what}: not within {LIMIT_S:.0f} s", hint=f"see {self.work}")
            await asyncio.sleep(POLL_S)


async def play_one(place: Path, *, width: int, remade: float, measured: float, peers: int, rounds: int) -> Row:
    """Play one run."""
    place.mkdir(parents=True)
    scene = Scene(place, place / "light.toml")
    scene.run_file.write_text(run_text(width=width, remade=remade, measured=measured))
    try:
        await scene.open()
        await scene.begin(volunteers(peers))
        await scene.until(scene.is_led_by_volunteers, "volunteers lead every module")
        first, before = scene.complete(), scene.status()
        await scene.until(lambda: scene.complete() >= first + rounds, "rounds")
        last, after = scene.complete(), scene.status()
        counted = [one for one in scene.versions() if first < one["version"] <= last]
        snapshots = {one["module"]: one["snapshot"]["size"] for one in counted}
        return Row(
            parameters=sum(snapshots.values()) // 4,
            remade=remade,
            measured=measured,
            rounds=last - first,
            contributions=round(sum(len(one["shares"]) for one in counted) / (last - first)),
            judged=sum(map(scene.is_judged, range(first, last - 1))),
            round_s=(after["running_s"] - before["running_s"]) / (last - first),
            in_bytes=(after["bytes_down"] - before["bytes_down"]) / (last - first),
            out_bytes=(after["bytes_up"] - before["bytes_up"]) / (last - first),
        )
    finally:
        await scene.end()


def main(
    peers: Annotated[int, typer.Option(min=3, help="Volunteers.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="That are measured.")] = 10,
    folder: Disks = None,
    json_file: JsonFile = None,
) -> None:
    """Play a run at each size, with a full archive and light ones, and count the coordinator's bytes."""
    rows: list[Row] = []

    async def play(place: Path) -> None:
        for width in WIDTHS:
            for remade, measured in ARCHIVES:
                name = f"{width}-{remade:g}-{measured:g}"
                print(f"width {width}, remade {remade:g}, measured {measured:g} ...", file=sys.stderr)
                played = play_one(
                    place / name, width=width, remade=remade, measured=measured, peers=peers, rounds=rounds
                )
                rows.append(await played)

    with tempfile.TemporaryDirectory() as made:
        place = folder or Path(made)
        code = run_program(lambda: play(place))
    columns = ("parameters", "remade", "measured", "contributions a round", "s a round", "judged", "MB in", "MB out")
    show(
        table(
            "the coordinator's line, for each round",
            columns,
            [
                (
                    f"{row.parameters:,}",
                    f"{row.remade:g}",
                    f"{row.measured:g}",
                    str(row.contributions),
                    f"{row.round_s:.1f}",
                    f"{row.judged} of {row.rounds - 1}",
                    f"{row.in_bytes / MB:.3f}",
                    f"{row.out_bytes / MB:.3f}",
                )
                for row in rows
            ],
        )
    )
    write_json(json_file, [asdict(row) for row in rows])
    raise typer.Exit(code)


if __name__ == "__main__":
    run_benchmark(main, epilog="Exit codes: 0 measured; 1 a run did not come to its rounds; 2 a wrong flag.")
