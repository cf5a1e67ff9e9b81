"""The operations of the fast mode on a CPU: beside formulas in float32, and as torch itself checks operators."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dipaco_p2p.core import fast_ops
from dipaco_p2p.core.head_loss import IGNORED

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
    mixed, wanted = fast_ops.attend(*fast), attention_by_the_formula(*exact)
    assert mixed.dtype == torch.bfloat16 and distance(mixed, wanted) < 0.01
    mixed.backward(grad)
    wanted.backward(grad.float())
    if tokens > 1:  # a single key has the weight 1, whatever the query
        assert all(distance(got.grad, one.grad) < 0.02 for got, one in zip(fast, exact, strict=True))


def test_no_query_sees_a_later_token():
    parts = [values(2, 300, 16, seed=seed) for seed in range(3)]
    before = fast_ops.attend(*parts)
    for part in parts:
        part[:, 200:] += 1
    after = fast_ops.attend(*parts)
    assert torch.equal(before[:, :200], after[:, :200]) and not torch.equal(before[:, 200:], after[:, 200:])


def test_long_contexts_keep_hardly_more_than_the_weights_that_are_not_zero():
    parts = [values(1, 1024, 16, seed=seed) for seed in range(3)]
    kept = sum(block.numel() for block in torch.ops.dipaco.attend(*parts)[1:])
    assert kept / 1024**2 == 0.625


def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Loss and gradients, ours and by the formula."""
    found = []
    for fast in (True, False):
        own, own_weight = leaves(hidden if fast else hidden.float(), weight)
        if fast:
            loss = fast_ops.head_loss(own, own_weight, targets)
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
    monkeypatch.setattr(fast_ops, "LOGITS", at_once)
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
