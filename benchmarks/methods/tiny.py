"""Routing by tiny language models that read ahead: they look at whole sequences, also at evaluation.

No method, since it reads what it is to predict, but a bound that says how much clusters of this kind are worth; the
method is core/tiny.py. n sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dipaco_p2p.core.discriminative import balanced_labels
from dipaco_p2p.core.features import token_counts
from dipaco_p2p.core.tiny import fit_unigrams

from .data import Ints
from .jobs import Job

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
