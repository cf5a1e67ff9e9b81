"""`python -m benchmarks.transfer`: from the first push until all have the next version, beside hivemind's averager."""

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

from benchmarks.report import MB, Disks, JsonFile, require_codecs, run_benchmark, show, table, write_json
from dipaco_p2p.config import CompressionConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.program.console import run_program
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets

from .measure import PHASES, Case, Wish, fan_ins, measure, slope_ratio
from .rival import COMPRESSIONS
from .runs import model_of

VALUES, QUICK_VALUES = 25_000_000, 1_000_000
QUICK_RUNS, QUICK_UP_TO = 2, 4
WANTED = 0.5
"""Of hivemind's time."""
LINEAR = 1.25
"""How many times more a contributor may cost among many than among few."""


def main(
    up_to: Annotated[int, typer.Option(min=2, max=64, help="Fan-ins are 2, 4, 8 and so on up to this.")] = 8,
    codec: Annotated[list[str] | None, typer.Option(help="Of the uplink; default: the run file's and int8.")] = None,
    rival: Annotated[str, typer.Option(help="hivemind's compression; `none` measures ours alone.")] = "8-bit blockwise",
    runs: Annotated[int, typer.Option(min=1, help="Counted rounds of each, in turns.")] = 5,
    processes: Annotated[int, typer.Option(min=1, help="Processes that the contributors share.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="4 MB, two rounds, up to 4 contributors: for trying.")] = False,
    folder: Disks = None,
    json_file: JsonFile = None,
) -> None:
    """Play rounds of a run whose only module has 100 MB, and all-reduces of the same tensors, in turns."""
    codecs = require_codecs(codec or (), default=(CompressionConfig().uplink, "int8"))
    if rival not in (*COMPRESSIONS, "none"):
        raise typer.BadParameter(f"no compression `{rival}`; there are {', '.join(COMPRESSIONS)}, and none")
    wish = Wish(
        values=QUICK_VALUES if quick else VALUES,
        fan_ins=fan_ins(min(up_to, QUICK_UP_TO) if quick else up_to),
        codecs=codecs,
        rival="" if rival == "none" else rival,
        runs=QUICK_RUNS if quick else runs,
        processes=processes,
    )
    raise typer.Exit(run_program(lambda: run(wish, folder=folder, json_file=json_file)))


async def run(wish: Wish, *, folder: Path | None, json_file: Path | None) -> None:
    """All of it; the peers' disks are in a new folder in `folder`, which is deleted at the end. Raises DipacoError."""
    work = Path(tempfile.mkdtemp(prefix="transfer-", dir=folder))
    try:
        cases = await measure(wish, work, show)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        sweep_stale_sockets()  # what was killed cannot remove its own
    size = module_layout(model_of(wish.values), 0).size
    title = f"{4 * size / MB:.1f} MB of float32, medians of {wish.runs}"
    show(ratio_table(cases, title=title), phase_table(cases), processor_table(cases), compared(wish), *linearity(cases))
    figures = {"wish": asdict(wish), "values": size, "cores": len(os.sched_getaffinity(0))}
    write_json(json_file, figures | {"cases": [asdict(case) for case in cases]})


def ratio_table(cases: Sequence[Case], *, title: str) -> Table:
    """A row for each case."""
    rows = []
    for case in cases:
        rival_s = f"{statistics.median(case.rival_s):.2f}" if case.rival_s else ""
        ratio = "" if case.ratio is None else f"{case.ratio:.2f}"
        memory = (f"{case.peak_bytes / MB:.0f}", f"{case.grown_bytes / MB:.0f}")
        rows.append((str(case.fan_in), case.codec, f"{case.seconds:.2f}", rival_s, ratio, *memory))
    columns = ("contributors", "codec", "ours s", "hivemind s", "ratio", "owner's peak MB", "of it new")
    return table(title, columns, rows)


def phase_table(cases: Sequence[Case]) -> Table:
    """Where our time goes."""
    rows = []
    for case in cases:
        megabytes = f"{case.rounds[0].payload_bytes / MB:.1f}"
        rows.append((str(case.fan_in), case.codec, megabytes, *(f"{case.phase(name):.2f}" for name in PHASES)))
    return table("Seconds of each phase, medians", ("contributors", "codec", "MB", *PHASES), rows)


def processor_table(cases: Sequence[Case]) -> Table:
    """The processor time of both: on few cores that is the time, however well it is spread."""
    rows = []
    for case in cases:
        ours = [
            (one.owner.programs_s, one.contributors.programs_s, one.owner.daemons_s + one.contributors.daemons_s)
            for one in case.rounds
        ]
        rival = [(one.programs_s, one.daemons_s) for one in case.rival_spent]
        with_sums = ([(*row, sum(row)) for row in side] for side in (ours, rival))
        found = [statistics.median(column) for side in with_sums for column in zip(*side, strict=True)]
        rows.append((str(case.fan_in), case.codec, *(f"{seconds:.2f}" for seconds in found)))
    columns = ("owner", "volunteers", "daemons", "ours", "averagers", "daemons", "hivemind")
    title = "Processor seconds of a round, all cores, medians"
    return table(title, ("contributors", "codec", *columns), rows)


def compared(wish: Wish) -> str:
    """What is compared with what."""
    ours = (
        f"ours: from the first encoding until all have applied the version; contributors in {wish.processes} processes"
    )
    if not wish.rival:
        return ours
    return f"{ours}. hivemind: the all-reduce alone, {wish.rival} both ways. Wanted: a ratio of {WANTED:g}"


def linearity(cases: Sequence[Case]) -> list[str]:
    """For every codec: whether the time is linear in the fan-in."""
    lines = []
    for codec in dict.fromkeys(case.codec for case in cases):
        ours = [case for case in cases if case.codec == codec]
        ratio = slope_ratio([case.fan_in for case in ours], [case.seconds for case in ours])
        if ratio is None:
            lines.append(f"{codec}: too few fan-ins, or no rise, to tell whether the time is linear in the fan-in")
        else:
            verdict = "linear in the fan-in" if ratio <= LINEAR else "worse than linear in the fan-in"
            lines.append(f"{codec}: {verdict} (ratio of slopes, upper half over lower: {ratio:.2f})")
    return lines


if __name__ == "__main__":
    run_benchmark(main)
