"""Evaluation: the loss of each sequence, window by window, under the path that a router gives it; and how sure it is.

Rule 1: the first 32 tokens route a document and count for no method; windows of 16 targets start after them.
Rule 2: one table of scores (n, J, P), of all P paths (`window_nats` of each), answers for every way to route.
Rule 3: documents are drawn independently, tokens are not: the interval of a loss is a bootstrap over documents.
Sources: DiPaCo (arXiv 2403.10616) sections 2.4.2 and 2.4.3; Efron, Tibshirani, An Introduction to the Bootstrap, 13.3.

n sequences, T tokens of each, J windows, P paths, B batch, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...config import PREFIX_TOKENS
from ...errors import IntegrityError
from ..arrays import Array, Floats
from ..model.transformer import PathModel, head_nats
from ..tensor_file import decode, encode

Doubles = npt.NDArray[np.float64]

WINDOW = 16
"""Targets in a window: the finest re-routing that a table of scores can tell apart."""


def window_starts(context: int, window: int = WINDOW) -> list[int]:
    """Position of the first target of each window in a sequence of `context` tokens; all windows but the last are full.

    These are also the positions at which a sequence that is routed again every `window` tokens is routed.
    """
    assert window >= 1, window
    return list(range(PREFIX_TOKENS, context, window))


@torch.no_grad()
def window_nats(model: PathModel, sequences: Array, *, window: int = WINDOW, batch: int = 32) -> Doubles:
    """Loss (n, J) in nats of `sequences` (n, T), summed over the targets of each window, `batch` sequences at a time.

    J is 0 for sequences of no more than 32 tokens.
    """
    starts = window_starts(sequences.shape[1], window)
    result = np.zeros((len(sequences), len(starts)), dtype=np.float64)
    if not starts:
        return result
    offsets = np.array(starts) - PREFIX_TOKENS
    for first in range(0, len(sequences), batch):
        rows = slice(first, first + batch)
        result[rows] = np.add.reduceat(_target_nats(model, sequences[rows]), offsets, axis=1)
    return result


def _target_nats(model: PathModel, sequences: Array) -> Doubles:
    """Loss (B, T - 32) of each target that counts."""
    device = next(model.parameters()).device
    tokens_BT = torch.from_numpy(sequences.astype(np.int64)).to(device)
    # The hidden state at position t is about the token at t + 1; the others need no logits.
    normed_BTD = model.model.norm(model.hidden(tokens_BT)[:, PREFIX_TOKENS - 1 : -1])
    targets_BT = tokens_BT[:, PREFIX_TOKENS:]
    nats = head_nats(normed_BTD.flatten(0, 1), model.head_weight, targets_BT.flatten())
    return nats.view(targets_BT.shape).double().cpu().numpy()


def encode_scores(nats: Doubles) -> bytes:
    """The bytes of one path's scores (n, J), for whoever fits a router on them."""
    return encode({"nats": nats.astype(np.float32)})


def decode_scores(data: bytes, *, count: int, context: int) -> Floats:
    """The inverse; raises IntegrityError unless it is finite losses of `count` sequences of `context` tokens."""
    nats = decode(data)[0].get("nats")
    shape = (count, len(window_starts(context)))
    if nats is None or nats.dtype != np.float32 or nats.shape != shape:
        raise IntegrityError(f"scores that are not float32 values of shape {shape}")
    if not np.isfinite(nats).all() or (nats < 0).any():
        raise IntegrityError("scores that cannot be losses")
    return nats


RESAMPLES = 1000
RESAMPLES_AT_ONCE = 50
"""Rows of drawn counts in memory at a time: 20 MB at 50,000 documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A sum of losses, and the tokens and bytes of text that it is over."""

    nats_total: float
    tokens: int
    bytes: int | None = None
    """Bytes (UTF-8) of the counted targets, where they are known."""
    low: float | None = None
    high: float | None = None
    """The 95 % interval of `loss`; None where nobody asked, or where there are fewer than two documents."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats_total / self.tokens

    @property
    def perplexity(self) -> float:
        """Infinite for a loss above 709 nats: the model has diverged, and e to that power is no float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which no choice of tokens changes; None where the bytes are not known."""
        return self.nats_total / math.log(2) / self.bytes if self.bytes else None


def counted_tokens(context: int) -> int:
    """Targets that count in a sequence of `context` tokens."""
    return max(context - PREFIX_TOKENS, 0)


def losses(model: PathModel, sequences: Array, *, batch: int = 32) -> Doubles:
    """Summed loss in nats of each of `sequences` (n, context), over the targets at positions 32 and on."""
    nats: Doubles = window_nats(model, sequences, batch=batch).sum(axis=1)
    return nats


def routed_once(table: Doubles, assignment: Array) -> Doubles:
    """Nats (n,) of each sequence if the path `assignment` (n,) reads all of it; table (n, J, P)."""
    return rerouted(table, np.repeat(assignment[:, None], table.shape[1], axis=1))


def rerouted(table: Doubles, choices: Array) -> Doubles:
    """Nats (n,) of each sequence if window j is read by the path `choices[:, j]`; table (n, J, P), choices (n, J).

    A path that takes over at a window has read everything before it, as the table's own scores have.
    """
    assert table.shape[:2] == choices.shape, (table.shape, choices.shape)
    nats: Doubles = np.take_along_axis(table, choices[:, :, None].astype(np.int64), axis=2).sum(axis=(1, 2))
    return nats


def held(choices: Array, *, every: int) -> Array:
    """The choices (n, J) of a router that is asked at every window but heeded only each `every` tokens.

    `every` is a multiple of the window.
    """
    assert every >= WINDOW and every % WINDOW == 0, every
    windows = np.arange(choices.shape[1])
    return choices[:, windows - windows % (every // WINDOW)]


def oracle_once(table: Doubles) -> Doubles:
    """Nats (n,) of each sequence under the one path that reads it best: no router can do better with one path."""
    nats: Doubles = table.sum(axis=1).min(axis=1)
    return nats


def summarise(
    nats: Doubles, *, tokens: int, bytes: npt.NDArray[np.int64] | None, documents: Array, seed: int
) -> Evaluation:
    """The evaluation of sequences with the losses `nats` (n,).

    `tokens` counted in each sequence; `bytes` (n,) of text in those tokens, if known; `documents` (n,) names the
    document of each sequence (any integers).
    """
    assert len(nats) == len(documents) and len(nats), (len(nats), len(documents))
    low, high = _interval(nats, tokens, documents, seed)
    return Evaluation(
        nats_total=math.fsum(nats.tolist()),
        tokens=len(nats) * tokens,
        bytes=None if bytes is None else int(bytes.sum()),
        low=low,
        high=high,
    )


def _interval(nats: Doubles, tokens: int, documents: Array, seed: int) -> tuple[float | None, float | None]:
    """The 2.5 % and 97.5 % quantiles of nats per token over resamples of whole documents."""
    _, place = np.unique(documents, return_inverse=True)
    nats_by_document = np.bincount(place, weights=nats)
    tokens_by_document = np.bincount(place) * tokens
    count = len(nats_by_document)
    if count < 2:
        return None, None
    generator = np.random.default_rng(seed)
    resampled = []
    for _ in range(RESAMPLES // RESAMPLES_AT_ONCE):
        drawn = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES_AT_ONCE)
        resampled.append(drawn @ nats_by_document / (drawn @ tokens_by_document))
    low, high = np.quantile(np.concatenate(resampled), [0.025, 0.975])
    return float(low), float(high)
