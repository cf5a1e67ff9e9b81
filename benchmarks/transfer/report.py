"""The whole benchmark: measure, print the tables, write the JSON."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets

from .floor import Rates, floor, measured
from .measure import Case, Wish, measure, slope_ratio
from .ours import PHASES
from .runs import model_of

MB = 1e6
WANTED = 0.5
"""Of hivemind's time."""
LINEAR = 1.25
"""A contributor may cost so many times more among many than among few."""


async def run(wish: Wish, *, folder: Path | None, json_file: Path | None) -> None:
    """All of it; disks of peers are in a new folder in `folder`, and gone afterwards. Raises DipacoError."""
    console = Console()
    work = Path(tempfile.mkdtemp(prefix="transfer-", dir=folder))
    try:
        cases = await measure(wish, work, console.print)
        rates = await asyncio.to_thread(measured, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        sweep_stale_sockets()  # what was killed cannot remove its own
    size = module_layout(model_of(wish.values), 0).size
    title = f"{4 * size / MB:.1f} MB of float32, medians of {wish.runs}"
    console.print(ratio_table(cases, title=title))
    console.print(phase_table(cases))
    console.print(processor_table(cases))
    console.print(floor_table(cases, rates, values=wish.values))
    console.print(compared(wish))
    for line in linearity(cases):
        console.print(line)
    if json_file is not None:
        cores = len(os.sched_getaffinity(0))
        figures = {"wish": asdict(wish), "values": size, "cores": cores, "rates": asdict(rates)}
        figures["cases"] = [asdict(case) for case in cases]
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def ratio_table(cases: Sequence[Case], *, title: str) -> Table:
    """A row for each case."""
    table = Table("contributors", "codec", "ours s", "hivemind s", "ratio", "owner's peak MB", "of it new", title=title)
    for case in cases:
        table.add_row(
            str(case.fan_in),
            case.codec,
            f"{case.seconds:.2f}",
            f"{statistics.median(case.rival_s):.2f}" if case.rival_s else "",
            "" if case.ratio is None else f"{case.ratio:.2f}",
            f"{case.peak_bytes / MB:.0f}",
            f"{case.grown_bytes / MB:.0f}",
        )
    return table


def phase_table(cases: Sequence[Case]) -> Table:
    """Where our time goes."""
    table = Table("contributors", "codec", "MB", *PHASES, title="Seconds of each phase, medians")
    for case in cases:
        megabytes = f"{case.rounds[0].payload_bytes / MB:.1f}"
        table.add_row(str(case.fan_in), case.codec, megabytes, *(f"{case.phase(name):.2f}" for name in PHASES))
    return table


def processor_table(cases: Sequence[Case]) -> Table:
    """What all took of the processor: on few cores that is the time, however well it is spread."""
    columns = ("owner", "volunteers", "daemons", "ours", "averagers", "daemons", "hivemind")
    table = Table("contributors", "codec", *columns, title="Processor seconds of a round, all cores, medians")
    for case in cases:
        ours = [
            (one.owner.programs_s, one.contributors.programs_s, one.owner.daemons_s + one.contributors.daemons_s)
            for one in case.rounds
        ]
        rival = [(one.programs_s, one.daemons_s) for one in case.rival_spent]
        found = [statistics.median(column) for rows in (ours, rival) for column in _with_sum(rows)]
        table.add_row(str(case.fan_in), case.codec, *(f"{seconds:.2f}" for seconds in found))
    return table


def _with_sum(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Columns, and one with the sum of each row."""
    return list(zip(*((*row, sum(row)) for row in rows), strict=True))


def floor_table(cases: Sequence[Case], rates: Rates, *, values: int) -> Table:
    """What of our time nobody could save; on both cores, all at once."""
    title = (
        f"To hash at {rates.hashed / MB:.0f} MB/s, to write and sync at {rates.written / MB:.0f} MB/s: all cores, best"
    )
    table = Table("contributors", "codec", "MB by all", "hashing s", "disks s", title=title)
    for case in cases:
        least = floor(rates, values=values, codec=case.codec, fan_in=case.fan_in)
        cells = f"{least.bytes / MB:.0f}", f"{least.hashed_s:.2f}", f"{least.written_s:.2f}"
        table.add_row(str(case.fan_in), case.codec, *cells)
    return table


def compared(wish: Wish) -> str:
    """What is held against what."""
    told = (
        f"ours: from the first encoding until all have applied the version; contributors in {wish.processes} processes"
    )
    if not wish.rival:
        return told
    return f"{told}. hivemind: the all-reduce alone, {wish.rival} both ways. Wanted: a ratio of {WANTED:g}"


def linearity(cases: Sequence[Case]) -> list[str]:
    """For every codec: whether the time is linear in the fan-in."""
    lines = []
    for codec in dict.fromkeys(case.codec for case in cases):
        ours = [case for case in cases if case.codec == codec]
        ratio = slope_ratio([case.fan_in for case in ours], [case.seconds for case in ours])
        if ratio is None:
            lines.append(f"{codec}: too few fan-ins, or no rise, to say whether the time is linear in the fan-in")
        else:
            verdict = "linear in the fan-in" if ratio <= LINEAR else "worse than linear in the fan-in"
            lines.append(f"{codec}: {verdict} (ratio of slopes, upper half over lower: {ratio:.2f})")
    return lines
