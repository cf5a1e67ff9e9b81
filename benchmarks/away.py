"""`python -m benchmarks.away`: the coordinator is killed, and its run goes on without any seed node for ten minutes.

Real processes on this machine: a coordinator and four volunteers, a tiny model, no judges. The coordinator is killed
with SIGKILL. While it is away the leader of the first module is killed as well, and a volunteer joins by the ticket
that the coordinator wrote before. Then it starts again in its folder. Counted are the versions that were made without
it, the longest time without a new one, how long it takes until the coordinator has signed all of them, and receipts of
which nothing came.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.light import Scene, run_text
from benchmarks.report import Disks, JsonFile, require_known, run_benchmark, show, table, write_json
from benchmarks.swarm_faults.check import check, lost_receipts
from benchmarks.swarm_faults.evidence import gather
from benchmarks.swarm_faults.schedule import SEED_NODE, Verb, volunteers
from bootstrap.progress import stage
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.entry import read_entry
from dipaco_p2p.program.console import run_program
from dipaco_p2p.program.control.client import ask
from peers.control.control import Request

PEERS = 4
STEPS = 60
NEWCOMER = "newcomer"
ARCHIVES = {"full": (1.0, 1.0), "light": (0.0, 1.0), "without parameters": (0.0, 0.0)}
"""`remade` and `measured` of the run file."""
SIGNED_WITHIN_S = 60.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    archive: str
    minutes: float
    """That the coordinator was away."""
    versions: int
    """Of each module that were made meanwhile: the least."""
    longest_s: float
    """Between two of them, of any module."""
    joined_s: float
    """From the start of the newcomer's program to its first receipt."""
    signed_s: float
    """From the coordinator's start to its signature of all that it had missed."""
    lost: int
    """Receipts of which nothing came."""
    breaches: int
    """Promises that were broken (benchmarks/swarm_faults/check.py)."""

    @property
    def times(self) -> tuple[float, float, float]:
        return self.longest_s, self.joined_s, self.signed_s

    @property
    def is_kept(self) -> bool:
        return not self.lost and not self.breaches and self.signed_s <= SIGNED_WITHIN_S


class Heads:
    """How far volunteers say that each module is, while nobody else can be asked."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.begin: dict[str, int] = {}
        """When the coordinator was killed."""
        self.newest: dict[str, int] = {}
        self._moved_s: dict[str, float] = {}
        self.longest_s = 0.0

    def look(self) -> None:
        """Ask all who live."""
        now_s = time.monotonic()
        for name in self._scene.volunteers:
            for module, version in versions_of(self._scene, name).items():
                if version > self.newest.get(module, -1):
                    self.newest[module] = version
                    self.longest_s = max(self.longest_s, now_s - self._moved_s.get(module, now_s))
                    self._moved_s[module] = now_s


def versions_of(scene: Scene, name: str) -> dict[str, int]:
    """Of the modules of its path; nothing of one that does not answer."""
    try:
        status = ask(scene.home(name), Request(ask="status")).body
    except DipacoError:
        return {}
    return {each["module"]: each["version"] for each in status["modules"]}


async def play(place: Path, archive: str, *, minutes: float) -> Row:
    """One run."""
    place.mkdir(parents=True)
    scene, (remade, measured) = Scene(place, place / "away.toml"), ARCHIVES[archive]
    scene.run_file.write_text(run_text(width=64, remade=remade, measured=measured, steps=STEPS, port=_free_port()))
    try:
        await scene.open()
        await scene.begin(volunteers(PEERS))
        await scene.until(scene.is_led_by_volunteers, "volunteers lead every module")
        await scene.until(lambda: _names_volunteers(scene), "a ticket that names volunteers")
        scene.address = json.loads((scene.folder / "address.json").read_text())["ticket"]
        heads, joined_s = await _away(scene, minutes=minutes)
        began_s = time.monotonic()
        await scene.act(Verb.START, SEED_NODE)
        await scene.until(lambda: _has_all(scene, heads.newest), "the coordinator has all that it missed")
        signed_s = time.monotonic() - began_s
    finally:
        await scene.end()
    homes = {name: scene.home(name) for name in scene.members if name != SEED_NODE}
    evidence = gather(scene.folder, homes, done=scene.done, ended_s=time.time())
    return Row(
        archive=archive,
        minutes=minutes,
        versions=min(heads.newest[module] - version for module, version in heads.begin.items()),
        longest_s=heads.longest_s,
        joined_s=joined_s,
        signed_s=signed_s,
        lost=len(lost_receipts(evidence)),
        breaches=len(check(evidence)),
    )


async def _away(scene: Scene, *, minutes: float) -> tuple[Heads, float]:
    """Without the coordinator, for so long: in its third part a leader is killed, in its half a volunteer joins."""
    heads, joined_s, killed = Heads(scene), 0.0, ""
    heads.look()
    began_s, heads.begin = time.monotonic(), dict(heads.newest)
    await scene.act(Verb.KILL, SEED_NODE)
    with stage("Without the coordinator", total=round(60 * minutes)) as advance:
        while (elapsed_s := time.monotonic() - began_s) < 60 * minutes:
            heads.look()
            advance(round(elapsed_s))
            if not killed and elapsed_s > 20 * minutes:
                killed = _leader(scene)
                await scene.act(Verb.KILL, killed)
            if not joined_s and elapsed_s > 30 * minutes:
                joined_s = await _join(scene)
            scene.require_up()
            await asyncio.sleep(POLL_S)
    return heads, joined_s


def _leader(scene: Scene) -> str:
    """The volunteer that leads the first module."""
    found = [ask(scene.home(name), Request(ask="status")).body for name in scene.volunteers]
    leaders = {each["module"]: each["leader"] for status in found for each in status["modules"]}
    names = {status["peer"]: name for name, status in zip(scene.volunteers, found, strict=True)}
    return names[leaders[min(leaders)]]


async def _join(scene: Scene) -> float:
    began_s = time.monotonic()
    await scene.begin([NEWCOMER])
    return time.monotonic() - began_s


def _names_volunteers(scene: Scene) -> bool:
    plate: dict[str, Any] = json.loads((scene.folder / "address.json").read_text())
    addresses = read_entry(plate["ticket"]).addresses if plate["ticket"] else ()
    return len({address.rpartition("/")[2] for address in addresses}) > 1


def _has_all(scene: Scene, newest: dict[str, int]) -> bool:
    """Whether the archive has these versions; what it has, it has signed."""
    documents = scene.folder / "grid" / "documents"
    return all((documents / f"version-{module}-{number:08d}.json").exists() for module, number in newest.items())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def main(
    minutes: Annotated[float, typer.Option(min=0.5, help="That the coordinator is away.")] = 10.0,
    archives: Annotated[str, typer.Option(help=f"Of {', '.join(ARCHIVES)}; separated by commas.")] = ",".join(ARCHIVES),
    folder: Disks = None,
    json_file: JsonFile = None,
) -> None:
    """Play a run with each archive; exit code 1 if a promise was broken, or signing took too long."""
    require_known("archive", archives.split(","), ARCHIVES)
    rows: list[Row] = []

    async def play_all(place: Path) -> None:
        for archive in archives.split(","):
            rows.append(await play(place / archive.replace(" ", "-"), archive, minutes=minutes))

    with tempfile.TemporaryDirectory() as made:
        place = folder or Path(made)
        code = run_program(lambda: play_all(place))
    times = ("longest without one, s", "joined after, s", "signed after, s")
    columns = ("archive", "versions meanwhile", *times, "lost", "breaches")
    found = [
        (row.archive, *map(str, (row.versions, *(f"{each:.1f}" for each in row.times), row.lost, row.breaches)))
        for row in rows
    ]
    title = f"{minutes:g} minutes without a coordinator (goal: signed within {SIGNED_WITHIN_S:g} s)"
    show(table(title, columns, found))
    write_json(json_file, [asdict(row) for row in rows])
    raise typer.Exit(code or int(not all(row.is_kept for row in rows)))


if __name__ == "__main__":
    run_benchmark(main, epilog="Exit codes: 0 all promises kept; 1 one broken, or signed too late; 2 a wrong flag.")
