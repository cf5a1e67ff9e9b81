"""A loop that fails is started again, a loop that ends has ended, and a cancelled one stays cancelled."""

from __future__ import annotations

import asyncio

import pytest

from dipaco_p2p.clock import ManualClock, settle
from dipaco_p2p.program.tasks import RESTART_S, SOON_S, keep_going, repeat


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


def test_steps_are_taken_again_in_time_or_sooner_if_something_happened_even_during_them() -> None:
    async def scenario() -> None:
        clock, sooner, taken = ManualClock(), asyncio.Event(), list[int]()
        twice = iter([False, False, False, True])

        async def step() -> None:
            taken.append(len(taken))
            if next(twice, False):
                sooner.set()

        work = repeat(step, clock=clock, every_s=5.0, is_wanted=lambda: len(taken) < 6, sooner=sooner)
        task = asyncio.create_task(work)
        await settle()
        assert len(taken) == 1
        sooner.set()
        await settle()
        await clock.advance(SOON_S)
        assert len(taken) == 2, "soon"
        await clock.advance(4.9)
        assert len(taken) == 2
        await clock.advance(0.1)
        assert len(taken) == 3
        sooner.set()
        await settle()
        await clock.advance(SOON_S)
        assert len(taken) == 4
        await clock.advance(SOON_S)
        assert len(taken) == 5, "once more for what happened during the fourth time"
        await clock.advance(5.0)
        await clock.advance(5.0)
        await task
        assert len(taken) == 6, "and no more than is wanted"

    asyncio.run(scenario())
