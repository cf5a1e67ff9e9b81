"""All measurements, the tables, and the JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dipaco_p2p.core.compress import CODECS, INT4

from .beside import COUNT, Beside, beside
from .module import MODULE, fill, run_of
from .work import AVERAGE, HELD, VERSION, Measured

COUNTS = (2, 4, 8, 16)
MB = 1e6

Found = Mapping[str, Mapping[int, Mapping[str, Measured]]]
"""By codec, number of contributions, and what was measured."""


def run(
    *, runs: int, threads: int, width: int, steps: int, round_s: float, json_file: Path | None
) -> dict[str, object]:
    """Measure, print, and write."""
    console = Console()
    found: dict[str, dict[int, dict[str, Measured]]] = {}
    with tempfile.TemporaryDirectory(prefix="averaging-") as folder:
        for codec in CODECS:
            fill(Path(folder) / codec, run_of(codec, width=width))
            found[codec] = {
                count: {
                    what: _in_a_process(Path(folder) / codec, codec, count, what, runs=runs, width=width)
                    for what in (AVERAGE, VERSION, HELD)
                }
                for count in COUNTS
            }
        owned = run_of(INT4, width=width)
        trained = beside(Path(folder) / INT4, owned, steps=steps, runs=runs, threads=threads, round_s=round_s)
    console.print(table(found, runs=runs))
    console.print(beside_table(trained, threads=threads, round_s=round_s))
    figures: dict[str, object] = {
        "module": str(MODULE),
        "cases": [
            {"codec": codec, "contributions": count, "what": what} | asdict(measured)
            for codec, counts in found.items()
            for count, kinds in counts.items()
            for what, measured in kinds.items()
        ],
        "memory of 16 over 2": memory_ratios(found),
        "trainer": asdict(trained)
        | {"threads": threads, "round_s": round_s}
        | {"averaging over alone": slowdown(trained), "round with a version over one without": round_slowdown(trained)},
    }
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def memory_ratios(found: Found) -> dict[str, dict[str, float]]:
    """Of each codec and thing measured: memory with the most contributions over that with the fewest."""
    return {
        codec: {
            what: counts[COUNTS[-1]][what].peak_bytes / counts[COUNTS[0]][what].peak_bytes
            for what in (AVERAGE, VERSION, HELD)
        }
        for codec, counts in found.items()
    }


def slowdown(trained: Beside) -> float:
    """Speed while averaging over speed alone: the median of the ratios within each run."""
    return _ratio(trained.averaging, trained.alone)


def round_slowdown(trained: Beside) -> float:
    """Speed over a round in which a version is made, over that of one without: the median of the ratios of the runs."""
    return _ratio(trained.round_once, trained.round_alone)


def _ratio(with_it: Sequence[float], alone: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(with_it, alone, strict=True))


def table(found: Found, *, runs: int) -> Table:
    """A row for each codec and number of contributions; memory in sizes of the module as float32."""
    values = next(iter(found.values()))[COUNTS[0]][AVERAGE].values
    title = f"Closing a round of a module of {values:,} values, one thread, medians of {runs}"
    columns = ("contributions", "average s", "MB/s", "memory, modules", "if all were held", "version s", "its memory")
    shown = Table("codec", *columns, title=title)
    for codec, counts in found.items():
        for count, kinds in counts.items():
            seconds = {what: statistics.median(kinds[what].seconds) for what in kinds}
            modules = {what: f"{kinds[what].peak_bytes / (4 * values):.2f}" for what in kinds}
            shown.add_row(
                codec,
                str(count),
                f"{seconds[AVERAGE]:.3f}",
                f"{count * 4 * values / MB / seconds[AVERAGE]:,.0f}",
                modules[AVERAGE],
                modules[HELD],
                f"{seconds[VERSION]:.3f}",
                modules[VERSION],
            )
        ratios = memory_ratios(found)[codec]
        cells = ["", "", f"x{ratios[AVERAGE]:.2f}", f"x{ratios[HELD]:.2f}", "", f"x{ratios[VERSION]:.2f}"]
        shown.add_row("", f"{COUNTS[-1]} over {COUNTS[0]}", *cells, end_section=True)
    return shown


def beside_table(trained: Beside, *, threads: int, round_s: float) -> Table:
    """The default path of `benchmarks.trainer`: alone, beside averages without a pause, beside a version a round."""
    shown = Table("inner loop", "tokens/s", "of alone", title=f"Training beside an owner, {threads} thread(s) of torch")
    rows: list[tuple[str, Sequence[float], str]] = [
        ("alone", trained.alone, ""),
        (f"beside {trained.averages} averages of {COUNT} in {INT4}", trained.averaging, f"{slowdown(trained):.3f}"),
        (f"a round of {round_s:g} s", trained.round_alone, ""),
        ("the same, with one whole version", trained.round_once, f"{round_slowdown(trained):.3f}"),
    ]
    for what, speeds, ratio in rows:
        shown.add_row(what, f"{statistics.median(speeds):,.0f}", ratio)
    return shown


def _in_a_process(folder: Path, codec: str, count: int, what: str, *, runs: int, width: int) -> Measured:
    command = [
        sys.executable,
        "-m",
        "benchmarks.averaging.work",
        str(folder),
        codec,
        str(count),
        what,
        str(runs),
        str(width),
    ]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Measured(**json.loads(said))
