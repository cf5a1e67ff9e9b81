"""The schedule: what a span says, over midnight, over the weekend, and in the two nights when clocks are set."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from dipaco_p2p.errors import ConfigError
from peers.preferences.schedule import Span, next_month_s, opening, parse_spans

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN, fold: int = 0) -> float:
    """Seconds since the epoch of a local time, such as `2026-11-23 19:00`, which is a Monday."""
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def is_open(schedule: str, text: str, fold: int = 0) -> bool:
    return opening(parse_spans(schedule), at(text, fold=fold), BERLIN).is_open


def until(schedule: str, text: str, fold: int = 0) -> str | None:
    """When that changes, as a clock in Berlin says."""
    end_s = opening(parse_spans(schedule), at(text, fold=fold), BERLIN).until_s
    return None if end_s is None else f"{datetime.fromtimestamp(end_s, BERLIN):%a %d %H:%M}"


NIGHTS = "mon-fri 19:00-08:00, sat-sun"


@pytest.mark.parametrize(
    ("moment", "expected", "change"),
    [
        ("2026-11-23 18:59", False, "Mon 23 19:00"),  # Monday
        ("2026-11-23 19:00", True, "Tue 24 08:00"),
        ("2026-11-24 07:59:59", True, "Tue 24 08:00"),
        ("2026-11-24 08:00", False, "Tue 24 19:00"),
        ("2026-11-27 20:00", True, "Mon 30 00:00"),  # Friday's night goes on as Saturday
        ("2026-11-28 12:00", True, "Mon 30 00:00"),
        ("2026-11-30 00:00", False, "Mon 30 19:00"),
    ],
)
def test_nights_and_weekends(moment: str, expected: bool, change: str) -> None:
    assert (is_open(NIGHTS, moment), until(NIGHTS, moment)) == (expected, change)


def test_a_span_over_midnight_belongs_to_the_day_it_begins_on() -> None:
    assert is_open("fri 22:00-06:00", "2026-11-28 05:59") and not is_open("fri 22:00-06:00", "2026-11-27 05:59")
    assert is_open("sun 22:00-06:00", "2026-11-30 03:00"), "Sunday's night goes on into Monday"


def test_days_may_go_over_the_weekend() -> None:
    assert is_open("sat-mon", "2026-11-23 12:00") and not is_open("sat-mon", "2026-11-24 12:00")
    assert until("sat-mon", "2026-11-22 12:00") == "Tue 24 00:00"


def test_without_spans_and_with_always_it_is_open_for_ever() -> None:
    for schedule in ("", "always", "mon-sun", "mon-fri, sat-sun", "00:00-12:00, 12:00-24:00"):
        assert (is_open(schedule, "2026-11-25 12:00"), until(schedule, "2026-11-25 12:00")) == (True, None)


def test_in_autumn_a_span_ends_once() -> None:
    """On 25 October 2026 it is 2:00 to 3:00 twice."""
    schedule = "01:30-02:30"
    assert is_open(schedule, "2026-10-25 02:29") and not is_open(schedule, "2026-10-25 02:30")
    assert not is_open(schedule, "2026-10-25 02:15", fold=1), "it was over when that came the first time"
    assert until(schedule, "2026-10-25 02:45") == "Mon 26 01:30"


def test_in_autumn_a_night_has_an_hour_more_and_in_spring_one_less() -> None:
    autumn = opening(parse_spans("22:00-08:00"), at("2026-10-24 22:00"), BERLIN).until_s
    spring = opening(parse_spans("22:00-08:00"), at("2026-03-28 22:00"), BERLIN).until_s
    assert autumn == at("2026-10-24 22:00") + 11 * 3600
    assert spring == at("2026-03-28 22:00") + 9 * 3600


def test_in_spring_a_span_in_the_hour_that_is_left_out_is_an_hour_later() -> None:
    """On 29 March 2026 there is no 2:00 to 3:00."""
    assert until("02:15-02:45", "2026-03-29 01:00") == "Sun 29 03:15"
    assert is_open("02:15-02:45", "2026-03-29 03:30") and not is_open("02:15-02:45", "2026-03-29 03:45")
    assert until("02:30-03:15", "2026-03-29 01:00") == "Mon 30 02:30", "that night it would end before it begins"


@pytest.mark.parametrize("text", ["mon-fri 19:00-08:00", "sat-sun", "22:00-06:00", "always", "sun 00:00-12:00"])
def test_what_is_written_is_read_back(text: str) -> None:
    assert str(Span.parse(text)) == text and Span.parse(str(Span.parse(text.upper()))) == Span.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "mo", "mon-tue-wed", "mon 8-9", "10:00-10:00", "24:00-02:00", "10:60-11:00", "never", "mon 1:00-2:00 x"],
)
def test_what_is_no_span_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Span.parse(text)
    assert "mon-fri 19:00-08:00" in caught.value.hint


def test_a_month_ends_by_the_local_clock() -> None:
    assert next_month_s(at("2026-11-22 04:00"), BERLIN) == at("2026-12-01 00:00")
    assert next_month_s(at("2026-12-31 23:59"), BERLIN) == at("2027-01-01 00:00")
    last_hour = datetime(2026, 11, 30, 23, 30, tzinfo=UTC).timestamp()
    assert next_month_s(last_hour, BERLIN) == at("2027-01-01 00:00"), "in Berlin it is December already"
