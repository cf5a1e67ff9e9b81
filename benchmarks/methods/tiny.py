"""Routing by tiny language models: one unigram model per path says which sequences are its own.

Hard EM: sequences go to the model that likes their first tokens best, in parts of equal size; then each model is
fitted on all of its sequences. At evaluation the most likely model is taken, whatever the sizes.
Source: the idea of SMALLTALK LM (arXiv 2410.03529), with the smallest models there are. `whole` lets the models look at
the whole sequence, also at evaluation: no method, since it reads what it is to predict, but a bound for clusters.
n sequences, T tokens, V vocabulary, P paths.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.discriminative import balanced_labels
from dipaco_p2p.core.router import Doubles

from .data import Ints

ROUNDS = 12
SMOOTHING = 1.0
"""Added to every count, so that no token is impossible."""


def tiny_routes(
    tokens: Mapping[str, Ints], start: Ints, *, path_count: int, vocab_size: int, whole: bool
) -> dict[str, Ints]:
    """The path (n, 1) of each sequence of each part, `tokens` (n, T); `start` (n,) are first labels of `train`."""
    counts = {name: _counts(rows, vocab_size) for name, rows in tokens.items()}
    seen = counts if whole else {name: _counts(rows[:, :PREFIX_TOKENS], vocab_size) for name, rows in tokens.items()}
    labels = start
    for _ in range(ROUNDS):
        models = _fit(counts["train"], labels, path_count)
        before, labels = labels, balanced_labels(_nats(seen["train"], models))
        if np.array_equal(before, labels):
            break
    models = _fit(counts["train"], labels, path_count)
    found = {name: _nats(rows, models).argmin(axis=1)[:, None] for name, rows in seen.items()}
    return found | {"train": labels[:, None]}


def _counts(rows: Ints, vocab_size: int) -> Doubles:
    """How often each token is in each sequence: (n, V)."""
    found = np.zeros((len(rows), vocab_size))
    np.add.at(found, (np.arange(len(rows))[:, None], rows), 1.0)
    return found


def _fit(counts: Doubles, labels: Ints, path_count: int) -> Doubles:
    """Log probabilities (P, V) of the tokens of each path's sequences."""
    sums = np.stack([counts[labels == path].sum(axis=0) for path in range(path_count)]) + SMOOTHING
    logs: Doubles = np.log(sums / sums.sum(axis=1, keepdims=True))
    return logs


def _nats(counts: Doubles, models: Doubles) -> Doubles:
    nats: Doubles = -(counts @ models.T)
    return nats
