"""A tiny job of the experiment, its start and its shards; the tests of rounds and of the every-step mode use it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from tiny_run import MODEL, initial

from benchmarks.methods.grid import WarmStart
from benchmarks.methods.jobs import Job
from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.shards import Shard

PRIVATE = replace(
    MODEL, levels=(MODEL.levels[0], LevelConfig(modules=2, blocks=1), LevelConfig(private=True, blocks=1))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyJob(Job):
    """A job of a small grid; two steps in a round."""

    path_model: ModelConfig = MODEL

    @property
    def model(self) -> ModelConfig:
        return self.path_model

    @property
    def inner(self) -> InnerConfig:
        return InnerConfig(steps=self.round_steps, batch=2, warmup_steps=1, optimizer=self.optimizer)


def tiny_job(**changes: object) -> TinyJob:
    return replace(TinyJob(method="tiny", seed=3, steps=4, round_steps=2), **changes)  # type: ignore[arg-type]


def start() -> WarmStart:
    flats, optimizer = initial()
    tensors = {}
    for level, flat in enumerate(flats):
        tensors |= module_layout(MODEL, level).split(flat)
    return WarmStart(tensors=tensors, optimizer=optimizer)


def made_up_shards(job: TinyJob) -> list[Shard]:
    """Of different sizes, noise."""
    generator = np.random.default_rng(0)
    sizes = range(6, 6 + job.model.path_count)
    return [Shard(tokens=generator.integers(0, 99, (size, 72)).astype(np.int32)) for size in sizes]
