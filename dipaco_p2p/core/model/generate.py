"""Generation: one path writes on, token by token; and the features that a prompt, or a text so far, is routed by.

Rule 1: a path sees at most `context` tokens. When they are full it goes on with the last half of them, so that the
work per token stays bounded; what it sees depends on the number of tokens alone.
Rule 2: keys and values of tokens that were read are kept, and change nothing but the time it takes.
Rule 3: a text shorter than the 32 tokens that routing looks at is routed by the mean over the tokens that there are.
Source: DiPaCo (arXiv 2403.10616) sections 2.4 and 2.4.3.

B batch (always 1 here), T new tokens, S tokens read before, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config import PREFIX_TOKENS
from ..arrays import Array, Floats
from ..routing.features import token_counts
from .transformer import PathModel, rope_tables


class Sampler:
    """Picks tokens from logits; the same seed and logits give the same tokens on every machine.

    `temperature` 0 takes the likeliest token; `top_k` keeps only that many of the likeliest tokens, 0 all of them.
    """

    def __init__(self, *, temperature: float = 0.8, top_k: int = 0, seed: int = 0) -> None:
        assert temperature >= 0 and top_k >= 0, (temperature, top_k)
        self._temperature = temperature
        self._top_k = top_k
        self._generator = np.random.default_rng(seed)

    def pick(self, logits: Array) -> int:
        """A token, by its logits (V,): the maximum of logits with Gumbel noise has the softmax's distribution."""
        if self._temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self._temperature
        if 0 < self._top_k < len(scaled):
            scaled[np.argsort(-scaled, kind="stable")[self._top_k :]] = -math.inf
        return int((scaled + self._generator.gumbel(size=len(scaled))).argmax())


def visible(count: int, context: int) -> int:
    """Where what a path sees of a text of `count` tokens begins: at most `context` and at least half of it."""
    hop = max(context // 2, 1)
    return max(0, -(-(count - context) // hop) * hop)


def generate(
    model: PathModel, tokens: Sequence[int], *, count: int, sampler: Sampler, end: int | None = None
) -> Iterator[int]:
    """Up to `count` tokens that follow `tokens`, of which there is at least one; the token `end` ends it, and is given.

    Stops early only there. The parameters of `model` must stay as they are meanwhile.
    """
    assert tokens, "there is nothing to follow"
    text, reading = list(tokens), Reading(model)
    start = None
    for _ in range(count):
        if start != (start := visible(len(text), model.config.context)):
            reading = Reading(model)
        token = sampler.pick(reading.read(text[start + reading.count :]))
        text.append(token)
        yield token
        if token == end:
            return


class Reading:
    """What a path has read so far: keys and values of every layer. At most `context` tokens."""

    def __init__(self, model: PathModel) -> None:
        self._model = model
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.count = 0
        """Tokens read."""

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Floats:
        """Logits (V,) of what follows, after reading `tokens` too; the same as of all tokens at once."""
        config, decoder = self._model.config, self._model.model
        assert tokens and self.count + len(tokens) <= config.context, (self.count, len(tokens), config.context)
        device = next(self._model.parameters()).device
        hidden_BTD = decoder.embed_tokens(torch.tensor([list(tokens)], device=device))
        cos, sin = rope_tables(config.context, config.width // config.heads, config.rope_theta, device)
        here = slice(self.count, self.count + len(tokens))
        for number in range(len(decoder.layers)):
            hidden_BTD = self._read_layer(number, hidden_BTD, (cos[here], sin[here]))
        self.count += len(tokens)
        logits: Floats = self._model.logits(hidden_BTD[:, -1:])[0, 0].float().cpu().numpy()
        return logits

    def _read_layer(self, number: int, hidden_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        layer: Any = self._model.model.layers[number]
        query_BHTK, key, value = layer.self_attn.project(layer.input_layernorm(hidden_BTD), rope)
        mixed_BHTK = _attend(query_BHTK, *self._keep(number, key, value))
        hidden_BTD = hidden_BTD + layer.self_attn.o_proj(mixed_BHTK.transpose(1, 2).reshape(hidden_BTD.shape))
        hidden_BTD = hidden_BTD + layer.mlp(layer.post_attention_layernorm(hidden_BTD))
        return hidden_BTD

    def _keep(self, number: int, key_BHTK: Tensor, value_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (B, H, S + T, K) of a layer, the new ones last."""
        if number == len(self._kept):
            self._kept.append((key_BHTK, value_BHTK))
        else:
            key, value = self._kept[number]
            self._kept[number] = torch.cat((key, key_BHTK), dim=2), torch.cat((value, value_BHTK), dim=2)
        return self._kept[number]


@torch.no_grad()
def prompt_features(model: PathModel, tokens: Sequence[int], *, has_counts: bool) -> Floats:
    """The features (1, D), or (1, D + C), that the router takes: of the first 32 of `tokens`, or of as many as there
    are, whose counts are then those of 32 such tokens."""
    first = tokens[:PREFIX_TOKENS]
    mean: Floats = _hidden(model, first).mean(axis=0, keepdims=True, dtype=np.float32)
    if not has_counts:
        return mean
    counts = token_counts(np.array([first], dtype=np.int64), vocab_size=model.config.vocab_size)
    return np.concatenate([mean, counts * np.float32(PREFIX_TOKENS / len(first))], axis=1)


@torch.no_grad()
def text_features(model: PathModel, tokens: Sequence[int]) -> Floats:
    """The features (1, 2D) that the token router takes at the end of `tokens`, as far as a path sees these.

    As `token_features` there: the mean over the last 32 tokens, or as many as there are, then the mean over all.
    """
    hidden = _hidden(model, tokens[visible(len(tokens), model.config.context) :])
    means = [part.mean(axis=0, dtype=np.float32) for part in (hidden[-PREFIX_TOKENS:], hidden)]
    both: Floats = np.concatenate(means)[None]
    return both


def _attend(query_BHTK: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention (B, H, T, K) of the last T of all S + T tokens."""
    scores = query_BHTK @ key.transpose(2, 3) / math.sqrt(key.shape[3])
    new, total = scores.shape[2:]
    is_ahead = torch.ones(new, total, dtype=torch.bool, device=scores.device).triu(total - new + 1)
    return scores.masked_fill(is_ahead, -math.inf).softmax(dim=3) @ value


def _hidden(model: PathModel, tokens: Sequence[int]) -> Floats:
    """Outputs (T, D) of the last block."""
    assert tokens, "there is nothing to route by"
    device = next(model.parameters()).device
    hidden: Floats = model.hidden(torch.tensor([list(tokens)], device=device))[0].float().cpu().numpy()
    return hidden
