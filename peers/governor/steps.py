"""What goes on between two inner steps, in the trainer's thread: waiting to keep a share, and the look at memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from dipaco_p2p.core.inner import StepReport
from dipaco_p2p.core.microbatch import MicroBatch

from ..preferences.keys import GB, Limits
from .brake import CpuShare, PowerShare
from .memory import Gauges, MemoryGuard
from .usage import cores, cpu_s, forget_peak, memory

OnStep = Callable[[StepReport], bool]


class BetweenSteps:
    """Of one process: all paths that it trains go through this."""

    def __init__(self, limits: Limits, *, micro: MicroBatch | None, free_bytes: Callable[[], int | None]) -> None:
        """`micro` as in `MemoryGuard`; `free_bytes` is what the machine has left."""
        self._cpu = None if limits.cpu is None else CpuShare(limits.cpu, cores())
        self._power: PowerShare | None = None
        gauges = Gauges(memory=memory, forget_peak=forget_peak, free_bytes=free_bytes)
        limit_bytes = None if limits.ram_gb is None else int(limits.ram_gb * GB)
        self._guard = MemoryGuard(gauges, limit_bytes=limit_bytes, micro=micro, say=self._say)
        self._ended_s: float | None = None
        """When the last step, and the wait after it, ended."""
        self._let_go = threading.Event()
        self._tell: Callable[[str], None] = lambda text: None

    def tell(self, listener: Callable[[str], None]) -> None:
        """From now on `listener` hears, in the event loop of the caller, what the guard does."""
        loop = asyncio.get_running_loop()

        def pass_on(text: str) -> None:
            loop.call_soon_threadsafe(listener, text)

        self._tell = pass_on

    def brake(self, power: PowerShare) -> None:
        """Keep the power of a GPU too."""
        self._power = power

    def stop(self) -> None:
        """Wait no more: the volunteer is leaving."""
        self._let_go.set()

    def follow(self, on_step: OnStep) -> OnStep:
        """`on_step`, and between steps what has to be done; the first of a round has nothing before it."""
        self._ended_s = time.monotonic()

        def followed(report: StepReport) -> bool:
            goes_on = on_step(report)
            if goes_on:
                self._between()
            return goes_on

        return followed

    def _between(self) -> None:
        now_s = time.monotonic()
        self._guard.look(now_s)
        busy_s = now_s - (self._ended_s or now_s)
        waits_s = [0.0]
        if self._cpu is not None:
            waits_s.append(self._cpu.wait_s(cpu_s(), now_s, busy_s=busy_s))
        if self._power is not None:
            waits_s.append(self._power.wait_s(busy_s))
        self._let_go.wait(max(waits_s))
        self._ended_s = time.monotonic()

    def _say(self, text: str) -> None:
        self._tell(text)
