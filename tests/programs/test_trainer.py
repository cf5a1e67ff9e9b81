"""Training one path: what it sends, what it still owes, and what a restart finds on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from runtime_harness import _initial, make_run, tiny_config

from dipaco_p2p.core.compress import decode_compressed, expand
from dipaco_p2p.core.inner import InnerResult, StepReport
from dipaco_p2p.core.shards import decode_shard
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.topology import PathId
from peers.trainer import PathTrainer

PATH = PathId((0, 1, 0))
BEFORE = _initial()[0]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / "store")
        self.run: Run = make_run(self.store, tiny_config(steps=3))

    def trainer(self, *, replica: int = 0) -> PathTrainer:
        model = self.run.config.model
        data = self.store.get(self.run.shard(PATH).blob.digest)
        optimizer = self.store.get(self.run.manifest.optimizer.digest)
        assert data is not None and optimizer is not None
        shard = decode_shard(data, vocab_size=model.vocab_size, context=model.context)
        return PathTrainer(
            self.run, PATH, shard, optimizer=optimizer, device="cpu", replica=replica, folder=self.folder / "paths"
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def train(trainer: PathTrainer, *, round_number: int = 0, steps: int = 3) -> InnerResult:
    seen: list[StepReport] = []

    def on_step(report: StepReport) -> bool:
        seen.append(report)
        return len(seen) < steps

    return asyncio.run(trainer.train(BEFORE, round_number=round_number, on_step=on_step))


def same(one: InnerResult, other: InnerResult) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.flats, other.flats, strict=True))


def test_a_round_has_its_steps_unless_it_is_stopped(bench: Bench) -> None:
    result = train(bench.trainer())
    assert (result.steps_done, result.tokens) == (3, bench.run.tokens_full)
    assert train(bench.trainer(), steps=1).steps_done == 1


def test_what_is_sent_and_what_is_owed_make_the_outer_gradient(bench: Bench) -> None:
    trainer = bench.trainer()
    after = train(trainer).flats
    for gradient, old, new in zip(trainer.outer_gradients(BEFORE, after), BEFORE, after, strict=True):
        sent = expand(decode_compressed(gradient.payload, size=old.size))
        assert np.array_equal((old - new) - sent, gradient.residual)
        assert np.abs(gradient.residual).max() > 0


def test_what_was_refused_is_not_owed_and_what_was_taken_is(bench: Bench) -> None:
    trainer = bench.trainer()
    after = train(trainer).flats
    first = trainer.outer_gradients(BEFORE, after)
    trainer.keep(first[0])
    again = trainer.outer_gradients(BEFORE, after)
    assert again[0].payload != first[0].payload, "the error of the first is added"
    assert [item.payload for item in again[1:]] == [item.payload for item in first[1:]]
    total = expand(decode_compressed(again[0].payload, size=BEFORE[0].size)) + again[0].residual
    assert np.allclose(total, BEFORE[0] - after[0] + first[0].residual, atol=1e-9)


def test_a_restart_goes_on_with_the_same_bits(bench: Bench) -> None:
    trainer = bench.trainer()
    after = train(trainer).flats
    for gradient in trainer.outer_gradients(BEFORE, after):
        trainer.keep(gradient)
    trainer.save()
    again = bench.trainer()
    assert same(train(again, round_number=1), train(trainer, round_number=1))
    pairs = zip(trainer.outer_gradients(BEFORE, after), again.outer_gradients(BEFORE, after), strict=True)
    assert all(one.payload == other.payload for one, other in pairs)


@pytest.mark.parametrize("kind", ["inner", "residuals"])
@pytest.mark.parametrize("damage", [b"", b"damaged", b"\x00" * 64])
def test_a_damaged_state_is_left_behind(bench: Bench, kind: str, damage: bytes) -> None:
    fresh = train(bench.trainer())
    trainer = bench.trainer()
    train(trainer)
    trainer.save()
    [path] = (bench.folder / "paths").glob(f"*.{kind}.safetensors")
    path.write_bytes(damage)
    again = train(bench.trainer())
    assert same(again, fresh) == (kind == "inner"), "AdamW's moments are those of the warm-up"


def test_residuals_of_another_size_are_left_behind(bench: Bench) -> None:
    trainer = bench.trainer()
    after = train(trainer).flats
    honest = trainer.outer_gradients(BEFORE, after)
    for gradient, wrong in zip(honest, (np.ones(3), np.full(BEFORE[1].size, np.nan), np.ones((1, 2))), strict=True):
        trainer._residuals[gradient.module] = wrong.astype(np.float32)
    trainer.save()
    again = bench.trainer()
    assert [item.payload for item in again.outer_gradients(BEFORE, after)] == [item.payload for item in honest]


def test_replicas_of_a_path_draw_other_batches(bench: Bench) -> None:
    assert same(train(bench.trainer()), train(bench.trainer()))
    assert not same(train(bench.trainer()), train(bench.trainer(replica=1)))
