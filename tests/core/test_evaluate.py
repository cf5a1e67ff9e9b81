"""Evaluation: which targets count, and that each sequence meets its own path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dipaco_p2p.config import PREFIX_TOKENS, LevelConfig, ModelConfig
from dipaco_p2p.core.evaluate import Evaluation, counted_tokens, evaluate_routed, losses
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules

CONFIG = ModelConfig(
    vocab_size=258,
    width=16,
    heads=2,
    ffn_width=24,
    context=64,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(modules=2, blocks=1)),
)
SEQUENCES = np.random.default_rng(0).integers(0, 258, (7, 64)).astype(np.int32)


def flats(seed: int) -> list[np.ndarray]:
    return [flat * 3 for flat in initial_modules(CONFIG, seed=seed).values()]


def make_model(seed: int) -> PathModel:
    model = PathModel(CONFIG)
    load_modules(model, flats(seed))
    return model


def test_exactly_the_targets_from_position_32_on_count():
    model = make_model(0)
    log_probs = F.log_softmax(model(torch.from_numpy(SEQUENCES.astype(np.int64))).detach().double(), dim=-1).numpy()
    expected = [
        -math.fsum(log_probs[row, position - 1, SEQUENCES[row, position]] for position in range(PREFIX_TOKENS, 64))
        for row in range(7)
    ]
    np.testing.assert_allclose(losses(model, SEQUENCES), expected, rtol=1e-5)
    np.testing.assert_allclose(losses(model, SEQUENCES, batch=3), expected, rtol=1e-5)
    assert counted_tokens(64) == 32 and counted_tokens(PREFIX_TOKENS) == 0


def test_a_prefix_token_counts_only_as_context():
    """With an attention that sees nothing, the first 31 tokens change no loss at all, and the token at 32 does."""
    blind = [flat.copy() for flat in flats(0)]
    blind[1][:] = 0
    model = PathModel(CONFIG)
    load_modules(model, blind)
    changed = SEQUENCES.copy()
    changed[:, : PREFIX_TOKENS - 1] = (changed[:, : PREFIX_TOKENS - 1] + 1) % 258
    np.testing.assert_array_equal(losses(model, changed), losses(model, SEQUENCES))
    changed[:, PREFIX_TOKENS] = (changed[:, PREFIX_TOKENS] + 1) % 258
    assert (losses(model, changed) != losses(model, SEQUENCES)).all()


def test_each_sequence_is_scored_by_its_own_path():
    assignment = np.array([0, 2, 2, 0, 2, 2, 0])
    asked: list[int] = []

    def paths(number: int) -> list[np.ndarray]:
        asked.append(number)
        return flats(number)

    result = evaluate_routed(paths, CONFIG, SEQUENCES, assignment)
    expected = losses(make_model(0), SEQUENCES)[assignment == 0].sum()
    expected += losses(make_model(2), SEQUENCES)[assignment == 2].sum()
    assert result.nats_total == pytest.approx(expected)
    assert result.tokens == 7 * 32
    assert asked == [0, 2]


def test_loss_and_perplexity_are_per_token():
    evaluation = Evaluation(nats_total=20.0, tokens=10)
    assert evaluation.loss == 2.0
    assert evaluation.perplexity == pytest.approx(math.e**2)
