"""Evaluation: which targets count, that each sequence and window meets its own path, and how sure a loss is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models_harness import llama, path_model, small

from dipaco_p2p.config import PREFIX_TOKENS, LevelConfig
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, load_modules
from dipaco_p2p.core.routing.evaluate import (
    WINDOW,
    Evaluation,
    counted_tokens,
    held,
    losses,
    oracle_once,
    rerouted,
    routed_once,
    summarise,
    window_nats,
    window_starts,
)

CONFIG = small()
SEQUENCES = np.random.default_rng(0).integers(0, 258, (7, 64)).astype(np.int32)


def flats(seed: int) -> list[np.ndarray]:
    return [flat for flat in initial_modules(CONFIG, seed=seed).values()]


def test_exactly_the_targets_from_position_32_on_count():
    model = path_model(CONFIG)
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


def test_loss_and_perplexity_are_per_token():
    evaluation = Evaluation(nats_total=20.0, tokens=10)
    assert evaluation.loss == 2.0
    assert evaluation.perplexity == pytest.approx(math.e**2)
    assert evaluation.bits_per_byte is None
    assert Evaluation(nats_total=math.log(2) * 30, tokens=10, bytes=20).bits_per_byte == pytest.approx(1.5)


TABLE = np.random.default_rng(1).uniform(1, 9, (6, 5, 3))  # 6 sequences, 5 windows, 3 paths


def test_a_sequence_routed_once_is_read_by_one_path():
    assignment = np.array([0, 2, 1, 1, 0, 2])
    expected = [sum(TABLE[row, window, path] for window in range(5)) for row, path in enumerate(assignment)]
    np.testing.assert_allclose(routed_once(TABLE, assignment), expected, rtol=1e-12)


def test_a_rerouted_sequence_is_read_window_by_window():
    choices = np.random.default_rng(2).integers(0, 3, (6, 5))
    expected = [sum(TABLE[row, window, choices[row, window]] for window in range(5)) for row in range(6)]
    np.testing.assert_allclose(rerouted(TABLE, choices), expected, rtol=1e-12)


def test_no_assignment_beats_the_oracle_and_one_reaches_it():
    every = np.stack([routed_once(TABLE, np.full(6, path)) for path in range(3)])
    np.testing.assert_allclose(oracle_once(TABLE), every.min(axis=0), rtol=1e-12)


def test_a_choice_is_held_until_the_next_time_the_router_is_heeded():
    choices = np.array([[0, 1, 2, 3, 4]])
    assert held(choices, every=16).tolist() == [[0, 1, 2, 3, 4]]
    assert held(choices, every=32).tolist() == [[0, 0, 2, 2, 4]]
    assert held(choices, every=48).tolist() == [[0, 0, 0, 3, 3]]
    assert held(choices, every=1024).tolist() == [[0, 0, 0, 0, 0]]


def test_a_summary_adds_up():
    nats, documents = np.array([30.0, 50.0, 40.0]), np.array([7, 7, 2])
    summary = summarise(nats, tokens=20, bytes=np.array([90, 110, 100]), documents=documents, seed=0)
    assert summary.nats_total == 120.0 and summary.tokens == 60 and summary.bytes == 300
    assert summary.loss == 2.0
    assert summary.bits_per_byte == pytest.approx(120 / math.log(2) / 300)
    assert summarise(nats, tokens=20, bytes=None, documents=documents, seed=0).bits_per_byte is None


def test_the_interval_is_that_of_a_plain_bootstrap_over_documents():
    """Drawn here one document at a time; the two differ by the noise of 1000 draws."""
    generator = np.random.default_rng(3)
    documents = np.repeat(np.arange(40), generator.integers(1, 6, 40))
    nats = (generator.normal(60, 12, 40)[documents] + generator.normal(0, 3, len(documents))).clip(1)
    rows = {document: nats[documents == document] for document in range(40)}
    means = []
    for _ in range(4000):
        drawn = [rows[document] for document in generator.integers(0, 40, 40)]
        means.append(np.concatenate(drawn).mean() / 20)
    low, high = np.quantile(means, [0.025, 0.975])
    summary = summarise(nats, tokens=20, bytes=None, documents=documents, seed=0)
    width = high - low
    assert abs(summary.low - low) < 0.1 * width and abs(summary.high - high) < 0.1 * width
    assert summary == summarise(nats, tokens=20, bytes=None, documents=documents, seed=0)


def test_the_interval_holds_the_truth_about_19_times_in_20():
    """Documents of one kind are alike: an interval over sequences would be far too narrow here."""
    generator = np.random.default_rng(4)
    documents, hits, naive_hits = np.repeat(np.arange(60), 8), 0, 0
    for seed in range(60):
        nats = 60 + generator.normal(0, 10, 60)[documents] + generator.normal(0, 2, 480)
        for names, by_document in ((documents, True), (np.arange(480), False)):
            summary = summarise(nats, tokens=20, bytes=None, documents=names, seed=seed)
            hit = summary.low <= 3.0 <= summary.high
            hits, naive_hits = hits + (hit and by_document), naive_hits + (hit and not by_document)
    assert 52 <= hits and naive_hits < 42


def test_one_document_has_no_interval():
    summary = summarise(np.array([30.0, 50.0]), tokens=20, bytes=None, documents=np.array([4, 4]), seed=0)
    assert summary.loss == 2.0 and summary.low is None and summary.high is None


CONTEXT = 90  # 58 targets that count: three windows of 16 and one of 10
LONGER = small(LevelConfig(modules=2, blocks=1), context=CONTEXT)
TEXTS = np.random.default_rng(0).integers(0, 258, (5, CONTEXT)).astype(np.int32)


READER = path_model(LONGER)


@torch.no_grad()
def reference_nats() -> np.ndarray:
    """Loss (n, context - 32) of each target, by transformers' model and plain cross-entropy."""
    tokens = torch.from_numpy(TEXTS.astype(np.int64))
    logits = llama(READER)(tokens).logits[:, PREFIX_TOKENS - 1 : -1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, PREFIX_TOKENS:], reduction="none").double().numpy()


@pytest.mark.parametrize("window", [16, 48, 64])
def test_each_window_sums_exactly_its_own_targets(window):
    nats = reference_nats()
    expected = np.stack([nats[:, start : start + window].sum(axis=1) for start in range(0, 58, window)], axis=1)
    np.testing.assert_allclose(window_nats(READER, TEXTS, window=window), expected, rtol=1e-5)


def test_the_size_of_a_batch_changes_nothing():
    whole = window_nats(READER, TEXTS)
    np.testing.assert_allclose(window_nats(READER, TEXTS, batch=2), whole, rtol=1e-6)
    assert whole.shape == (5, 4) and whole.dtype == np.float64


def test_the_windows_of_a_sequence_sum_to_its_loss():
    np.testing.assert_allclose(window_nats(READER, TEXTS).sum(axis=1), losses(READER, TEXTS), rtol=1e-12)


@pytest.mark.parametrize(
    ("context", "window", "expected"),
    [(90, 16, [32, 48, 64, 80]), (64, 16, [32, 48]), (33, 16, [32]), (32, 16, []), (20, 16, []), (90, 64, [32])],
)
def test_windows_start_after_the_prefix(context, window, expected):
    assert window_starts(context, window) == expected


@pytest.mark.parametrize("context", [8, 32])
def test_a_sequence_of_the_prefix_alone_has_no_windows(context):
    assert window_nats(READER, TEXTS[:, :context]).shape == (5, 0)
    assert losses(READER, TEXTS[:, :context]).tolist() == [0.0] * 5


def test_the_default_window_is_the_finest_re_routing():
    assert WINDOW == 16 and window_starts(64) == window_starts(64, 16)
