"""A loop that fails is started again, a loop that ends has ended, and a cancelled one stays cancelled."""

from __future__ import annotations

import asyncio

import pytest

from dipaco_p2p.clock import ManualClock, settle
from dipaco_p2p.runtime.tasks import RESTART_S, keep_going


class Flaky:
    """Fails twice, then works until it is told to end."""

    def __init__(self) -> None:
        self.starts = 0
        self.end = asyncio.Event()

    async def work(self) -> None:
        self.starts += 1
        if self.starts <= 2:
            raise ValueError("planted")
        await self.end.wait()


def test_a_loop_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        clock, flaky = ManualClock(), Flaky()
        task = asyncio.create_task(keep_going(flaky.work, clock))
        for starts in (1, 2, 3):
            await settle()
            assert flaky.starts == starts
            await clock.advance(RESTART_S)
        assert flaky.starts == 3 and not task.done(), "it works now, and is left alone"
        flaky.end.set()
        await task

    asyncio.run(scenario())
    assert caplog.text.count("Flaky.work failed and is started again") == 2


def test_a_cancelled_loop_is_not_started_again() -> None:
    async def scenario() -> None:
        flaky = Flaky()
        flaky.starts = 2
        task = asyncio.create_task(keep_going(flaky.work, ManualClock()))
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert flaky.starts == 3

    asyncio.run(scenario())
