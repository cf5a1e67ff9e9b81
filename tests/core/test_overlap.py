"""The estimate of a version that is not there yet, against torch's SGD and against steps written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.outer import OuterState, outer_step
from dipaco_p2p.core.overlap import Course

SIZE = 500
LR, MOMENTUM = 0.7, 0.9
RULE = {"lr": LR, "momentum": MOMENTUM}


def vector(seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


class Owner:
    """Steps a module as torch does, without compression."""

    def __init__(self) -> None:
        self._parameter = torch.nn.Parameter(torch.from_numpy(vector(0)))
        self._sgd = torch.optim.SGD([self._parameter], lr=LR, momentum=MOMENTUM, nesterov=True)

    @property
    def params(self) -> Floats:
        return self._parameter.detach().numpy().copy()

    def step(self, gradient: Floats) -> Floats:
        self._parameter.grad = torch.from_numpy(gradient)
        self._sgd.step()
        return self.params


def test_the_estimate_is_the_next_version_when_all_sent_the_same() -> None:
    owner = Owner()
    course = Course.begin(owner.params)
    for round_number in range(1, 9):
        gradient = vector(round_number)
        estimate = course.ahead(gradient, **RULE)
        params = owner.step(gradient)
        np.testing.assert_allclose(estimate, params, atol=1e-4)
        course = course.follow(params, **RULE)


def test_the_estimate_is_wrong_only_by_what_the_others_sent() -> None:
    owner = Owner()
    course = Course.begin(owner.params)
    for round_number in range(1, 5):
        own, others = vector(round_number), vector(100 + round_number)
        average = (own + others) / 2
        estimate = course.ahead(own, **RULE)
        params = owner.step(average)
        # Nesterov: lr * (g + mu * (mu * b + g)), so a gradient weighs lr * (1 + mu) in its own round.
        np.testing.assert_allclose(estimate - params, -LR * (1 + MOMENTUM) * (own - average), atol=1e-4)
        course = course.follow(params, **RULE)


def test_plain_averaging_goes_on_from_the_own_parameters() -> None:
    before, after = vector(1), vector(2)
    estimate = Course.begin(before).ahead(before - after, lr=1.0, momentum=0.0)
    np.testing.assert_allclose(estimate, after, atol=1e-6)


def test_who_comes_late_knows_the_momentum_after_a_few_versions() -> None:
    owner = Owner()
    for round_number in range(1, 6):
        owner.step(vector(round_number))
    course, errors = Course.begin(owner.params), []
    for round_number in range(6, 14):
        gradient = vector(round_number)
        estimate = course.ahead(gradient, **RULE)
        params = owner.step(gradient)
        errors.append(float(np.linalg.norm(estimate - params)))
        course = course.follow(params, **RULE)
    ratios = [after / before for before, after in zip(errors, errors[1:], strict=False)]
    # Each version leaves mu / (1 + mu) of the error in the momentum, which the owner's own mu passes on.
    assert ratios == pytest.approx([MOMENTUM / (1 + MOMENTUM)] * len(ratios), rel=1e-2)


def test_a_version_that_lost_the_momentum_is_followed_without_it() -> None:
    state = OuterState.fresh(vector(0))
    course = Course.begin(state.params)
    for round_number in range(1, 4):
        state, _ = outer_step(state, vector(round_number), **RULE)
        course = course.follow(state.params, **RULE)
    fresh, _ = outer_step(OuterState.fresh(state.params), vector(4), **RULE)
    course = course.follow(fresh.params, is_fresh=True, **RULE)
    np.testing.assert_allclose(course.momentum, vector(4), atol=0.02)  # int8 rounds


def test_a_rule_that_moves_nothing_is_followed_without_a_division() -> None:
    params = vector(0)
    course = Course.begin(params).follow(params, lr=0.0, momentum=MOMENTUM)
    np.testing.assert_array_equal(course.ahead(vector(1), lr=0.0, momentum=MOMENTUM), params)


def test_a_path_that_goes_on_moves_by_the_momentum_alone() -> None:
    owner = Owner()
    course = Course.begin(owner.params)
    for round_number in range(1, 5):
        course = course.follow(owner.step(vector(round_number)), **RULE)
    place = vector(50)
    begun = course.going_on(place, **RULE)
    before = owner.params
    np.testing.assert_allclose(begun - place, owner.step(np.zeros(SIZE, dtype=np.float32)) - before, atol=1e-4)
