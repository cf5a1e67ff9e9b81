"""Generation: one path writes on, token by token; and the features that a prompt, or a text so far, is routed by.

Rule 1: a path sees at most `context` tokens. When they are full it goes on with the last half of them, so that the
work per token stays bounded; what it sees depends on the number of tokens alone.
Rule 2: keys and values of tokens that were read are kept, and change nothing but the time it takes.
Rule 3: a text shorter than the 32 tokens that routing looks at is routed by the mean over the tokens that there are.
Source: DiPaCo (arXiv 2403.10616) sections 2.4 and 2.4.3.

B batch (always 1 here), T new tokens, S all tokens read, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import PREFIX_TOKENS, ModelConfig
from ..arrays import Array, Floats
from ..routing.features import token_counts
from .transformer import PathModel, rope_tables, rotate


class Sampler:
    """Picks tokens from logits; the same seed and logits give the same tokens on every machine.

    `temperature` 0 takes the likeliest token; `top_k` keeps only that many of the likeliest tokens, 0 all of them;
    `top_p` the likeliest that have this share of the probability together, 1 all of them.
    """

    def __init__(self, *, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        assert temperature >= 0 and top_k >= 0 and 0 < top_p <= 1, (temperature, top_k, top_p)
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._generator = np.random.default_rng(seed)

    def pick(self, logits: Array) -> int:
        """A token, by its logits (V,): the maximum of logits with Gumbel noise has the softmax's distribution."""
        if self._temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self._temperature
        if 0 < self._top_k < len(scaled):
            scaled[np.argsort(-scaled, kind="stable")[self._top_k :]] = -math.inf
        if self._top_p < 1:
            order = np.argsort(-scaled, kind="stable")
            chances = np.exp(scaled[order] - scaled[order[0]])
            before = np.cumsum(chances) - chances
            scaled[order[before >= self._top_p * chances.sum()]] = -math.inf
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
    for token, _ in itertools.islice(following(Reading(model), tokens, sampler=sampler), count):
        yield token
        if token == end:
            return


def following(reading: Reading, tokens: Sequence[int], *, sampler: Sampler) -> Iterator[tuple[int, Floats]]:
    """Tokens that follow `tokens`, each with the logits (V,) that it was picked from, without end.

    `reading` has read nothing yet, or the first few of `tokens` where all of these fit into a context.
    """
    assert tokens, "there is nothing to follow"
    text, start, model = list(tokens), 0, reading.model
    while True:
        if start != (start := visible(len(text), model.config.context)):
            reading = Reading(model)
        logits = reading.read(text[start + reading.count :])
        text.append(sampler.pick(logits))
        yield text[-1], logits


class Reading:
    """What a path has read so far: keys and values of every layer. At most `context` tokens."""

    def __init__(self, model: PathModel) -> None:
        config, weight = model.config, model.head_weight
        self.model = model
        # Not filled: a page of memory is taken when it is first written to.
        self._kept = weight.new_empty(_kept_shape(config), requires_grad=False)
        self.count = 0
        """Tokens read."""

    @staticmethod
    def bytes_max(config: ModelConfig) -> int:
        """Memory that one takes when a context is full, in float32."""
        return 4 * math.prod(_kept_shape(config))

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Floats:
        """Logits (V,) of what follows, after reading `tokens` too; the same as of all tokens at once."""
        logits: Floats = self.model.logits(self._hidden(tokens)[:, -1:])[0, 0].float().cpu().numpy()
        return logits

    @torch.inference_mode()
    def read_each(self, tokens: Sequence[int]) -> Floats:
        """The same after each of `tokens`: logits (T, V)."""
        logits: Floats = self.model.logits(self._hidden(tokens))[0].float().cpu().numpy()
        return logits

    def _hidden(self, tokens: Sequence[int]) -> Tensor:
        """Outputs (B, T, D) of the last block."""
        config, decoder = self.model.config, self.model.model
        assert tokens and self.count + len(tokens) <= config.context, (self.count, len(tokens), config.context)
        hidden_BTD: Tensor = decoder.embed_tokens(torch.tensor([list(tokens)], device=self._kept.device))
        cos, sin = rope_tables(config.context, config.width // config.heads, config.rope_theta, self._kept.device)
        here = slice(self.count, self.count + len(tokens))
        for layer, kept in zip(decoder.layers, self._kept, strict=True):
            hidden_BTD = _read_layer(layer, hidden_BTD, kept, here, (cos[here], sin[here]))
        self.count += len(tokens)
        return hidden_BTD


def _kept_shape(config: ModelConfig) -> tuple[int, ...]:
    """Layers, keys or values, H, tokens, K."""
    layers = sum(level.blocks for level in config.levels)
    return layers, 2, config.heads, config.context, config.width // config.heads


def _read_layer(layer: Any, hidden_BTD: Tensor, kept_2HSK: Tensor, here: slice, rope: tuple[Tensor, Tensor]) -> Tensor:
    """As the block itself, with the tokens before `here` known by `kept_2HSK`, to which the new ones are added.

    Queries and keys are turned at once: with few tokens, time goes by operations, not by numbers.
    """
    attention, normed_BTD = layer.self_attn, layer.input_layernorm(hidden_BTD)
    both_2TD = torch.cat((attention.q_proj(normed_BTD), attention.k_proj(normed_BTD)))
    query_HTK, kept_2HSK[0, :, here] = rotate(attention.split(both_2TD), rope)
    kept_2HSK[1, :, here] = attention.split(attention.v_proj(normed_BTD))[0]
    mixed_HTK = _attend(query_HTK, *kept_2HSK[:, :, : here.stop])
    hidden_BTD = hidden_BTD + attention.o_proj(mixed_HTK.transpose(0, 1).reshape(hidden_BTD.shape))
    return cast(Tensor, hidden_BTD + layer.mlp(layer.post_attention_layernorm(hidden_BTD)))


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


def _attend(query_HTK: Tensor, key_HSK: Tensor, value_HSK: Tensor) -> Tensor:
    """Causal attention (H, T, K) of the last T of S tokens."""
    new, total = query_HTK.shape[1], key_HSK.shape[1]
    mask = None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=query_HTK.device).tril(total - new)
    query, key, value = query_HTK[None], key_HSK[None], value_HSK[None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=1 < new == total)[0]


def _hidden(model: PathModel, tokens: Sequence[int]) -> Floats:
    """Outputs (T, D) of the last block."""
    assert tokens, "there is nothing to route by"
    device = next(model.parameters()).device
    hidden: Floats = model.hidden(torch.tensor([list(tokens)], device=device))[0].float().cpu().numpy()
    return hidden
