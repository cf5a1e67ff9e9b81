"""The benchmark of limits: what it calls held, and how it reads a history."""

from __future__ import annotations

import pytest

from benchmarks.limits import HELD_MAX, Row, _lasted


@pytest.mark.parametrize(("measured", "is_held"), [(0.0, True), (1.0, True), (HELD_MAX, True), (1.11, False)])
def test_a_limit_holds_up_to_a_tenth_above_it(measured: float, is_held: bool) -> None:
    assert Row(limit="cpu", wished=1.0, measured=measured, unit="").is_held == is_held


def test_how_long_something_took_is_until_the_next_event() -> None:
    events: list[dict[str, object]] = [{"doing": "a", "t": 1.0}, {"doing": "pushing", "t": 3.0}, {"round": 0, "t": 7.5}]
    assert _lasted(events, "pushing") == 4.5
