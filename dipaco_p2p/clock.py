"""Time as an argument: programs hold a `Clock`; rules below them only see numbers of seconds."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time in seconds since the epoch, and a way to wait for it."""

    def now_s(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class ManualClock:
    """A clock that moves only when told to, so that a test of an hour takes no time.

    `advance` wakes the sleepers in the order of their time, and lets each run before the next.
    """

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self._now_s = now_s
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        event = asyncio.Event()
        self._count += 1
        sleeper = (self._now_s + max(duration_s, 0.0), self._count, event)
        self._sleepers.append(sleeper)
        try:
            await event.wait()
        finally:
            if sleeper in self._sleepers:  # cancelled: nobody waits for this time any more
                self._sleepers.remove(sleeper)

    async def advance(self, duration_s: float) -> None:
        """Move time forward by `duration_s`, running what becomes due on the way."""
        end_s = self._now_s + duration_s
        await settle()
        while due := [s for s in self._sleepers if s[0] <= end_s]:
            first = min(due)
            self._sleepers.remove(first)
            self._now_s = max(self._now_s, first[0])
            first[2].set()
            await settle()
        self._now_s = end_s
        await settle()


async def settle(turns: int = 50) -> None:
    """Give every ready task of the loop a few turns."""
    for _ in range(turns):
        await asyncio.sleep(0)
