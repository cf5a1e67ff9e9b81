"""The bias of a router: which share of the documents each path gets.

Adding a bias per path to a table of scores moves documents between paths where it costs least. It is found by ascent
on the dual of the transport problem: paths that got too much pay, paths that got too little are paid, in ever smaller
steps; the best bias seen is kept. Source: DiPaCo (arXiv 2403.10616) section 2.4.2, which fits such a bias and does not
say how. n documents, D feature width, P paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...errors import CorpusError
from ..arrays import Array, Floats
from .router import Doubles, Paths, Router, best

STEP = 0.3
"""First step of the ascent, over the typical spread of a document's scores."""
LAST_STEP = 1e-3
"""Last step over first. Tight groups far apart need small ones: on 210 made-up tables, steps that shrank with the root
of their number instead left paths empty in 2, and 4.9 times too full in one; these none, and 1.7 times."""
FULLNESS_MAX = 3.0
"""Fullness that a step acts on at most, so that one overfull path does not throw its bias far away."""
ROUNDS = 400
BALANCED = 1.15
"""Largest shard over mean shard at which k-means stops balancing, if none is below half the mean."""
EVEN = 1.02
"""The same where only the bias is fitted, so that it costs nothing to be stricter."""

Badness = Callable[[Doubles], float]
"""How bad the path sizes (P,) of an assignment are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starvation:
    """How far an assignment is from the histogram that it should have."""

    distance: float
    """Share of the documents that would have to move (total variation distance), 0 to 1."""
    starved: tuple[int, ...]
    """Paths that got less than half of their share."""
    empty: tuple[int, ...]
    """Paths that got nothing of their share."""


def starvation(assignment: Paths, histogram: Array) -> Starvation:
    """Compare the path numbers (n,) with the `histogram` (P,) of what each path should get, in any unit."""
    wanted = _wanted(histogram, len(assignment))
    sizes = path_sizes(assignment, len(wanted))
    return Starvation(
        distance=float(np.abs(sizes - wanted).sum() / 2 / len(assignment)),
        starved=tuple(np.flatnonzero((wanted > 0) & (sizes < wanted / 2)).tolist()),
        empty=tuple(np.flatnonzero((wanted > 0) & (sizes == 0)).tolist()),
    )


def match_bias(router: Router, features: Floats, histogram: Array) -> Router:
    """`router` with the bias that sends `features` (n, D) to the paths in the proportions of `histogram` (P,).

    The cure for starvation (paper section 2.4.2): paths that are rare among the labels are rarer still, or gone, in
    the argmax of a classifier. Never further from the histogram than the given router.
    """
    assert histogram.shape == (router.path_count,), (histogram.shape, router.path_count)
    assert len(features), "no documents to match a bias on"
    wanted = _wanted(histogram, len(features))

    def distance(sizes: Doubles) -> float:
        return float(np.abs(sizes - wanted).sum() / 2 / len(features))

    def badness(sizes: Doubles) -> float:
        # No starved path first, but not at the price of a histogram further away than it was.
        far = distance(sizes)
        return far + int(((sizes == 0) & (wanted >= 1)).sum()) if far <= given else math.inf

    given = distance(path_sizes(router.assign(features), router.path_count))
    return refit_bias(router, features, wanted, badness=badness)


def balance_bias(router: Router, features: Floats) -> Router:
    """`router` with the bias that gives every path nearly the same number of `features` (n, D).

    Raises CorpusError when no bias was found that gives every path a document, as when there are too few distinct
    ones or when two paths have the same weights.
    """
    wanted = even(len(features), router.path_count)
    balanced = refit_bias(router, features, wanted, badness=unevenness, enough=EVEN)
    require_filled(path_sizes(balanced.assign(features), router.path_count))
    return balanced


def refit_bias(router: Router, features: Floats, wanted: Doubles, *, badness: Badness, enough: float = 0.0) -> Router:
    """`router` with the bias of `fit_bias` for `features` (n, D), starting from the bias that it has."""
    scores = replace(router, bias=np.zeros_like(router.bias)).scores(features)
    return replace(router, bias=fit_bias(scores, wanted, start=router.bias, badness=badness, enough=enough))


def fit_bias(
    scores: Doubles, wanted: Doubles, *, start: Array, badness: Badness, enough: float = 0.0, rounds: int = ROUNDS
) -> Floats:
    """The bias (P,) for `scores` (n, P) with the least badness seen in `rounds` steps from `start` (P,).

    Stops at a badness of `enough`. What is judged is the assignment by the rounded bias that is returned.
    """
    bias = start.astype(np.float64)
    unit = STEP * float((scores + bias).std(axis=1).mean()) if len(scores) else 0.0
    found, least = start.astype(np.float32), math.inf
    for number in range(rounds):
        rounded = bias.astype(np.float32)
        sizes = path_sizes(best(scores + rounded), len(wanted))
        if (worth := badness(sizes)) < least:
            found, least = rounded, worth
        if least <= enough:
            break
        step = unit * LAST_STEP ** (number / rounds)
        bias = bias - step * (np.minimum(_fullness(sizes, wanted), FULLNESS_MAX) - 1)
    return found


def even(documents: int, path_count: int) -> Doubles:
    """The sizes (P,) of equal shards."""
    return np.full(path_count, documents / path_count)


def path_sizes(assignment: Paths, path_count: int) -> Doubles:
    """Documents per path (P,)."""
    return np.bincount(assignment, minlength=path_count).astype(np.float64)


def unevenness(sizes: Doubles) -> float:
    """Largest shard over mean shard; infinite with an empty one, and above BALANCED with one below half the mean."""
    least = float(sizes.min() / sizes.mean()) if sizes.sum() else 0.0
    return max(float(sizes.max() / sizes.mean()), BALANCED / 2 / least) if least else math.inf


def require_filled(sizes: Doubles) -> None:
    """Raise CorpusError if a path got no document."""
    if not sizes.all():
        empty = int(np.flatnonzero(sizes == 0)[0])
        raise CorpusError(
            f"path {empty} of {len(sizes)} gets none of {int(sizes.sum())} documents: they are too few or too alike",
            hint="give the run more text, or a smaller grid",
        )


def _wanted(histogram: Array, documents: int) -> Doubles:
    counts = histogram.astype(np.float64)
    assert counts.min() >= 0 and counts.sum() > 0, histogram
    sizes: Doubles = counts / counts.sum() * documents
    return sizes


def _fullness(sizes: Doubles, wanted: Doubles) -> Doubles:
    """Sizes over wanted sizes; a path that should get nothing is right when it is empty, else overfull."""
    fullness = np.where(sizes > 0, FULLNESS_MAX, 1.0)
    np.divide(sizes, wanted, out=fullness, where=wanted > 0)
    return fullness
