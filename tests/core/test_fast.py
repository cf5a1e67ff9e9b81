"""The fast mode: the same loss and gradients but for rounding, one graph for all, and a way out without a compiler."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core import fast
from dipaco_p2p.core.inner import InnerLoop
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules, rope_tables
from dipaco_p2p.core.shards import Shard

TIED = ModelConfig(
    vocab_size=258,
    width=32,
    heads=2,
    ffn_width=48,
    context=64,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(modules=2, blocks=1)),
)
UNTIED = dataclasses.replace(TIED, tied=False)
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 258, (4, 64)))
SHARD = Shard(tokens=(np.arange(40)[:, None] * 3 + np.arange(64)).astype(np.int32) % 7)


def path_model(config: ModelConfig) -> PathModel:
    model = PathModel(config)
    load_modules(model, list(initial_modules(config, seed=0).values()))
    return model


def gradients(model: PathModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_what_is_compiled_is_the_exact_loss_but_for_rounding(config: ModelConfig):
    model = path_model(config)
    rope = rope_tables(64, 16, config.rope_theta, torch.device("cpu"))
    exact, quick = model.loss(TOKENS), fast._loss(model, TOKENS, rope)
    assert quick.dtype == torch.float32 and quick.item() == pytest.approx(exact.item(), abs=5e-3)
    exact_gradients, quick_gradients = gradients(model, exact), gradients(model, quick)
    for name, gradient in quick_gradients.items():
        assert gradient.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), exact_gradients[name].flatten(), dim=0)
        assert cosine > 0.995, name


def test_one_graph_serves_all_paths_and_grids(monkeypatch: pytest.MonkeyPatch):
    from torch._dynamo.utils import counters

    # Whether the graph is made anew is the question here, not what a C++ compiler makes of it, which takes long.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    fast._compiled.cache_clear()
    counters.clear()
    other = dataclasses.replace(TIED, levels=(LevelConfig(modules=3, blocks=1, embedding=True, head=True),))
    for config in (TIED, TIED, other):
        loops = [
            InnerLoop(InnerConfig(batch=4), 30, config, device="cpu", seed=5, fast=quick) for quick in (True, False)
        ]
        flats = list(initial_modules(config, seed=0).values())
        quick, exact = (loop.run(flats, SHARD, first_step=0, steps=5) for loop in loops)
        assert quick.loss == pytest.approx(exact.loss, abs=0.02)
    fast._compiled.cache_clear()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_without_compiling_it_is_the_same_function(is_checkpointed: bool):
    model = path_model(TIED)
    rope = rope_tables(64, 16, TIED.rope_theta, torch.device("cpu"))
    plain = gradients(model, fast._loss(model, TOKENS, rope))
    plain = {name: gradient.clone() for name, gradient in plain.items()}
    model.model.is_checkpointed = is_checkpointed
    again = gradients(model, fast.training_loss(fast=True, compiled=False)(model, TOKENS))
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


def test_a_compiler_that_fails_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch):
    from torch._dynamo.exc import TorchDynamoException

    calls = []

    def broken(function: object, **settings: object):
        def call(*inputs: object) -> torch.Tensor:
            calls.append(inputs)
            raise TorchDynamoException("no such toolchain\nand forty lines more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    fast._compiled.cache_clear()
    model = path_model(TIED)
    with pytest.warns(RuntimeWarning, match="without: no such toolchain$"):
        loss = fast.fast_loss(model, TOKENS)
    assert fast.fast_loss(model, TOKENS).item() == loss.item() == fast.eager_loss(model, TOKENS).item()
    assert len(calls) == 1, "it is not tried again"
    assert fast.has_failed()
    fast._compiled.cache_clear()
    assert not fast.has_failed()


def test_a_checkpointed_path_compiles_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    fast._compiled.cache_clear()
    model = path_model(TIED)
    plain = {name: gradient.clone() for name, gradient in gradients(model, fast.eager_loss(model, TOKENS)).items()}
    model.model.is_checkpointed = True
    again = gradients(model, fast.fast_loss(model, TOKENS))
    assert not fast.has_failed()
    fast._compiled.cache_clear()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=2e-3, rtol=0.05)


def test_without_a_compiler_training_is_exact_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler --with a flag")
    with pytest.warns(RuntimeWarning, match="C\\+\\+"):
        loop = InnerLoop(InnerConfig(batch=4), 30, TIED, device="cpu", seed=5, fast=True)
    flats = list(initial_modules(TIED, seed=0).values())
    exact = InnerLoop(InnerConfig(batch=4), 30, TIED, device="cpu", seed=5)
    results = [one.run(flats, SHARD, first_step=0, steps=2).flats for one in (loop, exact)]
    assert all((quick == plain).all() for quick, plain in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("is_fast", "device", "said"),
    [
        (False, "cpu", "plain attention"),
        (True, "cpu", "attention in blocks"),
        (False, "cuda", "plain attention"),
        (True, "cuda", "SDPA"),
    ],
)
def test_the_attention_that_is_told_is_the_one_that_is_used(is_fast: bool, device: str, said: str):
    loss = fast.training_loss(fast=is_fast, compiled=False)
    assert fast.attention_of(loss, torch.device(device)) == said
