"""What blobs may take of the line: a timetable on the clock, in each direction for itself."""

from __future__ import annotations

import asyncio

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.swarm.blobs.bandwidth import BURST_S, MBIT_BYTES, MBIT_MIN, RANGE_S, Bucket, Line

RATE = 1000


def test_bytes_go_one_after_the_other_at_the_rate() -> None:
    bucket = Bucket(RATE)
    waits_s = [bucket.take(500, 0.0) for _ in range(6)]
    assert waits_s == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5, 2.0]), "half a second was left unused before"


def test_what_was_not_used_for_long_is_gone() -> None:
    bucket = Bucket(RATE)
    bucket.take(500, 0.0)
    for _ in range(2):
        assert bucket.take(500, 1000.0) == 0.0
    assert bucket.take(500, 1000.0) == pytest.approx(2 * 0.5 - BURST_S)


def test_what_is_given_back_is_room_for_the_next() -> None:
    bucket = Bucket(RATE)
    bucket.take(10_000, 0.0)
    bucket.give_back(9_000)
    assert bucket.take(1, 0.0) == pytest.approx(1.0 - BURST_S)


def test_a_clock_that_is_set_back_costs_no_time() -> None:
    bucket = Bucket(RATE)
    bucket.take(2_000, 1_000_000.0)
    assert bucket.take(1_000, 0.0) == pytest.approx(2.0 - BURST_S)
    assert bucket.take(1_000, 0.0) == pytest.approx(3.0 - BURST_S)


async def test_over_a_minute_as_many_bytes_go_as_the_limit_says() -> None:
    clock = ManualClock()
    line, went, length = Line(up_mbit=8.0, clock=clock), [0, 0, 0], 61_234

    async def send(number: int) -> None:
        while True:
            await line.up.take(length)
            went[number] += length

    senders = [asyncio.ensure_future(send(number)) for number in range(len(went))]
    await clock.advance(60.0)
    for sender in senders:
        sender.cancel()
    assert sum(went) == pytest.approx(60.0 * 8.0 * MBIT_BYTES, rel=0.02)
    assert max(went) - min(went) <= 8.0 * MBIT_BYTES * BURST_S + 2 * length, "they take turns"


async def test_who_gives_up_waiting_leaves_its_place_and_the_other_direction_is_free() -> None:
    clock = ManualClock()
    line = Line(up_mbit=8.0, clock=clock)
    await line.up.take(int(MBIT_BYTES * 8 * BURST_S))
    await line.up.take(2 * 8 * MBIT_BYTES)
    waiting = asyncio.ensure_future(line.up.take(60 * 8 * MBIT_BYTES))
    await clock.advance(1.0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await line.down.take(2**40)
    late = asyncio.ensure_future(line.up.take(1))
    await clock.advance(0.9)
    assert not late.done()
    await clock.advance(0.2)
    assert late.done()


def test_ranges_are_half_a_second_long_at_most() -> None:
    line = Line(up_mbit=1.0)
    assert line.up.range_bytes(2**20) == MBIT_BYTES * RANGE_S
    assert line.up.range_bytes(1000) == 1000 and line.down.range_bytes(2**20) == 2**20


@pytest.mark.parametrize("mbit", [0.0, -1.0, float("nan"), float("inf"), MBIT_MIN / 2])
def test_what_is_no_limit_is_refused_with_the_value(mbit: float) -> None:
    for limits in ({"up_mbit": mbit}, {"down_mbit": mbit}):
        with pytest.raises(ConfigError, match=f"{mbit:g} Mbit/s {next(iter(limits)).removesuffix('_mbit')}"):
            Line(**limits)
