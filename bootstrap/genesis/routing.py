"""Which sequences each path gets: features of the frozen warm-up model, routers fitted on them, shards cut with them.

Every step is a function of its arguments, so a coordinator that died in the middle comes to the same again.
Source: DiPaCo (arXiv 2403.10616) sections 2.4.1 (by features), 2.4.2 (by the paths), 2.5 (overlap), 2.4.3 (tokens).
n sequences, D width, P paths, J windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.config import RunConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.shards import Shard, encode_shard
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.core.routing.arrange import arrange
from dipaco_p2p.core.routing.balance import balance_bias, match_bias
from dipaco_p2p.core.routing.discriminative import balanced_labels, best_path, fit_logistic
from dipaco_p2p.core.routing.evaluate import WINDOW, window_starts
from dipaco_p2p.core.routing.features import document_features, token_features
from dipaco_p2p.core.routing.kmeans import fit_kmeans, fit_product_kmeans
from dipaco_p2p.core.routing.router import Paths, Router, encode_router
from dipaco_p2p.core.routing.unigram import fit_on_best, tiny_router
from dipaco_p2p.errors import CorpusError
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import BlobRef, ShardRef

from ..progress import stage
from ..text.sequences import PARTS, Sequences

Flat = NDArray[np.float32]
Features = dict[str, Flat]
"""Features (n, D) of each part of the sequences."""

ROUTER_FIT_MAX = 20_000
"""Sequences that a k-means is fitted on; more changes its centroids by less than another seed does."""
AHEAD_TOKENS = 64
"""A token router is fitted on which path is best at this many tokens to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """What a discriminative fit gives."""

    router: Router
    token_router: Router


def routing_features(config: RunConfig, frozen: PathModel, sequences: Sequences) -> Features:
    """Features of the first 32 tokens of every sequence, by the `frozen` model of the warm-up."""
    has_counts = config.routing.has_counts
    with stage("Reading the features that route"):
        return {
            name: document_features(frozen, getattr(sequences, name).tokens, has_counts=has_counts) for name in PARTS
        }


def first_router(config: RunConfig, train: Flat, tokens: NDArray[np.int32]) -> Router:
    """k-means, arranged so that paths which share modules read similar text; tiny language models that begin with its
    clusters, arranged as well; or one k-means per level on its own part of the features, which arranges itself.

    `train` (n, D) are the features of `tokens` (n, T). Raises CorpusError.
    """
    chosen = np.sort(np.random.default_rng(config.seed).permutation(len(train))[:ROUTER_FIT_MAX])
    if config.routing.first == "product":
        widths = [level.modules for level in config.model.levels if not level.private and level.modules > 1]
        if len(widths) > 1:
            return fit_product_kmeans(train[chosen], widths=widths, seed=config.seed)
    points = train[chosen, : config.model.width]
    router = fit_kmeans(points, path_count=config.model.path_count, seed=config.seed)
    if config.routing.first == "tiny":
        return tiny_router(config.model, tokens[chosen], router.assign(points), seed=config.seed)
    sizes = [module_layout(config.model, level).size for level in range(len(config.model.levels))]
    return arrange(router, config.topology, sizes, seed=config.seed)


def fit_routers(
    config: RunConfig,
    frozen: PathModel,
    tokens: NDArray[np.int32],
    vectors: Flat,
    table: NDArray[np.float64],
    *,
    first: Router,
) -> Routers:
    """Routers from who predicted the router split best: `tokens` (n, T), their features (n, D), nats (n, J, P); `first`
    is the run's first router."""
    paths = config.model.path_count
    router = _document_router(config, vectors, table.sum(axis=1), first)
    starts = window_starts(tokens.shape[1])
    points = token_features(frozen, tokens, at=starts)
    ahead = best_path(_ahead(table).reshape(-1, paths))
    token_router = fit_logistic(points.reshape(len(ahead), -1), ahead, path_count=paths, seed=config.seed)
    return Routers(router=router, token_router=token_router)


def _document_router(config: RunConfig, vectors: Flat, nats: NDArray[np.float64], first: Router) -> Router:
    """Fitted on who was best (n, P); a path that never was gets its share all the same, else its shard were empty."""
    paths, labels, width = config.model.path_count, best_path(nats), config.model.width
    counts = np.bincount(labels, minlength=paths)
    is_matched = config.routing.balance == "match" and bool(counts.all())
    wanted = labels if is_matched else balanced_labels(nats)
    router = fit_on_best(vectors, wanted, first, width=width, path_count=paths, seed=config.seed)
    return match_bias(router, vectors, counts) if is_matched else balance_bias(router, vectors)


def _ahead(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Nats (n, J, P) of the next `AHEAD_TOKENS` tokens from each window on."""
    sums = np.cumsum(table[:, ::-1], axis=1)[:, ::-1]
    windows = AHEAD_TOKENS // WINDOW
    beyond = np.zeros_like(sums)
    beyond[:, :-windows] = sums[:, windows:]
    return sums - beyond


def cut_shards(
    config: RunConfig,
    store: Store,
    router: Router,
    tokens: NDArray[np.int32],
    vectors: Flat,
    *,
    chosen: Paths | None = None,
) -> tuple[ShardRef, ...]:
    """One shard per path, as blobs in `store`: of the paths that the `router` gives each sequence, or of those `chosen`
    (n, overlap). Raises CorpusError if a path would get nothing."""
    chosen = router.top(vectors, config.routing.overlap) if chosen is None else chosen
    refs = []
    for number, path in enumerate(config.topology.paths()):
        rows = tokens[(chosen == number).any(axis=1)]
        if not len(rows):
            message = f"no sequence of the text is routed to {path}, so it has nothing to train on"
            raise CorpusError(message, hint="give the run more text, or a smaller grid")
        refs.append(ShardRef(path=path, blob=store.put(encode_shard(Shard(tokens=rows))), sequences=len(rows)))
    return tuple(refs)


def router_blob(store: Store, router: Router) -> BlobRef:
    """Keep a router; its reference."""
    return store.put(encode_router(router))
