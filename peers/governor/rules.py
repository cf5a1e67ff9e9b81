"""When a volunteer has to pause, by what its owner wishes: pure, so that a test can play a year of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import tzinfo

from ..preferences.keys import When
from ..preferences.schedule import next_month_s, opening

MONTH_SHARE = 0.98
"""Of the monthly traffic: beyond it training pauses; the rest is for what goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is known of the machine at one moment."""

    now_s: float
    on_battery: bool = False
    idle_min: float | None = None
    """None: nobody knows, and then the owner is taken to be there."""
    month_share: float = 0.0
    """Of the monthly traffic, how much is used; 0 without a limit."""
    gpu: tuple[str, ...] = ()
    """Why the GPU is left alone, in words (yielding.py)."""


def holds(when: When, sight: Sight, zone: tzinfo | None = None) -> dict[str, float | None]:
    """Why training has to pause now, and until when each reason holds at least; None where nobody can say."""
    found: dict[str, float | None] = {}
    schedule = opening(when.schedule, sight.now_s, zone)
    if not schedule.is_open:
        found["schedule"] = schedule.until_s
    if sight.on_battery and not when.on_battery:
        found["battery"] = None
    if when.only_idle and (sight.idle_min is None or sight.idle_min < when.only_idle):
        found["idle"] = None
    if sight.month_share >= MONTH_SHARE:
        found["month"] = next_month_s(sight.now_s, zone)
    return found | dict.fromkeys(sight.gpu)


def look_s(when: When, sight: Sight, zone: tzinfo | None = None, *, at_most_s: float) -> float:
    """Seconds until the next look: at once when the schedule changes."""
    until_s = opening(when.schedule, sight.now_s, zone).until_s
    return at_most_s if until_s is None else max(0.01, min(at_most_s, until_s - sight.now_s))
