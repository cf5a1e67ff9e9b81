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
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.version import averaged, make_version
from dipaco_p2p.protocol.versions import genesis_version

from .module import LEADER, MODULE, admitted, state_of

TOTAL_STEPS = 100_000
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
    round_alone: list[float]
    round_once: list[float]
    """Over a round in which one whole version is made, as an owner does; the twin before it is of a round without."""


def beside(folder: Path, run: Run, *, steps: int, runs: int, threads: int, round_s: float) -> Beside:
    """In turns, so that what disturbs one disturbs both."""
    torch.set_num_threads(threads)
    train, items = _trainer(), admitted(folder, run, COUNT)
    parent, state = genesis_version(run.manifest, MODULE), state_of(run)
    found: dict[str, list[float]] = {"alone": [], "averaging": [], "round_alone": [], "round_once": []}
    averages, weights = 0, [1 / COUNT] * COUNT

    def version() -> None:
        make_version(run, parent, state, items, clip_norm=None, term=1, grant="0" * 64, author=LEADER.peer)

    train(3)  # caches and the allocator
    for _ in range(runs):
        found["alone"].append(train(steps))
        with Repeated(lambda: averaged(run, items, weights, clip_norm=None)) as repeated:
            found["averaging"].append(train(steps))
        averages += repeated.done
        round_steps = max(1, round(round_s * found["alone"][-1] / _tokens_a_step()))
        found["round_alone"].append(train(round_steps))
        with Repeated(version, times=1):
            found["round_once"].append(train(round_steps))
    return Beside(averages=averages, **found)


def _tokens_a_step() -> int:
    return InnerConfig().batch * ModelConfig().context


def _trainer() -> Callable[[int], float]:
    """Takes how many steps to go on by; tokens a second."""
    model, inner = ModelConfig(), InnerConfig()
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (SEQUENCES, model.context), dtype=np.int32)
    shard, flats = Shard(tokens=tokens), list(initial_modules(model, seed=0).values())
    loop = InnerLoop(inner, TOTAL_STEPS, model, device="cpu", seed=0)

    done = 0

    def train(count: int) -> float:
        nonlocal done
        began_s = time.perf_counter()
        trained = loop.run(flats, shard, first_step=done, steps=count)
        done += count
        return trained.tokens / (time.perf_counter() - began_s)

    return train


class Repeated:
    """Does its work in a thread while the block runs: at least once, and then again and again, or so many `times`."""

    def __init__(self, work: Callable[[], object], *, times: int | None = None) -> None:
        self._work = work
        self._times = times
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done = 0

    def __enter__(self) -> Repeated:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.done or (self.done != self._times and not self._is_over.is_set()):
            self._work()
            self.done += 1
