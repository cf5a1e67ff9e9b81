"""Between steps: over minutes the share of the processor is what was asked for, and parts of batches stay short."""

from __future__ import annotations

import random

import pytest

from peers.governor.brake import BURST_S, GPU_PART_S, LONG_STEPS, CpuShare, LongParts


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


def test_parts_get_shorter_after_some_long_steps_in_a_row_and_not_for_one_that_is_compiled() -> None:
    parts = LongParts()
    assert not any(parts.told(each) for each in [60.0, 60.0, 0.1] * 5)
    assert not any(parts.told(GPU_PART_S) for _ in range(10))
    told = [parts.told(GPU_PART_S * 1.01) for _ in range(2 * LONG_STEPS)]
    assert told == ([False] * (LONG_STEPS - 1) + [True]) * 2
