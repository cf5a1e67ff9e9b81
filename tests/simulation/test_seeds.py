"""A few runs as `make simulate` plays them: no promise broken, every fault and fault point met, and repeatable."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter

import pytest

from simulation.faults import FAULTS, ROOT, fault_points
from simulation.mutants import MUTANTS
from simulation.outcome import simulate
from simulation.plan import make_plan
from simulation.runner import Result, Wish, play_seed

SEEDS = (1, 2, 3, 4)
RARE = {"mandate: granted by a member", "mirror: branch left, contributions not submitted again"}
"""They need a partition of the right length, or a coordinator that is away while a group dies: few seeds meet them."""

plays_seeds = pytest.mark.xdist_group("seeds")
"""In one worker: what is played is kept in its process, and another one would play all of it again."""


@functools.cache
def played(seed: int, faults: tuple[str, ...] = tuple(FAULTS)) -> Result:
    return play_seed(seed, Wish(faults=faults))


@pytest.mark.slow
@plays_seeds
@pytest.mark.parametrize("seed", SEEDS)
def test_no_promise_is_broken(seed: int) -> None:
    assert list(map(str, played(seed).broken)) == []


def test_a_run_without_faults_comes_to_its_end_soon() -> None:
    result = played(1, ())
    assert result.broken == () and not result.faults


@pytest.mark.slow
@plays_seeds
def test_all_but_the_rarest_fault_points_are_passed_by_a_few_seeds() -> None:
    points = sum((played(seed).points for seed in SEEDS), Counter[str]())
    assert {point for point in fault_points() if not points[point]} <= RARE


def test_the_plans_of_a_hundred_seeds_hold_every_fault() -> None:
    plans = [make_plan(seed, tuple(FAULTS)) for seed in range(1, 101)]
    assert {fault.name for plan in plans for fault in plan.faults} == set(FAULTS)
    assert {plan.volunteers for plan in plans} == {4, 5, 6, 8, 12}
    assert all(fault.at_s < plan.faulty_s for plan in plans for fault in plan.faults)
    assert plans[0] == make_plan(1, tuple(FAULTS)) != make_plan(2, tuple(FAULTS))
    assert {plan.config.rounds.overlap for plan in plans} == {True, False}


@pytest.mark.slow
def test_a_seed_repeats_its_run_event_by_event() -> None:
    plan = make_plan(3, ("crash", "partition", "loss"))
    first, second = (simulate(plan)[0] for _ in range(2))
    # What goes over the wire carries a speed that the machine's own clock measured, so bytes may differ, and no more.
    assert [(event.t_s, event.who, event.ev) for event in first.events] == [
        (event.t_s, event.who, event.ev) for event in second.events
    ]
    assert first.chains == second.chains


@pytest.mark.slow
def test_a_seed_repeats_its_run_in_another_process() -> None:
    script = (
        "from simulation.outcome import simulate; from simulation.plan import make_plan\n"
        "outcome = simulate(make_plan(3, ('crash', 'partition', 'loss')))[0]\n"
        "print([(event.t_s, event.who, event.ev) for event in outcome.events], outcome.chains)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": "0"},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["receipt before the disk", "momentum applied without contributors"])
def test_a_planted_error_is_found_and_gone_afterwards(name: str) -> None:
    faults = MUTANTS[name].faults
    results = (play_seed(seed, Wish(mutant=name, faults=faults)) for seed in range(1, 6))
    caught = next((result for result in results if result.broken), None)
    assert caught is not None
    assert play_seed(caught.seed, Wish(faults=faults)).broken == ()


def test_there_are_mutants_enough() -> None:
    assert len(MUTANTS) >= 15
