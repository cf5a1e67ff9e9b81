"""The governor: which wishes make a volunteer pause and until when, and what it does where a pause does not help."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import EnvironmentUnfit
from peers.config import PeerConfig
from peers.governor.allowances import FILE_NAME, MonthAccount
from peers.governor.governor import IDLE_LOOK_S, LOOK_S, Governor, Senses, Sight, beside, check_before, holds, look_s
from peers.preferences.keys import Limits, When
from peers.preferences.schedule import parse_spans

NIGHTS = When(schedule=parse_spans("mon-fri 19:00-08:00"))


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


MONDAY = at("2026-11-23 12:00")
ALWAYS = When()


# -- the rules


def test_a_schedule_holds_until_it_opens_and_a_battery_until_somebody_knows() -> None:
    assert holds(NIGHTS, Sight(now_s=MONDAY), UTC) == {"schedule": at("2026-11-23 19:00")}
    assert holds(NIGHTS, Sight(now_s=at("2026-11-23 20:00")), UTC) == {}
    assert holds(ALWAYS, Sight(now_s=MONDAY, on_battery=True), UTC) == {"battery": None}
    assert holds(When(on_battery=True), Sight(now_s=MONDAY, on_battery=True), UTC) == {}


@pytest.mark.parametrize(("idle_min", "expected"), [(4.9, {"idle": None}), (5.0, {}), (None, {"idle": None})])
def test_a_user_counts_as_there_until_idle_for_long_enough_or_unknown(
    idle_min: float | None, expected: dict[str, None]
) -> None:
    assert holds(When(only_idle=5.0), Sight(now_s=MONDAY, idle_min=idle_min), UTC) == expected
    assert holds(ALWAYS, Sight(now_s=MONDAY, idle_min=idle_min), UTC) == {}, "nobody asked"


def test_a_month_that_is_nearly_used_up_holds_until_the_next() -> None:
    assert holds(ALWAYS, Sight(now_s=MONDAY, month_share=0.97), UTC) == {}
    assert holds(ALWAYS, Sight(now_s=MONDAY, month_share=0.98), UTC) == {"month": at("2026-12-01 00:00")}


def test_reasons_add_up() -> None:
    sight = Sight(now_s=MONDAY, on_battery=True, idle_min=0.0, month_share=2.0)
    when = When(schedule=NIGHTS.schedule, only_idle=1.0)
    assert holds(when, sight, UTC).keys() == {"schedule", "battery", "idle", "month"}


def test_the_next_look_is_no_later_than_the_schedule_changes() -> None:
    assert look_s(NIGHTS, Sight(now_s=at("2026-11-23 18:59:58")), UTC, at_most_s=5.0) == 2.0
    assert look_s(NIGHTS, Sight(now_s=MONDAY), UTC, at_most_s=5.0) == 5.0
    assert look_s(ALWAYS, Sight(now_s=MONDAY), UTC, at_most_s=5.0) == 5.0


# -- the loop


class Steered:
    """A volunteer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, float | None]] = []

    def pause(self, reason: str, *, until_s: float | None = None) -> None:
        self.told.append(("pause", reason, until_s))

    def resume(self, reason: str) -> None:
        self.told.append(("resume", reason, None))

    def stop(self) -> None:
        self.told.append(("stop", "", None))

    def news(self) -> list[tuple[str, str, float | None]]:
        told, self.told = self.told, []
        return told


class Machine:
    """What a test lets the senses see."""

    def __init__(self) -> None:
        self.on_battery = False
        self.idle_min: float | None = 0.0

    @property
    def senses(self) -> Senses:
        return Senses(on_battery=lambda: self.on_battery, idle_min=lambda: self.idle_min)


async def test_each_change_is_told_once_and_at_the_second() -> None:
    clock, steered, machine = ManualClock(at("2026-11-23 18:59:30")), Steered(), Machine()
    governor = Governor(steered, NIGHTS, clock=clock, senses=machine.senses, zone=UTC)
    async with beside(governor, steered):
        await clock.advance(29.0)
        assert steered.news() == [("pause", "schedule", at("2026-11-23 19:00"))]
        await clock.advance(1.5)
        assert steered.news() == [("resume", "schedule", None)]
        machine.on_battery = True
        await clock.advance(2 * LOOK_S)
        assert steered.news() == [("pause", "battery", None)]
        await clock.advance(at("2026-11-24 08:00:01") - clock.now_s())
        assert steered.news() == [("pause", "schedule", at("2026-11-24 19:00"))], "the battery holds as well"
        machine.on_battery = False
        await clock.advance(LOOK_S)
        assert steered.news() == [("resume", "battery", None)]


async def test_a_user_who_comes_back_is_noticed_and_who_goes_is_waited_for() -> None:
    clock, steered, machine = ManualClock(MONDAY), Steered(), Machine()
    governor = Governor(steered, When(only_idle=5.0), clock=clock, senses=machine.senses, zone=UTC)

    async def later(duration_s: float) -> None:
        """The senses answer from a thread, which no clock of a test waits for."""
        until_s = clock.now_s() + duration_s
        while clock.now_s() < until_s:
            await clock.advance(1.0)
            await asyncio.sleep(0.002)

    async with beside(governor, steered):
        await later(2 * IDLE_LOOK_S)
        assert steered.news() == [("pause", "idle", None)]
        machine.idle_min = 5.5
        await later(2 * IDLE_LOOK_S)
        assert steered.news() == [("resume", "idle", None)]
        machine.idle_min = None
        await later(2 * IDLE_LOOK_S)
        assert steered.news() == [("pause", "idle", None)], "nobody knows: somebody is taken to be there"


async def test_the_month_counts_pauses_and_at_last_ends_the_volunteer(tmp_path: Path) -> None:
    clock, steered, moved = ManualClock(MONDAY), Steered(), [0]
    month = MonthAccount(tmp_path, now_s=MONDAY, zone=UTC, limit_gb=1.0)
    when = When(on_battery=True)
    governor = Governor(steered, when, clock=clock, zone=UTC, month=month, moved_bytes=lambda: moved[0])
    with pytest.raises(EnvironmentUnfit, match="1.04 GB of the 1 GB of this month") as caught:
        async with beside(governor, steered):
            moved[0] = 970_000_000
            await clock.advance(LOOK_S)
            assert steered.news() == []
            moved[0] = 990_000_000
            await clock.advance(LOOK_S)
            assert steered.news() == [("pause", "month", at("2026-12-01 00:00"))]
            moved[0] = 1_040_000_000
            await clock.advance(LOOK_S)
            assert steered.news() == [("stop", "", None)], "what goes on in a pause is too much now"
    assert "01 December" in caught.value.hint


def test_before_anything_is_opened_a_used_month_and_an_unknown_user_are_refused(tmp_path: Path) -> None:
    clock = ManualClock(MONDAY)
    month = MonthAccount(tmp_path, now_s=MONDAY)
    month.count(2_000_000_000, now_s=MONDAY)
    month.save()
    with pytest.raises(EnvironmentUnfit, match="2.00 GB of the 2 GB"):
        check_before(PeerConfig(home=tmp_path, limits=Limits(month_gb=2.0)), clock)
    check_before(PeerConfig(home=tmp_path, limits=Limits(month_gb=2.1)), clock)
    machine = Machine()
    idle = PeerConfig(home=tmp_path, when=When(only_idle=5.0))
    check_before(idle, clock, senses=machine.senses)
    machine.idle_min = None
    with pytest.raises(EnvironmentUnfit, match="nobody knows whether this machine is idle") as caught:
        check_before(idle, clock, senses=machine.senses)
    assert "leave `only_idle` out" in caught.value.hint


# -- the month


def test_a_month_lives_through_restarts_and_begins_at_zero_when_the_next_comes(tmp_path: Path) -> None:
    first = MonthAccount(tmp_path, now_s=MONDAY, zone=UTC)
    first.count(5_000_000, now_s=MONDAY)
    first.count(5_000_100, now_s=MONDAY)
    assert first.used_bytes == 5_000_100
    again = MonthAccount(tmp_path, now_s=MONDAY, zone=UTC)
    assert again.used_bytes == 5_000_000, "the last hundred were not worth a write; a crash loses no more"
    again.count(7, now_s=MONDAY)
    assert again.used_bytes == 5_000_007, "a new process counts from nothing"
    again.count(9, now_s=at("2026-12-01 00:00"))
    assert again.used_bytes == 2
    again.count(10, now_s=at("2026-11-30 12:00"))
    assert again.used_bytes == 3, "a clock that was set back gives nothing back"
    again.save()
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {"month": "2026-12", "bytes": 3}


@pytest.mark.parametrize("text", ["", "[]", '{"month": 3}', '{"month": "2026-99", "bytes": 1}', '{"month": "2026-11"'])
def test_a_damaged_account_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    account = MonthAccount(tmp_path, now_s=MONDAY, zone=UTC)
    assert account.used_bytes == 0
    account.count(10**6, now_s=MONDAY)
    assert MonthAccount(tmp_path, now_s=MONDAY, zone=UTC).used_bytes == 10**6
