"""Generation: kept keys and values change no logits, samples follow the softmax, and short texts can be routed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from models_harness import TRUNK, path_model, small

from dipaco_p2p.config import PREFIX_TOKENS, LevelConfig
from dipaco_p2p.core.model.generate import (
    Reading,
    Sampler,
    Writing,
    generate,
    prompt_features,
    text_features,
    visible,
    write_next,
)
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.core.routing.features import document_features, features

LEVEL = LevelConfig(modules=2, blocks=1)
TIED = small(levels=(replace(TRUNK, blocks=1), replace(LEVEL, blocks=2)), width=32, ffn_width=48)
UNTIED = replace(TIED, heads=4, tied=False, levels=(replace(LEVEL, embedding=True), replace(LEVEL, head=True)))
TEXT = np.random.default_rng(0).integers(0, 258, 64).tolist()


@torch.no_grad()
def plain_logits(model: PathModel, tokens: list[int]) -> np.ndarray:
    """Logits (V,) after all of `tokens`, read at once by the model itself."""
    return model(torch.tensor([tokens]))[0, -1].numpy()


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("parts", [[64], [1] * 64, [10, 1, 1, 20, 31, 1]], ids=["at once", "one by one", "in pieces"])
def test_what_was_read_before_counts_as_if_read_at_once(config, parts):
    model = path_model(config)
    reading, end = Reading(model), 0
    for part in parts:
        logits = reading.read(TEXT[end : end + part])
        end += part
        np.testing.assert_allclose(logits, plain_logits(model, TEXT[:end]), atol=2e-5)
    assert reading.count == 64 and logits.std() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("parts", [[64], [10, 1, 53]], ids=["at once", "in pieces"])
def test_logits_after_each_token_are_those_of_the_whole_text(parts):
    model = path_model(UNTIED)
    reading, found = Reading(model), []
    for part in parts:
        found.append(reading.read_each(TEXT[reading.count : reading.count + part]))
    np.testing.assert_allclose(np.concatenate(found), model(torch.tensor([TEXT]))[0].numpy(), atol=2e-5)


def test_a_text_goes_on_from_what_was_read_of_it():
    model = path_model(TIED)
    reading = Reading(model)
    reading.read_each(TEXT[:39])
    writing = Writing(reading, TEXT[:40], sampler=Sampler(temperature=0))
    tokens, logits = zip(*(write_next([writing])[0] for _ in range(60)), strict=True)
    assert list(tokens) == greedy(model, TEXT[:40], 60)
    np.testing.assert_allclose(logits[0], plain_logits(model, TEXT[:40]), atol=2e-5)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_texts_that_are_read_together_are_what_each_is_alone(config):
    """Of several lengths; each of them reads half a context again at another time."""
    model = path_model(config)
    writings = [
        Writing(Reading(model), TEXT[:count], sampler=Sampler(temperature=0)) for count in (1, 2, 30, 50, 63, 64)
    ]
    found = [write_next(writings) for _ in range(80)]
    for number, count in enumerate((1, 2, 30, 50, 63, 64)):
        tokens, logits = zip(*(written[number] for written in found), strict=True)
        assert list(tokens) == greedy(model, TEXT[:count], 80)
        np.testing.assert_allclose(logits[0], plain_logits(model, TEXT[:count]), atol=2e-5)


def test_what_was_read_takes_the_memory_that_it_says():
    reading = Reading(path_model(UNTIED))
    assert reading.kept.nbytes == Reading.bytes_max(UNTIED) > 0


def greedy(model: PathModel, tokens: list[int], count: int) -> list[int]:
    return list(generate(model, tokens, count=count, sampler=Sampler(temperature=0)))


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_greedy_text_is_the_likeliest_token_every_time_also_beyond_the_context(config):
    model, text = path_model(config), TEXT[:40]
    for _ in range(100):
        text.append(int(plain_logits(model, text[visible(len(text), config.context) :]).argmax()))
    assert greedy(model, TEXT[:40], 100) == text[40:]


@pytest.mark.parametrize("context", [1, 2, 7, 64])
def test_a_path_sees_at_least_half_a_context_and_never_more_than_one(context):
    for count in range(1, 5 * context):
        start = visible(count, context)
        assert 0 <= start < count and count - start <= context
        assert start == 0 or count - start >= context - context // 2
        assert (start == 0) == (count <= context)


def test_generation_ends_with_the_end_token_or_the_count():
    model = path_model(TIED)
    text = greedy(model, TEXT[:8], 6)
    assert len(text) == 6
    stopped = list(generate(model, TEXT[:8], count=6, sampler=Sampler(temperature=0), end=text[3]))
    assert stopped == text[: text.index(text[3]) + 1]
    assert greedy(model, TEXT[:8], 0) == []


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    model = path_model(TIED)
    first, again, other = (
        list(generate(model, TEXT[:8], count=40, sampler=Sampler(temperature=1.0, seed=seed))) for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 3), (1.0, 99)])
def test_tokens_come_as_often_as_the_softmax_says(temperature, top_k):
    logits = np.array([1.0, 0.0, 2.0, -1.0, 1.5], dtype=np.float32)
    sampler = Sampler(temperature=temperature, top_k=top_k, seed=0)
    counts = np.bincount([sampler.pick(logits) for _ in range(20_000)], minlength=5)
    kept = np.exp(logits.astype(np.float64) / temperature)
    if top_k == 3:
        kept[[1, 3]] = 0.0
    expected = kept / kept.sum()
    # Five standard deviations.
    assert (np.abs(counts / 20_000 - expected) <= 5 * np.sqrt(expected * (1 - expected) / 20_000)).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, [2]), (0.5, [2, 4]), (0.8, [2, 4, 0]), (1.0, range(5)), (1e-9, [2])])
def test_the_likeliest_tokens_that_have_a_share_of_the_probability_stay_in(top_p, kept):
    logits = np.array([1.0, 0.0, 2.0, -1.0, 1.5], dtype=np.float32)  # chances 0.17, 0.06, 0.46, 0.02, 0.28
    sampler = Sampler(temperature=1.0, top_p=top_p, seed=0)
    assert {sampler.pick(logits) for _ in range(2_000)} == set(kept)


def test_temperature_0_is_the_maximum_and_top_1_too():
    logits = np.array([0.1, 3.0, 2.9], dtype=np.float32)
    assert {Sampler(temperature=0).pick(logits) for _ in range(5)} == {1}
    assert {Sampler(temperature=5.0, top_k=1, seed=seed).pick(logits) for seed in range(20)} == {1}


def test_a_prompt_is_routed_by_its_first_tokens_as_a_document_is():
    model = path_model(TIED)
    expected = features(model, np.array([TEXT[:PREFIX_TOKENS]], dtype=np.int32))
    np.testing.assert_allclose(prompt_features(model, TEXT, has_counts=False), expected, atol=1e-6)
    np.testing.assert_allclose(prompt_features(model, TEXT[:PREFIX_TOKENS], has_counts=False), expected, atol=1e-6)


def test_a_prompt_s_counts_are_those_of_a_document_and_of_a_short_one_as_if_it_went_on_alike():
    model = path_model(TIED)
    expected = document_features(model, np.array([TEXT], dtype=np.int32), has_counts=True)
    np.testing.assert_allclose(prompt_features(model, TEXT, has_counts=True), expected, atol=1e-6)
    short, long = ([7, 9] * count for count in (2, PREFIX_TOKENS // 2))
    counts = [prompt_features(model, prompt, has_counts=True)[:, model.config.width :] for prompt in (short, long)]
    np.testing.assert_array_equal(*counts)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 5, 31])
def test_a_short_prompt_is_routed_by_the_mean_over_what_is_there(count):
    model = path_model(TIED)
    mean = model.hidden(torch.tensor([TEXT[:count]]))[0].mean(dim=0).numpy()
    np.testing.assert_allclose(prompt_features(model, TEXT[:count], has_counts=False), mean[None], atol=1e-6)
    np.testing.assert_allclose(text_features(model, TEXT[:count]), np.concatenate([mean, mean])[None], atol=1e-6)


@torch.no_grad()
def test_a_text_is_routed_by_its_last_tokens_and_all_that_is_seen():
    model = path_model(TIED)
    hidden = model.hidden(torch.tensor([TEXT[:50]]))[0]
    expected = torch.cat((hidden[-PREFIX_TOKENS:].mean(dim=0), hidden.mean(dim=0))).numpy()
    np.testing.assert_allclose(text_features(model, TEXT[:50]), expected[None], atol=1e-6)
    # 70 tokens, of a context of 64: the last 38 are seen.
    np.testing.assert_array_equal(text_features(model, TEXT + TEXT[:6]), text_features(model, TEXT[32:] + TEXT[:6]))
