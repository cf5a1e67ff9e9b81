"""How long the `--help` of every command takes: `python -m benchmarks.startup`.

The target is half a second; torch and hivemind cost 4.
Whole processes, timed from outside, the commands in turn; the median of the runs is what counts. Beside it stands how
long a processor was at work: on a machine that does much else the rest is waiting for it.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.report import JsonFile, run_benchmark, show, spread, table, write_json
from bootstrap.cli import app as bootstrap_app
from peers.cli import app as peer_app

TARGET_S = 0.5


def commands() -> dict[str, list[str]]:
    """What is typed, with the module and the words that do it: both programs, all their groups and commands."""
    programs = (("dipaco-peer", "peers.cli", peer_app), ("dipaco-bootstrap", "bootstrap.cli", bootstrap_app))
    return {
        " ".join([program, *words, "--help"]): [module, *words, "--help"]
        for program, module, app in programs
        for words in _below(typer.main.get_command(app))
    }


def _below(node: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command, then those of everything below it."""
    yield words
    for name, inner in getattr(node, "commands", {}).items():
        yield from _below(inner, (*words, name))


def main(
    runs: Annotated[int, typer.Option(min=1, help="Counted runs of each command.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """Time the help of every command; exit code 1 if a median misses the target."""
    wanted = commands()
    times: dict[str, list[float]] = {name: [] for name in wanted}
    work: dict[str, list[float]] = {name: [] for name in wanted}
    for name in ("dipaco-peer --help", "dipaco-bootstrap --help"):  # once uncounted: the first run fills the disk cache
        _time(wanted[name])
    for _ in track(range(runs), description="in turn", transient=True):
        for name, arguments in wanted.items():
            took_s, cpu_s = _time(arguments)
            times[name].append(took_s)
            work[name].append(cpu_s)
    rows = [
        (name, *(f"{figure:.2f}" for figure in (*spread(values), statistics.median(work[name]), TARGET_S)))
        for name, values in times.items()
    ]
    columns = ("command", "median s", "min s", "max s", "CPU s", "target s")
    show(table("Help of every command", columns, rows))
    write_json(json_file, {"took_s": times, "cpu_s": work})
    raise typer.Exit(int(any(statistics.median(values) > TARGET_S for values in times.values())))


def _time(arguments: list[str]) -> tuple[float, float]:
    """How long it took, and how long a processor was at work for it."""
    module, *words = arguments
    began_s, cpu_before_s = time.perf_counter(), _cpu_s()
    code = f"import sys; sys.argv = {['x', *words]}; from {module} import main; main()"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began_s, _cpu_s() - cpu_before_s


def _cpu_s() -> float:
    """Of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    run_benchmark(main)
