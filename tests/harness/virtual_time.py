"""Virtual time for tests: the simulator's loop and clock, and what plays a scenario on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from simulation.virtual_time import BASE_S, VirtualClock, VirtualLoop

__all__ = ["BASE_S", "VirtualClock", "VirtualLoop", "end", "eventually", "play"]


def play(scenario: Callable[[], Awaitable[None]], *, limit_s: float = 600.0) -> None:
    """Run `scenario` to its end in virtual time, of which it may take `limit_s`."""

    async def run() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


async def eventually(holds: Callable[[], bool], *, limit_s: float = 120.0) -> None:
    """Let time pass until `holds`, in small steps and with a deadline, both in virtual time."""
    end_s = asyncio.get_running_loop().time() + limit_s
    while not holds():
        assert asyncio.get_running_loop().time() < end_s, "it did not come to hold in time"
        await asyncio.sleep(0.05)


async def end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
