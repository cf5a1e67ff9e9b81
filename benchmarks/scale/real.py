"""What volunteers read and are asked, as processes on this machine: the counts of their own programs, asked twice.

The model beside them trains as fast as it takes for its modules to have versions as often. Then the run is frozen:
nobody trains any more, and the same is counted of idle peers.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import memory_bytes
from benchmarks.swarm_faults.churn import write_run_file
from benchmarks.swarm_faults.evidence import read_events
from benchmarks.swarm_faults.schedule import volunteers
from benchmarks.swarm_faults.swarm import OPTIONS, LocalSwarm
from bootstrap.control.requests import Request as SeedRequest
from bootstrap.progress import stage
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.control.client import ask
from peers.control.control import Request
from peers.governor.machine import PROC, TICKS, cpu_of, descendants

from .churned import Churn
from .costs import Figures, Pace
from .counted import ROUNDS, TTL_S
from .model import Swarm

STEPS = 30
"""Of one short sequence each."""
DEADLINE_S = 300.0
CPU_SHARE = 0.9
"""Of all cores, that the volunteers have together: with all of them, those that lead are not heard, and modules change
hands for want of heartbeats."""
IDLE_AFTER_S = 30.0
"""Until what was under way when the run was frozen is over."""
PAUSE_S = 12.0
"""Between two starts, each of which takes twelve seconds of a core: at six, one of 24 could not reach the seed."""
ASK_S = 30.0
HOURS, HALVINGS = 0.5, 10
COUNTED = {
    "reads": "keys_read",
    "records": "records_read",
    "puts": "records_put",
    "asked": "calls_made",
    "answered": "calls_served",
    "cpu_s": "cpu_s",
    "all_cpu_s": "all_cpu_s",
    "daemon_bytes": "daemon_bytes",
}
"""In the answer to `status`, or what `_spent` adds to it."""
SETTINGS = {
    "model": {"width": "16", "ffn_width": "32"},
    "inner": {"batch": "1"},
    "rounds": {"min_paths": "1", "deadline_s": str(DEADLINE_S), "owners": "2"},
    "liveness": {"settle_s": "2.0"},
    "corpus": {"bytes_max": "2000000"},
}
LEVEL = "[[model.levels]]\nmodules = {modules}\nblocks = 1\n"
ENDS = "embedding = true\nhead = true\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """What one swarm of processes did, a minute."""

    volunteers: int
    median: dict[str, float]
    busiest: dict[str, float]
    cadence_s: float
    """Between two versions of a module, on the whole."""
    memory_bytes: float
    """PSS of the median volunteer with its daemon."""
    idle: dict[str, float]
    """As `median`, in the frozen run."""
    ordinary: int
    """Volunteers that led nothing, whose median is told; all, if everybody led something."""


async def count_real(peers: int, *, grid: Sequence[int], minutes: float, warm_up_s: float, work: Path) -> Real:
    """Start so many, wait for each one's first receipt and for the warm-up, and count. Raises DipacoError."""
    write_run(work / "run.toml", peers, grid)
    options = (*OPTIONS, "--cpu", f"{CPU_SHARE / peers:.3f}")
    swarm = LocalSwarm(work, work / "run.toml", options=options, pause_s=PAUSE_S)
    names = volunteers(peers)
    try:
        await swarm.open()
        await swarm.begin(names)
        with stage(f"Counting {peers} volunteers", total=round(warm_up_s + IDLE_AFTER_S + 120 * minutes)) as advance:
            began_s = time.time()
            await _wait(warm_up_s, swarm, advance, began_s)
            busy = await _count(names, swarm, minutes, advance, began_s)
            ask(swarm.folder, SeedRequest(ask="freeze", reason="to count idle peers"), timeout_s=ASK_S)
            await _wait(IDLE_AFTER_S, swarm, advance, began_s)
            idle = await _count(names, swarm, minutes, advance, began_s)
    finally:
        await swarm.end()
    events = read_events(swarm.folder.glob("*/history.jsonl"))
    versions = sum(event.ev == "archived" and 0 <= event.t_s - busy.since_s < busy.span_s for event in events)
    if not versions:
        raise DipacoError(f"no module had a version in {busy.span_s:.0f} s", hint="count for longer: --minutes")
    return Real(
        volunteers=peers,
        median=busy.median(),
        busiest={what: max(each[what] for each in busy.counts.values()) for what in COUNTED},
        cadence_s=busy.span_s * sum(grid) / versions,
        memory_bytes=busy.memory_bytes,
        idle=idle.median(),
        ordinary=len(busy.ordinary),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Of one span, a minute."""

    since_s: float
    span_s: float
    counts: dict[str, dict[str, float]]
    ordinary: list[str]
    memory_bytes: float

    def median(self) -> dict[str, float]:
        return {what: statistics.median(self.counts[name][what] for name in self.ordinary) for what in COUNTED}


async def _count(names: Sequence[str], swarm: LocalSwarm, minutes: float, advance: Any, began_s: float) -> _Counts:
    first, since_s = await _ask(swarm, names), time.time()
    await _wait(60 * minutes, swarm, advance, began_s)
    last, span_s = await _ask(swarm, names), time.time() - since_s
    ordinary = [name for name in names if not first[name]["leads"] and not last[name]["leads"]] or list(names)
    return _Counts(
        since_s=since_s,
        span_s=span_s,
        counts={
            name: {what: 60 * (last[name][key] - first[name][key]) / span_s for what, key in COUNTED.items()}
            for name in names
        },
        ordinary=ordinary,
        memory_bytes=statistics.median(last[name]["memory_bytes"] for name in ordinary),
    )


def model_of(real: Real, grid: tuple[int, ...]) -> Figures:
    """The model of the same swarm, whose modules have versions about as often."""

    def played(train_s: float) -> Figures:
        pace = Pace(train_s=train_s, train_sigma=0.0, module_bytes=5e4, deadline_s=DEADLINE_S, settle_s=2.0)
        return Swarm(real.volunteers, hours=HOURS, churn=Churn(is_quiet=True), widths=grid, pace=pace).play()

    low_s, high_s = 0.0, real.cadence_s
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        is_faster = played(middle_s).rounds * real.cadence_s > HOURS * 3600
        low_s, high_s = (middle_s, high_s) if is_faster else (low_s, middle_s)
    return played(high_s)


def write_run(path: Path, peers: int, grid: Sequence[int]) -> None:
    """The run file."""
    levels = "".join(LEVEL.format(modules=width) + ENDS * (not number) for number, width in enumerate(grid))
    write_run_file(
        path,
        peers=peers,
        seed=0,
        corpus="found",
        steps=STEPS,
        rounds=ROUNDS,
        heartbeat_ttl_s=TTL_S,
        judges=0,
        levels=levels,
        settings=SETTINGS,
    )


async def _wait(duration_s: float, swarm: LocalSwarm, advance: Any, began_s: float) -> None:
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s:
        swarm.require_up()
        advance(round(time.time() - began_s))
        await asyncio.sleep(1)


def _spent(pid: int) -> dict[str, float]:
    """By a volunteer with its daemon: beside inner steps, and in all. The daemon's bytes are those of others and of the
    program itself, about twice what the line carries."""
    daemons = list(descendants(pid))
    daemons_s = sum(map(cpu_of, daemons))
    return {
        "cpu_s": _main_thread_s(pid) + daemons_s,
        "all_cpu_s": cpu_of(pid) + daemons_s,
        "memory_bytes": sum(memory_bytes(one, "Pss", file="smaps_rollup") for one in (pid, *daemons)),
        "daemon_bytes": sum(map(_passed_bytes, daemons)),
    }


def _main_thread_s(pid: int) -> float:
    """Its processor time: inner steps have a thread of their own."""
    user, system = (PROC / f"{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def _passed_bytes(pid: int) -> float:
    """What went through its `read` and `write` (proc(5), io)."""
    lines = dict(line.split(": ") for line in (PROC / str(pid) / "io").read_text().splitlines())
    return float(lines["rchar"]) + float(lines["wchar"])


async def _ask(swarm: LocalSwarm, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The answer of each to `status`, and what it has spent. Raises DipacoError."""

    def one(name: str) -> dict[str, Any]:
        told = ask(swarm.home(name), Request(ask="status"), timeout_s=ASK_S).body
        return told | _spent(swarm.members[name].process.pid)

    found = await asyncio.gather(*(asyncio.to_thread(one, name) for name in names))
    return dict(zip(names, found, strict=True))
