"""Loss of paths on sequences; the first 32 tokens route a document and count for no method.

Source: DiPaCo (arXiv 2403.10616) section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..config import PREFIX_TOKENS, ModelConfig
from .arrays import Array, Floats
from .head_loss import head_nats
from .model import PathModel, load_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A sum of losses and the number of tokens it is over."""

    nats_total: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats_total / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def counted_tokens(context: int) -> int:
    """Targets that count in a sequence of `context` tokens."""
    return max(context - PREFIX_TOKENS, 0)


@torch.no_grad()
def losses(model: PathModel, sequences: Array, *, batch: int = 32) -> npt.NDArray[np.float64]:
    """Summed loss in nats of each of `sequences` (n, context), over the targets at positions 32 and on."""
    device = next(model.parameters()).device
    totals = np.zeros(len(sequences), dtype=np.float64)
    for start in range(0, len(sequences), batch):
        tokens_BT = torch.from_numpy(sequences[start : start + batch].astype(np.int64)).to(device)
        # The hidden state at position t is about the token at t + 1; the others need no logits.
        normed_BTD = model.model.norm(model.hidden(tokens_BT)[:, PREFIX_TOKENS - 1 : -1])
        targets_BT = tokens_BT[:, PREFIX_TOKENS:]
        nats = head_nats(normed_BTD.flatten(0, 1), model.head_weight, targets_BT.flatten())
        totals[start : start + batch] = nats.view(targets_BT.shape).double().sum(dim=1).cpu().numpy()
    return totals


def evaluate_routed(
    paths: Callable[[int], Sequence[Floats]], config: ModelConfig, sequences: Array, assignment: Array
) -> Evaluation:
    """Loss of each sequence under the path with the number that `assignment` (n,) gives it.

    `paths(number)` gives the path's flat vectors, one per level; only one path is in memory at a time.
    """
    assert len(sequences) and len(sequences) == len(assignment), (len(sequences), len(assignment))
    model = PathModel(config)
    nats: list[float] = []
    for number in np.unique(assignment).tolist():
        load_modules(model, paths(number))
        nats += losses(model, sequences[assignment == number]).tolist()
    return Evaluation(nats_total=math.fsum(nats), tokens=len(sequences) * counted_tokens(sequences.shape[1]))
