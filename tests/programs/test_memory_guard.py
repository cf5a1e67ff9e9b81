"""The memory guard: batches get smaller before a limit is reached, and the volunteer leaves when that is not enough."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dipaco_p2p.core.microbatch import Fit, MicroBatch, within_memory
from dipaco_p2p.errors import EnvironmentUnfit
from peers.governor.memory import FREE_BYTES_MIN, LOOK_S, STRIKES_MAX, Gauges, MemoryGuard
from peers.governor.usage import Memory, cores, forget_peak, memory
from peers.machine import memory_left
from peers.preferences.keys import Limits

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


def test_a_machine_that_others_fill_makes_batches_smaller_and_ends_nothing() -> None:
    machine = Machine(fixed=100 * MIB, sequence=MIB, limit=None, free=FREE_BYTES_MIN - 1)
    machine.steps(30)
    assert machine.micro.fit(8) == Fit(1, is_checkpointed=True)
    assert "free" in machine.said[0] and len(machine.said) == 4


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


def test_another_error_of_the_attempt_passes() -> None:
    def attempt(fit: Fit) -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="shape"):
        MicroBatch().fitted(8, attempt)
    with pytest.raises(RuntimeError, match="shape"), within_memory():
        raise RuntimeError("a shape is wrong")


def test_there_is_nothing_smaller_than_the_smallest() -> None:
    micro = MicroBatch()
    assert not micro.shrink(), "before the first step nothing is known"
    micro.fit(2)
    assert micro.shrink() and micro.shrink() and not micro.shrink()
    assert "(1 was too much)" in micro.described()
