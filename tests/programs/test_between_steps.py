"""Between steps and within one: a GPU that others want is given up after the part that is under way, and parts stay
short enough for that to be soon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from test_trainer import BEFORE, PATH, Bench

from dipaco_p2p.core.codec import encode_module
from dipaco_p2p.core.inner import StepReport
from dipaco_p2p.core.microbatch import Fit, MicroBatch
from dipaco_p2p.errors import Interrupted
from dipaco_p2p.node.measuring import BATCH, Measuring
from peers.governor.brake import GPU_PART_S, LONG_STEPS
from peers.governor.steps import FREE, BetweenSteps
from peers.preferences.keys import Limits

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


def test_both_are_said_once() -> None:
    async def scenario() -> list[str]:
        steps, said = between(), list[str]()
        steps.tell(said.append)
        steps.give_way("cooling the GPU, above 80 °C")
        steps.give_way("")
        await asyncio.sleep(0)
        return said

    assert asyncio.run(scenario()) == ["cooling the GPU, above 80 °C", FREE]


def test_a_measurement_for_others_ends_before_its_next_batch(tmp_path: Path) -> None:
    run, batches = Bench(tmp_path).run, list[int]()
    blobs = [encode_module(flat, run.layout(module)) for flat, module in zip(BEFORE, PATH.modules(), strict=True)]
    tokens = np.zeros((3 * BATCH, run.config.model.context), np.int32)

    def is_stopping() -> bool:
        batches.append(len(batches))
        return len(batches) == 3

    measuring = Measuring(cast(Any, SimpleNamespace(run=run)), is_stopping=is_stopping)
    with pytest.raises(Interrupted, match="not wanted any more"):
        measuring._evaluate(PATH, blobs, tokens)
    assert len(batches) == 3, "two of them were measured"


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
