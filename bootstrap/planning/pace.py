"""How fast this machine trains a path of a run, by some inner steps on tokens drawn at random."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dipaco_p2p.config import RunConfig
from dipaco_p2p.core.model.engine import BFLOAT16, at_first, on_device, spare_device
from dipaco_p2p.core.model.inner import InnerLoop, StepReport
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.model.transformer import initial_modules

from ..progress import stage

STEPS_MAX, LONG_ENOUGH_S = 200, 5.0


def tokens_per_s(config: RunConfig, *, now: Callable[[], float] = time.monotonic) -> float:
    """Tokens a second of steps after the first, which also looks for what fits into memory. On a GPU, if there is one
    that can.

    Raises EnvironmentUnfit where the path does not fit into this machine.
    """
    rows = np.random.default_rng(config.seed).integers(
        config.model.vocab_size, size=(config.inner.batch, config.model.context), dtype=np.int32
    )
    flats = list(initial_modules(config.model, seed=config.seed).values())

    def measured(device: str) -> float:
        began_s: float | None = None
        tokens, took_s = 0, 0.0

        def on_step(report: StepReport) -> bool:
            nonlocal began_s, tokens, took_s
            if began_s is None:
                began_s = now()
                return True
            tokens, took_s = tokens + report.tokens, now() - began_s
            return took_s < LONG_ENOUGH_S

        is_fast = at_first(BFLOAT16, device).is_fast
        loop = InnerLoop(config.inner, config.total_steps, config.model, device=device, seed=config.seed, fast=is_fast)
        loop.run(flats, Shard(tokens=rows), first_step=0, steps=STEPS_MAX, on_step=on_step)
        return tokens / took_s

    with stage("Training some steps to see how fast this machine is"):
        return on_device(spare_device(), measured)
