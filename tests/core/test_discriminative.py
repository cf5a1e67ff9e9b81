"""Labels from losses, the logistic router, and the cure of starvation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.core.routing.balance import balance_bias, match_bias, starvation
from dipaco_p2p.core.routing.discriminative import balanced_labels, best_path, fit_logistic
from dipaco_p2p.core.routing.router import Router, encode_router
from dipaco_p2p.errors import CorpusError


def labelled(documents: int, *, paths: int, width: int = 8, signal: float = 1.0, seed: int = 0):
    """Correlated features, and labels drawn from a softmax of them in which path k is 1 / (k + 1) as common."""
    generator = np.random.default_rng(seed)
    points = generator.standard_normal((documents, width)) @ generator.standard_normal((width, width))
    standard = (points - points.mean(axis=0)) / points.std(axis=0)
    weights = signal * generator.standard_normal((paths, width)) / np.sqrt(width)
    logits = standard @ weights.T - np.log(np.arange(1, paths + 1))
    labels = np.argmax(logits + generator.gumbel(size=logits.shape), axis=1)
    return points.astype(np.float32), labels, logits


def random_nats(documents: int, *, paths: int, seed: int = 0) -> np.ndarray:
    """Nats that differ more between documents than between paths, with some paths better than others."""
    generator = np.random.default_rng(seed)
    hard, skill = 500 + 40 * generator.standard_normal((documents, 1)), 3 * generator.standard_normal(paths)
    return hard + skill + 3 * generator.standard_normal((documents, paths))


def total(nats: np.ndarray, labels: np.ndarray) -> float:
    return float(nats[np.arange(len(nats)), labels].sum())


def test_the_label_is_the_path_that_needs_the_fewest_nats():
    assert best_path(np.array([[3.0, 1, 2], [5, 5, 5], [9, 8, 1]])).tolist() == [1, 0, 2]


def test_the_fit_is_the_minimum_of_the_penalised_likelihood():
    points, labels, _ = labelled(400, paths=5, seed=1)
    strength = 3.0
    router = fit_logistic(points, labels, path_count=5, seed=0, strength=strength)
    standard = torch.from_numpy((points.astype(np.float64) - router.mean) / router.scale)
    prior = torch.from_numpy(np.log((np.bincount(labels, minlength=5) + 0.5) / (400 + 2.5)))

    def objective(values: torch.Tensor) -> torch.Tensor:
        weights, bias = values[:40].view(5, 8), values[40:]
        chances = (standard @ weights.T + bias).log_softmax(dim=1)[torch.arange(400), torch.from_numpy(labels)]
        return -chances.mean() + strength / 800 * (weights.square().sum() + (bias - prior).square().sum())

    # Newton's method, which needs no more than a few steps from here.
    least = torch.cat([torch.zeros(40).double(), prior])
    for _ in range(8):
        slope = torch.autograd.functional.jacobian(objective, least)
        least = least - torch.linalg.solve(torch.autograd.functional.hessian(objective, least), slope)
    assert slope.abs().max() < 1e-9
    found = torch.from_numpy(np.concatenate([router.weights.flatten(), router.bias]).astype(np.float64))
    assert 0 <= float(objective(found) - objective(least)) < 1e-5
    assert float((found - least).abs().max()) < 0.02


def test_with_much_text_the_fit_finds_the_probabilities_that_made_the_labels():
    points, labels, logits = labelled(8000, paths=4, signal=2.0)
    router = fit_logistic(points, labels, path_count=4, seed=0)
    found, true = router.scores(points), logits
    shares, expected = (np.exp(each) / np.exp(each).sum(axis=1, keepdims=True) for each in (found, true))
    assert np.abs(shares - expected).mean() < 0.02


def test_features_that_say_nothing_get_hardly_any_weight():
    points = np.random.default_rng(3).standard_normal((300, 40)).astype(np.float32)
    labels = np.random.default_rng(4).integers(0, 3, 300)
    router = fit_logistic(points, labels, path_count=3, seed=0)
    loose = fit_logistic(points, labels, path_count=3, seed=0, strength=1.0)
    assert np.square(router.weights).sum() < 0.01 * np.square(loose.weights).sum()


def test_rows_of_one_document_are_held_out_together():
    # Five rows per document, as for a router of tokens: held out singly they would reward learning them by heart.
    points = np.random.default_rng(3).standard_normal((400, 60)).astype(np.float32).repeat(5, axis=0)
    labels = np.random.default_rng(4).integers(0, 2, 400).repeat(5)
    router = fit_logistic(points, labels, path_count=2, seed=0)
    loose = fit_logistic(points, labels, path_count=2, seed=0, strength=1.0)
    assert np.square(router.weights).sum() < 0.1 * np.square(loose.weights).sum()


@pytest.mark.parametrize("documents", [1, 2, 5])
def test_few_documents_and_paths_without_labels_still_give_a_router(documents):
    points = np.random.default_rng(0).standard_normal((documents, 6)).astype(np.float32)
    labels = np.full(documents, 2)
    assert fit_logistic(points, labels, path_count=4, seed=0).assign(points).tolist() == [2] * documents


def test_the_same_input_gives_the_same_router():
    points, labels, _ = labelled(300, paths=4)
    first, second = (fit_logistic(points, labels, path_count=4, seed=3) for _ in range(2))
    assert encode_router(first) == encode_router(second)


def test_many_paths_fit_too():
    points, labels, _ = labelled(1500, paths=64, width=32, signal=6.0)
    router = fit_logistic(points, labels, path_count=64, seed=0)
    assert (router.assign(points) == labels).mean() > 2 * np.bincount(labels).max() / 1500


def test_no_documents_or_features_that_are_not_finite_are_refused():
    points, labels, _ = labelled(20, paths=2)
    with pytest.raises(CorpusError, match="no documents"):
        fit_logistic(points[:0], labels[:0], path_count=2, seed=0)
    points[3, 2] = np.inf
    with pytest.raises(CorpusError, match="not finite"):
        fit_logistic(points, labels, path_count=2, seed=0)


def test_rare_paths_starve_in_the_plain_argmax_and_are_back_after_matching():
    points, labels, _ = labelled(3000, paths=12, signal=0.7)
    histogram = np.bincount(labels, minlength=12)
    plain = fit_logistic(points, labels, path_count=12, seed=0)
    matched = match_bias(plain, points, histogram)
    before, after = starvation(plain.assign(points), histogram), starvation(matched.assign(points), histogram)
    assert len(before.empty) >= 6 and set(before.empty) <= set(before.starved)
    assert before.distance > 0.4
    assert after.empty == after.starved == ()
    assert after.distance < 0.005


def test_matching_holds_on_documents_that_it_did_not_see():
    points, labels, _ = labelled(4000, paths=6)
    histogram = np.bincount(labels[::2], minlength=6)
    plain = fit_logistic(points[::2], labels[::2], path_count=6, seed=0)
    found = match_bias(plain, points[::2], histogram).assign(points[1::2])
    assert starvation(found, histogram).distance < 0.05 < starvation(plain.assign(points[1::2]), histogram).distance


def test_matching_changes_the_bias_only():
    points, labels, _ = labelled(300, paths=4)
    plain = fit_logistic(points, labels, path_count=4, seed=0)
    for router in (match_bias(plain, points, np.array([1, 1, 1, 1])), balance_bias(plain, points)):
        assert router.weights is plain.weights and router.mean is plain.mean and router.scale is plain.scale
        assert not np.array_equal(router.bias, plain.bias)


def test_a_path_that_should_get_nothing_gets_nothing():
    points, labels, _ = labelled(500, paths=4)
    plain = fit_logistic(points, labels, path_count=4, seed=0)
    sizes = np.bincount(match_bias(plain, points, np.array([0, 2, 1, 1])).assign(points), minlength=4)
    assert sizes[0] == 0
    np.testing.assert_allclose(sizes[1:] / 500, [0.5, 0.25, 0.25], atol=0.01)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    documents=st.integers(1, 60),
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    places=st.integers(0, 3),
)
def test_matching_never_moves_away_from_the_histogram(seed, documents, shares, places):
    generator = np.random.default_rng(seed)
    points = generator.standard_normal((documents, 2)).round(places).astype(np.float32)
    router = Router(
        weights=generator.standard_normal((len(shares), 2)).round(places).astype(np.float32),
        bias=generator.standard_normal(len(shares)).astype(np.float32),
        mean=np.zeros(2, np.float32),
        scale=np.ones(2, np.float32),
    )
    histogram = np.array(shares)
    before = starvation(router.assign(points), histogram)
    after = starvation(match_bias(router, points, histogram).assign(points), histogram)
    assert after.distance <= before.distance


@pytest.mark.parametrize(("copies", "expected"), [([8, 2], [8, 2]), ([7, 3], [10, 0])])
def test_a_starved_path_is_filled_if_the_histogram_gets_no_further_away(copies, expected):
    # Two different documents in some copies: 9 to 1 cannot be met. [8, 2] is as far from it as [10, 0], [7, 3] further.
    points = np.repeat(np.array([[0], [1]], np.float32), copies, axis=0)
    one = np.ones(1, np.float32)
    router = Router(
        weights=np.array([[0], [1]], np.float32), bias=np.array([5, 0], np.float32), mean=0 * one, scale=one
    )
    found = match_bias(router, points, np.array([9, 1])).assign(points)
    assert np.bincount(found, minlength=2).tolist() == expected


def test_balancing_fills_every_path_evenly():
    points, labels, _ = labelled(2000, paths=12)
    sizes = np.bincount(balance_bias(fit_logistic(points, labels, path_count=12, seed=0), points).assign(points))
    assert len(sizes) == 12
    assert sizes.min() > 0.9 * sizes.mean() and sizes.max() < 1.1 * sizes.mean()


def test_paths_with_the_same_weights_cannot_all_be_filled():
    points, labels, _ = labelled(200, paths=2)
    # Paths 2 and 3 never were the best: nothing tells them apart.
    router = fit_logistic(points, labels, path_count=4, seed=0)
    with pytest.raises(CorpusError, match="path . of 4 gets none of 200 documents"):
        balance_bias(router, points)


def test_balanced_labels_are_the_best_of_all_balanced_ones():
    for seed in range(20):
        nats = random_nats(8, paths=2, seed=seed)
        splits = [np.isin(np.arange(8), chosen).astype(np.int64) for chosen in itertools.combinations(range(8), 4)]
        least = min(total(nats, labels) for labels in splits)
        assert total(nats, balanced_labels(nats)) == pytest.approx(least, abs=1e-9)


@settings(max_examples=40)
@given(seed=st.integers(0, 999), paths=st.integers(1, 9), extra=st.integers(0, 40), places=st.integers(-1, 2))
def test_balanced_labels_give_every_path_its_share(seed, paths, extra, places):
    nats = random_nats(paths + extra, paths=paths, seed=seed).round(places)
    sizes = np.bincount(balanced_labels(nats), minlength=paths)
    assert len(sizes) == paths and sizes.sum() == paths + extra
    assert sizes.max() - sizes.min() <= 1


def test_balanced_labels_cost_little_more_than_free_ones_and_less_than_choice_by_likelihood():
    nats = random_nats(1600, paths=16)
    free, found, mean = total(nats, best_path(nats)), total(nats, balanced_labels(nats)), nats.mean(axis=1).sum()
    room, greedy = np.full(16, 100), 0.0
    for row in nats[np.argsort(nats.min(axis=1))]:
        path = int(np.argmin(np.where(room > 0, row, np.inf)))
        room[path] -= 1
        greedy += row[path]
    assert free < found < greedy < mean
    assert mean - found > 1.2 * (mean - greedy)


def test_fewer_documents_than_paths_are_refused():
    with pytest.raises(CorpusError, match="3 documents cannot be split over 4 paths"):
        balanced_labels(random_nats(3, paths=4))


def test_starvation_counts_what_would_have_to_move():
    found = starvation(np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2]), np.array([20, 20, 40, 20]))
    assert found.distance == pytest.approx(0.5)
    assert found.starved == (2, 3) and found.empty == (3,)
    assert starvation(np.array([1, 0, 1, 0]), np.array([7, 7, 0])).distance == 0


def test_a_path_starves_below_half_of_its_share():
    assignment = np.repeat([0, 1, 2, 3], [13, 4, 3, 0])
    found = starvation(assignment, np.array([4, 8, 8, 0]))
    assert found.starved == (2,) and found.empty == ()
