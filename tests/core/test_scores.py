"""Scores by window against transformers' Llama and plain cross-entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from dipaco_p2p.config import PREFIX_TOKENS, LevelConfig, ModelConfig
from dipaco_p2p.core.evaluate import losses
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules
from dipaco_p2p.core.scores import WINDOW, window_nats, window_starts

CONTEXT = 90  # 58 targets that count: three windows of 16 and one of 10
CONFIG = ModelConfig(
    vocab_size=258,
    width=16,
    heads=2,
    ffn_width=24,
    context=CONTEXT,
    levels=(LevelConfig(embedding=True, head=True, blocks=1), LevelConfig(modules=2, blocks=1)),
)
SEQUENCES = np.random.default_rng(0).integers(0, 258, (5, CONTEXT)).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> PathModel:
    model = PathModel(CONFIG)
    load_modules(model, [flat for flat in initial_modules(CONFIG, seed=0).values()])
    return model


@torch.no_grad()
def reference_nats(model: PathModel) -> np.ndarray:
    """Loss (n, context - 32) of each target, by transformers' model and plain cross-entropy."""
    config = LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.width,
        intermediate_size=CONFIG.ffn_width,
        num_hidden_layers=2,
        num_attention_heads=CONFIG.heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=CONFIG.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        tie_word_embeddings=True,
    )
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict(model.state_dict(), strict=False)
    llama.tie_weights()
    tokens = torch.from_numpy(SEQUENCES.astype(np.int64))
    logits = llama(tokens).logits[:, PREFIX_TOKENS - 1 : -1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, PREFIX_TOKENS:], reduction="none").double().numpy()


@pytest.mark.parametrize("window", [16, 48, 64])
def test_each_window_sums_exactly_its_own_targets(model, window):
    nats = reference_nats(model)
    expected = np.stack([nats[:, start : start + window].sum(axis=1) for start in range(0, 58, window)], axis=1)
    np.testing.assert_allclose(window_nats(model, SEQUENCES, window=window), expected, rtol=1e-5)


def test_the_size_of_a_batch_changes_nothing(model):
    whole = window_nats(model, SEQUENCES)
    np.testing.assert_allclose(window_nats(model, SEQUENCES, batch=2), whole, rtol=1e-6)
    assert whole.shape == (5, 4) and whole.dtype == np.float64


def test_the_windows_of_a_sequence_sum_to_its_loss(model):
    np.testing.assert_allclose(window_nats(model, SEQUENCES).sum(axis=1), losses(model, SEQUENCES), rtol=1e-12)


@pytest.mark.parametrize(
    ("context", "window", "expected"),
    [(90, 16, [32, 48, 64, 80]), (64, 16, [32, 48]), (33, 16, [32]), (32, 16, []), (20, 16, []), (90, 64, [32])],
)
def test_windows_start_after_the_prefix(context, window, expected):
    assert window_starts(context, window) == expected


@pytest.mark.parametrize("context", [8, 32])
def test_a_sequence_of_the_prefix_alone_has_no_windows(model, context):
    assert window_nats(model, SEQUENCES[:, :context]).shape == (5, 0)
    assert losses(model, SEQUENCES[:, :context]).tolist() == [0.0] * 5


def test_the_default_window_is_the_finest_re_routing():
    assert WINDOW == 16 and window_starts(64) == window_starts(64, 16)
