"""k-means and product k-means on the features of documents, with a bias that makes the shards near equal.

Rule: on the documents it was fitted on, a balanced router leaves no path empty; shards are near equal where the data
allow. A plain k-means leaves none empty even without balance.
Source: DiPaCo (arXiv 2403.10616) sections 2.4.1 and 7.3. n documents, D feature width, P paths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import CorpusError
from ..arrays import Array, Floats
from .balance import BALANCED, balance_bias, even, fit_bias, path_sizes, refit_bias, require_filled, unevenness
from .router import Doubles, Paths, Router, best, spread, standardise

RESTARTS = 4
PLACES = 4
"""Documents whose standardised features agree to this many decimals count as one when the data are checked."""
ITERATIONS_MAX = 50
ROUNDS = 20
"""Balancing rounds in each k-means iteration; the end gets more."""


def fit_kmeans(
    features: Floats,
    *,
    path_count: int,
    seed: int,
    balance: bool = True,
    begin: Paths | None = None,
) -> Router:
    """The best of several k-means fits on `features` (n, D); with `balance`, shards of near equal size. They
    begin with centroids by chance; or one does with the means of the labels `begin` (n,), which every path has.

    Raises CorpusError when there are fewer distinct documents than paths.
    """
    _require_documents(len(features), path_count)
    mean, scale = spread(features)
    points = standardise(features, mean, scale)
    distinct = np.unique(points.round(PLACES), axis=0)
    _require_documents(len(distinct), path_count)
    generator = np.random.default_rng(seed)
    if begin is None:
        starts = [_plus_plus(distinct, path_count, generator) for _ in range(RESTARTS)]
    else:
        starts = [np.stack([points[begin == path].mean(axis=0) for path in range(path_count)])]
    fits = [_lloyd(points, start, balance) for start in starts]
    # Documents far from each other as centroids, without bias: not the best, but with no empty path.
    fits.append((_far_apart(distinct, path_count), np.zeros(path_count)))
    routers = [_linear(*fit, mean=mean, scale=scale) for fit in fits]
    if balance:
        wanted = even(len(points), path_count)
        routers = [refit_bias(one, features, wanted, badness=unevenness, enough=BALANCED) for one in routers]
    assigned = [one.assign(features) for one in routers]
    ranks = [_rank(points, *pair, balance=balance) for pair in zip(routers, assigned, strict=True)]
    chosen = ranks.index(min(ranks))
    require_filled(path_sizes(assigned[chosen], path_count))
    return routers[chosen]


def fit_product_kmeans(features: Floats, *, widths: Sequence[int], seed: int, balance: bool = True) -> Router:
    """One k-means per level with more than one module, each on its own part of the features (n, D).

    The parts are contiguous and equally wide, the first ones wider by one if they must. A path's number is made of its
    cluster numbers, the last changing fastest, so cluster i of level l means module i of that level. With `balance`
    a bias per path makes the shards near equal; without it a path may be empty. Raises CorpusError when a part has
    fewer distinct values than clusters, or when a path stays empty.
    """
    kept = [width for width in widths if width > 1] or [1]
    assert features.shape[1] >= len(kept), (features.shape, widths)
    parts = np.array_split(features, len(kept), axis=1)
    routers = [
        fit_kmeans(part, path_count=width, seed=seed, balance=balance) for part, width in zip(parts, kept, strict=True)
    ]
    router = _product(routers)
    return balance_bias(router, features) if balance else router


def _product(routers: Sequence[Router]) -> Router:
    """The router whose score of a path is the sum of the scores of its clusters."""
    counts = [router.path_count for router in routers]
    clusters = np.unravel_index(np.arange(np.prod(counts)), counts)
    pairs = list(zip(routers, clusters, strict=True))
    return Router(
        weights=np.concatenate([router.weights[chosen] for router, chosen in pairs], axis=1),
        bias=np.sum([router.bias[chosen].astype(np.float64) for router, chosen in pairs], axis=0).astype(np.float32),
        mean=np.concatenate([router.mean for router in routers]),
        scale=np.concatenate([router.scale for router in routers]),
    )


def _require_documents(distinct_count: int, path_count: int) -> None:
    if distinct_count < path_count:
        raise CorpusError(
            f"{distinct_count} distinct documents cannot be split over {path_count} paths",
            hint="give the run more text, or a smaller grid",
        )


def _lloyd(points: Doubles, centroids: Doubles, balance: bool) -> tuple[Doubles, Doubles]:
    """Centroids (P, D), and the bias (P,) that is added to the negative squared distances."""
    path_count = len(centroids)
    bias = np.zeros(path_count)
    wanted = even(len(points), path_count)
    last: Array = np.empty(0)
    for _ in range(ITERATIONS_MAX):
        scores = -_distances(points, centroids)
        if balance:
            fitted = fit_bias(scores, wanted, start=bias, badness=unevenness, enough=BALANCED, rounds=ROUNDS)
            bias = fitted.astype(np.float64)
        labels = best(scores + bias)
        if np.array_equal(labels, last):
            break
        last = labels
        centroids = _means(points, labels, centroids, scores)
    return centroids, bias


def _linear(centroids: Doubles, bias: Doubles, *, mean: Floats, scale: Floats) -> Router:
    """The router that prefers the least squared distance less bias; the bias is made for the rounded weights."""
    weights = (2 * centroids).astype(np.float32)
    bias = bias - np.square(weights.astype(np.float64) / 2).sum(axis=1)
    return Router(weights=weights, bias=bias.astype(np.float32), mean=mean, scale=scale)


def _means(points: Doubles, labels: Paths, centroids: Doubles, scores: Doubles) -> Doubles:
    centroids = centroids.copy()
    worst = iter(np.argsort(scores[np.arange(len(labels)), labels], kind="stable"))
    for path in range(len(centroids)):
        members = points[labels == path]
        # A path that lost all its documents starts again at the one that fits worst where it is.
        centroids[path] = members.mean(axis=0) if len(members) else points[next(worst)]
    return centroids


def _rank(points: Doubles, router: Router, labels: Paths, *, balance: bool) -> tuple[bool, float, float]:
    """Fits without an empty path first, then balanced ones, then the closest."""
    sizes = path_sizes(labels, router.path_count)
    uneven = max(unevenness(sizes), BALANCED) if balance else 0.0
    gaps = points - router.weights[labels].astype(np.float64) / 2
    return not sizes.all(), uneven, float(np.square(gaps).sum())


def _plus_plus(points: Doubles, count: int, generator: np.random.Generator) -> Doubles:
    """k-means++: each further centroid is a point drawn with a chance proportional to its squared distance."""
    chosen = [int(generator.integers(len(points)))]
    nearest = _distances(points, points[chosen])[:, 0]
    for _ in range(count - 1):
        nearest[chosen] = 0
        chosen.append(int(generator.choice(len(points), p=nearest / nearest.sum())))
        nearest = np.minimum(nearest, _distances(points, points[chosen[-1:]])[:, 0])
    centroids: Doubles = points[chosen]
    return centroids


def _far_apart(points: Doubles, count: int) -> Doubles:
    """`count` points, each the one furthest from those before it."""
    chosen = [0]
    nearest = _distances(points, points[chosen])[:, 0]
    for _ in range(count - 1):
        chosen.append(int(np.argmax(nearest)))
        nearest = np.minimum(nearest, _distances(points, points[chosen[-1:]])[:, 0])
    centroids: Doubles = points[chosen]
    return centroids


def _distances(points: Doubles, centroids: Doubles) -> Doubles:
    """Squared distances (n, P)."""
    cross = points @ centroids.T
    squares: Doubles = np.square(points).sum(axis=1)[:, None] - 2 * cross + np.square(centroids).sum(axis=1)
    nearest: Doubles = np.maximum(squares, 0)
    return nearest
