"""The outer step against torch's SGD, plain DiLoCo, and any order of arrival."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.core.arrays import Floats, tree_norm
from dipaco_p2p.core.outer.blocks import BLOCK, SPAN
from dipaco_p2p.core.outer.codec import Compressed
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.core.outer.outer_step import (
    Course,
    OuterState,
    Share,
    apply_update,
    average,
    decode_state,
    nesterov,
    outer_gradient,
    outer_step,
    state_parts,
    weights,
)
from dipaco_p2p.core.tensor_file import encode
from dipaco_p2p.errors import IntegrityError

SIZE = 1000
LR, MOMENTUM = 0.7, 0.9
RULE = {"lr": LR, "momentum": MOMENTUM}


def vector(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def packed(values: np.ndarray) -> Compressed:
    return compress(values.astype(np.float32))[0]


def basis(index: int, length: float = 1.0, size: int = SIZE) -> Compressed:
    values = np.zeros(size, dtype=np.float32)
    values[index] = length
    return packed(values)


def share(path: str, shard_size: int, tokens: int) -> Share:
    return Share(path=path, shard_size=shard_size, tokens=tokens)


def test_nesterov_matches_torch_sgd():
    parameter = torch.nn.Parameter(torch.from_numpy(vector(0)))
    sgd = torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM, nesterov=True)
    params, buffer = vector(0), np.zeros(SIZE, dtype=np.float32)
    for round_number in range(1, 9):
        parameter.grad = torch.from_numpy(vector(round_number))
        sgd.step()
        buffer, step = nesterov(buffer, vector(round_number), **RULE)
        params = params - step
        np.testing.assert_allclose(params, parameter.detach().numpy(), atol=1e-4, rtol=1e-5)


def inner_quadratic(params: np.ndarray) -> np.ndarray:
    """Ten steps of gradient descent towards a fixed target: stands for the inner loop."""
    for _ in range(10):
        params = params - np.float32(0.02) * (params - vector(99))
    return params


def test_a_one_path_run_equals_plain_diloco():
    """Error feedback keeps the distance to about one int8 step of an update, however many rounds there are."""
    reference = torch.nn.Parameter(torch.from_numpy(vector(0)))
    sgd = torch.optim.SGD([reference], lr=LR, momentum=MOMENTUM, nesterov=True)
    state, uplink = OuterState.fresh(vector(0)), None
    for _ in range(20):
        start = reference.detach().numpy().copy()
        reference.grad = torch.from_numpy(start - inner_quadratic(start))
        sgd.step()

        gradient = outer_gradient(state.params, inner_quadratic(state.params))
        contribution, uplink = compress(gradient, uplink)
        alphas = weights([share("P0", 10, 500)], tokens_full=500)
        state, _ = outer_step(state, average([contribution], alphas, rule="sqrt"), **RULE)
    moved = np.abs(reference.detach().numpy() - vector(0)).mean()
    apart = np.abs(reference.detach().numpy() - state.params).mean()
    assert moved > 0.5
    assert apart < 0.01 * moved


def test_a_follower_that_applies_the_updates_holds_the_owners_bytes():
    state = OuterState.fresh(vector(0))
    follower = state.params
    for seed in range(1, 6):
        state, update = outer_step(state, vector(seed), **RULE)
        follower = apply_update(follower, update)
    assert follower.tobytes() == state.params.tobytes()


def test_updates_and_what_they_lost_add_up_to_the_exact_steps():
    state, exact, buffer = OuterState.fresh(vector(0)), vector(0).astype(np.float64), np.zeros(SIZE, np.float32)
    for seed in range(1, 9):
        buffer, step = nesterov(buffer, vector(seed), **RULE)
        exact -= step
        state, _ = outer_step(state, vector(seed), **RULE)
    np.testing.assert_allclose(state.params - state.residual, exact, atol=1e-4)


def test_a_step_that_is_not_finite_is_refused_and_changes_nothing():
    state = OuterState.fresh(vector(0))
    gradient = vector(1)
    gradient[3] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        outer_step(state, gradient, **RULE)
    assert state.params.tobytes() == vector(0).tobytes() and not state.momentum.any()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(6)), rule=st.sampled_from(["sqrt", "rda", "mean"]), clip=st.sampled_from([None, 30.0])
)
def test_any_order_of_arrival_gives_the_same_bytes(order, rule, clip):
    def run(order: list[int]) -> bytes:
        arrived = [(packed(vector(n) * (n + 1)), share(f"P{n % 4}", 10 + n, 100 * n + 7)) for n in order]
        arrived.sort(key=lambda item: hashlib.sha256(encode_compressed(item[0])).digest())
        alphas = weights([item[1] for item in arrived], tokens_full=500)
        gradient = average([item[0] for item in arrived], alphas, rule=rule, clip_norms=clip and [clip] * len(arrived))
        state, update = outer_step(OuterState.fresh(vector(50)), gradient, **RULE)
        return state.params.tobytes() + encode_compressed(update) + b"".join(state_parts(state))

    assert run(list(order)) == run(list(range(6)))


def test_the_bytes_of_a_step_are_those_written_down_once():
    """Guards against arithmetic that depends on the machine or on a library's version."""
    contributions = [packed((np.arange(SIZE) * (n + 1) % 97 - 48) / 16) for n in range(3)]
    digests = {}
    for rule in ("sqrt", "rda"):
        gradient = average(contributions, (0.5, 0.3, 0.2), rule=rule, clip_norms=[25.0] * 3)
        state, _ = outer_step(OuterState.fresh(np.ones(SIZE, np.float32)), gradient, **RULE)
        digests[rule] = hashlib.sha256(state.params.tobytes()).hexdigest()[:16]
    assert digests == {"sqrt": "d4576e32bc66995e", "rda": "b154f821aea5c314"}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10**6), st.integers(1, 10**9)), min_size=1, max_size=9)
)
def test_weights_are_positive_sum_to_one_and_ignore_the_order(rows):
    rows = [(path, {"a": 3, "b": 500, "c": 10**6}[path], tokens) for path, _, tokens in rows]
    alphas = weights([share(*row) for row in rows], tokens_full=1000)
    assert all(alpha > 0 for alpha in alphas)
    assert sum(alphas) == pytest.approx(1, abs=1e-12)
    backwards = weights([share(*row) for row in reversed(rows)], tokens_full=1000)
    assert backwards == alphas[::-1]


def test_weights_follow_shard_size_and_tokens_and_replicas_share():
    assert weights([share("a", 30, 100), share("b", 10, 100)], tokens_full=100) == pytest.approx((0.75, 0.25))
    assert weights([share("a", 10, 50), share("b", 10, 100)], tokens_full=100) == pytest.approx((1 / 3, 2 / 3))
    replicas = weights([share("a", 10, 100), share("a", 10, 100), share("b", 10, 100)], tokens_full=100)
    assert replicas == pytest.approx((0.25, 0.25, 0.5))


def test_sqrt_multiplies_the_mean_by_the_root_of_the_effective_number():
    one, other = packed(vector(1)), packed(vector(2))
    np.testing.assert_allclose(
        average([one, other], (0.5, 0.5), rule="sqrt"),
        (one.expand() + other.expand()) / 2 * 2**0.5,
        rtol=1e-5,
        atol=1e-6,
    )
    effective = 1 / (0.8**2 + 0.2**2)
    np.testing.assert_allclose(
        average([one, other], (0.8, 0.2), rule="sqrt"),
        (0.8 * one.expand() + 0.2 * other.expand()) * effective**0.5,
        rtol=1e-5,
        atol=1e-6,
    )


def test_replicas_of_a_path_count_as_one_path():
    one, other = packed(vector(1)), packed(vector(2))
    alone = average([one, other], (0.5, 0.5), rule="sqrt")
    twice = average([one, one, other, other], (0.25,) * 4, rule="sqrt", paths=["a", "a", "b", "b"])
    np.testing.assert_allclose(twice, alone, rtol=1e-5, atol=1e-7)
    of_one_path = average([one, other], (0.5, 0.5), rule="sqrt", paths=["a", "a"])
    np.testing.assert_allclose(of_one_path, average([one, other], (0.5, 0.5), rule="mean"), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rda_equals_sqrt_for_orthogonal_gradients_of_one_length(count):
    contributions = [basis(300 * n, 2.0) for n in range(count)]
    alphas = [1 / count] * count
    np.testing.assert_allclose(
        average(contributions, alphas, rule="rda"), average(contributions, alphas, rule="sqrt"), rtol=1e-6
    )


def test_rda_equals_the_mean_for_equal_gradients():
    gradient = packed(vector(1))
    np.testing.assert_allclose(average([gradient] * 4, [0.25] * 4, rule="rda"), gradient.expand(), rtol=1e-5)


def test_rda_has_the_mean_norm_and_ignores_empty_and_cancelling_gradients():
    long, short, empty = basis(0, 3.0), basis(300, 1.0), packed(np.zeros(SIZE))
    assert tree_norm(average([long, short], (0.5, 0.5), rule="rda")) == pytest.approx(2.0)
    with_empty = average([long, short, empty], (0.25, 0.25, 0.5), rule="rda")
    assert with_empty.tobytes() == average([long, short], (0.5, 0.5), rule="rda").tobytes()
    assert not average([empty, empty], (0.5, 0.5), rule="rda").any()
    assert not average([basis(0), basis(0, -5.0)], (0.5, 0.5), rule="rda").any()


@pytest.mark.parametrize("rule", ["sqrt", "rda", "mean"])
def test_clipping_shortens_only_what_is_longer(rule):
    assert tree_norm(average([basis(0, 10.0)], (1.0,), rule=rule, clip_norms=[4.0])) == pytest.approx(4.0)
    short = average([basis(0, 3.0)], (1.0,), rule=rule, clip_norms=[4.0])
    assert short.tobytes() == average([basis(0, 3.0)], (1.0,), rule=rule).tobytes()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 1000])
def test_tree_norm_is_the_euclidean_norm(size):
    assert tree_norm(vector(3, size)) == pytest.approx(np.linalg.norm(vector(3, size).astype(np.float64)))
    assert packed(vector(3, size)).norm() == pytest.approx(tree_norm(packed(vector(3, size)).expand()))


def test_state_survives_its_bytes_and_bad_bytes_are_refused():
    state, _ = outer_step(OuterState.fresh(vector(0)), vector(1), **RULE)
    momentum, residual = decode_state(b"".join(state_parts(state)), SIZE)
    assert momentum.tobytes() == state.momentum.tobytes() and residual.tobytes() == state.residual.tobytes()
    with pytest.raises(IntegrityError, match="1001 finite"):
        decode_state(b"".join(state_parts(state)), SIZE + 1)
    with pytest.raises(IntegrityError, match="exactly momentum"):
        decode_state(encode({"momentum": state.momentum}), SIZE)
    with pytest.raises(IntegrityError, match="finite"):
        decode_state(encode({"momentum": state.momentum, "residual": state.residual * np.nan}), SIZE)


def test_a_step_in_spans_is_the_step_over_the_whole_vector() -> None:
    size = 2 * SPAN + 3 * BLOCK + 77
    params, momentum, residual, gradient = (
        np.random.default_rng(seed).standard_normal(size, dtype=np.float32) for seed in range(4)
    )
    state = OuterState(params=params, momentum=momentum, residual=residual)
    after, update = outer_step(state, gradient, **RULE)
    buffer = np.float32(0.9) * momentum + gradient
    wanted = (np.float32(0.9) * buffer + gradient) * np.float32(0.7) + residual
    rows = np.pad(wanted, (0, -size % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(rows).max(axis=1) / np.float32(127)
    values = (np.rint(rows / scales[:, None]) * scales[:, None]).reshape(-1)[:size]
    assert (update.expand() == values).all() and (after.momentum == buffer).all()
    assert (after.residual == wanted - values).all() and (after.params == params - values).all()
    again, left = compress(wanted)
    assert encode_compressed(again) == encode_compressed(update) and (left == after.residual).all()
    assert (state.params == params).all() and (state.momentum == momentum).all()


def test_a_gradient_that_is_spent_gives_its_memory_and_changes_no_bit() -> None:
    state, gradient = OuterState.fresh(vector(0)), vector(1)
    after, update = outer_step(state, gradient, **RULE)
    again, same = outer_step(state, gradient, lr=0.7, momentum=0.9, is_spent=True)
    assert again.momentum is gradient and encode_compressed(same) == encode_compressed(update)
    for found, wanted in zip(
        (again.params, again.momentum, again.residual), (after.params, after.momentum, after.residual), strict=True
    ):
        assert found.tobytes() == wanted.tobytes()


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
