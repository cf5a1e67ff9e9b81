"""Scores: the loss of a path on a sequence, window by window.

Rule 1: the first 32 tokens route a document and count for no method; windows of 16 targets start after them.
Rule 2: one table of scores (n, J, P), of all P paths, answers for every way to route (core/evaluate.py).
Source: DiPaCo (arXiv 2403.10616) sections 2.4.2 and 2.4.3.

n sequences, T tokens of each, J windows, B batch, D width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..config import PREFIX_TOKENS
from ..errors import IntegrityError
from .arrays import Array, Floats
from .codec import decode, encode
from .head_loss import head_nats
from .model import PathModel

Doubles = npt.NDArray[np.float64]

WINDOW = 16
"""Targets in a window: the finest re-routing that a table of scores can tell apart."""


def window_starts(context: int, window: int = WINDOW) -> list[int]:
    """Position of the first target of each window in a sequence of `context` tokens; all windows but the last are full.

    These are also the positions at which a sequence that is routed anew every `window` tokens is routed.
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
        raise IntegrityError("scores that are no losses")
    return nats
