"""Where the text of a grid goes when that grows: children of a path begin with text that their parent read.

Rule: a level's module that becomes several splits the text of all its paths by k-means, and a child gets one part of
it, whatever the path: so what meets in a child module is alike, as `arrange` has it for a first grid. From these labels
the router of all paths is fitted, flat and balanced as every other.

Where new text comes with the growth, the first child of each module goes on with its parent's text, and all other paths
are for the new text, which k-means splits among them. The router learns these labels; what is trained on is the labels
themselves, so that no path loses a document of its own, and none gets one of the other text.
n documents, D feature width, P paths.
"""

from __future__ import annotations

import numpy as np

from ...config import RunConfig
from ...errors import CorpusError
from ...topology import ModuleId, PathId, Topology
from ..arrays import Array, Floats
from .balance import match_bias
from .discriminative import fit_logistic
from .kmeans import fit_kmeans
from .router import Paths, Router
from .unigram import behind, fit_labelled, fit_tiny

FIT_MAX = 20_000
"""Documents that the k-means of new text is fitted on."""


def grown_router(config: RunConfig, features: Floats, tokens: Array, parents: Paths, *, before: Topology) -> Router:
    """The router of the grid that `config` describes, from `features` (n, D) of `tokens` (n, T) and the path (n,) that
    each was routed to in the grid `before`. Raises CorpusError."""
    points, count = features[:, : config.model.width], config.model.path_count
    labels = grown_labels(points, parents, before=before, after=config.topology, seed=config.seed)
    router = fit_kmeans(points, path_count=count, seed=config.seed, begin=labels)
    if config.routing.first != "tiny":
        return router
    tiny = fit_tiny(tokens, router.assign(points), path_count=count, vocab_size=config.model.vocab_size)
    return behind(tiny, config.model.width)


def grown_labels(points: Floats, parents: Paths, *, before: Topology, after: Topology, seed: int) -> Paths:
    """The path (n,) of `after` that each document begins with; none is without one. Raises CorpusError."""
    old = np.array([path.indices for path in before.paths()])[parents]
    new = np.empty_like(old)
    for level, width in enumerate(after.widths):
        parent_of = np.array([after.parent(ModuleId(level, index), before).index for index in range(width)])
        for index in range(before.widths[level]):
            rows, children = np.flatnonzero(old[:, level] == index), np.flatnonzero(parent_of == index)
            new[rows, level] = children[_split(points[rows], len(children), seed=seed)]
    labels: Paths = np.array([after.number(PathId(tuple(map(int, row)))) for row in new], dtype=np.int64)
    return _filled(points, labels, parents, before=before, after=after)


def continued(*, before: Topology, after: Topology) -> Paths:
    """The path of `after` that goes on with the text of each path of `before`: that of the first children."""
    return np.array([after.number(PathId(_first(path, before, after))) for path in before.paths()], dtype=np.int64)


def opened(*, before: Topology, after: Topology) -> Paths:
    """The paths of `after` that are for new text: all others, of which there is one at least."""
    return np.setdiff1d(np.arange(after.path_count), continued(before=before, after=after))


def labels_beside(points: Floats, parents: Paths, *, before: Topology, after: Topology, seed: int) -> Paths:
    """The path (n,) of `after` that each document begins with, of the `points` (n, D) of the text of `before`, routed
    to its `parents`, and behind it of the new text. Every path gets one, if each text has as many as its paths."""
    old, new = continued(before=before, after=after), opened(before=before, after=after)
    known, fresh = points[: len(parents)], points[len(parents) :]
    sample = np.sort(np.random.default_rng(seed).permutation(len(fresh))[:FIT_MAX])
    try:
        parts = fit_kmeans(fresh[sample], path_count=len(new), seed=seed).assign(fresh)
    except CorpusError:  # too much of it begins alike: its paths share it in turn
        parts = np.arange(len(fresh), dtype=np.int64) % len(new)
    return np.concatenate([_each_has_one(known, old[parents], old), _each_has_one(fresh, new[parts], new)])


def router_beside(config: RunConfig, features: Floats, tokens: Array, labels: Paths) -> Router:
    """The router that has learnt the `labels` (n,) of `features` (n, D) and `tokens` (n, T), and gives each path as
    much as they do. Raises CorpusError."""
    count, width = config.model.path_count, config.model.width
    if config.routing.first == "tiny":
        router = behind(fit_labelled(tokens, labels, path_count=count, vocab_size=config.model.vocab_size), width)
    else:
        router = fit_logistic(features[:, :width], labels, path_count=count, seed=config.seed)
    return match_bias(router, features, np.bincount(labels, minlength=count))


def top_beside(router: Router, features: Floats, labels: Paths, count: int, *, new: Paths) -> Paths:
    """The paths (n, count) that train on each document: its label, then the best of those that have the same text."""
    scores, rows = router.scores(features), np.arange(len(labels))
    is_new = np.isin(np.arange(router.path_count), new)
    scores[is_new[None, :] != is_new[labels][:, None]] = -np.inf
    scores[rows, labels] = np.inf
    order: Paths = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return np.where(np.take_along_axis(scores, order, axis=1) == -np.inf, labels[:, None], order)


def _first(path: PathId, before: Topology, after: Topology) -> tuple[int, ...]:
    """The first child of each of its modules."""
    widths = zip(path.indices, before.widths, after.widths, strict=True)
    return tuple(-(-index * width // old) for index, old, width in widths)


def _each_has_one(points: Floats, labels: Paths, paths: Paths) -> Paths:
    """With a document for each of `paths`: that which fits worst into the fullest of them."""
    labels = labels.copy()
    for number in paths:
        if (labels == number).any():
            continue
        rows = np.flatnonzero(labels == np.bincount(labels).argmax())
        gaps = np.square(points[rows] - points[rows].mean(axis=0)).sum(axis=1)
        labels[rows[int(np.argmax(gaps))]] = number
    return labels


def _split(points: Floats, count: int, *, seed: int) -> Paths:
    if count == 1 or not len(points):
        return np.zeros(len(points), dtype=np.int64)
    try:
        return fit_kmeans(points, path_count=count, seed=seed).assign(points)
    except CorpusError:  # too little text went through this module: its children share it in turn
        return np.arange(len(points), dtype=np.int64) % count


def _filled(points: Floats, labels: Paths, parents: Paths, *, before: Topology, after: Topology) -> Paths:
    """With a document for each path: of its parent's if that has one to spare, that which fits worst where it is."""
    labels = labels.copy()
    for number, path in enumerate(after.paths()):
        if (labels == number).any():
            continue
        sizes = np.bincount(labels, minlength=after.path_count)
        spare = sizes[labels] > 1
        of_parent = spare & (parents == before.number(after.parent_path(path, before)))
        rows = np.flatnonzero(of_parent if of_parent.any() else spare)
        if len(rows):
            gaps = np.square(points[rows] - points[rows].mean(axis=0)).sum(axis=1)
            labels[rows[int(np.argmax(gaps))]] = number
    return labels
