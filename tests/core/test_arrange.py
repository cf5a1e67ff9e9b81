"""Arranging clusters in a grid: against all permutations, and on clusters whose right place is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.core.routing.arrange import arrange, best_order, cost, shared_values
from dipaco_p2p.core.routing.kmeans import fit_kmeans
from dipaco_p2p.topology import Topology

GRID = Topology((2, 2))


def test_paths_share_the_values_of_the_modules_that_they_have_in_common():
    shared = shared_values(Topology((1, 2, 4, 2), (False, False, True, False)), [100, 10, 7, 1])
    assert shared.tolist() == [[0, 110, 101, 100], [110, 0, 100, 101], [101, 100, 0, 110], [100, 101, 110, 0]]


@pytest.mark.parametrize("numbers", list(itertools.permutations(range(4))))
def test_two_languages_of_two_kinds_of_text_each_share_the_larger_level(numbers):
    """However k-means numbered them, each first-level module, which is larger, gets one language."""
    corners = np.array([[0.0, 0.0], [0.0, 2.0], [9.0, 0.0], [9.0, 2.0]], dtype=np.float32)
    points = np.repeat(corners, 20, axis=0) + np.random.default_rng(0).normal(0, 0.1, (80, 2)).astype(np.float32)
    fitted = fit_kmeans(points, path_count=4, seed=0)
    shuffled = type(fitted)(
        weights=fitted.weights[list(numbers)], bias=fitted.bias[list(numbers)], mean=fitted.mean, scale=fitted.scale
    )
    # On standardised features both directions count alike; with unequal ones the language is the greater distance.
    stretched = type(fitted)(
        weights=shuffled.weights * np.float32([3, 1]), bias=shuffled.bias, mean=fitted.mean, scale=fitted.scale
    )
    arranged = arrange(stretched, GRID, [1000, 100], seed=0)
    language = arranged.weights[:, 0] > 0
    assert language[0] == language[1] and language[2] == language[3] and language[0] != language[2]
    assert sorted(map(tuple, arranged.weights)) == sorted(map(tuple, stretched.weights))


@given(seed=st.integers(0, 999))
def test_few_paths_get_the_best_of_all_arrangements(seed):
    generator = np.random.default_rng(seed)
    points = generator.normal(size=(4, 3))
    distances = np.square(points[:, None] - points).sum(axis=2)
    shared = shared_values(GRID, [3, 2])
    found = cost(shared, distances, best_order(shared, distances, seed=0))
    costs = [cost(shared, distances, np.array(order)) for order in itertools.permutations(range(4))]
    assert found == min(costs)


def test_many_paths_get_a_better_arrangement_than_chance_with_every_cluster_once():
    generator = np.random.default_rng(1)
    topology = Topology((4, 4))
    # The places of a 4x4 grid as points, in any order: the right arrangement is known.
    points = np.array([[10 * (number // 4), number % 4] for number in generator.permutation(16)], dtype=np.float64)
    distances = np.square(points[:, None] - points).sum(axis=2)
    shared = shared_values(topology, [5, 1])
    order = best_order(shared, distances, seed=0)
    assert sorted(order.tolist()) == list(range(16))
    right = np.lexsort((points[:, 1], points[:, 0]))
    chance = np.mean([cost(shared, distances, generator.permutation(16)) for _ in range(200)])
    assert cost(shared, distances, order) <= cost(shared, distances, right) * 1.05 < chance


def test_the_same_clusters_are_arranged_the_same_way_each_time():
    generator = np.random.default_rng(2)
    points = generator.normal(size=(9, 4))
    distances = np.square(points[:, None] - points).sum(axis=2)
    shared = shared_values(Topology((3, 3)), [1, 1])
    assert best_order(shared, distances, seed=3).tolist() == best_order(shared, distances, seed=3).tolist()
