"""Between two inner steps: the share of the processor, short parts for the GPU, and the guard of the memory."""

from __future__ import annotations

import asyncio
import mmap
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_trainer import BEFORE, PATH, Bench

from dipaco_p2p.core.model.inner import StepReport
from dipaco_p2p.core.model.layout import encode_module
from dipaco_p2p.core.model.microbatch import Fit, MicroBatch, within_memory
from dipaco_p2p.errors import EnvironmentUnfit, Interrupted
from dipaco_p2p.node.measuring import BATCH, Measuring
from peers.governor import steps
from peers.governor.machine import Memory, cores, forget_peak, memory, memory_left
from peers.governor.steps import (
    BURST_S,
    FREE,
    FREE_BYTES_MIN,
    GPU_PART_S,
    LONG_STEPS,
    LOOK_S,
    STRIKES_MAX,
    BetweenSteps,
    CpuShare,
    Gauges,
    LongParts,
    MemoryGuard,
)
from peers.preferences.keys import Limits


@pytest.mark.parametrize(("share", "cores", "threads"), [(0.5, 2, 1), (0.25, 8, 8), (0.05, 1, 1), (1.0, 4, 4)])
@pytest.mark.parametrize("step_s", [0.01, 0.7, 12.0])
def test_the_mean_use_is_the_share(share: float, cores: float, threads: int, step_s: float) -> None:
    chance, brake = random.Random(3), CpuShare(share, cores)
    now_s = used_s = 0.0
    brake.wait_s(used_s, now_s, busy_s=0.0)
    while now_s < 600.0:
        length_s = step_s * chance.uniform(0.5, 1.5)
        now_s, used_s = now_s + length_s, used_s + length_s * threads
        now_s += brake.wait_s(used_s, now_s, busy_s=length_s)
    mean = used_s / now_s / cores
    assert mean <= share * 1.03
    assert mean >= min(share, threads / cores) * 0.95


def test_what_came_before_the_first_step_is_not_held_against_it() -> None:
    assert CpuShare(0.1, 1).wait_s(500.0, 20.0, busy_s=15.0) == 0.0


def test_time_that_was_waited_is_made_up_for_no_longer_than_a_burst() -> None:
    brake = CpuShare(0.5, 1)
    brake.wait_s(0.0, 0.0, busy_s=0.0)
    assert brake.wait_s(1.0, 1000.0, busy_s=1.0) == 0.0
    saved_s = BURST_S + 1.0 - 2.0
    assert brake.wait_s(11.0, 1010.0, busy_s=10.0) == pytest.approx(20.0 - 10.0 - saved_s)


def test_parts_get_shorter_after_some_long_steps_in_a_row_and_not_for_one_that_is_compiled() -> None:
    parts = LongParts()
    assert not any(parts.told(each) for each in [60.0, 60.0, 0.1] * 5)
    assert not any(parts.told(GPU_PART_S) for _ in range(10))
    told = [parts.told(GPU_PART_S * 1.01) for _ in range(2 * LONG_STEPS)]
    assert told == ([False] * (LONG_STEPS - 1) + [True]) * 2


REPORT = StepReport(step=0, loss=1.0, grad_norm=1.0, lr=0.0, tokens=1)


def between(parts: MicroBatch | None = None) -> BetweenSteps:
    return BetweenSteps(Limits(), micro=None, free_bytes=lambda: None, parts=parts)


def test_no_part_begins_while_others_want_the_gpu(tmp_path: Path) -> None:
    steps, asked = between(), list[StepReport]()
    trainer = Bench(tmp_path).trainer(steps=steps)

    def on_step(report: StepReport) -> bool:
        asked.append(report)
        if len(asked) == 2:
            steps.give_way("yielding the GPU to eldenring.exe")
        return True

    def taken() -> int:
        return asyncio.run(trainer.train(BEFORE, round_number=0, replica=(0, 1), on_step=on_step)).steps_done

    assert taken() == 2
    assert taken() == 0
    steps.give_way("")
    assert taken() == 3


async def test_both_are_said_once() -> None:
    steps, said = between(), list[str]()
    steps.tell(said.append)
    steps.give_way("cooling the GPU, above 80 °C")
    steps.give_way("")
    await asyncio.sleep(0)
    assert said == ["cooling the GPU, above 80 °C", FREE]


def test_a_measurement_for_others_ends_before_its_next_batch(tmp_path: Path) -> None:
    run, batches = Bench(tmp_path).run, list[int]()
    blobs = [encode_module(flat, run.layout(module)) for flat, module in zip(BEFORE, PATH.modules(), strict=True)]
    tokens = np.zeros((3 * BATCH, run.config.model.context), np.int32)

    def is_stopping() -> bool:
        batches.append(len(batches))
        return len(batches) == 3

    measuring = Measuring(cast(Any, SimpleNamespace(run=run)), is_stopping=is_stopping)
    with pytest.raises(Interrupted, match="not wanted any more"):
        measuring._evaluate(PATH, blobs, tokens, end=threading.Event())
    assert len(batches) == 3, "two of them were measured"
    nobody_waits = threading.Event()
    nobody_waits.set()
    with pytest.raises(Interrupted, match="not wanted any more"):
        measuring._evaluate(PATH, blobs, tokens, end=nobody_waits)
    assert len(batches) == 3


@pytest.mark.parametrize(
    ("parts", "part_s", "size"),
    [(1, GPU_PART_S * 0.9, 8), (1, GPU_PART_S * 1.1, 4), (4, GPU_PART_S * 0.9, 8), (4, GPU_PART_S * 1.1, 4)],
)
def test_parts_that_take_too_long_get_shorter(
    monkeypatch: pytest.MonkeyPatch, parts: int, part_s: float, size: int
) -> None:
    now_s = 100.0
    monkeypatch.setattr("peers.governor.steps.time", SimpleNamespace(monotonic=lambda: now_s))
    micro = MicroBatch()
    assert micro.fit(8) == Fit(8)
    steps = between(micro)
    on_step = steps.follow(lambda report: True)
    for _ in range(LONG_STEPS + 1):  # the first of them has nothing before it to be measured from
        for _ in range(parts):
            steps.goes_on()
            now_s += part_s
        on_step(REPORT)
    assert micro.fit(8) == Fit(size)


def test_the_wait_for_a_share_of_the_processor_is_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0

    class LetGo:
        def wait(self, duration_s: float) -> None:
            nonlocal now_s
            now_s += 60.0

    monkeypatch.setattr("peers.governor.steps.time", SimpleNamespace(monotonic=lambda: now_s))
    micro = MicroBatch()
    micro.fit(8)
    steps = BetweenSteps(Limits(cpu=0.5), micro=None, free_bytes=lambda: None, parts=micro)
    steps._let_go = LetGo()  # type: ignore[assignment]
    on_step = steps.follow(lambda report: True)
    for _ in range(3 * LONG_STEPS):
        steps.goes_on()
        now_s += GPU_PART_S / 2
        on_step(REPORT)
    assert micro.fit(8) == Fit(8)


MIB = 2**20


class Machine:
    """Memory as a function of the micro-batch, which the guard looks at as on a real machine."""

    def __init__(self, *, fixed: int, sequence: int, limit: int | None, free: int | None = None) -> None:
        self.micro = MicroBatch()
        self.micro.fit(8)
        self.fixed, self.sequence, self.free = fixed, sequence, free
        self.said: list[str] = []
        gauges = Gauges(memory=self.memory, forget_peak=lambda: None, free_bytes=lambda: self.free)
        self.guard = MemoryGuard(gauges, limit_bytes=limit, micro=self.micro, say=self.said.append)
        self.now_s = 0.0

    def memory(self) -> Memory:
        used = self.fixed + self.sequence * self.micro.fit(8).size
        return Memory(now=self.fixed, peak=used)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.now_s += LOOK_S
            self.guard.look(self.now_s)


def test_batches_get_smaller_until_the_peak_fits() -> None:
    machine = Machine(fixed=300 * MIB, sequence=100 * MIB, limit=620 * MIB)
    machine.steps(10)
    assert machine.micro.fit(8) == Fit(2)
    assert len(machine.said) == 2 and "1,100 MiB of the 620 MiB" in machine.said[0]
    assert "goes on with micro-batch 4" in machine.said[0] and "micro-batch 2" in machine.said[1]


def test_within_its_limit_nothing_changes() -> None:
    machine = Machine(fixed=300 * MIB, sequence=10 * MIB, limit=500 * MIB, free=FREE_BYTES_MIN + 1)
    machine.steps(10)
    assert machine.micro.fit(8) == Fit(8) and machine.said == []


def test_when_the_smallest_is_too_much_for_the_limit_it_leaves_with_a_reason() -> None:
    machine = Machine(fixed=700 * MIB, sequence=MIB, limit=600 * MIB)
    with pytest.raises(EnvironmentUnfit, match="701 MiB of the 600 MiB") as caught:
        machine.steps(20)
    assert machine.micro.fit(8) == Fit(1, is_checkpointed=True) and "`ram_gb`" in caught.value.hint
    assert machine.now_s == LOOK_S * (len(machine.said) + STRIKES_MAX), "it is not given up at the first look"


def test_a_machine_that_others_fill_makes_batches_smaller_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    machine = Machine(fixed=100 * MIB, sequence=MIB, limit=None, free=FREE_BYTES_MIN - 1)
    monkeypatch.setattr(steps, "give_back", lambda: given.append(machine.now_s))
    machine.steps(30)
    assert machine.micro.fit(8) == Fit(1, is_checkpointed=True)
    assert "free" in machine.said[0] and len(machine.said) == 4
    assert given == [1.0, 2.0, 3.0, 4.0, 5.0], "a collection of a second at every look would take half of the time"
    machine.free = None
    machine.steps(1)
    machine.free = FREE_BYTES_MIN - 1
    machine.steps(2)
    assert given[5:] == [32.0], "memory had been enough in between"


def test_looks_are_a_second_apart() -> None:
    machine = Machine(fixed=700 * MIB, sequence=MIB, limit=600 * MIB)
    for _ in range(5):
        machine.guard.look(10.0)
    assert len(machine.said) == 1


def test_a_peak_is_seen_and_forgotten() -> None:
    forget_peak()
    before = memory()
    with mmap.mmap(-1, 64 * MIB) as block:  # of its own: a heap with room keeps what is freed into it
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert memory().peak >= before.now + 60 * MIB
    forget_peak()
    assert memory().peak < before.now + 60 * MIB, "what a step took for a moment must not count for ever"


def test_a_limit_of_its_own_bounds_what_training_plans_with() -> None:
    free = memory_left(Limits())
    assert free is None or free > 0
    used = memory().now
    left = memory_left(Limits(ram_gb=(used + 50 * MIB) / 10**9))
    assert left is not None and left < 60 * MIB
    assert memory_left(Limits(ram_gb=0.25 if used > 250_000_000 else used / 2e9)) == 0


def test_cores_are_those_of_the_quota_where_there_is_one(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert cores(cpu_max=quota) == 0.5
    quota.write_text("max 100000\n")
    assert cores(cpu_max=quota) == cores(cpu_max=tmp_path / "none") >= 1


# -- what the system says when there is no more


def too_much() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def no_memory() -> None:
    raise MemoryError


def cuda_has_none() -> None:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")


def cublas_has_none() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize("ask", [too_much, no_memory, cuda_has_none, cublas_has_none])
def test_without_memory_a_batch_gets_smaller_whoever_says_so(ask: Callable[[], None]) -> None:
    micro, tried = MicroBatch(), []

    def attempt(fit: Fit) -> str:
        tried.append(fit.size)
        if fit.size > 2:
            ask()
        return "done"

    assert micro.fitted(8, attempt) == "done" and tried == [8, 4, 2]
    with pytest.raises(EnvironmentUnfit, match="does not fit"), within_memory():
        ask()


def test_there_is_nothing_smaller_than_the_smallest() -> None:
    micro = MicroBatch()
    assert not micro.shrink(), "before the first step nothing is known"
    micro.fit(2)
    assert micro.shrink() and micro.shrink() and not micro.shrink()
    assert "(1 was too much)" in micro.described()
