"""Routing by tiny language models: one unigram model per path says which text is its own.

Hard expectation maximisation: documents go to the path whose model likes their first tokens best, in shards of near
equal size, and each model is fitted on all tokens of its documents. The likelihood of a unigram model is a sum over
tokens, so that what comes of it is a linear router of how often each token is among the first ones.
Source: the idea of SMALLTALK LM (arXiv 2410.03529), which has small transformers instead.
n documents, T tokens, C buckets of tokens, D width of features that it does not look at, P paths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...config import PREFIX_TOKENS, ModelConfig
from ..arrays import Array, Floats
from ..model.layout import module_layout
from .arrange import arrange
from .balance import BALANCED, even, fit_bias, path_sizes, refit_bias, require_filled, unevenness
from .discriminative import fit_logistic
from .features import token_counts
from .router import Doubles, Paths, Router, best

ITERATIONS = 20
SMOOTHING = 1.0
"""Added to every count, so that no token is impossible."""
BIAS_ROUNDS = 100
"""Balancing rounds in each iteration; the end gets more."""


def tiny_router(model: ModelConfig, tokens: Array, start: Paths, *, seed: int) -> Router:
    """The router of the features (n, D + C) of a grid: of `fit_tiny`, arranged so that paths which share modules read
    similar text. Raises CorpusError."""
    router = fit_tiny(tokens, start, path_count=model.path_count, vocab_size=model.vocab_size)
    sizes = [module_layout(model, level).size for level in range(len(model.levels))]
    router = arrange(router, model.topology, sizes, seed=seed, distances=divergences(router))
    return behind(router, model.width)


def fit_tiny(tokens: Array, start: Paths, *, path_count: int, vocab_size: int) -> Router:
    """The router of the counts (n, C) of the first tokens of `tokens` (n, T), from the first labels `start` (n,).

    Raises CorpusError when no bias was found that gives every path a document.
    """
    whole = token_counts(tokens, vocab_size=vocab_size)
    seen = token_counts(tokens[:, :PREFIX_TOKENS], vocab_size=vocab_size)
    wanted, bias, labels = even(len(tokens), path_count), np.zeros(path_count), start
    for _ in range(ITERATIONS):
        weights = fit_unigrams(whole, labels, path_count)
        scores = seen.astype(np.float64) @ weights.T
        found = fit_bias(scores, wanted, start=bias, badness=unevenness, enough=BALANCED, rounds=BIAS_ROUNDS)
        bias, before = found.astype(np.float64), labels
        labels = best(scores + bias)
        if np.array_equal(before, labels):
            break
    router = replace(fit_labelled(tokens, labels, path_count=path_count, vocab_size=vocab_size), bias=found)
    router = refit_bias(router, seen, wanted, badness=unevenness, enough=BALANCED)
    require_filled(path_sizes(router.assign(seen), path_count))
    return router


def fit_labelled(tokens: Array, labels: Paths, *, path_count: int, vocab_size: int) -> Router:
    """The router of one unigram model per path, fitted on all `tokens` (n, T) of its `labels` (n,); without bias."""
    whole = token_counts(tokens, vocab_size=vocab_size)
    width = whole.shape[1]
    return Router(
        weights=fit_unigrams(whole, labels, path_count).astype(np.float32),
        bias=np.zeros(path_count, dtype=np.float32),
        mean=np.zeros(width, dtype=np.float32),
        scale=np.ones(width, dtype=np.float32),
    )


def fit_unigrams(counts: Floats, labels: Paths, path_count: int) -> Doubles:
    """Log probabilities (P, C) of the tokens in each path's documents, of `counts` (n, C)."""
    sums = np.stack([counts[labels == path].sum(axis=0, dtype=np.float64) for path in range(path_count)]) + SMOOTHING
    logs: Doubles = np.log(sums / sums.sum(axis=1, keepdims=True))
    return logs


def divergences(router: Router) -> Doubles:
    """How far the models of `fit_tiny` are from each other (P, P), in nats a token: Jeffreys' divergence."""
    logs = router.weights.astype(np.float64)
    shares = np.exp(logs)
    one_way = (shares * logs).sum(axis=1)[:, None] - shares @ logs.T
    both: Doubles = np.maximum(one_way + one_way.T, 0)
    return both


def behind(router: Router, width: int) -> Router:
    """The same router of features that have `width` (D) more in front, which it does not look at."""
    zeros = np.zeros((router.path_count, width), dtype=np.float32)
    return replace(
        router,
        weights=np.concatenate([zeros, router.weights], axis=1),
        mean=np.concatenate([zeros[0], router.mean]),
        scale=np.concatenate([np.ones(width, dtype=np.float32), router.scale]),
    )


def fit_on_best(
    features: Floats, labels: Paths, first: Router | None, *, width: int, path_count: int, seed: int
) -> Router:
    """The logistic router of who was best, `labels` (n,), on `features` (n, D) or (n, D + C), with `width` D. Counts
    are taken as the scores that `first`, then a router of `fit_tiny` and `behind`, gives with them.

    A few hundred labels say little about each of a thousand tokens. These scores are sums over counts, so that what
    comes of it is a linear router of the features again. Raises CorpusError, as `fit_logistic`.
    """
    if features.shape[1] == width:
        return fit_logistic(features, labels, path_count=path_count, seed=seed)
    assert first is not None and first.width == features.shape[1], (first, features.shape)
    likes = first.weights[:, width:]
    points = np.concatenate([features[:, :width], features[:, width:] @ likes.T], axis=1)
    fit = fit_logistic(points, labels, path_count=path_count, seed=seed)
    slopes = fit.weights[:, width:].astype(np.float64) / fit.scale[width:]
    return Router(
        weights=np.concatenate([fit.weights[:, :width], slopes @ likes], axis=1).astype(np.float32),
        bias=(fit.bias - slopes @ fit.mean[width:]).astype(np.float32),
        mean=np.concatenate([fit.mean[:width], first.mean[width:]]),
        scale=np.concatenate([fit.scale[:width], first.scale[width:]]),
    )
