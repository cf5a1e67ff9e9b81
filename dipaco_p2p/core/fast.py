"""A quicker loss: products in bfloat16, and the whole step in one compiled graph where that pays.

Rule 1: parameters, their gradients and the optimizer's state stay float32; only what lies between is bfloat16.
Rule 2: it gives other bits than `PathModel.loss`, and other bits again on another machine. A volunteer contributes
whatever it trained; what others have to repeat (an owner's step, a score that is checked) is never made with it.

On one thread of an Intel Xeon with AMX a step of the default path takes 50 ms of processor time instead of 103 (exact);
the first one takes 30 to 50 s, in later processes a few.
On a GPU nothing of this has run yet: what does not depend on the device is tested on a CPU, the rest is as documented.
B batch, T tokens, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import functools
import math
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .fast_ops import attend, head_loss
from .head_loss import IGNORED
from .model import PathModel, rope_tables, run_block

Rope = tuple[Tensor, Tensor]
Loss = Callable[[PathModel, Tensor], Tensor]


def training_loss(*, fast: bool, compiled: bool = True) -> Loss:
    """The loss of a training step: exact, `fast`, or fast but not `compiled`. Without a compiler on this machine what
    was to be compiled is exact, with a warning.

    The mean cross-entropy in nats over the predicted positions of tokens (B, T), as `PathModel.loss`.
    """
    if fast and compiled and not compiler():
        warnings.warn("no C++ compiler (g++) found: training goes on without the fast mode", RuntimeWarning, 2)
        fast = False
    if not fast:
        return PathModel.loss
    return fast_loss if compiled else eager_loss


def attention_of(loss: Loss, device: torch.device) -> str:
    """What `loss` computes attention with, in words."""
    if loss is PathModel.loss:
        return "plain attention"
    return "attention in blocks" if device.type == "cpu" else "SDPA"


def fast_loss(model: PathModel, tokens_BT: Tensor) -> Tensor:
    """`PathModel.loss` to about 1e-3, compiled; float32."""
    return _compiled()(model, tokens_BT, _rope(model, tokens_BT))


def eager_loss(model: PathModel, tokens_BT: Tensor) -> Tensor:
    """The same without compiling: on a CPU slower than that, on a GPU still far ahead of float32."""
    return _loss(model, tokens_BT, _rope(model, tokens_BT))


def compiler() -> str | None:
    """The C++ compiler that torch would call; None without one."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return shutil.which(command[0])


def has_failed() -> bool:
    """Whether compiling failed in this process, which so goes on without."""
    return _compiled.cache_info().currsize > 0 and _compiled().has_failed


class _Compiled:
    """`_loss` compiled when it is first called; as it is, with a warning, from when that failed."""

    def __init__(self) -> None:
        from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

        self.has_failed = False
        self._failure = TorchDynamoException
        self._call = cast(Callable[[PathModel, Tensor, Rope], Tensor], torch.compile(_loss, dynamic=False))

    def __call__(self, model: PathModel, tokens_BT: Tensor, rope: Rope) -> Tensor:
        try:
            return self._call(model, tokens_BT, rope)
        except self._failure as error:  # a toolchain can be broken in more ways than can be looked for
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"compiling failed, training goes on without: {reason}", RuntimeWarning, 2)
            self.has_failed, self._call = True, _loss
            return _loss(model, tokens_BT, rope)


@functools.cache
def _compiled() -> _Compiled:
    """One for the process: parameters are inputs of the graph, so that all paths and methods share it."""
    return _Compiled()


def _rope(model: PathModel, tokens_BT: Tensor) -> Rope:
    # The tables come from outside, so that they are not computed again in every step.
    config = model.config
    return rope_tables(tokens_BT.shape[1], config.width // config.heads, config.rope_theta, tokens_BT.device)


def _loss(model: PathModel, tokens_BT: Tensor, rope: Rope) -> Tensor:
    decoder = model.model
    with torch.autocast(tokens_BT.device.type, torch.bfloat16):
        hidden_BTD = decoder.embed_tokens(tokens_BT)
        for block in decoder.layers:
            through = functools.partial(_through, block)
            hidden_BTD = run_block(through, hidden_BTD, rope, is_checkpointed=decoder.is_checkpointed)
        normed_BTD = decoder.norm(hidden_BTD)
        targets_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED)
        return head_loss(normed_BTD.flatten(0, 1).bfloat16(), model.head_weight, targets_BT.flatten())


def _through(block: Any, hidden_BTD: Tensor, rope: Rope) -> Tensor:
    attention, mlp = block.self_attn, block.mlp
    parts = _products(block.input_layernorm(hidden_BTD), attention.q_proj, attention.k_proj, attention.v_proj)
    mixed_BTHK = _attend(*attention.turned(*parts, rope)).transpose(1, 2)
    hidden_BTD = hidden_BTD + attention.o_proj(mixed_BTHK.reshape(hidden_BTD.shape))
    gate, up = _products(block.post_attention_layernorm(hidden_BTD), mlp.gate_proj, mlp.up_proj)
    return cast(Tensor, hidden_BTD + mlp.down_proj(F.silu(gate) * up))


def _products(normed_BTD: Tensor, *layers: Any) -> Sequence[Tensor]:
    """What each layer makes of the same values, by one product, whose ways back are single ones too."""
    joined = F.linear(normed_BTD, torch.cat([layer.weight for layer in layers]))
    return joined.chunk(len(layers), dim=-1)


def _attend(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor) -> Tensor:
    # Rotated in float32, and the fused kernels want one type.
    if query_BHTK.device.type != "cpu":
        query, key = (part.to(value_BHTK.dtype) for part in (query_BHTK, key_BHTK))
        return F.scaled_dot_product_attention(query, key, value_BHTK, is_causal=True)
    query_BHTK = query_BHTK / math.sqrt(query_BHTK.shape[-1])
    parts = (part.to(value_BHTK.dtype).contiguous().flatten(0, 1) for part in (query_BHTK, key_BHTK, value_BHTK))
    return attend(*parts).view(query_BHTK.shape)
