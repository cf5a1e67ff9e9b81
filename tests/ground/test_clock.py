"""The manual clock wakes sleepers in the order of their time; the system's clock is the machine's."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.clock import Clock, ManualClock, SystemClock, settle

START_S = 1_000_000.0


async def wake_ups(durations_s: list[float], advances_s: list[float]) -> list[tuple[int, float]]:
    """Sleepers by number, with the time each saw when it woke."""
    clock, woken = ManualClock(START_S), []

    async def sleeper(number: int, duration_s: float) -> None:
        await clock.sleep(duration_s)
        woken.append((number, clock.now_s() - START_S))

    async with asyncio.TaskGroup() as group:
        for number, duration_s in enumerate(durations_s):
            group.create_task(sleeper(number, duration_s))
        for duration_s in advances_s:
            await clock.advance(duration_s)
    return woken


def test_sleepers_wake_in_the_order_of_their_time_and_see_it() -> None:
    woken = asyncio.run(wake_ups([30.0, 10.0, 20.0], [100.0]))
    assert woken == [(1, 10.0), (2, 20.0), (0, 30.0)]


def test_who_slept_first_wakes_first_at_the_same_time() -> None:
    assert asyncio.run(wake_ups([5.0, 5.0, 5.0], [5.0])) == [(0, 5.0), (1, 5.0), (2, 5.0)]


@given(st.lists(st.integers(0, 50).map(float), max_size=8), st.lists(st.integers(0, 20).map(float), max_size=5))
def test_any_advance_wakes_all_that_are_due(durations_s: list[float], advances_s: list[float]) -> None:
    woken = asyncio.run(wake_ups(durations_s, [*advances_s, 1000.0]))
    assert woken == sorted(enumerate(durations_s), key=lambda item: (item[1], item[0]))


async def test_nobody_wakes_early() -> None:
    clock, seen = ManualClock(START_S), []
    task = asyncio.create_task(clock.sleep(10.0))
    for duration_s in (9.999, 0.0, 0.001):
        await clock.advance(duration_s)
        seen.append(task.done())
    assert seen == [False, False, True]


async def test_what_becomes_due_on_the_way_runs_at_its_own_time() -> None:
    clock, ticks = ManualClock(START_S), list[float]()

    async def ticker() -> None:
        for _ in range(4):
            await clock.sleep(25.0)
            ticks.append(clock.now_s() - START_S)

    task = asyncio.create_task(ticker())
    await clock.advance(90.0)
    assert clock.now_s() == START_S + 90.0
    await clock.advance(10.0)
    await task
    assert ticks == [25.0, 50.0, 75.0, 100.0]


@pytest.mark.parametrize("duration_s", [0.0, -5.0])
async def test_a_sleep_of_nothing_ends_without_time_passing(duration_s: float) -> None:
    clock = ManualClock(START_S)
    task = asyncio.create_task(clock.sleep(duration_s))
    await clock.advance(0.0)
    await task
    assert clock.now_s() == START_S


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock(START_S)
    tasks = [asyncio.create_task(clock.sleep(10.0)) for _ in range(3)]
    await settle()
    tasks[1].cancel()
    await settle()
    assert len(clock._sleepers) == 2
    await clock.advance(10.0)
    assert [task.cancelled() for task in tasks] == [False, True, False]
    assert all(task.done() for task in tasks) and not clock._sleepers
    assert clock.now_s() == START_S + 10.0


def test_time_stands_still_between_advances() -> None:
    clock: Clock = ManualClock(START_S)
    assert clock.now_s() == clock.now_s() == START_S


def test_the_system_clock_is_wall_time_and_sleeps_at_least_as_long() -> None:
    clock: Clock = SystemClock()
    assert abs(clock.now_s() - time.time()) < 60.0
    before_s = time.monotonic()
    asyncio.run(clock.sleep(0.01))
    assert time.monotonic() - before_s >= 0.009
