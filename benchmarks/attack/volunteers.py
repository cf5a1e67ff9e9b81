"""Attacks by volunteers: they take part with the public program and train, and hand in something else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm
from peers.config import PeerConfig
from peers.path.trainer import OuterGradient, PathTrainer
from peers.stages import Entrance, Parts, StageRunner

Change = Callable[[Floats, Floats], Floats]
"""What is said to have come of the steps, from where they began and where they came to."""


class Spoiling(PathTrainer):
    """Trains, and hands in what `change` makes of it; with `is_permuted` on text whose words are in disorder."""

    def __init__(self, *parts: Any, change: Change | None = None, is_permuted: bool = False, **settings: Any) -> None:
        self._change, self._is_permuted = change, is_permuted
        super().__init__(*parts, **settings)
        self.use_shard(self._shard, self.sharding)

    def use_shard(self, shard: Shard, sharding: int) -> None:
        tokens = np.random.default_rng(0).permuted(shard.tokens, axis=1) if self._is_permuted else shard.tokens
        super().use_shard(Shard(tokens=tokens), sharding)

    def outer_gradients(self, before: Sequence[Floats], after: Sequence[Floats]) -> list[OuterGradient]:
        change = self._change
        told = after if change is None else [change(old, new) for old, new in zip(before, after, strict=True)]
        return super().outer_gradients(before, told)


def times(factor: float) -> Change:
    """So many times what the steps came to."""
    return lambda old, new: old + np.float32(factor) * (new - old)


def noise(factor: float) -> Change:
    """Random numbers, so many times as long as what the steps came to."""
    chance = np.random.default_rng(0)

    def change(old: Floats, new: Floats) -> Floats:
        random = chance.standard_normal(old.shape, dtype=np.float32)
        return old + random * np.float32(factor * np.linalg.norm(new - old) / np.linalg.norm(random))

    return change


VOLUNTEERS: dict[str, Callable[..., PathTrainer]] = {
    "flip": partial(Spoiling, change=times(-1)),
    "flip-3": partial(Spoiling, change=times(-3)),
    "scale-3": partial(Spoiling, change=times(3)),
    "scale-tiny": partial(Spoiling, change=times(1e-3)),
    "random": partial(Spoiling, change=noise(1)),
    "random-3": partial(Spoiling, change=noise(3)),
    "permuted": partial(Spoiling, is_permuted=True),
}
"""Attacks by somebody who takes part with the public program, but for its trainer."""


async def take_part(name: str, swarm: Libp2pSwarm, host: PeerId, stages: Sequence[Run], folder: Path) -> None:
    """As a volunteer does, until cancelled."""
    parts = Parts(make_trainer=VOLUNTEERS[name], show=_show_nothing)
    config = PeerConfig(home=folder, engine="exact", threads=1)
    runner = StageRunner(swarm, config, SystemClock(), entrance=Entrance(host=host), device="cpu", parts=parts)
    await runner.take_part(stages)
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _show_nothing(status: object, history: object) -> AsyncIterator[None]:
    yield
