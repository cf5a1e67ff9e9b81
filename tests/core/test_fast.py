"""The fast mode: the same loss and gradients but for rounding, one graph for all, and a way out without a compiler."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models_harness import path_model, small
from torch import Tensor

from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core.model import engine as fast
from dipaco_p2p.core.model import engine as ops
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.model.transformer import IGNORED, PathModel, initial_modules, rope_tables

TIED = small(width=32, ffn_width=48)
UNTIED = dataclasses.replace(TIED, tied=False)
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 258, (4, 64)))
SHARD = Shard(tokens=(np.arange(40)[:, None] * 3 + np.arange(64)).astype(np.int32) % 7)


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


@pytest.mark.parametrize("kind", ["dynamo", "import"])
def test_a_backward_pass_that_does_not_compile_does_not_end_the_training(kind: str, monkeypatch: pytest.MonkeyPatch):
    from torch._dynamo.exc import TorchDynamoException

    words = "ImportError: /cache/main.so: file too short"
    error = TorchDynamoException(f"backend raised:\n{words}") if kind == "dynamo" else ImportError(words)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise error

    monkeypatch.setattr(torch, "compile", lambda loss, **settings: lambda *inputs: Broken.apply(loss(*inputs)))
    fast._compiled.cache_clear()
    flats = list(initial_modules(TIED, seed=0).values())
    loops = [InnerLoop(InnerConfig(batch=4), 30, TIED, device="cpu", seed=5) for _ in range(2)]
    for loop, is_compiled in zip(loops, (True, False), strict=True):
        loop.use(fast=True, compiled=is_compiled)
    with pytest.warns(RuntimeWarning, match=f"without: {words}$"):
        broken = loops[0].run(flats, SHARD, first_step=0, steps=3)
    plain = loops[1].run(flats, SHARD, first_step=0, steps=3)
    assert all((one == other).all() for one, other in zip(broken.flats, plain.flats, strict=True))
    assert "not compiled after all" in loops[0].described()
    fast._compiled.cache_clear()


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


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def values(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Random values that are the same in bfloat16."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def leaves(*parts: Tensor) -> list[Tensor]:
    return [part.clone().requires_grad_() for part in parts]


def attention_by_the_formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    future = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).triu(1)
    return (query @ key.mT).masked_fill(future, -math.inf).softmax(dim=-1) @ value


def distance(got: Tensor | None, wanted: Tensor | None) -> float:
    assert got is not None and wanted is not None
    return ((got.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 300, 700])
def test_attention_and_its_gradients_are_those_of_the_formula(tokens: int):
    parts = [values(3, tokens, 16, seed=seed) for seed in range(3)]
    fast, exact, grad = leaves(*parts), leaves(*(part.float() for part in parts)), values(3, tokens, 16, seed=9)
    mixed, wanted = ops.attend(*fast), attention_by_the_formula(*exact)
    assert mixed.dtype == torch.bfloat16 and distance(mixed, wanted) < 0.01
    mixed.backward(grad)
    wanted.backward(grad.float())
    if tokens > 1:  # a single key has the weight 1, whatever the query
        assert all(distance(got.grad, one.grad) < 0.02 for got, one in zip(fast, exact, strict=True))


def test_no_query_sees_a_later_token():
    parts = [values(2, 300, 16, seed=seed) for seed in range(3)]
    before = ops.attend(*parts)
    for part in parts:
        part[:, 200:] += 1
    after = ops.attend(*parts)
    assert torch.equal(before[:, :200], after[:, :200]) and not torch.equal(before[:, 200:], after[:, 200:])


def test_long_contexts_keep_hardly_more_than_the_weights_that_are_not_zero():
    parts = [values(1, 1024, 16, seed=seed) for seed in range(3)]
    kept = sum(block.numel() for block in torch.ops.dipaco.attend(*parts)[1:])
    assert kept / 1024**2 == 0.625


def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Loss and gradients, ours and by the formula."""
    found = []
    for is_fast in (True, False):
        own, own_weight = leaves(hidden if is_fast else hidden.float(), weight)
        if is_fast:
            loss = ops.head_loss(own, own_weight, targets)
        else:
            loss = F.cross_entropy(own @ own_weight.bfloat16().float().T, targets, ignore_index=IGNORED)
        (3 * loss).backward()
        found.append((loss.detach(), own.grad, own_weight.grad))
    return found


@pytest.mark.parametrize("at_once", [1, 1 << 12, 1 << 20])
@pytest.mark.parametrize("positions", [8, 100])
def test_the_head_and_its_gradients_are_those_of_cross_entropy(
    at_once: int, positions: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ops, "LOGITS", at_once)
    targets = torch.arange(positions) * 7 % 300
    targets[3::8] = IGNORED
    hidden, weight = values(positions, 16, seed=1), values(300, 16, seed=2, scale=0.5).float() * 1.001
    ours, wanted = head(hidden, weight, targets)
    assert ours[0].dtype == torch.float32 and ours[0].item() == pytest.approx(wanted[0].item(), abs=5e-3)
    assert distance(ours[1], wanted[1]) < 0.01 and not ours[1][3].any(), "what is not counted has no gradient"
    assert ours[2].dtype == torch.float32 and distance(ours[2], wanted[2]) < 0.01


def test_what_is_nearly_sure_keeps_its_small_loss_and_gradient():
    # In bfloat16 a probability above 0.998 is 1, of which nothing would be left to learn.
    hidden, weight = torch.ones(4, 8).bfloat16(), torch.zeros(300, 8)
    weight[5] = 1.625
    ours, wanted = head(hidden, weight, torch.full((4,), 5))
    assert wanted[0] < 1e-3 and ours[0].item() == pytest.approx(wanted[0].item(), rel=0.02)
    assert distance(ours[1], wanted[1]) < 0.02 and distance(ours[2][5], wanted[2][5]) < 0.02


def test_what_is_all_wrong_has_a_loss_that_is_finite_and_one_that_is_broken_has_not():
    hidden, weight = torch.ones(4, 8).bfloat16(), torch.zeros(300, 8)
    weight[5] = 100.0
    loss, grad, _ = head(hidden, weight, torch.full((4,), 6))[0]
    assert 80 < loss < 90 and grad is not None and grad.float().norm() > 1
    hidden[0, 0] = math.nan
    assert head(hidden, weight, torch.full((4,), 6))[0][0].isnan()


def test_torch_finds_the_operators_as_they_are_declared():
    parts = [part.requires_grad_() for part in (values(2, 300, 16, seed=seed) for seed in range(3))]
    torch.library.opcheck(torch.ops.dipaco.attend.default, parts, test_utils=CHECKS)
    grad, *weights = (part.detach() for part in torch.ops.dipaco.attend(*parts))
    given = [part.detach() for part in parts]
    torch.library.opcheck(torch.ops.dipaco.attend_backward.default, (grad, *given, weights), test_utils=CHECKS)
    hidden, weight = values(20, 16, seed=1).requires_grad_(), values(300, 16, seed=2).float().requires_grad_()
    torch.library.opcheck(torch.ops.dipaco.head.default, (hidden, weight, torch.arange(20)), test_utils=CHECKS)
