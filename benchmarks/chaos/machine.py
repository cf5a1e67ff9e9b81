"""How busy this machine is, from Linux's counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = slice(3, 5)
"""Idle and waiting for the disk, among the counters of the first line."""


def _ticks() -> tuple[int, int]:
    """Ticks of all processors so far: in use, and altogether. Zeros where there is no such file."""
    if not STAT.exists():
        return 0, 0
    counters = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(counters) - sum(counters[IDLE]), sum(counters)


@dataclass(slots=True)
class ProcessorUse:
    """The machine's processors since this was made."""

    _start: tuple[int, int] = field(default_factory=_ticks)

    @property
    def busy(self) -> float:
        """Share that was in use, from 0 to 1."""
        busy, total = (now - then for now, then in zip(_ticks(), self._start, strict=True))
        return busy / total if total else 0.0
