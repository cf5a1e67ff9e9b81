"""The memory guard: before the owner's limit or the machine's memory is used up, fewer sequences go through at once.

Rule 1: looked at between steps, with the peak since the last look: what a step takes for moments only counts too.
Rule 2: first a smaller micro-batch (core/microbatch.py), again and again. When there is no smaller one and the owner's
limit is still exceeded, the volunteer leaves in good order, with a reason, rather than being killed in the middle.
Rule 3: what others take of the machine is no reason to leave, only to get smaller.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass

from dipaco_p2p.core.microbatch import MicroBatch
from dipaco_p2p.errors import EnvironmentUnfit

from .usage import Memory

LIMIT_SHARE = 0.95
"""Of the owner's limit: beyond it batches get smaller."""
FREE_BYTES_MIN = 256 * 2**20
"""Less than this left on the machine, or in its container, and batches get smaller."""
LOOK_S = 1.0
STRIKES_MAX = 3
"""Looks in a row beyond the limit, with the smallest batch."""
HINT = "raise `ram_gb`, or join a run with smaller paths; leading modules takes memory too: try --no-listen"
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Where a guard reads; a test has its own."""

    memory: Callable[[], Memory]
    forget_peak: Callable[[], None]
    free_bytes: Callable[[], int | None]


class MemoryGuard:
    """Watches one process; called by the thread that takes the steps."""

    def __init__(
        self, gauges: Gauges, *, limit_bytes: int | None, micro: MicroBatch | None, say: Callable[[str], None]
    ):
        """`micro` is None where batches are not in this memory: on a GPU. `say` is told what was done."""
        self._gauges = gauges
        self._limit_bytes = limit_bytes
        self._micro = micro
        self._say = say
        self._seen_s: float | None = None
        self._strikes = 0

    def look(self, now_s: float) -> None:
        """Get smaller if need be; raises EnvironmentUnfit when that is not enough."""
        if self._seen_s is not None and now_s - self._seen_s < LOOK_S:
            return
        self._seen_s = now_s
        used = self._gauges.memory().peak
        why = self._too_much(used)
        if not why:
            self._strikes = 0
            self._gauges.forget_peak()
        elif self._shrunk(why):
            self._strikes = 0
        else:
            self._strike(used, why)

    def _too_much(self, used: int) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self._limit_bytes is not None and used > LIMIT_SHARE * self._limit_bytes:
            return f"{used / MIB:,.0f} MiB of the {self._limit_bytes / MIB:,.0f} MiB that are allowed are in use"
        free = self._gauges.free_bytes()
        if free is not None and free < FREE_BYTES_MIN:
            return f"only {free / MIB:,.0f} MiB of the machine's memory are free"
        return ""

    def _shrunk(self, why: str) -> bool:
        if self._micro is None or not self._micro.shrink():
            return False
        give_back()
        self._gauges.forget_peak()
        self._say(f"{why}: goes on with {self._micro.described()}")
        return True

    def _strike(self, used: int, why: str) -> None:
        is_over = self._limit_bytes is not None and used > self._limit_bytes
        self._strikes = self._strikes + 1 if is_over else 0
        give_back()
        self._gauges.forget_peak()
        if self._strikes >= STRIKES_MAX:
            raise EnvironmentUnfit(f"{why}, with the smallest batch that there is", hint=HINT)


def give_back() -> None:
    """Return to the system what Python and the C library keep for later."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc only
    except (AttributeError, OSError):
        pass
