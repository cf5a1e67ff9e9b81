"""The loops that are compared. Each takes some steps from where it stands, on the same sequences.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn import functional

from dipaco_p2p.config import InnerConfig, ModelConfig
from dipaco_p2p.core.model.engine import compile_hindrance, hindrance
from dipaco_p2p.core.model.inner import InnerLoop, learning_rate
from dipaco_p2p.core.model.shards import Shard, batch
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, load_modules

TOTAL_STEPS = 10_000
SEQUENCES = 256

Loop = Callable[[int, int], float]
"""Takes the number of its first step and how many; the mean loss."""

PLAIN, EXACT, FAST = "plain loop, float32", "volunteer, exact", "volunteer, fast"
PLAIN_COMPILED = "plain loop, bfloat16, compiled"


def loops(model: ModelConfig, inner: InnerConfig, *, is_quick: bool, device: str = "cpu") -> Mapping[str, Loop]:
    """By name; what this machine cannot do is left out."""
    bench = _Bench(model, inner, device)
    found = {PLAIN: bench.plain(), EXACT: bench.volunteer(fast=False)}
    if not is_quick and hindrance(device) is None and compile_hindrance(device) is None:
        found[PLAIN_COMPILED] = bench.plain(compiled=True)
        found[FAST] = bench.volunteer(fast=True)
    return found


def noise(model: ModelConfig) -> Shard:
    """Sequences of random tokens: how long a step takes does not depend on them."""
    shape = (SEQUENCES, model.context)
    return Shard(tokens=np.random.default_rng(0).integers(0, model.vocab_size, shape, dtype=np.int32))


class _Bench:
    """What all loops of one comparison share."""

    def __init__(self, model: ModelConfig, inner: InnerConfig, device: str) -> None:
        self._model, self._inner, self._device = model, inner, device
        self._shard, self._flats = noise(model), list(initial_modules(model, seed=0).values())

    def volunteer(self, *, fast: bool) -> Loop:
        """The loop of the programs."""
        loop = InnerLoop(self._inner, TOTAL_STEPS, self._model, device=self._device, seed=0, fast=fast)

        def steps(first: int, count: int) -> float:
            return loop.run(self._flats, self._shard, first_step=first, steps=count).loss

        return steps

    def plain(self, *, compiled: bool = False) -> Loop:
        """What a tutorial would write: logits, cross-entropy, AdamW, clipping; the same schedule and batches."""
        inner, path = self._inner, PathModel(self._model)
        load_modules(path, self._flats)
        path.to(self._device)
        optimizer = torch.optim.AdamW(
            path.parameters(), betas=(inner.beta1, inner.beta2), weight_decay=inner.weight_decay
        )

        def loss_of(tokens_BT: torch.Tensor) -> torch.Tensor:
            with torch.autocast(tokens_BT.device.type, torch.bfloat16, enabled=compiled):
                logits_BTV = path(tokens_BT)
            targets = tokens_BT[:, 1:].flatten()
            return functional.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), targets)

        compute = torch.compile(loss_of, dynamic=False) if compiled else loss_of

        def steps(first: int, count: int) -> float:
            losses = []
            for step in range(first, first + count):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(inner, step, TOTAL_STEPS)
                with warnings.catch_warnings(action="ignore"):
                    loss = compute(batch(self._shard, seed=0, step=step, size=inner.batch).to(self._device))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(path.parameters(), inner.clip)
                optimizer.step()
                losses.append(loss.item())
            return float(np.mean(losses))

        return steps
