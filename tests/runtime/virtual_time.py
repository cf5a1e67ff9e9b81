"""A loop whose time is not the machine's: it jumps to the next timer as soon as nothing is left to do.

Its worker threads are plain calls, so that no order of events depends on the machine. A minute of the protocol takes
a second, and no test waits for real time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

BASE_S = 1_000_000.0


class _Selector(selectors.DefaultSelector):
    """Where the loop would wait for the machine, time jumps instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits for something that nothing will bring"
        self.loop.skipped_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` moves only when all tasks wait for it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.set_default_executor(_Inline())

    def time(self) -> float:
        return self.skipped_s


class _Inline(ThreadPoolExecutor):
    """Runs what is submitted at once, so that no order of events depends on the machine."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class VirtualClock:
    """The time of the running loop."""

    def now_s(self) -> float:
        return BASE_S + asyncio.get_running_loop().time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


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
