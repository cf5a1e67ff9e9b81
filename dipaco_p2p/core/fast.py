"""A quicker loss for experiments on one machine's CPU: the whole step in one compiled graph, products in bfloat16.

Rule 1: parameters, their gradients and the optimizer's state stay float32; only what lies between is bfloat16.
Rule 2: it gives other bits than `PathModel.loss`, and other bits again on another machine, so that nothing that ends
in a digest is trained with it.

A step of the default path took 43 to 45 ms instead of 77, with one thread of an EPYC that has bfloat16 products, and
two such processes do not slow each other down; the first step costs 10 to 40 s, later processes a few.
B batch, T tokens, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import functools
import math
import os
import shlex
import shutil
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .head_loss import IGNORED
from .model import PathModel, rope_tables

Rope = tuple[Tensor, Tensor]
Loss = Callable[[PathModel, Tensor], Tensor]


def training_loss(*, fast: bool) -> Loss:
    """The loss of a training step; with `fast` the compiled one, unless this machine has no compiler: then a warning.

    The mean cross-entropy in nats over the predicted positions of tokens (B, T), as `PathModel.loss`.
    """
    if fast and not _compiler():
        warnings.warn("no C++ compiler (g++) found: training goes on without the fast mode", RuntimeWarning, 2)
        fast = False
    return fast_loss if fast else PathModel.loss


def fast_loss(model: PathModel, tokens_BT: Tensor) -> Tensor:
    """`PathModel.loss` to about 1e-3, for a model on a CPU; float32."""
    config = model.config
    device = model.head_weight.device
    assert device.type == "cpu", device
    # The tables come from outside, so that they are not computed again in every step.
    rope = rope_tables(tokens_BT.shape[1], config.width // config.heads, config.rope_theta, device)
    return _compiled()(model, tokens_BT, rope)


def _compiler() -> str | None:
    """The compiler that torch would call."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return shutil.which(command[0])


@functools.cache
def _compiled() -> Callable[[PathModel, Tensor, Rope], Tensor]:
    """One for the process: parameters are inputs of the graph, so that all paths and methods share it."""
    compiled = torch.compile(_loss, dynamic=False)
    return cast(Callable[[PathModel, Tensor, Rope], Tensor], compiled)


def _loss(model: PathModel, tokens_BT: Tensor, rope: Rope) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTD = model.model.embed_tokens(tokens_BT)
        block: Any
        for block in model.model.layers:
            parts = block.self_attn.project(block.input_layernorm(hidden_BTD), rope)
            mixed_BTHK = _attend(*parts).transpose(1, 2)
            hidden_BTD = hidden_BTD + block.self_attn.o_proj(mixed_BTHK.reshape(hidden_BTD.shape))
            hidden_BTD = hidden_BTD + block.mlp(block.post_attention_layernorm(hidden_BTD))
        logits_BTV = F.linear(model.model.norm(hidden_BTD), model.head_weight)
    targets_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)


def _attend(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor) -> Tensor:
    # Plain products, which the compiler fuses; torch's own kernel would cost a third of the step at this head width.
    tokens, width = query_BHTK.shape[-2:]
    scores_BHTT = query_BHTK @ key_BHTK.transpose(-1, -2) / math.sqrt(width)
    future_TT = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return scores_BHTT.masked_fill(future_TT, -math.inf).softmax(dim=-1) @ value_BHTK
