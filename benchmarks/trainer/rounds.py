"""Whole rounds of a volunteer beside its bare inner steps: how much of their speed everything around them leaves.

A round here is all that a volunteer does for itself: modules into the model, tau steps, modules read back, outer
gradients with the default codec, the path's state. What it waits for on the line is not in it.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace

from benchmarks.report import seconds_of
from dipaco_p2p.config import ModelConfig, RunConfig
from dipaco_p2p.core.model.engine import EXACT, FAST
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.transformer import initial_modules
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.signing import Signer
from peers.path.trainer import Engines, PathTrainer
from simulation.training import sealed_manifest

from .loops import TOTAL_STEPS, noise

KEY = bytes(range(32))


class Volunteer:
    """One that has everything it needs, and one that does nothing but steps."""

    def __init__(self, config: RunConfig, *, device: str, fast: bool) -> None:
        path, shard, inner = config.topology.path(0), noise(config.model), config.inner
        self._bare = InnerLoop(inner, TOTAL_STEPS, config.model, device=device, seed=0, fast=fast)
        engines = Engines(device, wanted=FAST if fast else EXACT, on_choice=lambda engine: None)
        start, run = self._bare.state_bytes(), Run(sealed_manifest(Signer(KEY), config))
        self._trainer = PathTrainer(run, path, shard, optimizer=start, device=device, engines=engines)
        self._shard, self._steps = shard, inner.steps
        self.flats = list(initial_modules(config.model, seed=0).values())
        self.rounds_done = 0

    def bare_s(self, rounds: int) -> float:
        """Seconds of as many steps as these rounds have."""
        first_step, steps = self.rounds_done * self._steps, rounds * self._steps
        return seconds_of(lambda: self._bare.run(self.flats, self._shard, first_step=first_step, steps=steps))

    def whole_s(self, rounds: int) -> float:
        """Seconds of these rounds, one after the other."""
        return seconds_of(lambda: asyncio.run(self._rounds(rounds)))

    async def _rounds(self, rounds: int) -> None:
        trainer = self._trainer
        for _ in range(rounds):
            after = await trainer.train(
                self.flats, round_number=self.rounds_done, replica=(0, 1), on_step=lambda report: True
            )
            gradients = trainer.outer_gradients(self.flats, after.flats)
            trainer.state_parts(gradients)
            for gradient in gradients:
                trainer.keep(gradient)
            self.flats = after.flats
            self.rounds_done += 1


def shares(config: RunConfig, *, rounds: int, runs: int, device: str, fast: bool) -> list[float]:
    """Of each run: the speed over whole rounds as a share of the bare steps'."""
    volunteer = Volunteer(config, device=device, fast=fast)
    volunteer.bare_s(1)  # caches, allocator, compiling
    volunteer.whole_s(1)
    return [volunteer.bare_s(rounds) / volunteer.whole_s(rounds) for _ in range(runs)]


def whole_rounds(
    *,
    rounds: int,
    runs: int,
    device: str,
    fast: bool,
    steps: int | None = None,
    model: ModelConfig | None = None,
    batch: int | None = None,
) -> dict[str, object]:
    """The figures for the default run, of rounds of `steps` inner steps; or for another model and batch."""
    config = RunConfig(model=model or ModelConfig())
    inner = replace(config.inner, steps=steps or config.inner.steps, batch=batch or config.inner.batch)
    found = shares(replace(config, inner=inner), rounds=rounds, runs=runs, device=device, fast=fast)
    return {"steps_a_round": inner.steps, "rounds": rounds, "median": statistics.median(found), "shares": found}
