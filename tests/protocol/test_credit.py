"""Credit is earned once, is not lost, and its recent average follows its definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.protocol.credit import DAY_S, HALF_LIFE_S, Earned, recent_credit, share_credit

NOW_S = 1_700_000_000.0
tokens = st.integers(1, 10**12)
levels = st.integers(1, 16)
work = st.lists(st.builds(Earned, credit=st.floats(0, 1e9), at_s=st.floats(NOW_S - 400 * DAY_S, NOW_S)), max_size=30)


@given(tokens, tokens, levels)
def test_a_round_that_entered_all_its_modules_earns_its_tokens_once(count: int, full: int, depth: int) -> None:
    earned = math.fsum(share_credit(count, tokens_full=full, levels=depth) for _ in range(depth))
    assert earned == pytest.approx(min(count, full))


@given(tokens, tokens, levels)
def test_more_tokens_never_earn_less_and_never_more_than_a_full_round(count: int, full: int, depth: int) -> None:
    earned = share_credit(count, tokens_full=full, levels=depth)
    assert 0 < earned <= full / depth
    assert earned <= share_credit(count + 1, tokens_full=full, levels=depth)


@given(work, st.floats(0, 100 * DAY_S))
def test_recent_credit_halves_with_every_half_life(earned: list[Earned], wait_s: float) -> None:
    now = recent_credit(earned, now_s=NOW_S)
    later = recent_credit(earned, now_s=NOW_S + wait_s)
    assert later == pytest.approx(now * 0.5 ** (wait_s / HALF_LIFE_S), rel=1e-9, abs=1e-12)


@given(work, work)
def test_recent_credit_is_the_sum_of_its_parts_in_any_order(one: list[Earned], other: list[Earned]) -> None:
    both = recent_credit([*other, *one], now_s=NOW_S)
    apart = recent_credit(one, now_s=NOW_S) + recent_credit(other, now_s=NOW_S)
    assert both == pytest.approx(apart, rel=1e-12, abs=1e-12)


@given(work)
def test_recent_credit_over_all_time_is_all_credit(earned: list[Earned]) -> None:
    """The average of a day, summed over all days to come, gives back what was earned: nothing is lost or made."""
    now = recent_credit(earned, now_s=NOW_S)
    days = HALF_LIFE_S / DAY_S / math.log(2)  # the mean life: what an exponential decay integrates to
    aged = math.fsum(one.credit * 0.5 ** ((NOW_S - one.at_s) / HALF_LIFE_S) for one in earned)
    assert now * days == pytest.approx(aged, rel=1e-9, abs=1e-9)


def test_who_earns_the_same_every_day_comes_near_that_figure() -> None:
    earned = [Earned(credit=100.0, at_s=NOW_S - (day + 0.5) * DAY_S) for day in range(365)]
    assert recent_credit(earned, now_s=NOW_S) == pytest.approx(100.0, rel=0.01)


def test_a_clock_that_is_ahead_earns_no_more_than_one_that_is_right() -> None:
    ahead = recent_credit([Earned(credit=5.0, at_s=NOW_S + 30 * DAY_S)], now_s=NOW_S)
    assert ahead == recent_credit([Earned(credit=5.0, at_s=NOW_S)], now_s=NOW_S)


def test_nothing_earned_is_nothing() -> None:
    assert recent_credit([], now_s=NOW_S) == 0.0
