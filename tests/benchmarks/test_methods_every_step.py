"""Synchronising at every inner step: against plain AdamW, and against a loop that shares nothing with it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from methods_harness import PRIVATE, TinyJob, made_up_shards, start, tiny_job
from tiny_run import MODEL, initial

from benchmarks.methods.every_step import EveryStep
from benchmarks.methods.grid import WarmStart
from benchmarks.methods.jobs import WARMUP_STEPS
from dipaco_p2p.core import tensor_file as codec
from dipaco_p2p.core.model.inner import InnerLoop, learning_rate
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.optimizer import InnerState
from dipaco_p2p.core.model.shards import Shard, batch
from dipaco_p2p.core.model.transformer import PathModel, load_modules
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.topology import ModuleId

Moments = tuple[np.ndarray, np.ndarray]


TAKEN = 3
"""Steps that are in the moments which everything starts from."""


def warm() -> WarmStart:
    """The start with moments: as if one path had trained before."""
    job, (flats, _) = tiny_job(path_model=MODEL.one_path()), initial()
    loop = InnerLoop(job.inner, 9, job.model, device="cpu", seed=1)
    loop.run(flats, made_up_shards(job)[0], first_step=0, steps=TAKEN)
    return replace(start(), optimizer=loop.state_bytes())


def trained(job: TinyJob, shards: list[Shard]) -> EveryStep:
    grid = EveryStep(job, warm(), shards, fast=False)
    for number in range(job.rounds):
        grid.round(number)
    return grid


def test_one_path_is_the_plain_inner_loop_to_the_bit() -> None:
    job = tiny_job(path_model=MODEL.one_path(), outer="every step")
    shards = made_up_shards(job)
    flats, _ = initial()
    total = WARMUP_STEPS + job.steps
    loop = InnerLoop(job.inner, total, job.model, device="cpu", seed=(3 * 1_000_003) % 2**31)
    loop.load_state(warm().optimizer)
    plain = loop.run(flats, shards[0], first_step=WARMUP_STEPS, steps=job.steps).flats
    assert [a.tobytes() for a in trained(job, shards).flats(0)] == [b.tobytes() for b in plain]


@pytest.mark.parametrize("model", [MODEL, PRIVATE], ids=["shared", "private"])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_module_takes_adamws_step_on_the_average_over_its_paths(model, weighted: bool) -> None:
    job = tiny_job(path_model=model, outer="every step", weighted=weighted)
    shards = made_up_shards(job)
    grid, expected = trained(job, shards), by_hand(job, shards)
    for number, path in enumerate(job.model.topology.paths()):
        for flat, module in zip(grid.flats(number), path.modules(), strict=True):
            np.testing.assert_allclose(flat, expected[module], rtol=0, atol=2e-6, err_msg=str(module))


def test_weights_and_sharing_matter_here() -> None:
    """Else the test above could not fail: each of these moves modules by far more than its tolerance."""
    job = tiny_job(outer="every step")
    shards = made_up_shards(job)
    even, skewed = trained(tiny_job(outer="every step", weighted=False), shards), trained(job, shards)
    assert max(np.abs(a - b).max() for a, b in zip(even.flats(0), skewed.flats(0), strict=True)) > 1e-4
    first, last = skewed.flats(0), skewed.flats(3)
    assert np.array_equal(first[0], last[0]) and not np.array_equal(first[1], last[1])


def test_a_loss_that_is_not_a_number_ends_it() -> None:
    job = tiny_job(outer="every step")
    broken = EveryStep(job, start(), made_up_shards(job), fast=False)
    next(iter(broken._modules[ModuleId(2, 1)].values())).data.fill_(math.inf)
    with pytest.raises(DipacoError, match="path 1"):
        broken.round(0)


def by_hand(job: TinyJob, shards: list[Shard]) -> dict[ModuleId, np.ndarray]:
    """The same in numpy: one flat vector and two moments per module, nothing shared but by its name."""
    inner, topology = job.inner, job.model.topology
    flats = {module: initial()[0][module.level].astype(np.float64) for module in topology.modules()}
    moments = {module: first_moments(job, module) for module in flats}
    for number in range(job.steps):
        step, taken = WARMUP_STEPS + number, TAKEN + number
        sums = {module: np.zeros_like(flat) for module, flat in flats.items()}
        totals = dict.fromkeys(flats, 0.0)
        for number, path in enumerate(topology.paths()):
            seed = (job.seed * 1_000_003 + number * 7919) % 2**31
            tokens = batch(shards[number], seed=seed, step=step, size=inner.batch)
            gradients = gradient(job, [flats[module] for module in path.modules()], tokens)
            size = shards[number].tokens.size if job.weighted else 1
            for module, values in zip(path.modules(), gradients, strict=True):
                sums[module] += size * values
                totals[module] += size
        lr = learning_rate(inner, step, WARMUP_STEPS + job.steps)
        for module in flats:
            decayed = 1 - lr * inner.weight_decay * is_matrix(job, module)
            first, second = moments[module]
            mean = sums[module] / totals[module]
            first = inner.beta1 * first + (1 - inner.beta1) * mean
            second = inner.beta2 * second + (1 - inner.beta2) * mean**2
            moments[module] = first, second
            rescaled = first / (1 - inner.beta1 ** (taken + 1))
            root = np.sqrt(second / (1 - inner.beta2 ** (taken + 1))) + 1e-8
            flats[module] = flats[module] * decayed - lr * rescaled / root
    return flats


def first_moments(job: TinyJob, module: ModuleId) -> Moments:
    state = InnerState(values=codec.decode(warm().optimizer)[0])
    layout = module_layout(job.model, module.level)
    first, second = (
        layout.flatten({name: state.moment(f"{name}/{kind}") for name in layout.names}).astype(np.float64)
        for kind in ("exp_avg", "exp_avg_sq")
    )
    return first, second


def gradient(job: TinyJob, flats: list[np.ndarray], tokens) -> list[np.ndarray]:
    """Of one path's batch, per level, clipped as a whole."""
    model = PathModel(job.model)
    load_modules(model, [flat.astype(np.float32) for flat in flats])
    model.loss(tokens).backward()
    found = dict(model.named_parameters())
    made = []
    for level in range(len(flats)):
        layout = module_layout(job.model, level)
        made.append(layout.flatten({name: found[name].grad for name in layout.names}).astype(np.float64))
    norm = math.sqrt(sum(float((values**2).sum()) for values in made))
    return [values * min(1.0, job.inner.clip / (norm + 1e-6)) for values in made]


def is_matrix(job: TinyJob, module: ModuleId) -> np.ndarray:
    """Which values of a module decay: 1 in matrices, 0 in norms."""
    layout = module_layout(job.model, module.level)
    kinds = {n: np.full(s, float(len(s) > 1), np.float32) for n, s in zip(layout.names, layout.shapes, strict=True)}
    return layout.flatten(kinds)
