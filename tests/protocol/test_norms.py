"""The measure of outer gradients: from the chain alone, and moved by no minority of paths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from tiny_run import signer
from version_harness import child, share

from dipaco_p2p.config import InnerConfig
from dipaco_p2p.core.model.inner import learning_rate
from dipaco_p2p.protocol.admission import judge_norm
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.norms import (
    CLIP_MULTIPLE,
    FIRST_MULTIPLE,
    LR_MULTIPLE_MAX,
    NORM_MULTIPLE_MAX,
    NORM_SHARE_MIN,
    NORM_VERSIONS,
    Norms,
    first_clip_norm,
    lr_percent,
    lr_sum,
)
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.topology import PathId

SIZE = 1_000_000
LR_SUM = 0.01
MOST = LR_MULTIPLE_MAX * LR_SUM * math.sqrt(SIZE)
Round = Mapping[int, Sequence[float]]
"""Of each path, by its number, the norms that a version counts."""


def version(number: int, norms: Round) -> ModuleVersion:
    shares = [
        replace(share(f"{number} {path} {place}", base=number - 1), path=PathId((0, path)), norm=norm)
        for path, found in norms.items()
        for place, norm in enumerate(found)
    ]
    return replace(child(shares=tuple(shares)), version=number)


def measure(*rounds: Round, paths: int = 4) -> Norms:
    history = [version(number, norms) for number, norms in enumerate(rounds, 1)]
    return Norms(history=history, paths=paths, size=SIZE, lr_sum=lambda base: LR_SUM)


def is_refused(norms: Norms, norm: float) -> bool:
    return judge_norm(norm, norms, base=len(norms.history)).reason is Reason.NORM


HONEST: Round = {0: [1.0], 1: [1.1], 2: [0.9], 3: [1.0]}


def test_without_a_history_the_optimiser_is_the_measure() -> None:
    assert measure().clip_norm(0) is None
    assert is_refused(measure(), MOST * 1.001) and not is_refused(measure(), MOST * 0.999)
    assert not is_refused(measure(), 1e-9)


@pytest.mark.parametrize(
    ("lengths", "clip"),
    [
        ({}, None),
        ({1: [1.0, 9.0]}, None),  # a second path makes no author two
        ({1: [1.0], 2: [3.0]}, 1.0),
        ({1: [1.0, 9.0], 2: [3.0]}, 1.0),
        ({1: [1.0], 2: [1.04], 3: [1.02]}, 1.02),
        ({1: [1.0], 2: [1.04], 3: [1.02], 4: [3.0]}, 1.02),  # attack: three times the step
        ({1: [1.0], 2: [1.04], 3: [1.02], 4: [1e-7]}, 1.0),  # attack: to scale others' down to nothing
        ({1: [1.0], 2: [1.04], 3: [1.02], 4: [3.0] * 50}, 1.02),  # attack: many paths
        ({1: [1.0], 2: [1.04], 3: [1.02], 4: [1e-7] * 50}, 1.0),
    ],
)
def test_while_nothing_is_usual_authors_measure_each_other(lengths: dict[int, list[float]], clip: float | None) -> None:
    of = [(signer(number).peer, norm) for number, norms in lengths.items() for norm in norms]
    assert first_clip_norm(of) == (None if clip is None else pytest.approx(FIRST_MULTIPLE * clip))


def test_what_is_usual_bounds_norms_in_both_directions_and_says_what_is_clipped() -> None:
    norms = measure(HONEST)
    assert norms.usual == pytest.approx(1.0 / LR_SUM)
    assert norms.clip_norm(1) == pytest.approx(CLIP_MULTIPLE)
    assert not is_refused(norms, NORM_MULTIPLE_MAX * 0.999) and is_refused(norms, NORM_MULTIPLE_MAX * 1.001)
    assert not is_refused(norms, NORM_SHARE_MIN * 1.001) and is_refused(norms, NORM_SHARE_MIN * 0.999)


def test_a_usual_norm_never_lifts_the_bound_of_the_optimiser() -> None:
    norms = measure({path: [MOST / 2] for path in range(4)})
    assert is_refused(norms, MOST * 1.001)


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("norm", [1e-7, 9.9])
def test_no_crowd_on_one_path_moves_it(count: int, norm: float) -> None:
    """Attack: very small norms became the measure, and honest work was refused as too long."""
    norms = measure(*[HONEST | {3: [1.0, *[norm] * count]}] * NORM_VERSIONS)
    assert norms.usual == pytest.approx(1.0 / LR_SUM, rel=0.11)
    assert not is_refused(norms, 1.0)


def test_nothing_is_usual_until_half_of_the_paths_have_counted() -> None:
    one = {0: [1e-7]}
    assert measure(one, one, one).usual is None
    assert measure(one, one, {1: [1e-7]}).usual == pytest.approx(1e-7 / LR_SUM)
    assert measure(one, one, one, paths=1).usual == pytest.approx(1e-7 / LR_SUM)


def test_only_the_last_versions_count() -> None:
    assert measure({path: [5.0] for path in range(4)}, *[HONEST] * NORM_VERSIONS).usual == pytest.approx(1 / LR_SUM)


def test_a_norm_is_judged_by_the_learning_rates_of_its_round() -> None:
    """At the end of the schedule honest norms are a tenth of what they were, and still usual."""
    falling = {0: 0.01, 1: 0.001}
    norms = replace(measure(HONEST), lr_sum=lambda base: falling[base])
    assert norms.clip_norm(1) == pytest.approx(CLIP_MULTIPLE * 0.1)
    assert norms.bounds(1) == pytest.approx((NORM_SHARE_MIN * 0.1, NORM_MULTIPLE_MAX * 0.1))


@pytest.mark.parametrize("warmup_steps", [0, 20])
@pytest.mark.parametrize("lr_min_ratio", [0.0, 0.1, 1.0])
def test_the_sum_of_learning_rates_follows_the_schedule(warmup_steps: int, lr_min_ratio: float) -> None:
    inner = InnerConfig(steps=10, warmup_steps=warmup_steps, lr_min_ratio=lr_min_ratio)
    for first in range(0, 400, 10):
        exact = math.fsum(learning_rate(inner, step, 400) for step in range(first, first + 10))
        assert lr_sum(inner, first, 400) == pytest.approx(exact, abs=0.02 * inner.lr * 10)


def test_the_learning_rate_of_a_round_in_percent_falls_with_the_schedule_and_never_rises() -> None:
    """An early round, in which the rate rises, is no excuse for gaining less."""
    inner = InnerConfig(steps=10, warmup_steps=20, lr_min_ratio=0.0)
    found = [lr_percent(inner, first, 400) for first in range(0, 400, 10)]
    assert found[:3] == [100] * 3 and found[-1] == 1 and found == sorted(found, reverse=True)
    for first in range(20, 400, 10):
        mean = math.fsum(learning_rate(inner, step, 400) for step in range(first, first + 10)) / 10
        assert lr_percent(inner, first, 400) == pytest.approx(100 * mean / inner.lr, abs=2)
    assert lr_percent(replace(inner, lr=0.0), 0, 400) == 100
