"""What only a GPU runs, on torch's device that holds no values: it takes the same ways through the code as a GPU does.

So devices, types and shapes fit together. Whether the numbers are right, and how quick it is, only a GPU can say:
`python -m benchmarks.gpu`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from models_harness import small
from torch import Tensor

from dipaco_p2p.config import LevelConfig
from dipaco_p2p.core.model import engine as fast_ops
from dipaco_p2p.core.model import transformer as model
from dipaco_p2p.core.model.engine import eager_loss
from dipaco_p2p.core.model.transformer import PathModel, rope_tables

PATH = small(LevelConfig(blocks=2), vocab_size=300, width=32, ffn_width=48)
NO_CPU = torch.device("meta")


@pytest.fixture
def path() -> Iterator[PathModel]:
    """A path that is not on a CPU. Tables that are kept must not be left behind for others."""
    yield PathModel(PATH).to(NO_CPU)
    for table in (rope_tables, model._causal_mask):
        table.cache_clear()


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """That device has none; so products stay in float32 here."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **settings: contextlib.nullcontext())


@pytest.fixture
def no_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*inputs: object, **settings: object) -> Tensor:
        raise AssertionError("a fused kernel whose way back adds up in any order")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)


def tokens() -> Tensor:
    return torch.zeros(4, 64, dtype=torch.long, device=NO_CPU)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("loss_of", [PathModel.loss, eager_loss], ids=["exact", "bfloat16"])
def test_a_step_stays_where_the_path_is(
    path: PathModel, no_autocast: None, loss_of: Callable[[PathModel, Tensor], Tensor], is_checkpointed: bool
) -> None:
    path.model.is_checkpointed = is_checkpointed
    loss = loss_of(path, tokens())
    assert loss.device == NO_CPU and loss.dtype == torch.float32 and loss.shape == ()
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(path.parameters(), 1.0).device == NO_CPU
    for parameter in path.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.device, parameter.grad.dtype) == (NO_CPU, torch.float32)


@pytest.mark.parametrize("at_once", [1, 1 << 27])
def test_the_head_is_one_operation_there_too(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_ops, "CUDA_LOGITS", at_once)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("dipaco::head", "CUDA")
    hidden = torch.empty(200, 32, dtype=torch.bfloat16, device=NO_CPU)
    weight, targets = torch.empty(300, 32, device=NO_CPU), torch.zeros(200, dtype=torch.long, device=NO_CPU)
    total, hidden_grad, weight_grad = fast_ops._head_in_slices(hidden, weight, targets)
    assert (total.dtype, total.shape, total.device) == (torch.float32, (), NO_CPU)
    assert (hidden_grad.dtype, hidden_grad.shape, hidden_grad.device) == (hidden.dtype, hidden.shape, NO_CPU)
    assert (weight_grad.dtype, weight_grad.shape, weight_grad.device) == (weight.dtype, weight.shape, NO_CPU)


def test_an_exact_step_uses_no_kernel_that_gives_other_bits_each_time(path: PathModel, no_fused_kernel: None) -> None:
    path.loss(tokens()).backward()
    with torch.no_grad(), pytest.raises(AssertionError, match="any order"):
        path.loss(tokens())  # what learns nothing may


def test_a_fast_step_uses_the_fused_kernel(path: PathModel, no_autocast: None, no_fused_kernel: None) -> None:
    with pytest.raises(AssertionError, match="any order"):
        eager_loss(path, tokens())
