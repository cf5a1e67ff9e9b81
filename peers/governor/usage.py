"""What this program takes of the machine, with the daemons that it started: processor time and memory, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
KIB = 1024
TICKS = os.sysconf("SC_CLK_TCK")
RESET_PEAK = "5"
"""What forgets the peak, written into clear_refs (proc_pid_clear_refs(5))."""
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that are in memory."""

    now: int
    peak: int
    """The most since `forget_peak`, or since the process began where that cannot be forgotten."""


def cores(*, cpu_max: Path = CPU_MAX) -> float:
    """How many cores this program may use: those it is bound to, fewer in a container that has a quota (cgroup v2)."""
    bound = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # `max` is no number, and no limit
        quota, period = map(float, cpu_max.read_text().split())
        return min(bound, quota / period)
    return bound


def cpu_s() -> float:
    """Processor time so far, in seconds, of all threads and daemons."""
    return time.process_time() + sum(map(cpu_of, descendants(os.getpid())))


def memory() -> Memory:
    """Of this process and its daemons; memory that several of them share is counted once for each."""
    own = _lines(os.getpid())
    others = sum(_lines(pid).get("VmRSS", 0) for pid in descendants(os.getpid()))
    now = own.get("VmRSS", 0)
    return Memory(now=now + others, peak=max(now, own.get("VmHWM", 0)) + others)


def forget_peak() -> None:
    """Let `peak` begin anew; where the kernel will not, it stays the most there ever was."""
    with contextlib.suppress(OSError):
        (PROC / "self" / "clear_refs").write_text(RESET_PEAK)


def descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and those that they did."""
    for thread in _entries(PROC / str(pid) / "task"):
        with contextlib.suppress(OSError, ValueError):
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from descendants(child)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def cpu_of(pid: int) -> float:
    """Processor time of one process alone so far, in seconds; 0 when it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name before the last parenthesis may hold anything; user and system time are fields 14 and 15 of proc(5).
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def _lines(pid: int) -> dict[str, int]:
    """The lines of a process's status that are sizes, in bytes."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0]) * KIB
    return found
