"""One path's trainer: its steps, outer gradients and state; and which engine it trains with."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import initial, make_run, tiny_config
from torch import Tensor

from dipaco_p2p.core.arrays import TRAINER_NICENESS, from_bfloat16, to_bfloat16
from dipaco_p2p.core.model import engine, inner
from dipaco_p2p.core.model.engine import AUTO, EXACT, FAST, Engine
from dipaco_p2p.core.model.inner import InnerResult, StepReport
from dipaco_p2p.core.model.microbatch import MicroBatch
from dipaco_p2p.core.model.shards import decode_shard
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.core.outer.compress import INT4, decode_compressed
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.sizes import STATE_HEADER_BYTES_MAX, state_bytes_max
from dipaco_p2p.node.store import Store
from dipaco_p2p.topology import PathId
from peers.path import trainer as engines
from peers.path.trainer import STEPS_MIN, Engines, PathTrainer

REPORT = StepReport(step=0, loss=1.0, grad_norm=1.0, lr=0.1, tokens=10)
LONG = 10**6


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(engine, "compiler", lambda: "g++")
    monkeypatch.setattr(engine, "has_triton", lambda: True)


class Volunteer:
    """What the trainer does with an `Engines`, on a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "cpu", wanted: str = AUTO) -> None:
        self.time_s = 0.0
        monkeypatch.setattr(engines.time, "perf_counter", lambda: self.time_s)
        self.told: list[Engine] = []
        self.engines = Engines(device, wanted=wanted, on_choice=self.told.append)

    def round(self, *, steps_left: int, step_s: float = 0.25, between_s: float = 0.0, steps: int = STEPS_MIN) -> Engine:
        """Train a round; with what."""
        found = self.engines.engine(steps_left=steps_left)

        def on_step(report: StepReport) -> bool:
            self.time_s += between_s
            return report.step > 0

        watched = self.engines.watched(on_step, taken=lambda: self.engines.tell("all the rest"))
        for _ in range(steps):
            self.time_s += step_s
            assert not watched(REPORT), "the answer is the listener's"
        return found


def test_the_choice_is_made_of_what_the_steps_took_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    volunteer = Volunteer(monkeypatch)
    assert not volunteer.round(steps_left=LONG).is_fast and volunteer.told == []
    found = volunteer.round(steps_left=LONG)
    assert found.is_fast and found.is_compiled and "250 ms" in found.why
    assert volunteer.round(steps_left=1) is found, "also when the run is nearly over"
    [told] = volunteer.told
    assert (told.is_fast, told.why, told.setup) == (True, found.why, "all the rest")


def test_too_few_steps_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    volunteer = Volunteer(monkeypatch)
    volunteer.round(steps_left=LONG, steps=STEPS_MIN - 1)
    assert volunteer.engines.engine(steps_left=LONG).why == engine.at_first(AUTO, "cpu").why
    assert volunteer.told == []


@pytest.mark.parametrize(("wanted", "is_fast"), [(EXACT, False), (FAST, True)])
def test_what_was_asked_for_holds_from_the_first_step_and_is_told_after_it(
    monkeypatch: pytest.MonkeyPatch, wanted: str, is_fast: bool
) -> None:
    volunteer = Volunteer(monkeypatch, wanted=wanted)
    assert volunteer.engines.engine(steps_left=LONG).is_fast == is_fast
    assert volunteer.told == [], "the micro-batch is not known before a step was taken"
    volunteer.round(steps_left=LONG)
    assert len(volunteer.told) == 1


def test_a_gpu_trains_its_first_steps_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    volunteer = Volunteer(monkeypatch, device="cuda")
    first, second = (volunteer.round(steps_left=LONG) for _ in range(2))
    assert first.is_fast and not first.is_compiled and second.is_compiled


def test_what_the_listener_does_between_two_steps_is_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    volunteer = Volunteer(monkeypatch)
    volunteer.round(steps_left=100, step_s=0.01, between_s=9.0)
    volunteer.round(steps_left=100)
    assert "100 steps of 10 ms" in volunteer.told[0].why


PATH = PathId((0, 1, 0))
BEFORE = initial()[0]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "store")
        self.run: Run = make_run(self.store, tiny_config(steps=3))

    def trainer(self, *, path: PathId = PATH, **settings: Any) -> PathTrainer:
        model = self.run.config.model
        data = self.store.get(self.run.shard(path).blob.digest)
        optimizer = self.store.get(self.run.manifest.optimizer.digest)
        assert data is not None and optimizer is not None
        shard = decode_shard(data, vocab_size=model.vocab_size, context=model.context)
        return PathTrainer(self.run, path, shard, optimizer=optimizer, device="cpu", **settings)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def train(
    trainer: PathTrainer, *, round_number: int = 0, steps: int = 3, replica: tuple[int, int] = (0, 1)
) -> InnerResult:
    seen: list[StepReport] = []

    def on_step(report: StepReport) -> bool:
        seen.append(report)
        return len(seen) < steps

    return asyncio.run(trainer.train(BEFORE, round_number=round_number, replica=replica, on_step=on_step))


def same(one: InnerResult, other: InnerResult) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.flats, other.flats, strict=True))


def test_a_round_has_its_steps_unless_it_is_stopped(bench: Bench) -> None:
    result = train(bench.trainer())
    assert (result.steps_done, result.tokens) == (3, bench.run.tokens_full)
    assert train(bench.trainer(), steps=1).steps_done == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
def test_steps_on_the_cpu_give_way_to_all_else(bench: Bench) -> None:
    niceness: list[int] = []

    def on_step(report: StepReport) -> bool:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return False

    asyncio.run(bench.trainer().train(BEFORE, round_number=0, replica=(0, 1), on_step=on_step))
    assert niceness == [max(os.getpriority(os.PRIO_PROCESS, 0), TRAINER_NICENESS)]


def test_what_is_sent_and_what_is_owed_make_the_outer_gradient(bench: Bench) -> None:
    trainer = bench.trainer()
    after = train(trainer).flats
    for gradient, old, new in zip(trainer.outer_gradients(BEFORE, after), BEFORE, after, strict=True):
        sent = decode_compressed(gradient.payload, size=old.size, codec=INT4).expand()
        assert np.array_equal(to_bfloat16((old - new) - sent), gradient.residual)
        assert np.abs(from_bfloat16(gradient.residual)).max() > 0


def test_what_was_refused_is_not_owed_and_what_was_taken_is(bench: Bench) -> None:
    trainer = bench.trainer()
    after = train(trainer).flats
    first = trainer.outer_gradients(BEFORE, after)
    trainer.keep(first[0])
    again = trainer.outer_gradients(BEFORE, after)
    assert again[0].payload != first[0].payload, "the error of the first is added"
    assert [item.payload for item in again[1:]] == [item.payload for item in first[1:]]
    total = decode_compressed(again[0].payload, size=BEFORE[0].size, codec=INT4).expand() + from_bfloat16(
        again[0].residual
    )
    owed = from_bfloat16(first[0].residual)
    assert np.allclose(total, BEFORE[0] - after[0] + owed, atol=float(np.abs(owed).max()) / 256)


def test_whoever_goes_on_from_the_state_gets_the_same_bits(bench: Bench) -> None:
    trainer = bench.trainer()
    after = train(trainer).flats
    sent = trainer.outer_gradients(BEFORE, after)
    state = trainer.state_bytes(sent)
    for gradient in sent:
        trainer.keep(gradient)
    assert trainer.state_bytes() == state
    again = bench.trainer()
    again.load_state(state)
    assert again.state_bytes() == state
    assert same(train(again, round_number=1), train(trainer, round_number=1))
    pairs = zip(trainer.outer_gradients(BEFORE, after), again.outer_gradients(BEFORE, after), strict=True)
    assert all(one.payload == other.payload for one, other in pairs)


def test_starting_over_leaves_nothing_of_a_state(bench: Bench) -> None:
    trainer = bench.trainer()
    fresh = trainer.state_bytes()
    for gradient in trainer.outer_gradients(BEFORE, train(trainer).flats):
        trainer.keep(gradient)
    assert trainer.state_bytes() != fresh
    trainer.start_over()
    assert trainer.state_bytes() == fresh


def test_a_state_fits_its_bound(bench: Bench) -> None:
    trainer = bench.trainer()
    sent = trainer.outer_gradients(BEFORE, train(trainer).flats)
    size = len(trainer.state_bytes(sent))
    assert size < state_bytes_max(bench.run.config, PATH) < size + 2 * STATE_HEADER_BYTES_MAX


MODULE = PATH.modules()[1]
SIZE = BEFORE[1].size


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"residual/{MODULE}", np.ones(3, np.uint16)),
        (f"residual/{MODULE}", np.ones((SIZE, 1), np.uint16)),
        (f"residual/{MODULE}", to_bfloat16(np.full(SIZE, np.inf, np.float32))),
        (f"residual/{MODULE}", np.full(SIZE, 0x7FC0, np.uint16)),
        (f"residual/{MODULE}", np.ones(SIZE, np.float16)),
        ("residual/L9.M9", np.ones(SIZE, np.uint16)),
        ("model.norm.weight/exp_avg_scales", np.full(1, np.inf, np.float32)),
        ("junk", np.ones(3, np.float32)),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(bench: Bench, name: str, tensor: Any) -> None:
    trainer = bench.trainer()
    good = trainer.state_bytes(trainer.outer_gradients(BEFORE, train(trainer).flats))
    tensors, _ = decode(good)
    before = trainer.state_bytes()
    with pytest.raises(IntegrityError):
        trainer.load_state(encode(tensors | {name: tensor}))
    with pytest.raises(IntegrityError):
        trainer.read_state(encode(tensors | {name: tensor}))
    for junk in (b"", b"damaged", b"\x00" * 64, good[:-1]):
        with pytest.raises(IntegrityError):
            trainer.load_state(junk)
    assert trainer.state_bytes() == before


def test_batches_are_those_of_the_path_and_the_part_whoever_trains(bench: Bench) -> None:
    alone = train(bench.trainer())
    assert same(alone, train(bench.trainer()))
    first, second = (train(bench.trainer(), replica=(index, 2)) for index in range(2))
    assert not same(first, second) and not same(first, alone)
    assert not same(alone, train(bench.trainer(path=PathId((0, 1, 1)))))


def test_what_it_trains_with_is_told_once_in_one_line(bench: Bench) -> None:
    told: list[Engine] = []
    engines = Engines("cpu", wanted=EXACT, on_choice=told.append)
    trainer = bench.trainer(engines=engines, micro=MicroBatch(size=1, checkpoint=True))
    assert told == []
    for _ in range(2):
        train(trainer)
    [line] = map(str, told)
    parts = [
        "float32",
        "not compiled",
        "cpu",
        "plain attention",
        "fused AdamW",
        "micro-batch 1, checkpointing",
        "thread",
    ]
    assert all(part in line for part in parts), line
    assert line.count("as was asked for") == 2, "of the micro-batch, and of the engine"


def quick(model: PathModel, tokens: Tensor) -> Tensor:
    """In place of the compiled loss."""
    return model.loss(tokens)


def test_compiling_is_told_before_the_first_step_and_its_end_after_it_once_in_a_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (engine, inner):
        monkeypatch.setattr(module, "fast_loss", quick)
    told: list[str] = []
    engines = Engines("cpu", wanted=FAST)
    engines.follow(
        lambda choice: told.append("chosen"),
        on_compiling=lambda takes_s: told.append(f"compiling {takes_s:.0f} s"),
        on_compiled=lambda: told.append("compiled"),
    )

    async def scenario() -> None:
        for path in (PATH, PathId((0, 0, 0))):
            trainer = bench.trainer(path=path, engines=engines, micro=MicroBatch(size=1))
            for round_number in range(2):

                def on_step(report: StepReport) -> bool:
                    told.append("step")
                    return True

                await trainer.train(BEFORE, round_number=round_number, replica=(0, 1), on_step=on_step)
                await asyncio.sleep(0)

    asyncio.run(scenario())
    takes = f"compiling {engine.COMPILING['cpu'].takes_s:.0f} s"
    assert [said for said in told if said not in ("step", "chosen")] == [takes, "compiled"]
    assert told.index(takes) < told.index("step") < told.index("compiled")
    assert told.count("step") == 12 and told.count("chosen") == 1


def test_all_trainers_of_a_process_share_what_was_found(bench: Bench) -> None:
    micro = MicroBatch(memory_bytes=1)
    first, second = (bench.trainer(micro=micro) for _ in range(2))
    train(first)
    assert not micro.is_open, "so that nothing is measured again"
    assert same(train(second), train(bench.trainer(micro=MicroBatch(size=1, checkpoint=True))))
