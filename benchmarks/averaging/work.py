"""One measurement in a process of its own: `python -m benchmarks.averaging.work FOLDER CODEC COUNT WHAT RUNS WIDTH`.

Memory is the most that the process had at once (VmHWM) above what it had before, so that nothing another measurement
left behind counts, nor the outer state, which an owner holds all the time. Linux only: it reads /proc.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.core.outer import average
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.version import averaged, make_version
from dipaco_p2p.protocol.versions import genesis_version

from .module import LEADER, MODULE, admitted, run_of, state_of

AVERAGE, VERSION, HELD = "average", "version", "held"
"""The average by itself; the whole version, with its outer step and blobs; the average of what is decoded before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one number of contributions."""

    seconds: list[float]
    """Of each run."""
    peak_bytes: int
    """The most memory at once, above what there was before."""
    values: int
    """Of the module."""


def measure(folder: Path, run: Run, count: int, what: str, *, runs: int) -> Measured:
    """In this process, which should do nothing else."""
    work = _work(folder, run, count, what)
    before = _memory("VmRSS")
    _forget_peak()
    seconds = []
    for _ in range(runs):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return Measured(seconds=seconds, peak_bytes=_memory("VmHWM") - before, values=run.layout(MODULE).size)


def _work(folder: Path, run: Run, count: int, what: str) -> Callable[[], object]:
    items = admitted(folder, run, count)
    alphas = [1 / count] * count
    if what == AVERAGE:
        return lambda: averaged(run, items, alphas, clip_norm=None)
    if what == HELD:
        rule = run.config.outer.norm_rule
        return lambda: average([item.read() for item in items], alphas, rule=rule)
    parent, state = genesis_version(run.manifest, MODULE), state_of(run)
    return lambda: make_version(run, parent, state, items, clip_norm=None, term=1, grant="0" * 64, author=LEADER.peer)


def _memory(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _forget_peak() -> None:
    """VmHWM begins anew from what there is now; see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


if __name__ == "__main__":
    folder, codec, count, what, runs, width = sys.argv[1:]
    found = measure(Path(folder), run_of(codec, width=int(width)), int(count), what, runs=int(runs))
    print(json.dumps({"seconds": found.seconds, "peak_bytes": found.peak_bytes, "values": found.values}))
