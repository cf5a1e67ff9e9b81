"""`python -m benchmarks.transfer`: rounds of one large module, from the first push until all have the next version."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.report import MB, Disks, JsonFile, require_known, run_benchmark, show, table, write_json
from dipaco_p2p.config import CompressionConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.outer.compress import CODECS
from dipaco_p2p.program.console import run_program
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets

from .measure import PHASES, PROCESSES, Case, fan_ins, measure
from .owner import model_of

VALUES, QUICK_VALUES = 25_000_000, 1_000_000
QUICK_RUNS, QUICK_UP_TO = 2, 4


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


if __name__ == "__main__":
    run_benchmark(main)
