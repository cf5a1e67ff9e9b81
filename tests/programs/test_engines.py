"""A volunteer measures its first steps, chooses once, and tells it once, with all that was chosen beside it."""

from __future__ import annotations

import pytest

from dipaco_p2p.core import engine
from dipaco_p2p.core.engine import AUTO, EXACT, FAST, Engine
from dipaco_p2p.core.inner import StepReport
from peers import engines
from peers.engines import STEPS_MIN, Engines

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
