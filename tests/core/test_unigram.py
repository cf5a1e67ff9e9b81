"""Routing by unigram models, against likelihoods taken token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.routing.discriminative import fit_logistic
from dipaco_p2p.core.routing.features import token_counts
from dipaco_p2p.core.routing.router import Router
from dipaco_p2p.core.routing.unigram import behind, divergences, fit_on_best, fit_tiny, fit_unigrams
from dipaco_p2p.errors import CorpusError

VOCAB = 340
KINDS = 3


def texts(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Documents (n, 64) of three kinds with words of their own, and the kinds (n,)."""
    generator = np.random.default_rng(seed)
    kinds = generator.integers(0, KINDS, count)
    return generator.integers(0, 40, (count, 64)) + 100 * kinds[:, None], kinds


def fitted(tokens: np.ndarray, seed: int = 1) -> Router:
    start = np.random.default_rng(seed).integers(0, KINDS, len(tokens))
    return fit_tiny(tokens, start, path_count=KINDS, vocab_size=VOCAB)


def assigned(router: Router, tokens: np.ndarray) -> np.ndarray:
    return router.assign(token_counts(tokens[:, :PREFIX_TOKENS], vocab_size=VOCAB))


@pytest.mark.parametrize("seed", range(4))
def test_texts_of_different_words_come_to_different_paths_also_new_ones(seed: int) -> None:
    tokens, kinds = texts(300, seed=seed)
    router = fitted(tokens, seed)
    assert len(set(zip(kinds.tolist(), assigned(router, tokens).tolist(), strict=True))) == KINDS
    new_tokens, new_kinds = texts(50, seed=seed + 100)
    assert len(set(zip(new_kinds.tolist(), assigned(router, new_tokens).tolist(), strict=True))) == KINDS


def test_shards_are_near_equal_where_one_kind_is_most_of_the_text() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 200, (400, 64)) // generator.integers(1, 8, (400, 1))
    sizes = np.bincount(assigned(fitted(tokens), tokens), minlength=KINDS)
    assert sizes.max() <= 1.15 * sizes.mean() and sizes.min() >= 0.5 * sizes.mean(), sizes


def test_a_score_is_the_log_likelihood_of_the_first_tokens() -> None:
    tokens, kinds = texts(60)
    logs = fit_unigrams(token_counts(tokens, vocab_size=VOCAB), kinds, KINDS)
    for path in range(KINDS):
        words = tokens[kinds == path].ravel().tolist()
        for token in (5, 105, 339):
            assert math.isclose(logs[path, token], math.log((words.count(token) + 1) / (len(words) + VOCAB)))
    router = Router(
        weights=logs.astype(np.float32),
        bias=np.zeros(KINDS, dtype=np.float32),
        mean=np.zeros(VOCAB, dtype=np.float32),
        scale=np.ones(VOCAB, dtype=np.float32),
    )
    scores = router.scores(token_counts(tokens[:5, :PREFIX_TOKENS], vocab_size=VOCAB))
    expected = [[logs[path, tokens[row, :PREFIX_TOKENS]].sum() for path in range(KINDS)] for row in range(5)]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_the_divergence_of_two_models_is_what_each_loses_on_the_others_text() -> None:
    router = fitted(texts(300)[0])
    shares = np.exp(router.weights.astype(np.float64))
    for one in range(KINDS):
        for other in range(KINDS):
            ratio = np.log(shares[one] / shares[other])
            expected = ((shares[one] - shares[other]) * ratio).sum()
            assert math.isclose(divergences(router)[one, other], expected, rel_tol=1e-4, abs_tol=1e-6)


def test_features_in_front_are_not_looked_at() -> None:
    tokens, _ = texts(100)
    router = fitted(tokens)
    counts = token_counts(tokens[:, :PREFIX_TOKENS], vocab_size=VOCAB)
    front = np.random.default_rng(0).standard_normal((100, 7)).astype(np.float32) * 1e6
    wider = behind(router, 7)
    assert wider.width == 7 + VOCAB
    np.testing.assert_array_equal(wider.scores(np.concatenate([front, counts], axis=1)), router.scores(counts))


def test_a_logistic_router_on_it_has_the_scores_of_one_that_is_given_the_likelihoods() -> None:
    tokens, kinds = texts(200)
    first = behind(fitted(tokens), 4)
    front = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    counts = token_counts(tokens[:, :PREFIX_TOKENS], vocab_size=VOCAB)
    features = np.concatenate([front, counts], axis=1)
    labels = np.where(front[:, 0] > 1, 0, kinds)
    found = fit_on_best(features, labels, first, width=4, path_count=KINDS, seed=0)
    points = np.concatenate([front, counts @ first.weights[:, 4:].T], axis=1)
    expected = fit_logistic(points, labels, path_count=KINDS, seed=0)
    assert found.width == first.width
    np.testing.assert_allclose(found.scores(features), expected.scores(points), atol=1e-3)
    assert (found.assign(features) == labels).mean() > 0.9


def test_the_same_text_for_every_path_is_one_clear_line() -> None:
    tokens = np.zeros((10, 64), dtype=np.int64)
    with pytest.raises(CorpusError):
        fit_tiny(tokens, np.zeros(10, dtype=np.int64), path_count=KINDS, vocab_size=VOCAB)
