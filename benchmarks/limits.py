"""`python -m benchmarks.limits`: whether a volunteer keeps its owner's limits within a tenth, with real processes.

One case for each limit: a coordinator, a volunteer with the limit, and what the kernel and its history say of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from benchmarks.processes import memory_bytes
from benchmarks.report import Disks, JsonFile, require_known, run_benchmark, show, table, write_json
from benchmarks.swarm_faults.swarm import LocalSwarm
from bootstrap.processes import Child, require_alive
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.console import run_program
from dipaco_p2p.program.history import read_history
from peers.governor.machine import cpu_of, descendants

T = TypeVar("T")
START_S = 300.0
RUN = """\
[run]
name = "limits"
[warmup]
rounds = 0
[model]
context = 512
[[model.levels]]
modules = 1
embedding = true
head = true
blocks = 1
[[model.levels]]
modules = 2
blocks = 2
[inner]
steps = 10
batch = 32
[rounds]
rounds = 100000
min_paths = 1
deadline_s = 300.0
[liveness]
heartbeat_ttl_s = 15.0
[corpus]
source = {corpus}
validation_share = 0.02
holdout_share = 0.02
router_share = 0.02
[archive]
rounds = 0
[leaderboard]
serve = false
[node]
host = "127.0.0.1"
port = 0
"""


@dataclass(slots=True)
class Volunteer:
    """One volunteer's process."""

    child: Child
    home: Path

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def events(self, *names: str) -> list[dict[str, Any]]:
        """What its history says under these names, in order."""
        found = [event for path in self.home.glob("runs/*/history.jsonl") for event in read_history(path)]
        return [event for event in found if event["ev"] in names]

    async def until(self, look: Callable[[], T | None], what: str) -> T:
        """The first answer of `look`; raises DipacoError when the volunteer ends before, or nothing comes."""
        deadline_s = time.monotonic() + START_S
        while (found := look()) is None:
            require_alive(self.child, f"waiting for {what}")
            if time.monotonic() > deadline_s:
                raise DipacoError(f"{self.child.name}: no {what} within {START_S:g} s", hint=f"see {self.child.log}")
            await asyncio.sleep(POLL_S)
        return found

    async def event(self, name: str, **values: Any) -> dict[str, Any]:
        """The first event like this."""

        def look() -> dict[str, Any] | None:
            matching = (e for e in self.events(name) if all(e.get(key) == value for key, value in values.items()))
            return next(matching, None)

        return await self.until(look, f"`{name}`")

    def cpu_s(self) -> float:
        """Processor time of it and its daemons so far."""
        return sum(map(cpu_of, [self.pid, *descendants(self.pid)]))

    def memory_bytes(self) -> int:
        """The most that it had so far, and what its daemons have."""
        return memory_bytes(self.pid, "VmHWM") + sum(memory_bytes(pid, "VmRSS") for pid in descendants(self.pid))

    def home_bytes(self) -> int:
        """What its folder takes of the disk."""
        total = 0
        for path in self.home.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.lstat().st_blocks * 512
        return total


class Scene(LocalSwarm):
    """A coordinator whose run never ends, and volunteers one after the other."""

    async def __aenter__(self) -> Scene:
        corpus = self.work / "corpus.jsonl"
        _write_corpus(corpus)
        self.run_file.write_text(RUN.format(corpus=json.dumps(str(corpus))))
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.end()

    @contextlib.asynccontextmanager
    async def volunteer(self, name: str, *wishes: str) -> AsyncIterator[Volunteer]:
        """A volunteer that nobody can dial, so that it trains and leads nothing, while the block runs."""
        await self.start(name, "--engine", "exact", "--threads", "1", "--no-listen", *wishes)
        try:
            yield Volunteer(self.members[name], self.home(name))
        finally:
            await self.members[name].end()


def _write_corpus(path: Path) -> None:
    chance = random.Random(1)
    known = ["".join(chance.choices("abcdefghijklmnopqrst", k=chance.randint(2, 9))) for _ in range(3000)]
    texts = (" ".join(chance.choices(known, k=300)) for _ in range(1500))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


MB, GB, MBIT = 10**6, 10**9, 10**6
HELD_MAX = 1.1
"""A limit holds when no more than a tenth above it was measured."""
CORE_SHARE = 0.1
RAM_SHARE = 0.7
DISK_SHARE = 0.6
RATE_MBIT = 0.25
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    limit: str
    wished: float
    measured: float
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.measured / self.wished

    @property
    def is_held(self) -> bool:
        return self.ratio <= HELD_MAX


Case = Callable[[Scene, float], Awaitable[list[Row]]]


async def cpu(scene: Scene, seconds: float) -> list[Row]:
    """A tenth of a core, so that a busy machine has it to give, over so many seconds of training."""
    cores = len(os.sched_getaffinity(0))
    share = CORE_SHARE / cores
    async with scene.volunteer("cpu", "--cpu", f"{share:g}") as volunteer:
        await volunteer.event("doing", doing="training")
        await volunteer.event("round")
        mean = await _cpu_share(volunteer, seconds) / cores
    return [Row(limit="cpu", wished=share, measured=mean, unit="of all cores", note=f"over {seconds:g} s")]


async def ram(scene: Scene, seconds: float) -> list[Row]:
    """Less than a volunteer without a limit takes."""
    async with scene.volunteer("ram-free") as volunteer:
        free = await _memory_peak(volunteer, seconds)
    limit = RAM_SHARE * free
    async with scene.volunteer("ram", "--ram-gb", f"{limit / GB:.3f}") as volunteer:
        used = await _memory_peak(volunteer, seconds)
        said = [event["detail"] for event in volunteer.events("limited", "engine")]
    note = f"{free / MB:.0f} MB without; {said[-1] if said else 'nothing said'}"
    return [Row(limit="ram_gb", wished=limit / MB, measured=used / MB, unit="MB at its peak", note=note)]


async def rates(scene: Scene, seconds: float) -> list[Row]:
    """The shard and the optimizer's start down, and the pushes of a round up: blobs, which are what is limited."""
    limits = ("--up-mbit", f"{RATE_MBIT}", "--down-mbit", f"{RATE_MBIT}")
    async with scene.volunteer("rates", *limits) as volunteer:
        await volunteer.event("doing", doing="fetching modules")
        down = _blob_bytes(volunteer, "blobs")
        up = 0
        while not volunteer.events("round"):
            up = max(up, _blob_bytes(volunteer, "outbox/blobs"))
            await asyncio.sleep(POLL_S)
        doings = volunteer.events("doing", "round")
    found = (
        ("down_mbit", down, _lasted(doings, "fetching its shard")),
        ("up_mbit", up, _lasted(doings, "pushing")),
    )
    return [
        Row(
            limit=limit,
            wished=RATE_MBIT,
            measured=size * 8 / MBIT / took_s,
            unit="Mbit/s",
            note=f"{size / MB:.2f} MB in {took_s:.1f} s",
        )
        for limit, size, took_s in found
    ]


async def disk(scene: Scene, seconds: float) -> list[Row]:
    """Less than a volunteer without a limit takes: what can go goes, and then it leaves with exit code 5."""
    async with scene.volunteer("disk-free") as volunteer:
        await volunteer.event("round")
        free = volunteer.home_bytes()
    limit = DISK_SHARE * free
    async with scene.volunteer("disk", "--disk-gb", f"{limit / GB:.6f}") as volunteer:
        most, until_s = 0, time.monotonic() + seconds * 4
        while volunteer.child.is_alive and time.monotonic() < until_s:
            most = max(most, volunteer.home_bytes())
            await asyncio.sleep(POLL_S)
    note = f"{free / MB:.2f} MB without; exit code {volunteer.child.process.returncode}"
    return [Row(limit="disk_gb", wished=limit / MB, measured=most / MB, unit="MB at its most", note=note)]


async def schedule(scene: Scene, seconds: float) -> list[Row]:
    """It trains, pauses when the schedule closes, takes no step in the pause, and goes on when it opens."""
    closes = (datetime.now() + timedelta(seconds=max(90.0, seconds))).replace(second=0, microsecond=0)
    closes += timedelta(minutes=1)
    opens, ends = closes + timedelta(minutes=1), closes + timedelta(minutes=30)
    before = closes - timedelta(minutes=10)
    spans = f"{before:%H:%M}-{closes:%H:%M}, {opens:%H:%M}-{ends:%H:%M}"
    async with scene.volunteer("schedule", "--schedule", spans) as volunteer:
        await volunteer.event("round")
        paused = await volunteer.event("doing", doing="paused")
        share = await _cpu_share(volunteer, min(seconds, 30.0))

        def goes_on() -> float | None:
            later = [e["t"] for e in volunteer.events("doing") if e["doing"] == "training" and e["t"] > paused["t"]]
            return later[0] if later else None

        resumed_s = await volunteer.until(goes_on, "training after the pause")
    delay_s, again_s = paused["t"] - closes.timestamp(), resumed_s - opens.timestamp()
    note = f"paused {delay_s:.1f} s after it closed, its push included; trained {again_s:.1f} s after it opened"
    return [Row(limit="schedule", wished=0.1, measured=share, unit="of a core in the pause", note=note)]


CASES: dict[str, Case] = {"cpu": cpu, "ram": ram, "rates": rates, "disk": disk, "schedule": schedule}


async def _cpu_share(volunteer: Volunteer, seconds: float) -> float:
    """Cores that it takes in the mean."""
    used_s, began_s = volunteer.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (volunteer.cpu_s() - used_s) / (time.monotonic() - began_s)


async def _memory_peak(volunteer: Volunteer, seconds: float) -> int:
    """Until its first round is done, and so many seconds more."""
    most, done_s = 0, float("inf")
    while time.monotonic() < done_s + seconds and volunteer.child.is_alive:
        most = max(most, volunteer.memory_bytes())
        if done_s == float("inf") and volunteer.events("round"):
            done_s = time.monotonic()
        await asyncio.sleep(POLL_S)
    return most


def _blob_bytes(volunteer: Volunteer, folder: str) -> int:
    return sum(path.stat().st_size for path in volunteer.home.glob(f"runs/*/{folder}/*/*") if path.suffix != ".tmp")


def _lasted(events: list[dict[str, object]], doing: str) -> float:
    """How long it did this for the first time."""
    at = next(number for number, event in enumerate(events) if event.get("doing") == doing)
    return float(str(events[at + 1]["t"])) - float(str(events[at]["t"]))


EPILOG = """Exit codes: 0 every limit holds; 1 one does not; 2 a wrong flag."""


def main(
    case: Annotated[list[str] | None, typer.Option(help="cpu, ram, rates, disk or schedule; default: all.")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="How long a mean is taken over.")] = 60.0,
    folder: Disks = None,
    json_file: JsonFile = None,
) -> None:
    """Start a coordinator and one volunteer after the other, each with a limit, and measure it from outside."""
    names = case or list(CASES)
    require_known("case", names, CASES)
    rows: list[Row] = []

    async def play(place: Path) -> None:
        async with Scene(place, place / "run.toml") as scene:
            for name in names:
                typer.echo(f"{name} ...", err=True)
                rows.extend(await CASES[name](scene, seconds))
                typer.echo(f"{rows[-1].limit}: {rows[-1].measured:.3f} of {rows[-1].wished:.3f}", err=True)

    with tempfile.TemporaryDirectory() as made:
        place = folder or Path(made)
        place.mkdir(parents=True, exist_ok=True)
        code = run_program(lambda: play(place))
    show(limits_table(rows))
    write_json(json_file, [asdict(row) for row in rows])
    raise typer.Exit(code or int(not all(row.is_held for row in rows)))


def limits_table(rows: Sequence[Row]) -> Table:
    """A row for each limit that was measured."""
    cells = []
    for row in rows:
        ratio = f"{row.ratio:.2f}" + ("" if row.is_held else " NOT HELD")
        cells.append((row.limit, f"{row.wished:.3f}", f"{row.measured:.3f}", row.unit, ratio, row.note))
    columns = ("limit", "wished", "measured", "unit", f"ratio (up to {HELD_MAX:g})", "note")
    return table("Limits, measured from outside", columns, cells, left=("unit", "note"))


if __name__ == "__main__":
    run_benchmark(main, epilog=EPILOG)
