"""The router: from a document's features to a path, by one linear score per path.

Rule 1: a document goes to the path with the greatest score; of equal scores the lower path number wins.
Rule 2: scores are the same bits on every machine, and for a document alone or among others.
k-means, product k-means and logistic regression all give such a router: the least |x - c|^2 is the greatest
2 c.x - |c|^2. Source: DiPaCo (arXiv 2403.10616) section 2.4.
n documents, D feature width, P paths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import CorpusError, IntegrityError
from ..arrays import Array, Floats
from ..tensor_file import decode, encode

Doubles = npt.NDArray[np.float64]
Paths = npt.NDArray[np.int64]

BLOCK = 1 << 15
"""Scores computed at a time, so that they stay in the cache."""

_TENSORS = ("weights", "bias", "mean", "scale")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    """Weights (P, D) and bias (P,) of the scores, and the mean and scale (D,) that standardise the features."""

    weights: Floats
    bias: Floats
    mean: Floats
    scale: Floats

    @property
    def path_count(self) -> int:
        """P."""
        return len(self.weights)

    @property
    def width(self) -> int:
        """D."""
        return int(self.weights.shape[1])

    def scores(self, features: Floats) -> Doubles:
        """Scores (n, P) of `features` (n, D) for all paths; greater is better."""
        assert features.ndim == 2 and features.shape[1] == self.width, (features.shape, self.width)
        points = standardise(features, self.mean, self.scale)
        weights = self.weights.astype(np.float64)
        result = np.empty((len(points), self.path_count))
        rows = max(BLOCK // self.path_count, 1)
        for start in range(0, len(points), rows):
            result[start : start + rows] = _products(weights, points[start : start + rows]).T
        return result + self.bias.astype(np.float64)

    def assign(self, features: Floats) -> Paths:
        """The path number (n,) of each row of `features` (n, D)."""
        return best(self.scores(features))

    def top(self, features: Floats, count: int) -> Paths:
        """The `count` best path numbers (n, count) of each row, best first, for overlapping shards."""
        assert 1 <= count <= self.path_count, (count, self.path_count)
        order: Paths = np.argsort(-self.scores(features), axis=1, kind="stable")
        return order[:, :count]


def best(scores: Doubles) -> Paths:
    """The path (n,) with the greatest of `scores` (n, P); the lower number of equal ones."""
    paths: Paths = np.argmax(scores, axis=1)
    return paths


def spread(features: Floats) -> tuple[Floats, Floats]:
    """Mean and scale (D,) of `features` (n, D); the scale is 1 where they do not vary. Raises CorpusError."""
    if not np.isfinite(features).all():
        raise CorpusError(
            "features of documents that are not finite numbers",
            hint="the model that makes them has diverged: warm it up again with a lower learning rate",
        )
    mean, scale = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    return mean.astype(np.float32), np.where(scale > 1e-6, scale, 1.0).astype(np.float32)


def standardise(features: Floats, mean: Floats, scale: Floats) -> Doubles:
    """`features` (n, D) less their mean, over their scale."""
    points: Doubles = (features.astype(np.float64) - mean) / scale
    return points


def encode_router(router: Router) -> bytes:
    """The bytes of a router."""
    return encode({name: getattr(router, name) for name in _TENSORS})


def decode_router(data: bytes, *, path_count: int | None = None, width: int | None = None) -> Router:
    """The inverse.

    Raises IntegrityError for wrong names, types or shapes, for values that are not finite, and for a router that has
    not `path_count` paths or features of not `width` values, where these are given.
    """
    tensors, _ = decode(data)
    if tensors.keys() != set(_TENSORS):
        raise IntegrityError(f"a router must hold exactly {', '.join(_TENSORS)}")
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
            raise IntegrityError(f"`{name}` of a router is not finite float32 values")
    _check_shapes(tensors)
    router = Router(**tensors)
    for what, found, expected in (("paths", router.path_count, path_count), ("features", router.width, width)):
        if expected is not None and found != expected:
            raise IntegrityError(f"a router of another run: it has {found} {what}, expected {expected}")
    return router


def _check_shapes(tensors: dict[str, Array]) -> None:
    weights = tensors["weights"]
    if weights.ndim != 2 or not weights.size:
        raise IntegrityError(f"router weights of shape {weights.shape}, expected (paths, features)")
    paths, width = weights.shape
    if {name: tensors[name].shape for name in ("bias", "mean", "scale")} != {
        "bias": (paths,),
        "mean": (width,),
        "scale": (width,),
    }:
        raise IntegrityError("the tensors of a router do not fit together")
    if (tensors["scale"] <= 0).any():
        raise IntegrityError("a router with a scale that is not positive")


def _products(weights: Doubles, points: Doubles) -> Doubles:
    """weights @ points.T (P, n), added up feature by feature: the order of a matrix product is the machine's choice."""
    total = np.zeros((len(weights), len(points)))
    term = np.empty_like(total)
    for weight, value in zip(weights.T, np.ascontiguousarray(points.T), strict=True):
        np.multiply(weight[:, None], value, out=term)
        total += term
    return total
