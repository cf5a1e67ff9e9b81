"""The processor time of programs with all that they started, by what it is that runs; Linux, proc(5)."""

from __future__ import annotations

from dataclasses import dataclass

from peers.governor.machine import PROC, cpu_of, descendants

DAEMON = "p2pd"
"""The program that carries what libp2p's peers say, in ours and in the rival's."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of all cores together."""

    programs_s: float
    daemons_s: float

    def since(self, before: Spent) -> Spent:
        """What was spent after `before`."""
        return Spent(self.programs_s - before.programs_s, self.daemons_s - before.daemons_s)


def spent(*pids: int) -> Spent:
    """By these processes and all that descend from them, as far as they live."""
    programs_s = daemons_s = 0.0
    for pid in {one for root in pids for one in (root, *descendants(root))}:
        if _name(pid) == DAEMON:
            daemons_s += cpu_of(pid)
        else:
            programs_s += cpu_of(pid)
    return Spent(programs_s, daemons_s)


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:  # it ended meanwhile
        return ""
