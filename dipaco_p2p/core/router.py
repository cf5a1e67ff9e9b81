"""The router: from a document's features to a path, fitted by k-means with a bias that balances the shards.

Rule 1: after standardising, a document goes to the path with the least squared distance plus bias.
Rule 2: on the documents it was fitted on, no path is empty; shards are near equal where the data allow.
Source: DiPaCo (arXiv 2403.10616) section 2.4.1; balancing by dual ascent on the transport problem.
n documents, D feature width, P paths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import CorpusError, IntegrityError
from .arrays import Array, Floats
from .codec import decode, encode

Doubles = npt.NDArray[np.float64]

RESTARTS = 4
BALANCED = 1.15
"""Largest shard over mean shard at which balancing stops, if none is below half the mean."""
PLACES = 4
"""Documents whose standardised features agree to this many decimals count as one when the data are checked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    """Centroids (P, D) of standardised features, bias (P,), and the mean and scale (D,) of the features."""

    centroids: Floats
    bias: Floats
    mean: Floats
    scale: Floats

    def assign(self, features: Floats) -> npt.NDArray[np.int64]:
        """The path number (n,) of each row of `features` (n, D)."""
        points = _standardise(features, self.mean, self.scale)
        return _assign(_distances(points, self.centroids.astype(np.float64)), self.bias.astype(np.float64))


def fit_kmeans(features: Floats, *, path_count: int, seed: int, iterations: int = 50, balance: bool = True) -> Router:
    """The best of several k-means fits on `features` (n, D); with `balance`, shards of near equal size.

    Raises CorpusError when there are fewer distinct documents than paths.
    """
    _require_documents(len(features), path_count)
    mean, scale = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    mean, scale = mean.astype(np.float32), np.where(scale > 1e-6, scale, 1.0).astype(np.float32)
    points = _standardise(features, mean, scale)
    distinct = np.unique(points.round(PLACES), axis=0)
    _require_documents(len(distinct), path_count)
    generator = np.random.default_rng(seed)
    starts = [_plus_plus(distinct, path_count, generator) for _ in range(RESTARTS)]
    fits = [_lloyd(points, start, iterations, balance) for start in starts]
    # Distinct documents as centroids, without bias: far from the best, but never with an empty path.
    fits.append((starts[0].astype(np.float32), np.zeros(path_count, dtype=np.float32)))
    centroids, bias = min(fits, key=lambda fit: _rank(points, fit[0], fit[1], balance))
    return Router(centroids=centroids, bias=bias, mean=mean, scale=scale)


def _require_documents(distinct_count: int, path_count: int) -> None:
    if distinct_count < path_count:
        raise CorpusError(
            f"{distinct_count} distinct documents cannot be split over {path_count} paths",
            hint="give the run more text, or a smaller grid",
        )


def encode_router(router: Router) -> bytes:
    """The bytes of a router."""
    return encode({name: getattr(router, name) for name in ("centroids", "bias", "mean", "scale")})


def decode_router(data: bytes) -> Router:
    """The inverse; raises IntegrityError for wrong names, types or shapes, or values that are not finite."""
    tensors, _ = decode(data)
    if tensors.keys() != {"centroids", "bias", "mean", "scale"}:
        raise IntegrityError("a router must hold exactly centroids, bias, mean and scale")
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
            raise IntegrityError(f"`{name}` of a router is not finite float32 values")
    router = Router(**tensors)
    if router.centroids.ndim != 2 or not router.centroids.size:
        raise IntegrityError(f"router centroids of shape {router.centroids.shape}, expected (paths, features)")
    paths, width = router.centroids.shape
    if router.bias.shape != (paths,) or router.mean.shape != (width,) or router.scale.shape != (width,):
        raise IntegrityError("the tensors of a router do not fit together")
    if (router.scale <= 0).any():
        raise IntegrityError("a router with a scale that is not positive")
    return router


def _lloyd(points: Doubles, centroids: Doubles, iterations: int, balance: bool) -> tuple[Floats, Floats]:
    bias = np.zeros(len(centroids))
    last: Array = np.empty(0)
    for _ in range(iterations):
        distances = _distances(points, centroids)
        bias = _balance(distances, bias, rounds=20) if balance else bias
        labels = _assign(distances, bias)
        if np.array_equal(labels, last):
            break
        last = labels
        centroids = _means(points, labels, centroids, distances)
    rounded = centroids.astype(np.float32)
    if balance:
        bias = _balance(_distances(points, rounded.astype(np.float64)), bias, rounds=400)
    return rounded, bias.astype(np.float32)


def _balance(distances: Doubles, bias: Doubles, *, rounds: int) -> Doubles:
    """Raise the price of full paths and lower that of empty ones; the best prices seen.

    Ascent on the dual of the balanced assignment: the step is in units of the typical distance and shrinks.
    """
    unit = distances.mean() / 8
    best, best_unevenness = bias, math.inf
    for number in range(rounds):
        fullness = _fullness(_assign(distances, bias), distances.shape[1])
        unevenness = _unevenness(fullness)
        if unevenness < best_unevenness:
            best, best_unevenness = bias, unevenness
        if unevenness <= BALANCED:
            break
        bias = bias + unit / math.sqrt(1 + number) * (np.minimum(fullness, 3) - 1)
    centred: Doubles = best - best.mean()
    return centred


def _fullness(labels: Array, path_count: int) -> Doubles:
    """Size of each shard over the mean size."""
    counts = np.bincount(labels, minlength=path_count).astype(np.float64)
    return counts * np.float64(path_count / len(labels))


def _unevenness(fullness: Doubles) -> float:
    """Fullness of the largest shard; infinite with an empty one, and above BALANCED with one below half the mean."""
    least = float(fullness.min())
    return max(float(fullness.max()), BALANCED / 2 / least) if least else math.inf


def _means(points: Doubles, labels: Array, centroids: Doubles, distances: Doubles) -> Doubles:
    centroids = centroids.copy()
    worst = iter(np.argsort(-distances[np.arange(len(labels)), labels], kind="stable"))
    for path in range(len(centroids)):
        members = points[labels == path]
        # A path that lost all its documents starts again at the one that fits worst where it is.
        centroids[path] = members.mean(axis=0) if len(members) else points[next(worst)]
    return centroids


def _rank(points: Doubles, centroids: Floats, bias: Floats, balance: bool) -> tuple[bool, float, float]:
    """Fits without an empty path first, then balanced ones, then the closest."""
    distances = _distances(points, centroids.astype(np.float64))
    labels = _assign(distances, bias.astype(np.float64))
    fullness = _fullness(labels, len(centroids))
    unevenness = max(_unevenness(fullness), BALANCED) if balance else 0.0
    return bool((fullness == 0).any()), unevenness, float(distances[np.arange(len(labels)), labels].sum())


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


def _standardise(features: Floats, mean: Floats, scale: Floats) -> Doubles:
    return (features.astype(np.float64) - mean) / scale


def _distances(points: Doubles, centroids: Doubles) -> Doubles:
    """Squared distances (n, P)."""
    cross = points @ centroids.T
    squares: Doubles = np.square(points).sum(axis=1)[:, None] - 2 * cross + np.square(centroids).sum(axis=1)
    nearest: Doubles = np.maximum(squares, 0)
    return nearest


def _assign(distances: Doubles, bias: Doubles) -> npt.NDArray[np.int64]:
    labels: npt.NDArray[np.int64] = np.argmin(distances + bias, axis=1)
    return labels
