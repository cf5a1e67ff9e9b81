"""What `plan` advises: by how long a round's line is busy, how long its steps take, and the number of rounds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bootstrap.cli import app
from bootstrap.planning.advice import BUSY, CHOICES, OVERLAP_COSTS, OVERLAP_FROM, ROUNDS, Advice, advise
from dipaco_p2p.config import DOWNLINKS, UPLINKS, RunConfig

REPO = Path(__file__).parents[2]
EXACT, SMALLEST = CHOICES[0], CHOICES[-1]


def run_of(rounds: int = 2 * ROUNDS, steps: int = 30) -> RunConfig:
    run = RunConfig()
    return replace(run, rounds=replace(run.rounds, rounds=rounds), inner=replace(run.inner, steps=steps))


def times(exact_s: float) -> dict[tuple[str, str], float]:
    """Each choice takes the line half as long as the one before."""
    return {(choice.uplink, choice.downlink): exact_s / 2**place for place, choice in enumerate(CHOICES)}


def advised(exact_s: float, *, steps_s: float = 100.0, run: RunConfig | None = None) -> Advice:
    known = times(exact_s)
    return advise(run or run_of(), lambda up, down: known[up, down], steps_s=steps_s)


def test_the_choices_are_codecs_of_a_run_file_from_the_most_exact_on() -> None:
    assert EXACT == replace(EXACT, uplink=RunConfig().compression.uplink, rounds_min=0, outer="")
    for choice in CHOICES:
        assert choice.uplink in UPLINKS and choice.downlink in DOWNLINKS
    assert [choice.costs for choice in CHOICES] == sorted(choice.costs for choice in CHOICES)


def test_a_fast_line_needs_nothing() -> None:
    found = advised(0.9 * 100 * BUSY / (1 - BUSY))
    assert (found.uplink, found.downlink, found.overlap) == (EXACT.uplink, EXACT.downlink, False)
    assert len(found.why) == 1


@pytest.mark.parametrize("place", range(1, len(CHOICES)))
def test_a_slower_line_gets_the_first_codec_that_leaves_it_idle_enough(place: int) -> None:
    found, choice = advised(0.9 * 2**place * 100 * BUSY / (1 - BUSY)), CHOICES[place]
    assert (found.uplink, found.downlink) == (choice.uplink, choice.downlink) and found.busy <= BUSY
    assert f"{choice.costs:g} %" in found.why[1] and choice.outer in found.why[1]


@pytest.mark.parametrize("place", range(1, len(CHOICES)))
def test_a_run_that_is_too_short_for_a_codec_gets_the_one_before_and_hears_why(place: int) -> None:
    found = advised(5000.0, run=run_of(rounds=CHOICES[place].rounds_min - 1))
    assert (found.uplink, found.overlap) == (CHOICES[place - 1].uplink, False) and found.busy > BUSY
    assert f"{CHOICES[place].uplink} is for runs of {CHOICES[place].rounds_min} rounds and more" in found.why


@pytest.mark.parametrize("rounds", [ROUNDS - 1, 2 * ROUNDS])
def test_so_many_steps_as_it_says_need_no_smaller_codec(rounds: int) -> None:
    slow = advised(5000.0, run=run_of(rounds=rounds))
    [steps] = [int(word.replace(",", "")) for why in slow.why if "rounds of" in why and "would do" in why
               for word in why.split() if word.replace(",", "").isdigit()]  # fmt: skip
    for count, is_enough in ((steps, True), (steps - 1, False)):
        found = advised(5000.0, steps_s=100.0 * count / 30, run=run_of(rounds=rounds, steps=count))
        assert (found.busy <= BUSY and len(found.why) == 1) == is_enough, count


@pytest.mark.parametrize(("share", "rounds", "overlap"), [(0.9, 60, False), (1.1, 60, True), (1.1, 59, False)])
def test_overlap_is_for_long_runs_whose_line_stays_busy(share: float, rounds: int, overlap: bool) -> None:
    busy = share * OVERLAP_FROM
    smallest_s = 100.0 * busy / (1 - busy)
    last = max(place for place, choice in enumerate(CHOICES) if rounds >= choice.rounds_min)
    found = advised(smallest_s * 2**last, run=run_of(rounds=rounds))
    assert found.overlap == overlap and found.busy == pytest.approx(busy)
    assert any("overlap hides" in why for why in found.why) == overlap


def test_what_a_choice_costs_is_what_the_docs_measured() -> None:
    text = (REPO / "docs" / "performance.md").read_text()
    for costs in (*(choice.costs for choice in CHOICES), OVERLAP_COSTS):
        assert re.search(rf"\{costs:+.1f}( %|,)", text), costs


def test_plan_says_it_where_the_pace_is_known(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[rounds]\nrounds = 100\n")
    told = CliRunner().invoke(app, ["plan", str(path), "--tokens-per-s", "200000", "--up-mbit", "0.1"]).output
    assert f"advice         uplink {SMALLEST.uplink}, downlink {SMALLEST.downlink}, overlap" in told
    assert max(map(len, told.splitlines())) <= 160
    assert "advice" not in CliRunner().invoke(app, ["plan", str(path)]).output
