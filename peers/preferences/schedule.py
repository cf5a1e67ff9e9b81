"""When a volunteer may train: spans of the local week such as `mon-fri 19:00-08:00` or `sat-sun`.

Rule 1: a span belongs to the days it begins on. `mon-fri 19:00-08:00` ends on Saturday at 8; without a time it is the
whole day; without days it is every day. No spans at all, or `always`, is all of the time.
Rule 2: a beginning and an end are times on the wall, and become moments before they are compared. So in the night when
clocks are set back a span ends at the first of the two times with its name, and does not begin again; one that begins
in the hour that is left out when they are set forward begins an hour later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Self

from dipaco_p2p.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
HORIZON_DAYS = 8
"""A week shows every change that there is; one more day for spans over midnight."""
FORM = re.compile(r"(?P<days>[a-z][a-z -]*?)?(?:(?:^|\s+)(?P<from>\d{1,2}:\d\d)\s*-\s*(?P<to>\d{1,2}:\d\d))?")
HINT = 'a span looks like "mon-fri 19:00-08:00", "sat-sun" or "22:00-06:00"; "always" is all of the time'


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A time of the day, on some days of the week."""

    first: int = 0
    """The first of its days; 0 is Monday."""
    last: int = 6
    """The last one; before the first: over the weekend."""
    from_min: int = 0
    """Minutes since midnight."""
    to_min: int = DAY_MIN
    """Not after `from_min`: on the next day."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` gives, in any case; raises ConfigError."""
        words = " ".join(text.lower().split())
        if words == "always":
            return cls()
        found = FORM.fullmatch(words)
        if found is None or not words:
            raise ConfigError(f"`{text}` is not a time to train", hint=HINT)
        first, last = (0, 6) if found["days"] is None else _days(found["days"], text)
        if found["from"] is None:
            return cls(first=first, last=last)
        from_min, to_min = _minutes(found["from"], text), _minutes(found["to"], text)
        if from_min in (to_min, DAY_MIN):
            raise ConfigError(f"`{text}` begins when it ends", hint=f"for whole days, leave out the time; {HINT}")
        return cls(first=first, last=last, from_min=from_min, to_min=to_min)

    def covers(self, day: int) -> bool:
        """Whether the span begins on this day of the week."""
        return (day - self.first) % 7 <= (self.last - self.first) % 7

    def __str__(self) -> str:
        is_daily, is_whole = (self.last - self.first) % 7 == 6, (self.from_min, self.to_min) == (0, DAY_MIN)
        days = "" if is_daily else "-".join(DAYS[day] for day in dict.fromkeys((self.first, self.last)))
        time = "" if is_whole else f"{_clock(self.from_min)}-{_clock(self.to_min)}"
        return " ".join(filter(None, (days, time))) or "always"


def parse_spans(text: str) -> tuple[Span, ...]:
    """Spans with commas between them, as a flag or the environment has them."""
    return tuple(Span.parse(part) for part in text.split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Whether a schedule is open at some moment, and when that changes; None: never."""

    is_open: bool
    until_s: float | None


def opening(spans: Sequence[Span], now_s: float, zone: tzinfo | None = None) -> Opening:
    """What the schedule says at `now_s` (seconds since the epoch); `zone` None is the machine's own."""
    if not spans:
        return Opening(is_open=True, until_s=None)
    times = _merged(_moments(spans, now_s, zone))
    for begin_s, end_s in times:
        if begin_s > now_s:
            return Opening(is_open=False, until_s=begin_s)
        if end_s > now_s:
            is_endless = end_s - now_s >= (HORIZON_DAYS - 1) * 86_400
            return Opening(is_open=True, until_s=None if is_endless else end_s)
    return Opening(is_open=False, until_s=None)


def next_month_s(now_s: float, zone: tzinfo | None = None) -> float:
    """When the next calendar month begins, by the local clock."""
    today = datetime.fromtimestamp(now_s, zone)
    years, month = divmod(today.month, 12)
    return datetime(today.year + years, month + 1, 1, tzinfo=zone).timestamp()


def _moments(spans: Sequence[Span], now_s: float, zone: tzinfo | None) -> list[tuple[float, float]]:
    """Beginnings and ends from yesterday to the horizon."""
    today = datetime.fromtimestamp(now_s, zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    days = [today + timedelta(days=number) for number in range(-1, HORIZON_DAYS + 1)]
    return [
        (_at(day, span.from_min), _at(day, span.to_min + (DAY_MIN if span.to_min <= span.from_min else 0)))
        for day in days
        for span in spans
        if span.covers(day.weekday())
    ]


def _at(midnight: datetime, minutes: int) -> float:
    # Days and minutes are added on the wall, not to the moment: a day may have 23 or 25 hours.
    return (midnight + timedelta(minutes=minutes)).timestamp()


def _merged(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same without overlaps, in order; what is empty, since clocks were set forward over it, is left out."""
    merged: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(time for time in times if time[0] < time[1]):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((begin_s, end_s))
    return merged


def _days(words: str, text: str) -> tuple[int, int]:
    """The first and the last of `mon`, `mon-fri` or `fri-mon`."""
    names = words.replace(" ", "").split("-")
    unknown = [name for name in names if name not in DAYS]
    if unknown or len(names) > 2:
        what = unknown[0] if unknown else words
        raise ConfigError(f"`{what}` in `{text}` is not a day", hint=f"days are {', '.join(DAYS)}; {HINT}")
    return DAYS.index(names[0]), DAYS.index(names[-1])


def _minutes(clock: str, text: str) -> int:
    hours, minutes = map(int, clock.split(":"))
    if minutes > 59 or hours * 60 + minutes > DAY_MIN:
        raise ConfigError(f"`{clock}` in `{text}` is not a time of day", hint=HINT)
    return hours * 60 + minutes


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"
