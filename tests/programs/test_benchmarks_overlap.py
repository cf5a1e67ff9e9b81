"""The benchmark of overlap measures what it says, on sizes that take no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tiny_run import MODEL, initial

from benchmarks.methods.grid import Grid, WarmStart
from benchmarks.methods.jobs import Job
from benchmarks.overlap.losses import ESTIMATES, OFF, OverlappedGrid
from benchmarks.overlap.report import loss_table, share_table
from benchmarks.overlap.share import WIDTH, Lines, model_of, path_values, share_of
from dipaco_p2p.config import InnerConfig, ModelConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.core.shards import Shard

VALUES = 20 * path_values(model_of(WIDTH))
LINES = Lines(up_mbit=20.0, down_mbit=100.0, values=VALUES)
ON = next(name for name in ESTIMATES if name.startswith("on"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyJob(Job):
    @property
    def model(self) -> ModelConfig:
        return MODEL

    @property
    def inner(self) -> InnerConfig:
        return InnerConfig(steps=self.round_steps, batch=2, warmup_steps=1)


def trained(name: str, *, rounds: int) -> tuple[Grid, list[list[Floats]]]:
    """The grid after so many rounds, and what its first path began each round with."""
    flats, optimizer = initial()
    tensors: dict[str, Floats] = {}
    for level, flat in enumerate(flats):
        tensors |= module_layout(MODEL, level).split(flat)
    generator = np.random.default_rng(0)
    shards = [Shard(tokens=generator.integers(0, 99, (6, 72)).astype(np.int32)) for _ in range(4)]
    job, start = TinyJob(method="tiny", seed=3, steps=8, round_steps=2), WarmStart(tensors=tensors, optimizer=optimizer)
    estimate = ESTIMATES[name]
    if estimate is None:
        grid = Grid(job, start, shards, fast=False)
    else:
        grid = OverlappedGrid(job, start, shards, estimate=estimate, fast=False)
    starts = []
    for number in range(rounds):
        starts.append(grid.starts(0))
        grid.round(number, lambda report: True)
    return grid, starts


def same(one: Sequence[Floats], other: Sequence[Floats]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_estimate_gives_the_first_version_and_other_ones_after_it() -> None:
    firsts = {name: trained(name, rounds=1)[0].flats(0) for name in ESTIMATES}
    assert all(same(firsts[OFF], first) for first in firsts.values())
    later = [trained(name, rounds=3)[0].flats(0) for name in ESTIMATES]
    assert not any(same(one, other) for place, one in enumerate(later) for other in later[:place])


def test_a_round_begins_with_the_last_version_and_the_own_outer_gradient() -> None:
    grid, starts = trained(ON, rounds=2)
    [worker] = trained(ON, rounds=1)[0]._workers[0]
    for before, own, start in zip(starts[0], worker.own, starts[1], strict=True):
        np.testing.assert_allclose(start, before - grid.job.lr * (1 + grid.job.momentum) * own, atol=1e-5)


def test_a_slow_line_is_hidden_by_inner_steps() -> None:
    off, on = (share_of(LINES, round_s=4.0, overlap=overlap, rounds=3) for overlap in (False, True))
    assert 0 < off.share < on.share <= 1
    assert on.seconds < off.seconds
    [cells] = [list(column.cells) for column in share_table([off, on], LINES).columns][1:2]
    assert cells == [f"{off.share:.1%}"]


def test_a_slower_line_leaves_less_time_for_steps() -> None:
    slow = Lines(up_mbit=4.0, down_mbit=100.0, values=VALUES)
    shares = [share_of(lines, round_s=2.0, overlap=False, rounds=2).share for lines in (LINES, slow)]
    assert shares[0] > shares[1]


def test_losses_are_compared_within_a_seed() -> None:
    cells = list(loss_table({OFF: [5.0, 4.0], ON: [5.1, 4.3]}, 6).columns[2].cells)
    assert cells == ["+0.0000", "+0.2000"]
