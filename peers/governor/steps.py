"""What goes on between two inner steps, and within one, in the trainer's thread: waiting to keep a share, the look at
memory, and giving way to others who want the GPU.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dipaco_p2p.core.model.inner import StepReport
from dipaco_p2p.core.model.microbatch import MicroBatch
from dipaco_p2p.errors import EnvironmentUnfit

from ..preferences.keys import GB, Limits
from .machine import Memory, cores, cpu_s, forget_peak, memory

BURST_S = 5.0
"""Processor time that was left unused so long before a step, or later, may be caught up."""
GPU_PART_S = 0.4
"""Two parts may still follow once a GPU is wanted (core/model/microbatch.py), and a look may be a second away."""
LONG_STEPS = 3


class CpuShare:
    """When the next step may begin, so that the program takes its share of the processor and no more.

    A timetable like that of a line (bandwidth.py): a second of processor time takes 1 / (share * cores) seconds. All
    that the program does counts, but only steps wait: leading modules or answering others may take more than that.
    """

    def __init__(self, share: float, cores: float) -> None:
        assert share > 0 and cores > 0
        self._rate = share * cores
        self._used_s: float | None = None
        self._free_s = -math.inf
        """When all that was used so far is through."""

    def wait_s(self, used_s: float, now_s: float, *, busy_s: float) -> float:
        """How long from now on to wait, after a step of `busy_s`; `used_s` is the program's processor time so far."""
        if self._used_s is None:  # starting is not counted
            self._used_s, self._free_s = used_s, now_s
            return 0.0
        length_s, self._used_s = used_s - self._used_s, used_s
        self._free_s = max(self._free_s, now_s - busy_s - BURST_S) + length_s / self._rate
        return max(0.0, self._free_s - now_s)


class LongParts:
    """Whether parts of a batch take too long for a GPU to be given up in time: three steps in a row, since now and then
    one is compiled first."""

    def __init__(self) -> None:
        self._long = 0

    def told(self, longest_s: float) -> bool:
        """Of one step, the longest part; whether parts should be shorter from now on."""
        self._long = self._long + 1 if longest_s > GPU_PART_S else 0
        if self._long < LONG_STEPS:
            return False
        self._long = 0
        return True


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
        self._has_given_back = False
        """Since memory was last enough: while others fill it, once more a second would only cost time."""

    def look(self, now_s: float) -> None:
        """Get smaller if need be; raises EnvironmentUnfit when that is not enough."""
        if self._seen_s is not None and now_s - self._seen_s < LOOK_S:
            return
        self._seen_s = now_s
        used = self._gauges.memory().peak
        why = self._too_much(used)
        if not why:
            self._strikes, self._has_given_back = 0, False
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
        if is_over or not self._has_given_back:
            give_back()
            self._has_given_back = True
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


OnStep = Callable[[StepReport], bool]

FREE = "the GPU is free again"


class BetweenSteps:
    """Of one process: all paths that it trains go through this."""

    def __init__(
        self,
        limits: Limits,
        *,
        micro: MicroBatch | None,
        free_bytes: Callable[[], int | None],
        parts: MicroBatch | None = None,
    ) -> None:
        """`micro` as in `MemoryGuard`; `free_bytes` is what the machine has left; `parts` get smaller where one of them
        takes so long that a GPU could not be given up in time."""
        self._cpu = None if limits.cpu is None else CpuShare(limits.cpu, cores())
        gauges = Gauges(memory=memory, forget_peak=forget_peak, free_bytes=free_bytes)
        limit_bytes = None if limits.ram_gb is None else int(limits.ram_gb * GB)
        self._guard = MemoryGuard(gauges, limit_bytes=limit_bytes, micro=micro, say=self.say)
        self._parts = parts
        self._long = LongParts()
        self._part_began_s: float | None = None
        self._longest_s = 0.0
        """Of the parts since the last step ended."""
        self._ended_s: float | None = None
        """When the last step, and the wait after it, ended."""
        self._let_go = threading.Event()
        self._gives_way = threading.Event()
        self._tell: Callable[[str], None] = lambda text: None

    def tell(self, listener: Callable[[str], None]) -> None:
        """From now on `listener` hears, in the event loop of the caller, what the guard does."""
        loop = asyncio.get_running_loop()

        def pass_on(text: str) -> None:
            loop.call_soon_threadsafe(listener, text)

        self._tell = pass_on

    def say(self, text: str) -> None:
        """Let whoever listens hear it; from any thread."""
        self._tell(text)

    def give_way(self, why: str) -> None:
        """Others want the GPU, for these reasons: the part of a batch that is under way is the last. Or, without any,
        they do no more. To be told of after the pause, which keeps further rounds from beginning."""
        if why:
            self._gives_way.set()
        else:
            self._gives_way.clear()
        self.say(why or FREE)

    def goes_on(self) -> bool:
        """Asked before each part of a batch: whether nobody else wants the GPU."""
        now_s = time.monotonic()
        if self._part_began_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._part_began_s)
        self._part_began_s = now_s
        return not self._gives_way.is_set()

    def stop(self) -> None:
        """Wait no more: the volunteer is leaving."""
        self._let_go.set()

    def follow(self, on_step: OnStep) -> OnStep:
        """`on_step`, and between steps what has to be done; the first of a round has nothing before it."""
        self._ended_s, self._part_began_s, self._longest_s = time.monotonic(), None, 0.0

        def followed(report: StepReport) -> bool:
            goes_on = on_step(report)
            if goes_on:
                self._between()
            return goes_on

        return followed

    def _between(self) -> None:
        now_s = time.monotonic()
        self._guard.look(now_s)
        self._keep_parts_short()
        busy_s = now_s - (self._ended_s or now_s)
        if self._cpu is not None:
            self._let_go.wait(max(0.0, self._cpu.wait_s(cpu_s(), now_s, busy_s=busy_s)))
        self._ended_s = time.monotonic()
        if self._part_began_s is not None:
            self._part_began_s += self._ended_s - now_s

    def _keep_parts_short(self) -> None:
        longest_s, self._longest_s = self._longest_s, 0.0
        if self._parts is not None and self._long.told(longest_s) and self._parts.shorten():
            self.say(f"{self._parts.described()}, for the GPU to be given up in time")
