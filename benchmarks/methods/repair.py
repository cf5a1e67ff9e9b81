"""Forged work that counted until auditors found it: what it costs, and which repair is the better one.

In some rounds in the middle of a run one path's volunteer sends the negative of its outer gradients. Then it is banned,
another volunteer trains the path, and what counted meanwhile is

    kept          the run goes on
    rolled back   every module goes back to the version before, and the rounds since are lost
    rebuilt       the same, and the other paths' outer gradients of these rounds are counted once more without the
                  forged ones. They were made on the versions that are gone, so they only nearly fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.outer.compress import compress

from .grid import Arrived, Grid, WarmStart, received
from .jobs import Job

KEPT, ROLLED_BACK, REBUILT, REFUSED = "kept", "rolled back", "rebuilt", "refused at once"
FIRST, ROUNDS = 8, 3
"""The first round with forged work, and how many there are until it is found."""


class RepairedGrid(Grid):
    """A grid whose path 0 is forged for some rounds."""

    def __init__(self, job: Job, start: WarmStart, shards: Sequence[Shard], *, fast: bool, device: str = "cpu") -> None:
        super().__init__(job, start, shards, fast=fast, device=device)
        self._forger = str(self.topology.path(0))
        self._before = dict(self.states)
        self._honest: list[Arrived] = []

    def train(self, number: int) -> Arrived:
        made = super().train(number)
        if not FIRST <= number < FIRST + ROUNDS:
            return made
        for contributions in made.values():
            for place, one in enumerate(contributions):
                if one.share.path == self._forger:
                    forged = received(one.gradient) * np.float32(-self.job.forged)
                    contributions[place] = replace(one, gradient=compress(forged, codec=self.job.codec)[0])
        return made

    def step(self, arrived: Arrived, number: int) -> None:
        if number == FIRST:
            self._before = dict(self.states)
        if FIRST <= number < FIRST + ROUNDS:
            honest = {
                module: [one for one in contributions if one.share.path != self._forger]
                for module, contributions in arrived.items()
            }
            self._honest.append(honest)
            arrived = honest if self.job.repair == REFUSED else arrived
        super().step(arrived, number)
        if number == FIRST + ROUNDS - 1 and self.job.repair in (ROLLED_BACK, REBUILT):
            self.states = self._before
            for honest in self._honest if self.job.repair == REBUILT else ():
                super().step(honest, number)
