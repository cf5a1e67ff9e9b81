"""Where the text of a grid goes when that grows: children of a path begin with text that their parent read.

Rule: a level's module that becomes several splits the text of all its paths by k-means, and a child gets one part of
it, whatever the path: so what meets in a child module is alike, as `arrange` has it for a first grid. From these labels
the router of all paths is fitted, flat and balanced as every other.
n documents, D feature width, P paths.
"""

from __future__ import annotations

import numpy as np

from ...config import RunConfig
from ...errors import CorpusError
from ...topology import ModuleId, PathId, Topology
from ..arrays import Array, Floats
from .kmeans import fit_kmeans
from .router import Paths, Router
from .unigram import behind, fit_tiny


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
