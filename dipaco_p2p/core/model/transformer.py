"""One path as a torch module: a Llama decoder whose parameters carry Hugging Face's names, and its loss.

B batch, T tokens, N = B x T positions, D width, H heads, K width of a head, V vocabulary.
RMSNorm, rotary positions in the `rotate_half` convention, SwiGLU, no biases, causal attention.
Source of the architecture: Llama (arXiv 2302.13971); `LlamaForCausalLM` is the reference in the tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...config import ModelConfig
from ..arrays import Floats
from .layout import module_layout

INIT_STD = 0.02
INIT_WIDTH = 768
"""GPT-2's deviation of initial weights, and the width that it is right for: narrower models need larger weights."""

QUERIES = 128
"""Queries at a time in attention without a fused kernel."""


class _Linear(nn.Linear):
    """A projection without bias and without initial values: these always come from a blob or from `initial_modules`."""

    # Not `skip_init`: that draws values for a meta tensor first, by way of torch._refs, which took most of the time of
    # making a tiny path, and 2 s of imports before the first.
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """The same of an embedding."""

    def reset_parameters(self) -> None:
        pass


class PathModel(nn.Module):
    """A whole path; its state dict has the names of `module_layout` over all levels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config)
        self.lm_head = None if config.tied else _Linear(config.width, config.vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each position."""
        return self.logits(self.hidden(tokens_BT))

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Output (B, T, D) of the last block, before the final norm."""
        return cast(Tensor, self.model(tokens_BT))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Final norm and output head."""
        return F.linear(self.model.norm(hidden_BTD), self.head_weight)

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the predicted positions, without ever holding all logits."""
        normed_BTD = self.model.norm(self.hidden(tokens_BT))
        # To shift these instead of the logits saves a copy of the latter.
        targets_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED)
        return head_loss(normed_BTD.flatten(0, 1), self.head_weight, targets_BT.flatten())

    @property
    def head_weight(self) -> Tensor:
        """The output head (V, D)."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(_Block(config) for _ in range(sum(level.blocks for level in config.levels)))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.is_checkpointed = False
        """Whether the blocks keep nothing of a way forward but their input."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.embed_tokens(tokens_BT)
        head_width = self.config.width // self.config.heads
        rope = rope_tables(tokens_BT.shape[1], head_width, self.config.rope_theta, hidden_BTD.device)
        for layer in self.layers:
            hidden_BTD = run_block(layer, hidden_BTD, rope, is_checkpointed=self.is_checkpointed)
        return cast(Tensor, hidden_BTD)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = _SwiGlu(config)

    def forward(self, hidden_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rope)
        return cast(Tensor, hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD)))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (_Linear(config.width, config.width) for _ in range(4))

    def forward(self, normed_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        mixed_BHTK = _attend(*self.project(normed_BTD, rope))
        return cast(Tensor, self.o_proj(mixed_BHTK.transpose(1, 2).reshape(normed_BTD.shape)))

    def project(self, normed_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, K), the first two turned by the angles of their positions."""
        return self.turned(self.q_proj(normed_BTD), self.k_proj(normed_BTD), self.v_proj(normed_BTD), rope)

    def turned(
        self, query_BTD: Tensor, key_BTD: Tensor, value_BTD: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same from what the three projections gave."""
        return rotate(self.split(query_BTD), rope), rotate(self.split(key_BTD), rope), self.split(value_BTD)

    def split(self, values_BTD: Tensor) -> Tensor:
        """Into heads (B, H, T, K)."""
        batch, tokens, width = values_BTD.shape
        return values_BTD.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)


class _SwiGlu(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(config.width, config.ffn_width)
        self.up_proj = _Linear(config.width, config.ffn_width)
        self.down_proj = _Linear(config.ffn_width, config.width)

    def forward(self, normed_BTD: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(normed_BTD)) * self.up_proj(normed_BTD)))


def run_block(
    block: Callable[..., Tensor], hidden_BTD: Tensor, rope: tuple[Tensor, Tensor], *, is_checkpointed: bool
) -> Tensor:
    """`block(hidden_BTD, rope)`; checkpointed, what it keeps for the way back is computed again there."""
    if not is_checkpointed:
        return block(hidden_BTD, rope)
    # No block draws random numbers, so that no generator's state needs to be kept.
    again = checkpoint(block, hidden_BTD, rope, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, again)


def initial_modules(config: ModelConfig, *, seed: int) -> dict[int, Floats]:
    """The flat vector of a fresh module per level: normal weights of deviation 0.02 sqrt(768 / width), norms 1.

    Projections that write into the residual stream are scaled down by sqrt(2 * layers), as in GPT-2.
    """
    std = INIT_STD * math.sqrt(INIT_WIDTH / config.width)
    residual_std = std / math.sqrt(2 * sum(level.blocks for level in config.levels))
    modules = {}
    for level in range(len(config.levels)):
        generator = np.random.default_rng([seed, level])
        layout = module_layout(config, level)
        modules[level] = np.ones(layout.size, dtype="<f4")
        for name, view in layout.split(modules[level]).items():
            if view.ndim == 2:
                scale = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else std
                view[...] = generator.standard_normal(view.shape, dtype=np.float32) * np.float32(scale)
    return modules


def load_modules(model: PathModel, flats: Sequence[Floats]) -> None:
    """Copy one flat vector per level, in level order, into the model."""
    assert len(flats) == len(model.config.levels), len(flats)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for level, flat in enumerate(flats):
            for name, values in module_layout(model.config, level).split(flat).items():
                # A copy: views of a blob are read-only, which torch warns about.
                parameters[name].copy_(torch.from_numpy(values.copy()))


def path_model(config: ModelConfig, flats: Sequence[Floats]) -> PathModel:
    """A path in memory, with one flat vector per level."""
    model = PathModel(config)
    load_modules(model, flats)
    return model


def read_module(model: PathModel, level: int) -> Floats:
    """A fresh flat vector of what the model now holds of `level`."""
    parameters = dict(model.named_parameters())
    layout = module_layout(model.config, level)
    return layout.flatten({name: parameters[name] for name in layout.names})


def rotate(values_BHTK: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys, turned by the angles of their positions: `rope` of `rope_tables`, (T, K) each."""
    cos_TK, sin_TK = rope
    first, second = values_BHTK.chunk(2, dim=-1)
    return values_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


def _attend(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor) -> Tensor:
    # On a GPU, the way back of torch's fused kernel for float32 adds up in any order: no two runs give the same bits.
    if query_BHTK.device.type != "cpu" and not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(query_BHTK, key_BHTK, value_BHTK, is_causal=True)
    # On a CPU, at the default sizes, plain products are a little quicker than torch's fused kernel (a training step in
    # 82 to 84 ms, not 86 to 89; best of 35, one thread), if queries go in slices: then the later half of the keys
    # is not computed for the earlier half of the queries.
    batch, heads, tokens, width = query_BHTK.shape
    query, key, value = (part.reshape(batch * heads, tokens, width) for part in (query_BHTK, key_BHTK, value_BHTK))
    mixed = []
    for start in range(0, tokens, QUERIES):
        end = min(start + QUERIES, tokens)
        mask = _causal_mask(tokens, query.device)[start:end, :end].expand(batch * heads, -1, -1)
        scores = torch.baddbmm(mask, query[:, start:end], key[:, :end].transpose(1, 2), alpha=1 / math.sqrt(width))
        mixed.append(torch.bmm(scores.softmax(dim=-1), value[:, :end]))
    return torch.cat(mixed, dim=1).view(batch, heads, tokens, width)


# Kept tables must be ordinary tensors, even if the first to ask is in inference mode.
@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _causal_mask(tokens: int, device: torch.device) -> Tensor:
    return torch.full((tokens, tokens), -math.inf, device=device).triu(1)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def rope_tables(tokens: int, head_width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, K); the two halves of K hold the same angles."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(device), angles.sin().to(device)


IGNORED = -100
CPU_LOGITS = 1 << 18
"""Logits at a time on a CPU: 1 MB, which stays in its cache. Those of a whole batch are by far the largest tensor of a
step: in slices, memory does not grow with the vocabulary, and a step of the default model took 84 to 94 ms, not 108."""
CUDA_LOGITS = 1 << 26


def head_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross-entropy in nats of `targets_N` under the logits `hidden_ND @ weight_VD.T`; differentiable once.

    A target of `IGNORED` does not count.
    """
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
