"""A loop that fails is started again, a loop that ends has ended, and a cancelled one stays cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dipaco_p2p.clock import ManualClock, settle
from dipaco_p2p.errors import BlobMissing, Refused
from dipaco_p2p.program.tasks import CHECK_S, RESTART_S, SOON_S, SingleFlight, as_long_as, keep_going, repeat


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


async def test_a_loop_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, flaky = ManualClock(), Flaky()
    task = asyncio.create_task(keep_going(flaky.work, clock))
    for starts in (1, 2, 3):
        await settle()
        assert flaky.starts == starts
        await clock.advance(RESTART_S)
    assert flaky.starts == 3 and not task.done(), "it works now, and is left alone"
    flaky.end.set()
    await task
    assert caplog.text.count("Flaky.work failed and is started again") == 2


async def test_a_cancelled_loop_is_not_started_again() -> None:
    flaky = Flaky()
    flaky.starts = 2
    task = asyncio.create_task(keep_going(flaky.work, ManualClock()))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert flaky.starts == 3


async def test_steps_are_taken_again_in_time_or_sooner_if_something_happened_even_during_them() -> None:
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


# -- work that several ask for at once


class Works:
    """Each waits until it may end; how many have begun, and ended by cancellation."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    def of(self, *, fails: bool = False) -> Callable[[], Coroutine[Any, Any, str]]:
        async def work() -> str:
            self.begun += 1
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if fails:
                raise BlobMissing("nobody has it")
            return "done"

        return work


async def settled() -> None:
    """Let everything go on that can."""
    for _ in range(9):
        await asyncio.sleep(0)


async def test_one_work_serves_all_and_the_next_begins_anew() -> None:
    shared, works = SingleFlight[str](), Works()
    waiting = [asyncio.create_task(shared.do("a", works.of())) for _ in range(3)]
    other = asyncio.create_task(shared.do("b", works.of()))
    await settled()
    assert works.begun == 2
    works.may_end.set()
    assert await asyncio.gather(*waiting, other) == ["done"] * 4
    assert await shared.do("a", works.of()) == "done" and works.begun == 3


async def test_it_ends_with_the_last_who_waits_for_it() -> None:
    shared, works = SingleFlight[str](), Works()
    first, second = (asyncio.create_task(shared.do("a", works.of())) for _ in range(2))
    await settled()
    first.cancel()  # who began it: the other still wants it
    await settled()
    assert (works.begun, works.cancelled) == (1, 0)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await settled()
    assert (works.begun, works.cancelled) == (1, 1)


async def test_who_shared_a_work_that_failed_tries_it_alone() -> None:
    shared, works = SingleFlight[str](), Works()
    first = asyncio.create_task(shared.do("a", works.of(fails=True)))
    second = asyncio.create_task(shared.do("a", works.of()))
    await settled()
    works.may_end.set()
    with pytest.raises(BlobMissing):
        await first
    assert await second == "done" and works.begun == 2


async def test_work_ends_when_its_check_fails_and_does_not_begin_after_that() -> None:
    clock, reasons, ended = ManualClock(), list[str](), list[bool]()

    def check() -> None:
        if reasons:
            raise Refused(reasons[0])

    async def work() -> int:
        try:
            await clock.sleep(5 * CHECK_S)
        finally:
            ended.append(True)
        return 7

    whole, cut = (asyncio.create_task(as_long_as(check, work, clock)) for _ in range(2))
    await settle()
    await clock.advance(4 * CHECK_S)
    assert not ended
    await clock.advance(CHECK_S)
    assert await whole == await cut == 7
    cut = asyncio.create_task(as_long_as(check, work, clock))
    await settle()
    reasons.append("another one leads")
    await clock.advance(CHECK_S)
    with pytest.raises(Refused, match="another"):
        await cut
    with pytest.raises(Refused, match="another"):
        await as_long_as(check, work, clock)
    await settle()
    assert len(ended) == 3, "the last one did not begin"
