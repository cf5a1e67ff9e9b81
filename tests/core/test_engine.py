"""The choice between exact, bfloat16 and compiled steps, and its reasons."""

from __future__ import annotations

import pytest

from dipaco_p2p.core.model import engine
from dipaco_p2p.core.model.engine import (
    AUTO,
    BFLOAT16,
    COMPILING,
    EXACT,
    FAST,
    REPAYS,
    Engine,
    at_first,
    choose,
    on_device,
)
from dipaco_p2p.errors import EnvironmentUnfit

LONG = 10**7
"""Steps that repay everything."""


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can do everything, whatever this one is."""
    monkeypatch.setattr(engine, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(engine, "compiler", lambda: "g++")
    monkeypatch.setattr(engine, "has_triton", lambda: True)


def chosen(wanted: str, device: str, *, step_s: float | None = 0.1, steps_left: int = LONG) -> Engine:
    found = choose(wanted, device, step_s=step_s, steps_left=steps_left)
    assert found is not None
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_long_run_is_compiled_and_a_short_one_is_not(device: str) -> None:
    long, short = chosen(AUTO, device), chosen(AUTO, device, steps_left=100)
    assert long.is_fast and long.is_compiled and f"{LONG} steps of 100 ms" in long.why
    assert not short.is_compiled and "does not repay" in short.why


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_where_compiling_is_repaid_three_times(device: str) -> None:
    compiling = COMPILING[device]
    saved_a_step_s = 0.1 * (1 - 1 / compiling.gain)
    enough = int(REPAYS * compiling.takes_s / saved_a_step_s) + 1
    assert [chosen(AUTO, device, steps_left=steps).is_compiled for steps in (enough - 2, enough)] == [False, True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_chosen_before_a_step_was_measured(device: str) -> None:
    assert choose(AUTO, device, step_s=None, steps_left=LONG) is None


def test_a_gpu_begins_in_bfloat16_and_a_cpu_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_first(AUTO, "cuda").is_fast and not at_first(AUTO, "cpu").is_fast
    assert not at_first(EXACT, "cuda").is_fast
    assert chosen(AUTO, "cuda", steps_left=1).is_fast and not chosen(AUTO, "cpu", steps_left=1).is_fast
    monkeypatch.setattr(engine, "has_bfloat16", lambda device: False)
    assert not at_first(AUTO, "cuda").is_fast


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("wanted", "is_fast", "is_compiled"), [(EXACT, False, False), (BFLOAT16, True, False), (FAST, True, True)]
)
def test_the_user_may_choose(device: str, wanted: str, is_fast: bool, is_compiled: bool) -> None:
    found = chosen(wanted, device, step_s=None, steps_left=1)
    assert (found.is_fast, found.is_compiled) == (is_fast, is_compiled) and "asked for" in str(found)


@pytest.mark.parametrize("wanted", [AUTO, FAST])
def test_a_machine_that_cannot_says_why(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not for mps" in str(chosen(wanted, "mps"))
    monkeypatch.setattr(engine, "compiler", lambda: None)
    assert "C++ compiler" in str(chosen(wanted, "cpu")) and not chosen(wanted, "cpu").is_fast
    monkeypatch.setattr(engine, "has_bfloat16", lambda device: False)
    assert "processor has no bfloat16" in str(chosen(wanted, "cpu"))
    assert "GPU has no bfloat16" in str(chosen(wanted, "cuda:0"))


@pytest.mark.parametrize("wanted", [AUTO, FAST])
def test_a_gpu_without_triton_stays_with_bfloat16(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_triton", lambda: False)
    found = chosen(wanted, "cuda")
    assert found.is_fast and not found.is_compiled and "triton" in found.why


def test_the_line_holds_everything() -> None:
    line = str(Engine(True, True, "as was asked for", "cpu, plain attention"))
    assert line == "bfloat16, compiled, cpu, plain attention: as was asked for"


@pytest.mark.parametrize("refusal", [RuntimeError("no kernel image"), EnvironmentUnfit("others have its memory")])
def test_what_a_gpu_refuses_is_done_on_the_processor(refusal: Exception) -> None:
    asked: list[str] = []

    def work(device: str) -> str:
        asked.append(device)
        if device != "cpu":
            raise refusal
        return "done"

    assert on_device("cuda", work) == "done" and asked == ["cuda", "cpu"]


def test_an_error_of_the_work_itself_is_raised() -> None:
    def work(device: str) -> None:
        raise RuntimeError(f"not on {device} either")

    with pytest.raises(RuntimeError, match="not on cpu either"):
        on_device("cuda", work)
