"""Generation: one path writes on, token by token; and the features that a prompt, or a text so far, is routed by.

Rule 1: a path sees at most `context` tokens. When they are full it goes on with the last half of them, so that the
work per token stays bounded; what it sees depends on the number of tokens alone.
Rule 2: keys and values of tokens that were read are kept, and change nothing but the time it takes.
Rule 3: a text shorter than the 32 tokens that routing looks at is routed by the mean over the tokens that there are.
Source: DiPaCo (arXiv 2403.10616) sections 2.4 and 2.4.3.

B batch: texts of one path that are read together, T new tokens of each, S all tokens read of one, D width, H heads,
K width of a head, V vocabulary.
"""

from __future__ import annotations

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
    writing = Writing(Reading(model), tokens, sampler=sampler)
    for _ in range(count):
        [(token, _)] = write_next([writing])
        yield token
        if token == end:
            return


class Writing:
    """A text that a path goes on with.

    `reading` has read nothing yet, or the first few of `tokens` where all of these fit into a context.
    """

    def __init__(self, reading: Reading, tokens: Sequence[int], *, sampler: Sampler) -> None:
        assert tokens, "there is nothing to follow"
        self.reading = reading
        self._text = list(tokens)
        self._sampler = sampler
        self._start = 0

    def unread(self) -> list[int]:
        """What `reading` has yet to read before the next token."""
        model = self.reading.model
        if self._start != (start := visible(len(self._text), model.config.context)):
            self._start, self.reading = start, Reading(model)
        return self._text[start + self.reading.count :]

    def add(self, logits: Floats) -> int:
        """Pick the next token by its logits (V,)."""
        self._text.append(self._sampler.pick(logits))
        return self._text[-1]


def write_next(writings: Sequence[Writing]) -> list[tuple[int, Floats]]:
    """The next token of each text, with the logits (V,) that it was picked from.

    All are of one path. Those that have one token to read are read together: on a CPU, 16 take as long as a few.
    """
    unread = [writing.unread() for writing in writings]
    short = [number for number, tokens in enumerate(unread) if len(tokens) == 1]
    logits = {n: writings[n].reading.read(unread[n]) for n in range(len(writings)) if n not in short}
    if short:
        rows = read_together([writings[number].reading for number in short], [unread[number] for number in short])
        logits |= dict(zip(short, rows, strict=True))
    return [(writing.add(logits[number]), logits[number]) for number, writing in enumerate(writings)]


class Reading:
    """What a path has read so far: keys and values of every layer. At most `context` tokens."""

    def __init__(self, model: PathModel) -> None:
        config, weight = model.config, model.head_weight
        self.model = model
        # Not filled: a page of memory is taken when it is first written to.
        self.kept = weight.new_empty(_kept_shape(config), requires_grad=False)
        self.count = 0
        """Tokens read."""

    @staticmethod
    def bytes_max(config: ModelConfig) -> int:
        """Memory that one takes when a context is full, in float32."""
        return 4 * math.prod(_kept_shape(config))

    def read(self, tokens: Sequence[int]) -> Floats:
        """Logits (V,) of what follows, after reading `tokens` too; the same as of all tokens at once."""
        logits: Floats = read_together([self], [tokens])[0]
        return logits

    @torch.inference_mode()
    def read_each(self, tokens: Sequence[int]) -> Floats:
        """The same after each of `tokens`: logits (T, V)."""
        logits: Floats = self.model.logits(_read([self], [tokens]))[0].float().cpu().numpy()
        return logits


@torch.inference_mode()
def read_together(readings: Sequence[Reading], tokens_BT: Sequence[Sequence[int]]) -> Floats:
    """Logits (B, V) of what follows, after each text has read T tokens more; all are of one path."""
    logits: Floats = readings[0].model.logits(_read(readings, tokens_BT)[:, -1]).float().cpu().numpy()
    return logits


def _read(readings: Sequence[Reading], tokens_BT: Sequence[Sequence[int]]) -> Tensor:
    """Outputs (B, T, D) of the last block."""
    model, device = readings[0].model, readings[0].kept.device
    config, decoder = model.config, model.model
    places = [slice(reading.count, reading.count + len(tokens_BT[0])) for reading in readings]
    assert tokens_BT[0] and max(place.stop for place in places) <= config.context, (places, config.context)
    hidden_BTD: Tensor = decoder.embed_tokens(torch.tensor([list(tokens) for tokens in tokens_BT], device=device))
    tables = rope_tables(config.context, config.width // config.heads, config.rope_theta, device)
    cos, sin = (table[places[0]] for table in tables)
    if len(places) > 1:  # of each text its own places, twice, for queries and keys; the same for all heads
        cos, sin = (torch.stack([table[place] for place in places]).repeat(2, 1, 1)[:, None] for table in tables)
    for number, layer in enumerate(decoder.layers):
        kept = [reading.kept[number] for reading in readings]
        hidden_BTD = _read_layer(layer, hidden_BTD, kept, places, (cos, sin))
    for reading, place in zip(readings, places, strict=True):
        reading.count = place.stop
    return hidden_BTD


def _kept_shape(config: ModelConfig) -> tuple[int, ...]:
    """Layers, keys or values, H, tokens, K."""
    layers = sum(level.blocks for level in config.levels)
    return layers, 2, config.heads, config.context, config.width // config.heads


def _read_layer(
    layer: Any, hidden_BTD: Tensor, kept: Sequence[Tensor], places: Sequence[slice], rope: tuple[Tensor, Tensor]
) -> Tensor:
    """As the block itself, with the tokens before its place known of each text by what is `kept` (2, H, S, K), to which
    the new ones are added.

    Queries and keys are turned at once: with few tokens, time goes by operations, not by numbers.
    """
    attention, normed_BTD = layer.self_attn, layer.input_layernorm(hidden_BTD)
    both = rotate(attention.split(torch.cat((attention.q_proj(normed_BTD), attention.k_proj(normed_BTD)))), rope)
    new = zip(*both.chunk(2), attention.split(attention.v_proj(normed_BTD)), kept, places, strict=True)
    mixed = []
    for query_HTK, key_HTK, value_HTK, kept_2HSK, place in new:
        kept_2HSK[0, :, place], kept_2HSK[1, :, place] = key_HTK, value_HTK
        mixed.append(_attend(query_HTK, *kept_2HSK[:, :, : place.stop]).transpose(0, 1))
    hidden_BTD = hidden_BTD + attention.o_proj(torch.stack(mixed).reshape(hidden_BTD.shape))
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
