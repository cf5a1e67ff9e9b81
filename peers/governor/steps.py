"""What goes on between two inner steps, and within one, in the trainer's thread: waiting to keep a share, the look at
memory, and giving way to others who want the GPU."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from dipaco_p2p.core.inner import StepReport
from dipaco_p2p.core.microbatch import MicroBatch

from ..preferences.keys import GB, Limits
from .brake import CpuShare, LongParts
from .memory import Gauges, MemoryGuard
from .usage import cores, cpu_s, forget_peak, memory

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
