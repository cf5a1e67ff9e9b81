"""`python -m benchmarks.newcomer`: what a volunteer fetches until it trains, in a run that is a thousand rounds old.

Real processes on this machine: a coordinator and three volunteers play the rounds, with a tiny model and no judges, and
then one more comes through the public command, at each of the ages. Its bytes are its own count (as `dipaco-peer
status` tells it) when it first says that it trains; records of the DHT are not in it. What does not grow with the run
is named beside it: the parameters of its path, and the blobs that the manifest names.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.light import LIMIT_S, Scene, run_text
from benchmarks.report import Disks, JsonFile, run_benchmark, show, table, write_json
from benchmarks.swarm_faults.schedule import volunteers
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.console import run_program
from dipaco_p2p.program.control.client import ask
from peers.control.control import Request

AGES = "50,1000"
PEERS = 3
"""As many as own a module: else the newcomer becomes a mirror, and reads the whole chain of each."""
POLL_S = 0.1
MB = 10**6
ALLOWED_MB = 5.0
"""Beside the parameters of its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One newcomer."""

    rounds: int
    """Of the run, when it came."""
    path_bytes: int
    """Parameters of its path."""
    in_bytes: int
    """All that it fetched until it trained."""
    after_s: float
    """Since its program was started."""

    @property
    def beside_mb(self) -> float:
        return (self.in_bytes - self.path_bytes) / MB

    @property
    def mb(self) -> tuple[float, float, float]:
        """Of its path, in all, and beside its path."""
        return self.path_bytes / MB, self.in_bytes / MB, self.beside_mb


async def newcomer(scene: Scene, name: str) -> Row:
    """Start one, and look at it until it trains; then it leaves."""
    rounds, began_s = scene.complete(), time.monotonic()
    await scene.start(name)
    while (status := _status(scene, name)) is None or status["doing"] != "training":
        scene.require_up()
        if time.monotonic() > began_s + LIMIT_S:
            raise DipacoError(f"{name} does not train within {LIMIT_S:.0f} s", hint=f"see {scene.work}")
        await asyncio.sleep(POLL_S)
    after_s, sizes = time.monotonic() - began_s, {one["module"]: one["snapshot"]["size"] for one in scene.newest()}
    await scene.members[name].end()
    path_bytes = sum(sizes[one["module"]] for one in status["modules"])
    return Row(rounds=rounds, path_bytes=path_bytes, in_bytes=status["bytes_down"], after_s=after_s)


def _status(scene: Scene, name: str) -> dict[str, Any] | None:
    try:
        return ask(scene.home(name), Request(ask="status")).body
    except DipacoError:  # its program has only begun
        return None


async def play(place: Path, ages: list[int]) -> list[Row]:
    """Of one run, a newcomer at each age."""
    place.mkdir(parents=True, exist_ok=True)
    scene = Scene(place, place / "newcomer.toml")
    scene.run_file.write_text(run_text(width=16, steps=1))
    rows = []
    try:
        await scene.open()
        await scene.begin(volunteers(PEERS))
        for number, age in enumerate(ages):
            await _grow(scene, age)
            rows.append(await newcomer(scene, f"newcomer-{number}"))
        return rows
    finally:
        await scene.end()


async def _grow(scene: Scene, age: int) -> None:
    """Until the run has so many rounds."""
    reached, moved_s = 0, time.monotonic()
    while (complete := scene.complete()) < age:
        scene.require_up()
        if complete > reached:
            reached, moved_s = complete, time.monotonic()
        if time.monotonic() > moved_s + LIMIT_S:
            raise DipacoError(f"the run stays at round {reached}", hint=f"see {scene.work}")
        await asyncio.sleep(1.0)


def main(
    ages: Annotated[str, typer.Option(help="Rounds after which a newcomer comes, separated by commas.")] = AGES,
    folder: Disks = None,
    json_file: JsonFile = None,
) -> None:
    """Play a run, let newcomers come, and count what they fetch; exit code 1 above the allowed bytes."""
    if not all(age.isdecimal() for age in ages.split(",")):
        raise typer.BadParameter(f"`{ages}` are no rounds: say them as {AGES}")
    rows: list[Row] = []

    async def play_all(place: Path) -> None:
        rows.extend(await play(place, sorted(map(int, ages.split(",")))))

    with tempfile.TemporaryDirectory() as made:
        place = folder or Path(made)
        code = run_program(lambda: play_all(place))
    columns = ("rounds", "MB of its path", "MB in all", "MB beside its path", "trains after, s")
    found = [(str(row.rounds), *(f"{mb:.3f}" for mb in row.mb), f"{row.after_s:.1f}") for row in rows]
    show(table(f"what a newcomer fetches (allowed beside its path: {ALLOWED_MB:g} MB)", columns, found))
    write_json(json_file, [asdict(row) for row in rows])
    raise typer.Exit(code or int(any(row.beside_mb > ALLOWED_MB for row in rows)))


if __name__ == "__main__":
    run_benchmark(main, epilog="Exit codes: 0 within the allowed bytes; 1 more, or a run that stopped; 2 a wrong flag.")
