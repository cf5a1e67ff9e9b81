"""Which cluster gets which place in the grid: paths that share modules should read similar text.

k-means numbers its clusters arbitrarily, but in a grid the numbers decide who shares: with four clusters of two
languages on 2x2 it is chance whether a first-level module serves one language or both. The cost of an arrangement is
the sum over pairs of paths of (values they share) x (squared distance of their clusters); a better one is sought by
swapping pairs.

P paths, L levels. The problem is a quadratic assignment: exact only for few paths, where all arrangements are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...topology import Topology
from .router import Doubles, Router

EXACT_MAX = 6
"""Paths up to which all arrangements are tried: 720 of them."""
STARTS = 8

Order = npt.NDArray[np.int64]


def arrange(
    router: Router, topology: Topology, sizes: Sequence[int], *, seed: int, distances: Doubles | None = None
) -> Router:
    """The same clusters under other numbers; `sizes[l]` is the number of values in a module of level l.

    `distances` (P, P) are those of the clusters; without them `router` is of k-means, whose weights are its centroids
    twice.
    """
    assert router.path_count == topology.path_count, (router.path_count, topology.path_count)
    if distances is None:
        distances = _squared_distances(router)
    order = best_order(shared_values(topology, sizes), distances, seed=seed)
    return replace(router, weights=router.weights[order], bias=router.bias[order])


def _squared_distances(router: Router) -> Doubles:
    centroids = router.weights.astype(np.float64) / 2
    squares = np.square(centroids).sum(axis=1)
    distances: Doubles = np.maximum(squares[:, None] + squares - 2 * centroids @ centroids.T, 0)
    return distances


def shared_values(topology: Topology, sizes: Sequence[int]) -> Doubles:
    """How many values each pair of paths (P, P) has in common."""
    indices = np.array([path.indices for path in topology.paths()])
    same = indices[:, None, :] == indices[None, :, :]
    shared: Doubles = (same * np.array(sizes, dtype=np.float64)).sum(axis=2)
    np.fill_diagonal(shared, 0)
    return shared


def best_order(shared: Doubles, distances: Doubles, *, seed: int) -> Order:
    """The cluster (P,) for each place in the grid, of the least cost that was found; of equal ones the first."""
    count = len(shared)
    if count <= EXACT_MAX:
        orders = [np.array(order) for order in itertools.permutations(range(count))]
    else:
        generator = np.random.default_rng(seed)
        starts = [np.arange(count), *(generator.permutation(count) for _ in range(STARTS - 1))]
        orders = [_swapped(shared, distances, start) for start in starts]
    costs = [cost(shared, distances, order) for order in orders]
    return orders[int(np.argmin(costs))]


def cost(shared: Doubles, distances: Doubles, order: Order) -> float:
    """What an arrangement costs."""
    return math.fsum((shared * distances[np.ix_(order, order)]).ravel().tolist())


def _swapped(shared: Doubles, distances: Doubles, order: Order) -> Order:
    """Swap the pair that gains most, until none gains."""
    order = order.copy()
    while True:
        placed = distances[np.ix_(order, order)]
        # What it would cost to have the cluster of place b in place a, all others staying: (a, b).
        moved = shared @ placed
        here = np.diag(moved)
        gains = moved + moved.T - here[:, None] - here[None, :] + 2 * shared * placed
        gains[np.diag_indices(len(order))] = 0
        place, other = divmod(int(np.argmin(gains)), len(order))
        if gains[place, other] >= -1e-9 * abs(float(here.sum())):
            return order
        order[[place, other]] = order[[other, place]]
