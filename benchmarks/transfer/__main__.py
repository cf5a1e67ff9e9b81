"""`python -m benchmarks.transfer`: rounds of one large module, from the first push until all have the next version."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.processes import Helper, Spent, forget_peak, memory_bytes, spent, start_helper
from benchmarks.report import MB, Disks, JsonFile, require_known, run_benchmark, show, table, write_json
from dipaco_p2p.config import CompressionConfig, RunConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.outer.compress import CODECS
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.console import run_program
from dipaco_p2p.strict import plain
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets

from .owner import config_of, model_of

VALUES, QUICK_VALUES = 25_000_000, 1_000_000
QUICK_RUNS, QUICK_UP_TO = 2, 4
PROCESSES = 2
"""That the contributors share."""
PHASES = ("encode", "push", "admit", "close", "make and keep", "publish", "pull")
CLOSED = "round closed, version not made"
AVERAGED, ANNOUNCED = "averaged, version not on disk", "version announced"


def main(
    up_to: Annotated[int, typer.Option(min=2, max=64, help="Fan-ins are 2, 4, 8 and so on up to this.")] = 8,
    codec: Annotated[list[str] | None, typer.Option(help="Of the uplink; default: the run file's and int8.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Counted rounds of each.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="4 MB, two rounds, up to 4 contributors: for trying.")] = False,
    folder: Disks = None,
    json_file: JsonFile = None,
) -> None:
    """Play rounds of a run whose only module has 100 MB."""
    codecs = dict.fromkeys(codec or (CompressionConfig().uplink, "int8"))
    require_known("codec", codecs, CODECS)
    counts = fan_ins(min(up_to, QUICK_UP_TO) if quick else up_to)
    cases = [Case(codec=name, fan_in=fan_in) for fan_in in counts for name in codecs]
    values, runs = (QUICK_VALUES, QUICK_RUNS) if quick else (VALUES, runs)
    raise typer.Exit(run_program(lambda: run(cases, values, runs=runs, folder=folder, json_file=json_file)))


async def run(cases: list[Case], values: int, *, runs: int, folder: Path | None, json_file: Path | None) -> None:
    """All of it; the peers' disks are in a new folder in `folder`, which is deleted at the end. Raises DipacoError."""
    work = Path(tempfile.mkdtemp(prefix="transfer-", dir=folder))
    try:
        for case in cases:
            await measure(case, values, runs=runs, folder=work / f"{case.codec}-{case.fan_in}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
        sweep_stale_sockets()  # what was killed cannot remove its own
    size = module_layout(model_of(values), 0).size
    show(*tables(cases, title=f"{4 * size / MB:.1f} MB of float32, medians of {runs}"))
    show(f"from the first encoding until all have applied the version; contributors in {PROCESSES} processes")
    figures = {"values": size, "cores": len(os.sched_getaffinity(0)), "cases": [asdict(case) for case in cases]}
    write_json(json_file, figures)


def tables(cases: Sequence[Case], *, title: str) -> list[Table]:
    """Seconds and the owner's memory; where the time goes; and the processor's, which is the time on few cores."""
    rounds, phases, processor = [], [], []
    for case in cases:
        name = (str(case.fan_in), case.codec)
        memory = (f"{case.peak_bytes / MB:.0f}", f"{case.grown_bytes / MB:.0f}")
        rounds.append((*name, f"{case.seconds:.2f}", *memory))
        megabytes = f"{case.rounds[0].payload_bytes / MB:.1f}"
        phases.append((*name, megabytes, *(f"{case.phase(phase):.2f}" for phase in PHASES)))
        spent = [
            (one.owner.programs_s, one.contributors.programs_s, one.owner.daemons_s + one.contributors.daemons_s)
            for one in case.rounds
        ]
        columns = zip(*((*row, sum(row)) for row in spent), strict=True)
        processor.append((*name, *(f"{statistics.median(column):.2f}" for column in columns)))
    first = ("contributors", "codec")
    return [
        table(title, (*first, "s", "owner's peak MB", "of it new"), rounds),
        table("Seconds of each phase, medians", (*first, "MB", *PHASES), phases),
        table(
            "Processor seconds of a round, all cores, medians",
            (*first, "owner", "volunteers", "daemons", "all"),
            processor,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: from the first encoding until every contributor has applied the next version."""

    seconds: float
    phases: Mapping[str, float]
    """Seconds of each, from when the last contributor was through the one before; together `seconds`."""
    kept_s: float
    """Seconds more until all have it on disk."""
    payload_bytes: int
    before_bytes: int
    """What the owner held when the round began."""
    peak_bytes: int
    """The most that the owner held in the round (VmHWM)."""
    owner: Spent
    contributors: Spent
    """Of the processor, until all have it on disk."""


class Swarm:
    """One run on loopback, from `open` to `close`."""

    def __init__(self, folder: Path, config: RunConfig, *, contributors: int) -> None:
        self._folder = folder
        self._config = config
        self._count = contributors
        self._helpers: list[Helper] = []

    async def open(self) -> None:
        """Start all processes; raises DipacoError."""
        owner = await self._start("owner", str(self._folder / "owner"), json.dumps(plain(self._config)))
        address = (await owner.ask("open"))["address"]
        for index in range(PROCESSES):
            numbers = [str(number) for number in range(1, self._count + 1)[index::PROCESSES]]
            await self._start("volunteer", str(self._folder), address, *numbers)

    async def round(self) -> Round:
        """Play one; raises DipacoError if it closed without one of the contributors."""
        owner, *others = self._helpers
        await asyncio.gather(*(helper.ask("prepare") for helper in others))
        await owner.ask("tell")  # and forget what was before
        forget_peak(owner.pid)
        before_bytes, before = memory_bytes(owner.pid, "VmRSS"), self._spent()
        answers = await asyncio.gather(*(helper.ask("round") for helper in others))
        by_owner, by_contributors = (now.since(then) for now, then in zip(self._spent(), before, strict=True))
        peak_bytes, told = memory_bytes(owner.pid, "VmHWM"), await owner.ask("tell")
        counted = [version["contributions"] for version in told["versions"]]
        if counted != [self._count]:
            raise DipacoError(f"a round of {self._count} contributors made versions of {counted}")
        turns = [turn for answer in answers for turn in answer["turns"]]
        began_s = min(answer["began_s"] for answer in answers)
        ends_s = ends_of(turns, dict(told["passed"]))
        phases = phases_of(began_s, ends_s)
        return Round(
            seconds=sum(phases.values()),
            phases=phases,
            kept_s=max(turn["kept_s"] for turn in turns) - ends_s[-1],
            payload_bytes=max(turn["bytes"] for turn in turns),
            before_bytes=before_bytes,
            peak_bytes=peak_bytes,
            owner=by_owner,
            contributors=by_contributors,
        )

    def _spent(self) -> tuple[Spent, Spent]:
        owner, *others = (helper.pid for helper in self._helpers)
        return spent(owner), spent(*others)

    async def close(self) -> None:
        """End the contributors, then the owner."""
        await asyncio.gather(*(helper.end() for helper in self._helpers[1:]))
        await asyncio.gather(*(helper.end() for helper in self._helpers[:1]))

    async def _start(self, kind: str, *arguments: str) -> Helper:
        name = f"{kind}-{len(self._helpers)}"
        log = self._folder / f"{name}.log"
        helper = await start_helper(f"benchmarks.transfer.{kind}", *arguments, name=name, log=log)
        self._helpers.append(helper)
        return helper


def ends_of(turns: Sequence[Mapping[str, Any]], passed: Mapping[str, float]) -> list[float]:
    """When the last contributor, or the owner, was through each phase."""
    pushed = [max(float(turn[name]) for turn in turns) for name in ("encoded_s", "uploaded_s", "receipt_s")]
    applied_s = max(max(turn["applied_s"].values()) for turn in turns)
    return [*pushed, *(passed[point] for point in (CLOSED, AVERAGED, ANNOUNCED)), applied_s]


def phases_of(began_s: float, ends_s: Sequence[float]) -> dict[str, float]:
    """Seconds of each phase. They overlap: one may push while another still encodes, which counts as encoding."""
    steps = pairwise(accumulate((began_s, *ends_s), max))
    return {name: after - before for name, (before, after) in zip(PHASES, steps, strict=True)}


@dataclass(slots=True, kw_only=True)
class Case:
    """All rounds of one codec and number of contributors."""

    codec: str
    fan_in: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(played.seconds for played in self.rounds)

    @property
    def peak_bytes(self) -> int:
        """The most that the owner held, in any round."""
        return max(played.peak_bytes for played in self.rounds)

    @property
    def grown_bytes(self) -> int:
        """The most that the owner held above what it held before the round, in any."""
        return max(played.peak_bytes - played.before_bytes for played in self.rounds)

    def phase(self, name: str) -> float:
        """Median seconds of one phase."""
        return statistics.median(played.phases[name] for played in self.rounds)


def fan_ins(up_to: int) -> list[int]:
    """2, 4, 8, and so on."""
    found = [2]
    while 2 * found[-1] <= up_to:
        found.append(2 * found[-1])
    return found


async def measure(case: Case, values: int, *, runs: int, folder: Path) -> None:
    """Play the rounds of a case with a module of so many values, and tell of each; raises DipacoError."""
    swarm = Swarm(folder, config_of(model_of(values), case.codec), contributors=case.fan_in)
    try:
        await swarm.open()
        await swarm.round()  # opens connections and fills caches
        for number in range(1, runs + 1):
            case.rounds.append(await swarm.round())
            seconds = case.rounds[-1].seconds
            show(f"{case.fan_in} contributors, {case.codec}, round {number}: {seconds:.2f} s")
    finally:
        await swarm.close()


if __name__ == "__main__":
    run_benchmark(main)
