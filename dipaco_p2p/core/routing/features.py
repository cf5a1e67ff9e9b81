"""The features that text is routed by, from the last block's outputs of the frozen warm-up model.

`features` are those of a document: the mean over its first tokens, and how often each token is among them where the
router reads tokens (`first = "tiny"`). `token_features` are those of a position inside it,
for re-routing: the mean over the tokens just before it, and over all before it. Whatever comes at or after a position
never changes its features.
Source: DiPaCo (arXiv 2403.10616) sections 2.4.1 and 2.4.3; there a whole transformer routes inside a sequence, here a
linear router of these means. n documents, T tokens, J positions, D model width, C buckets of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...config import PREFIX_TOKENS, count_buckets
from ..arrays import Array, Floats
from ..model.transformer import PathModel


def document_features(model: PathModel, tokens: Array, *, has_counts: bool) -> Floats:
    """Features (n, D) of documents by the first 32 of their `tokens` (n, T); with counts (n, D + C)."""
    means = features(model, tokens[:, :PREFIX_TOKENS])
    return with_counts(means, tokens, vocab_size=model.config.vocab_size) if has_counts else means


def with_counts(means: Floats, tokens: Array, *, vocab_size: int) -> Floats:
    """The features (n, D + C) of documents whose `means` (n, D) are known already."""
    return np.concatenate([means, token_counts(tokens[:, :PREFIX_TOKENS], vocab_size=vocab_size)], axis=1)


def token_counts(tokens: Array, *, vocab_size: int) -> Floats:
    """How often each token is in `tokens` (n, T): (n, C). A large vocabulary shares C buckets, by remainder; those of
    byte-pair encoding are numbered from the shortest on, so that what is frequent meets what is rare."""
    width = count_buckets(vocab_size)
    counts = np.zeros((len(tokens), width), dtype=np.float32)
    np.add.at(counts, (np.arange(len(tokens))[:, None], tokens % width), np.float32(1))
    return counts


@torch.no_grad()
def features(model: PathModel, prefix_tokens: Array, batch: int = 256) -> Floats:
    """Features (n, D) of `prefix_tokens` (n, 32), the first tokens of each document, `batch` documents at a time."""
    assert prefix_tokens.ndim == 2 and prefix_tokens.shape[1] == PREFIX_TOKENS, prefix_tokens.shape
    device = next(model.parameters()).device
    result = np.empty((len(prefix_tokens), model.config.width), dtype=np.float32)
    for start in range(0, len(prefix_tokens), batch):
        tokens = torch.from_numpy(prefix_tokens[start : start + batch].astype(np.int64)).to(device)
        result[start : start + batch] = model.hidden(tokens).float().mean(dim=1).cpu().numpy()
    return result


@torch.no_grad()
def token_features(model: PathModel, tokens: Array, *, at: Sequence[int], batch: int = 32) -> Floats:
    """Features (n, J, 2D) of `tokens` (n, T) at each position of `at` (J): how many tokens were seen, 32 to T.

    The first D are the mean of the last 32 tokens seen, the others that of all tokens seen; at 32 both are `features`.
    """
    assert tokens.ndim == 2 and all(PREFIX_TOKENS <= seen <= tokens.shape[1] for seen in at), (tokens.shape, at)
    device, width = next(model.parameters()).device, model.config.width
    result = np.empty((len(tokens), len(at), 2 * width), dtype=np.float32)
    if not len(at):
        return result
    means = _means(at).to(device)
    for start in range(0, len(tokens), batch):
        part = torch.from_numpy(tokens[start : start + batch, : max(at)].astype(np.int64)).to(device)
        # A product with the weights of the means: differences of running sums would lose digits.
        both = means @ model.hidden(part).float()
        result[start : start + batch] = both.reshape(len(part), len(at), 2 * width).cpu().numpy()
    return result


def _means(at: Sequence[int]) -> torch.Tensor:
    """Weights (2J, T): for each position those of the mean of the last tokens, then those of the mean of all."""
    weights = torch.zeros(2 * len(at), max(at))
    for row, seen in enumerate(at):
        weights[2 * row, seen - PREFIX_TOKENS : seen] = 1 / PREFIX_TOKENS
        weights[2 * row + 1, :seen] = 1 / seen
    return weights
