"""The inner loop of a volunteer that leads a module: how fast it trains while it averages, and while it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dipaco_p2p.config import InnerConfig, ModelConfig
from dipaco_p2p.core.inner import InnerLoop
from dipaco_p2p.core.model import initial_modules
from dipaco_p2p.core.shards import Shard
from dipaco_p2p.runtime.recompute import averaged
from dipaco_p2p.runtime.run import Run

from .module import admitted

TOTAL_STEPS = 10_000
SEQUENCES = 256
COUNT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Tokens a second in every run, each with its twin before it."""

    alone: list[float]
    averaging: list[float]
    """While contributions are averaged without a pause."""
    averages: int
    """How many averages were made meanwhile, in all runs."""


def beside(folder: Path, run: Run, *, steps: int, runs: int, threads: int) -> Beside:
    """In turns, so that what disturbs one disturbs both."""
    torch.set_num_threads(threads)
    train, items = _trainer(), admitted(folder, run, COUNT)
    alone, averaging, averages = [], [], 0
    train(0, 3)  # caches and the allocator
    for number in range(runs):
        alone.append(train(3 + 2 * number * steps, steps))
        with _Repeated(lambda: averaged(run, items, [1 / COUNT] * COUNT, clip_norm=None)) as repeated:
            averaging.append(train(3 + (2 * number + 1) * steps, steps))
        averages += repeated.done
    return Beside(alone=alone, averaging=averaging, averages=averages)


def _trainer() -> Callable[[int, int], float]:
    """Takes the number of its first step and how many; tokens a second."""
    model, inner = ModelConfig(), InnerConfig()
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (SEQUENCES, model.context), dtype=np.int32)
    shard, flats = Shard(tokens=tokens), list(initial_modules(model, seed=0).values())
    loop = InnerLoop(inner, TOTAL_STEPS, model, device="cpu", seed=0)

    def train(first: int, count: int) -> float:
        began_s = time.perf_counter()
        trained = loop.run(flats, shard, first_step=first, steps=count)
        return trained.tokens / (time.perf_counter() - began_s)

    return train


class _Repeated:
    """Does its work in a thread, again and again while the block runs, and at least once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done = 0

    def __enter__(self) -> _Repeated:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.done or not self._is_over.is_set():
            self._work()
            self.done += 1
