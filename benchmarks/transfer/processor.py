"""The processor time of programs with all that they started, by what it is that runs; Linux, proc(5)."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
DAEMON = "p2pd"
"""The program that carries what libp2p's peers say, in ours and in the rival's."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of all cores together."""

    programs_s: float
    daemons_s: float

    def since(self, before: Spent) -> Spent:
        """What was spent after `before`."""
        return Spent(self.programs_s - before.programs_s, self.daemons_s - before.daemons_s)


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    spent_s: float


def spent(*pids: int) -> Spent:
    """By these processes and all that descend from them, as far as they live."""
    found = dict(_processes())
    children = defaultdict(list)
    for pid, process in found.items():
        children[process.parent].append(pid)
    ours, left = {}, [pid for pid in pids if pid in found]
    while left:
        pid = left.pop()
        ours[pid] = found[pid]
        left += children[pid]
    daemons_s = sum(process.spent_s for process in ours.values() if process.name == DAEMON)
    return Spent(sum(process.spent_s for process in ours.values()) - daemons_s, daemons_s)


def _processes() -> Iterator[tuple[int, _Process]]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                yield int(folder.name), _read((folder / "stat").read_text())


def _read(stat: str) -> _Process:
    """A line of /proc/PID/stat; the name, in brackets, may hold anything."""
    name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
    return _Process(name=name, parent=int(fields[1]), spent_s=(int(fields[11]) + int(fields[12])) * _TICK_S)
