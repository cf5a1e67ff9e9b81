"""Waiting between steps: over minutes the share of the processor, or the power of a card, is what was asked for."""

from __future__ import annotations

import random

import pytest

from peers.governor.brake import BURST_S, DUTY_MIN, CpuShare, PowerShare


@pytest.mark.parametrize(("share", "cores", "threads"), [(0.5, 2, 1), (0.25, 8, 8), (0.05, 1, 1), (1.0, 4, 4)])
@pytest.mark.parametrize("step_s", [0.01, 0.7, 12.0])
def test_the_mean_use_is_the_share(share: float, cores: float, threads: int, step_s: float) -> None:
    chance, brake = random.Random(3), CpuShare(share, cores)
    now_s = used_s = 0.0
    brake.wait_s(used_s, now_s, busy_s=0.0)
    while now_s < 600.0:
        length_s = step_s * chance.uniform(0.5, 1.5)
        now_s, used_s = now_s + length_s, used_s + length_s * threads
        now_s += brake.wait_s(used_s, now_s, busy_s=length_s)
    mean = used_s / now_s / cores
    assert mean <= share * 1.03
    assert mean >= min(share, threads / cores) * 0.95


def test_what_came_before_the_first_step_is_not_held_against_it() -> None:
    assert CpuShare(0.1, 1).wait_s(500.0, 20.0, busy_s=15.0) == 0.0


def test_time_that_was_waited_is_made_up_for_no_longer_than_a_burst() -> None:
    brake = CpuShare(0.5, 1)
    brake.wait_s(0.0, 0.0, busy_s=0.0)
    assert brake.wait_s(1.0, 1000.0, busy_s=1.0) == 0.0
    saved_s = BURST_S + 1.0 - 2.0
    assert brake.wait_s(11.0, 1010.0, busy_s=10.0) == pytest.approx(20.0 - 10.0 - saved_s)


def card(power: PowerShare, *, idle_w: float, load_w: float, seconds: int, seed: int = 1) -> float:
    """The mean power of the second half, of a card that computes as the brake lets it, with samples that are noisy."""
    chance, drawn = random.Random(seed), []
    for _ in range(seconds):
        watts = idle_w + (load_w - idle_w) * power.duty
        drawn.append(watts)
        power.told(watts * chance.uniform(0.85, 1.15))
    return sum(drawn[seconds // 2 :]) / (seconds - seconds // 2)


@pytest.mark.parametrize("limit_w", [120.0, 220.0, 300.0])
def test_the_mean_power_of_a_card_ends_at_the_limit(limit_w: float) -> None:
    power = PowerShare(limit_w)
    assert card(power, idle_w=60.0, load_w=350.0, seconds=400) == pytest.approx(limit_w, rel=0.05)
    assert not power.is_too_low


def test_below_the_limit_nothing_waits_and_below_what_an_idle_card_draws_that_is_said() -> None:
    high, low = PowerShare(400.0), PowerShare(50.0)
    card(high, idle_w=60.0, load_w=350.0, seconds=100)
    assert high.duty == 1.0 and high.wait_s(3.0) == 0.0
    card(low, idle_w=60.0, load_w=350.0, seconds=400)
    assert low.is_too_low and low.duty == DUTY_MIN


def test_a_wait_makes_steps_the_wanted_share_of_the_time() -> None:
    power = PowerShare(100.0)
    power.duty = 0.25
    assert power.wait_s(2.0) == pytest.approx(6.0)
