"""How far parameters go in first steps of the demo's model, in sums of its learning rates: `pytest -s` prints it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dipaco_p2p.config import InnerConfig, ModelConfig
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.model.transformer import initial_modules
from dipaco_p2p.protocol.norms import FURTHEST_MULTIPLE, lr_sum

TEXTS = Path(__file__).parents[2] / "docs"
WORDS = 1024


@pytest.mark.slow
@pytest.mark.parametrize(("warmup_steps", "beta2"), [(20, 0.95), (0, 0.95), (20, 0.999)])
def test_some_go_as_far_as_the_learning_rates_and_none_much_further(warmup_steps: int, beta2: float) -> None:
    """So honest first steps are not scaled down, and any that are much longer are."""
    model, steps = replace(ModelConfig(), vocab_size=WORDS), 20
    inner = InnerConfig(steps=steps, warmup_steps=warmup_steps, beta2=beta2)
    words = [word for path in sorted(TEXTS.glob("*.md")) for word in re.findall(r"\w+|\W", path.read_text("utf-8"))]
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(WORDS - 1), 1)}
    tokens = np.array([numbers.get(word, 0) for word in words], dtype=np.int32)
    shard = Shard(tokens=tokens[: len(tokens) // model.context * model.context].reshape(-1, model.context))
    before = [flat.copy() for flat in initial_modules(model, seed=0).values()]
    torch.manual_seed(0)
    loop = InnerLoop(inner, 10 * steps, model, device="cpu", seed=0)
    after = loop.run(before, shard, first_step=0, steps=steps, on_step=lambda report: True).flats
    rates = lr_sum(inner, 0, 10 * steps)
    for level, (old, new) in enumerate(zip(before, after, strict=True)):
        moved = np.abs(new - old) / rates
        size, furthest = float(np.sqrt(np.mean(moved**2))), float(moved.max())
        print(f"level {level}, {warmup_steps} of warm-up, {beta2}: the furthest {furthest:.2f}, all {size:.2f}")
        assert 0.6 * FURTHEST_MULTIPLE < furthest < 0.95 * FURTHEST_MULTIPLE
        assert size < furthest
