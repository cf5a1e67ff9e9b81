"""Features of documents and of positions, against means taken one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models_harness import path_model

from dipaco_p2p.config import PREFIX_TOKENS, ModelConfig
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.core.routing.features import document_features, features, token_counts, token_features

CONFIG = ModelConfig(vocab_size=300, width=16, ffn_width=24, context=80)


@pytest.fixture(scope="module")
def model() -> PathModel:
    return path_model(CONFIG)


def random_tokens(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (count, length)).astype(np.int32)


def hidden(model: PathModel, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.hidden(torch.from_numpy(tokens.astype(np.int64))).double().numpy()


def test_features_are_the_mean_of_the_last_blocks_output_in_any_batching(model):
    prefixes = random_tokens(7, PREFIX_TOKENS)
    expected = hidden(model, prefixes).mean(axis=1)
    np.testing.assert_allclose(features(model, prefixes), expected, atol=1e-6)
    np.testing.assert_allclose(features(model, prefixes, batch=3), expected, atol=1e-6)
    assert features(model, prefixes[:0]).shape == (0, 16)


def test_a_document_s_features_are_the_means_and_where_routers_count_the_counts_of_its_first_tokens(model):
    tokens = random_tokens(6, CONFIG.context)
    plain = document_features(model, tokens, has_counts=False)
    np.testing.assert_array_equal(plain, features(model, tokens[:, :PREFIX_TOKENS]))
    found = document_features(model, tokens, has_counts=True)
    np.testing.assert_array_equal(found[:, :16], plain)
    for row in range(6):
        expected = np.bincount(tokens[row, :PREFIX_TOKENS], minlength=CONFIG.vocab_size)
        np.testing.assert_array_equal(found[row, 16:], expected)


def test_a_large_vocabulary_is_counted_in_buckets():
    counts = token_counts(np.array([[0, 1024, 2048, 5, 1029, 31_999]]), vocab_size=32_000)
    assert counts.shape == (1, 1024)
    assert {int(place): float(counts[0, place]) for place in np.flatnonzero(counts)} == {0: 3.0, 5: 2.0, 255: 1.0}


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_token_features_are_the_means_of_the_last_and_of_all_tokens_seen(model, batch):
    tokens, at = random_tokens(5, CONFIG.context), [64, 32, 33, 80]
    outputs = hidden(model, tokens)
    found = token_features(model, tokens, at=at, batch=batch)
    assert found.shape == (5, 4, 32) and found.dtype == np.float32
    for place, seen in enumerate(at):
        for row in range(5):
            last, everything = outputs[row, seen - 32 : seen].mean(axis=0), outputs[row, :seen].mean(axis=0)
            np.testing.assert_allclose(found[row, place], np.concatenate([last, everything]), atol=2e-7)


def test_at_the_end_of_the_prefix_both_halves_are_the_documents_features(model):
    tokens = random_tokens(4, CONFIG.context)
    expected = features(model, tokens[:, :PREFIX_TOKENS])
    found = token_features(model, tokens, at=[PREFIX_TOKENS, CONFIG.context])[:, 0]
    np.testing.assert_allclose(found, np.concatenate([expected, expected], axis=1), atol=1e-6)


def test_what_comes_later_does_not_change_the_features_of_a_position(model):
    tokens = random_tokens(4, CONFIG.context)
    other = tokens.copy()
    other[:, 48:] = 7
    before, after = (token_features(model, each, at=[48, 80]) for each in (tokens, other))
    np.testing.assert_allclose(before[:, 0], after[:, 0], atol=1e-6)
    assert np.abs(before[:, 1] - after[:, 1]).max() > 1e-3


def test_no_positions_or_no_documents_give_no_features(model):
    tokens = random_tokens(2, 40)
    assert token_features(model, tokens, at=[]).shape == (2, 0, 32)
    assert token_features(model, tokens[:0], at=[32, 40]).shape == (0, 2, 32)


@pytest.mark.parametrize("at", [[31], [41], [32, 0]])
def test_a_position_without_a_prefix_or_beyond_the_tokens_is_a_programmers_error(model, at):
    with pytest.raises(AssertionError):
        token_features(model, random_tokens(2, 40), at=at)
