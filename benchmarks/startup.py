"""How long `--help` takes: `python -m benchmarks.startup`. The target is half a second; torch and hivemind cost 4.

Whole processes, timed from outside, the two programs in turn; the median of the runs is what counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PROGRAMS = {"dipaco-peer --help": "peers.cli", "dipaco-bootstrap --help": "bootstrap.cli"}
TARGET_S = 0.5


def main(
    runs: Annotated[int, typer.Option(min=1, help="Counted runs of each command.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time the help of both programs; exit code 1 if a median misses the target."""
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for module in PROGRAMS.values():  # once uncounted: the first run fills the disk cache
        _time(module)
    for _ in range(runs):
        for name, module in PROGRAMS.items():
            times[name].append(_time(module))
    table = Table("command", "median s", "min s", "max s", "target s")
    for name, values in times.items():
        figures = (statistics.median(values), min(values), max(values), TARGET_S)
        table.add_row(name, *(f"{value:.2f}" for value in figures))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(times, indent=1) + "\n")
    raise typer.Exit(int(any(statistics.median(values) > TARGET_S for values in times.values())))


def _time(module: str) -> float:
    began_s = time.perf_counter()
    code = f"import sys; sys.argv = ['x', '--help']; from {module} import main; main()"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    typer.run(main)
