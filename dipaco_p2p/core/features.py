"""The features that documents are routed by: mean of the last block's output over the first tokens.

Source: DiPaCo (arXiv 2403.10616) section 2.4.1. n documents, D model width.
"""

from __future__ import annotations

import numpy as np
import torch

from ..config import PREFIX_TOKENS
from .arrays import Array, Floats
from .model import PathModel


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
