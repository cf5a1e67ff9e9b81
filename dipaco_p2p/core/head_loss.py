"""Output head and cross-entropy in one, a few rows at a time.

The logits of a whole batch are by far the largest tensor of a step (8 x 256 tokens x 2048 words = 16 MB, several times
over). In slices, memory does not grow with the vocabulary, and a training step of the default model took 84 to 94 ms
instead of 108 (medians, one thread of a shared EPYC).

N positions, D width, V vocabulary. A target of -100 does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

IGNORED = -100
CPU_LOGITS = 1 << 18
"""Logits at a time on a CPU: 1 MB, which stays in its cache."""
CUDA_LOGITS = 1 << 26


def head_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross-entropy in nats of `targets_N` under the logits `hidden_ND @ weight_VD.T`; differentiable once."""
    return cast(Tensor, _HeadLoss.apply(hidden_ND, weight_VD, targets_N))  # type: ignore[no-untyped-call]


@torch.no_grad()
def head_nats(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy in nats (N,) of each target; no gradient."""
    nats_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
    for rows, logits, probs in _slices(hidden_ND, weight_VD):
        nats_N[rows] = _nats(logits, probs, targets_N[rows, None])[:, 0]
    return nats_N


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients on the way forward, while the slice of probabilities is at hand."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        counted_N1 = (targets_N != IGNORED).to(hidden_ND.dtype)[:, None]
        share_N1 = counted_N1 / counted_N1.sum()
        index_N1 = targets_N.clamp(min=0)[:, None]
        hidden_grad_ND, weight_grad_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
        total = hidden_ND.new_zeros(())
        for rows, logits, probs in _slices(hidden_ND, weight_VD):
            share = share_N1[rows]
            total += (_nats(logits, probs, index_N1[rows]) * share).sum()
            grad = probs.mul_(share).scatter_add_(1, index_N1[rows], -share)
            torch.mm(grad, weight_VD, out=hidden_grad_ND[rows])
            weight_grad_VD.addmm_(grad.T, hidden_ND[rows])
        ctx.save_for_backward(hidden_grad_ND, weight_grad_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        return hidden_grad_ND * grads[0], weight_grad_VD * grads[0], None


def _nats(logits: Tensor, probs: Tensor, index: Tensor) -> Tensor:
    # The logarithm of the sum of exponentials, by way of the likeliest word, whose probability cannot underflow.
    log_sum = logits.amax(dim=1, keepdim=True) - probs.amax(dim=1, keepdim=True).log()
    return log_sum - logits.gather(1, index)


def _slices(hidden_ND: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Logits and probabilities of some rows at a time; the caller may overwrite them."""
    slice_logits = CPU_LOGITS if hidden_ND.device.type == "cpu" else CUDA_LOGITS
    rows = max(1, min(slice_logits // len(weight_VD), len(hidden_ND)))
    # Two buffers serve every slice.
    logits, probs = hidden_ND.new_empty((2, rows, len(weight_VD)))
    for start in range(0, len(hidden_ND), rows):
        here = slice(start, min(start + rows, len(hidden_ND)))
        count = here.stop - start
        torch.mm(hidden_ND[here], weight_VD.T, out=logits[:count])
        torch.softmax(logits[:count], dim=1, out=probs[:count])
        yield here, logits[:count], probs[:count]
