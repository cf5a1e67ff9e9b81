"""Routing by tiny language models, as `first = "tiny"` of a run file; and as a bound, by models that read ahead.

`read_ahead` lets the models look at whole sequences, also at evaluation: no method, since it reads what it is to
predict, but it says how much clusters of this kind are worth. n sequences, T tokens, P paths.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dipaco_p2p.core.arrange import arrange
from dipaco_p2p.core.discriminative import balanced_labels
from dipaco_p2p.core.features import token_counts
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.core.router import Router
from dipaco_p2p.core.tiny import behind, divergences, fit_tiny, fit_unigrams

from .data import Ints
from .jobs import Job

ROUNDS = 12


def by_first_tokens(job: Job, tokens: Ints, start: Ints, *, fit_max: int) -> Router:
    """The router of features and counts, from the training text's `tokens` (n, T) and first labels `start` (n,)."""
    model = job.model
    chosen = np.sort(np.random.default_rng(job.seed).permutation(len(start))[:fit_max])
    router = fit_tiny(tokens[chosen], start[chosen], path_count=model.path_count, vocab_size=model.vocab_size)
    sizes = [module_layout(model, level).size for level in range(len(model.levels))]
    router = arrange(router, model.topology, sizes, seed=job.seed, distances=divergences(router))
    return behind(router, model.width)


def read_ahead(job: Job, tokens: Mapping[str, Ints], start: Ints) -> dict[str, Ints]:
    """The path (n, 1) of each sequence of each part, by all of its tokens (n, T)."""
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
