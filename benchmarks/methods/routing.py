"""Which path each sequence goes to: in training to its shard, elsewhere to be read.

Tiny language models that read ahead look at whole sequences, also at evaluation. They are not a method, since they read
what they should predict, but a bound: how much clusters of this kind are worth. n sequences, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.routing.arrange import arrange
from dipaco_p2p.core.routing.balance import balance_bias, match_bias
from dipaco_p2p.core.routing.discriminative import balanced_labels, best_path
from dipaco_p2p.core.routing.features import token_counts, with_counts
from dipaco_p2p.core.routing.kmeans import fit_kmeans, fit_product_kmeans
from dipaco_p2p.core.routing.router import Doubles, Router
from dipaco_p2p.core.routing.unigram import fit_on_best, fit_unigrams, tiny_router
from dipaco_p2p.errors import CorpusError

from .data import PARTS, Ints, Part
from .jobs import Job

FIT_MAX = 20_000
"""Sequences that a k-means is fitted on, as in a run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The paths (n, m) of each sequence of each part, m = 1 but for overlapping shards; and the router, if any."""

    choices: Mapping[str, Ints]
    router: Router | None = None

    def once(self, part: str) -> Ints:
        """The best path (n,) of each sequence."""
        return self.choices[part][:, 0]


def first_routes(job: Job, features: Mapping[str, Floats], tokens: Mapping[str, Ints]) -> Routes:
    """By k-means on the features (n, D) of each part, by the lot, or by tiny language models on the tokens (n, T) of
    each; the one path, if there is only one."""
    paths = job.model.path_count
    if paths == 1:
        return Routes(choices={part: np.zeros((len(features[part]), 1), dtype=np.int64) for part in PARTS})
    if job.routing == "random":
        drawn = {
            part: np.random.default_rng([job.seed, place]).integers(paths, size=(len(features[part]), 1))
            for place, part in enumerate(PARTS)
        }
        return Routes(choices=drawn)
    routes = _by_router(job, _fit(job, features["train"]), features)
    if job.routing == "tiny":
        chosen = _drawn(job, len(tokens["train"]))
        router = tiny_router(job.model, tokens["train"][chosen], routes.once("train")[chosen], seed=job.seed)
        return _by_router(job, router, router_features(job, features, tokens))
    if job.routing == "tiny whole":
        return Routes(choices=read_ahead(job, tokens, routes.once("train")))
    return routes


def router_features(job: Job, means: Mapping[str, Floats], tokens: Mapping[str, Ints]) -> Mapping[str, Floats]:
    """What the job's routers look at, of each part: `means` (n, D), with counts (n, D + C) if tiny models route."""
    if job.routing != "tiny":
        return means
    return {part: with_counts(means[part], tokens[part], vocab_size=job.model.vocab_size) for part in PARTS}


def rerouted(job: Job, features: Mapping[str, Floats], nats: Doubles, first: Router | None) -> Routes:
    """By who was best: `nats` (n, P) of the router split under all paths; `first` is the router of the first shards."""
    labels, paths = best_path(nats), job.model.path_count
    router = fit_on_best(features["router"], labels, first, width=job.model.width, path_count=paths, seed=job.seed)
    if job.balance == "match":
        router = match_bias(router, features["router"], np.bincount(labels, minlength=paths))
    else:
        router = balance_bias(router, features["router"])
    return _by_router(job, router, features)


def shards(job: Job, routes: Routes, train: Part) -> list[Shard]:
    """One per path; raises CorpusError if one of them is empty. One smaller than a batch is no error: a batch is places
    of an endless stream of shuffled epochs (core/model/shards.py), so that sequences are in it more than once."""
    chosen = routes.choices["train"]
    if job.train_share < 1:
        order = np.random.default_rng(job.seed).permutation(len(chosen))
        chosen = chosen.copy()
        chosen[order[round(job.train_share * len(order)) :]] = -1
    cut = [Shard(tokens=train.tokens[(chosen == number).any(axis=1)]) for number in range(job.model.path_count)]
    for number, shard in enumerate(cut):
        if not len(shard.tokens):
            message = f"no sequence is routed to path {number} of {len(cut)}, so it has nothing to train on"
            raise CorpusError(message, hint="give the experiment more text")
    return cut


def _drawn(job: Job, count: int) -> Ints:
    """The rows that routers are fitted on."""
    return np.sort(np.random.default_rng(job.seed).permutation(count)[:FIT_MAX])


def _fit(job: Job, features: Floats) -> Router:
    points = features[_drawn(job, len(features))]
    if job.routing == "product":
        widths = [level.modules for level in job.model.levels if not level.private]
        return fit_product_kmeans(points, widths=widths, seed=job.seed)
    balance = job.routing != "unbalanced"
    router = fit_kmeans(points, path_count=job.model.path_count, seed=job.seed, balance=balance)
    if job.routing == "kmeans":
        return router
    sizes = [module_layout(job.model, level).size for level in range(len(job.model.levels))]
    return arrange(router, job.model.topology, sizes, seed=job.seed)


def _by_router(job: Job, router: Router, features: Mapping[str, Floats]) -> Routes:
    counts = {part: job.overlap if part == "train" else 1 for part in PARTS}
    return Routes(choices={part: router.top(features[part], counts[part]) for part in PARTS}, router=router)


ROUNDS = 12


def read_ahead(job: Job, tokens: Mapping[str, Ints], start: Ints) -> dict[str, Ints]:
    """The path (n, 1) of each sequence of each part, by all of its `tokens` (n, T); `start` (n,) are first labels of
    `train`."""
    paths, vocab_size = job.model.path_count, job.model.vocab_size
    counts = {name: token_counts(rows, vocab_size=vocab_size) for name, rows in tokens.items()}
    labels = start
    for _ in range(ROUNDS):
        before, models = labels, fit_unigrams(counts["train"], labels, paths)
        labels = balanced_labels(-(counts["train"] @ models.T))
        if np.array_equal(before, labels):
            break
    models = fit_unigrams(counts["train"], labels, paths)
    found = {name: (rows @ models.T).argmax(axis=1)[:, None] for name, rows in counts.items()}
    return found | {"train": labels[:, None]}
