"""Discriminative routing: documents labelled by the path that predicts them best, and a linear router of the labels.

1. All paths score the documents of the router split; `best_path` labels each with its best path.
2. `fit_logistic` learns the labels from the features that every router sees.
3. `match_bias` (the paper's) or `balance_bias` of balance.py cures the starvation of rare paths.
`balanced_labels` replaces 1 where every path must get an equal share.
Source: DiPaCo (arXiv 2403.10616) sections 2.4.2 and 7.2.1; labels by capacity: SMALLTALK LM (arXiv 2410.03529).
n documents, D feature width, P paths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import CorpusError
from ..arrays import Floats
from .balance import even, fit_bias, unevenness
from .router import Doubles, Paths, Router, spread, standardise

STRENGTHS = (1e4, 1e3, 1e2, 1e1, 1e0)
"""Precisions of the Gaussian prior of the weights that are tried, strongest first."""
CHOICE_MAX = 4096
"""Rows that the strength is chosen on, about: a prior's precision is the same for any number of documents."""
RUNS = 50
"""Runs of neighbouring rows that are held out as a whole: rows of one document must not be on both sides."""
HELD_OUT = 5
"""One run in this many is held out."""
ITERATIONS = 40
TOLERANCE = 1e-5
"""Gain in nats a step, or greatest partial derivative, at which a fit ends before ITERATIONS."""
RIDGE = 1e-6
"""Added to the second moments of the features, which need not be of full rank."""


def best_path(nats: Doubles) -> Paths:
    """The label (n,) of each document: the path with the least of `nats` (n, P), the lower number of equal ones."""
    labels: Paths = np.argmin(nats, axis=1)
    return labels


def balanced_labels(nats: Doubles) -> Paths:
    """Labels (n,) with path sizes that differ by at most one, at nearly the least total of `nats` (n, P).

    Each path has room for its share only; documents choose in the order of their best likelihood, each the best path
    that still has room. Before that each path gets the price at which demand nearly meets its room: of what the optimal
    balanced assignment gains over a random one, the choice without prices gained 54 to 94 %, with them 100.0 % (four
    tables of made-up nats, 4 and 16 paths). Raises CorpusError with fewer documents than paths.
    """
    count, path_count = nats.shape
    if count < path_count:
        raise CorpusError(
            f"{count} documents cannot be split over {path_count} paths",
            hint="give the run a larger router split, or a smaller grid",
        )
    prices = fit_bias(-nats, even(count, path_count), start=np.zeros(path_count), badness=unevenness, enough=1.0)
    costs = nats - prices
    return _fill(costs, np.argsort(costs.min(axis=1), kind="stable"))


def _fill(costs: Doubles, order: Paths) -> Paths:
    """The path (n,) with the least of `costs` (n, P) that still has room when a document's turn in `order` comes."""
    count, path_count = costs.shape
    room, larger = divmod(count, path_count)
    sizes, closed = np.zeros(path_count, dtype=np.int64), np.zeros(path_count)
    labels = np.empty(count, dtype=np.int64)
    for document in order:
        path = int(np.argmin(costs[document] + closed))
        labels[document] = path
        sizes[path] += 1
        larger -= int(sizes[path] > room)
        closed[sizes >= room + (larger > 0)] = np.inf
    return labels


def fit_logistic(
    features: Floats, labels: Paths, *, path_count: int, seed: int, strength: float | None = None
) -> Router:
    """The logistic regression of `labels` (n,), path numbers, on `features` (n, D), by full-batch L-BFGS.

    The weights have a Gaussian prior of precision `strength`; None takes the one of STRENGTHS that predicts held-out
    rows best, `seed` says which those are; the rows of one document must be neighbours. Raises CorpusError without
    documents or with features that are not finite.
    """
    assert labels.shape == (len(features),), (labels.shape, features.shape)
    assert not len(labels) or 0 <= labels.min() <= labels.max() < path_count, (labels.min(), labels.max(), path_count)
    if not len(labels):
        raise CorpusError("no documents to fit a router on", hint="give the run a larger router split")
    mean, scale = spread(features)
    points = torch.from_numpy(standardise(features, mean, scale))
    targets = torch.from_numpy(labels.astype(np.int64))
    start = None
    if strength is None:
        strength, start = _choose_strength(points, targets, path_count, seed)
    fit = _minimise(points, targets, path_count, strength, start)
    return Router(weights=_floats(fit.weights), bias=_floats(fit.bias), mean=mean, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """Weights (P, D) and bias (P,) on standardised features."""

    weights: Tensor
    bias: Tensor

    def loss(self, points: Tensor, targets: Tensor) -> float:
        """Mean cross-entropy of the `targets` (n,)."""
        return float(F.cross_entropy(points @ self.weights.T + self.bias, targets))


def _choose_strength(points: Tensor, targets: Tensor, path_count: int, seed: int) -> tuple[float, _Fit | None]:
    """The strength with the least cross-entropy on held-out documents, and its fit; ends when it gets worse."""
    count = len(points)
    runs = min(RUNS, count)
    place = np.random.default_rng(seed).permutation(runs)[np.arange(count) * runs // count]
    used, held = place < max(runs * CHOICE_MAX // count, 2), place % HELD_OUT == 0
    training, testing = torch.from_numpy(used & ~held), torch.from_numpy(used & held)
    chosen, least, fit = STRENGTHS[0], math.inf, None
    for strength in STRENGTHS if training.any() else ():
        trial = _minimise(points[training], targets[training], path_count, strength, start=fit)
        if (loss := trial.loss(points[testing], targets[testing])) >= least:
            break
        chosen, least, fit = strength, loss, trial
    return chosen, fit


def _minimise(points: Tensor, targets: Tensor, path_count: int, strength: float, start: _Fit | None = None) -> _Fit:
    """The minimum of cross-entropy plus strength / 2n (|weights|^2 + |bias - prior|^2).

    The prior is the labels' own log histogram, so that a path without labels has a minimum too. Solved for
    weights @ lower, in which the features are uncorrelated: those of a language model are not, and would need many
    times the steps.
    """
    count, width = points.shape
    counts = torch.bincount(targets, minlength=path_count).double()
    prior = ((counts + 0.5) / (count + path_count / 2)).log()
    start = start or _Fit(weights=torch.zeros(path_count, width, dtype=torch.float64), bias=prior)
    lower = torch.linalg.cholesky(points.T @ points / count + (strength / count + RIDGE) * torch.eye(width).double())
    white = torch.linalg.solve_triangular(lower, points.T, upper=False).T.contiguous()
    turned, bias = (start.weights @ lower).requires_grad_(), start.bias.clone().requires_grad_()

    def weights() -> Tensor:
        return cast(Tensor, torch.linalg.solve_triangular(lower, turned, upper=False, left=False))

    def closure() -> Tensor:
        solver.zero_grad()
        penalty = weights().square().sum() + (bias - prior).square().sum()
        loss = F.cross_entropy(white @ turned.T + bias, targets) + strength / (2 * count) * penalty
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver = torch.optim.LBFGS(
        [turned, bias],
        max_iter=ITERATIONS,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE,
        line_search_fn="strong_wolfe",
    )
    solver.step(closure)  # type: ignore[no-untyped-call]
    return _Fit(weights=weights().detach(), bias=bias.detach())


def _floats(values: Tensor) -> Floats:
    array: Floats = values.numpy().astype(np.float32)
    return array
