"""From results to figures: rates that `tune` chose and `report` shows, claims, pages, and files that survive a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.table import Table

from benchmarks.methods.claims import FAILS, HOLDS, UNTESTED, Verdict, shown, verdicts
from benchmarks.methods.data import Data, split_sequences
from benchmarks.methods.jobs import STEPS
from benchmarks.methods.plan import (
    ABLATIONS,
    DENSE,
    DENSE_OUTER,
    DILOCO,
    EVERY_STEP,
    KMEANS,
    LIKE,
    METHODS,
    RANDOM,
    Rates,
    changed,
    is_scored,
    job,
    needed,
    neighbours,
    tried_first,
    tuning,
)
from benchmarks.methods.report import _ppls, told
from benchmarks.methods.store import Folder, Results
from benchmarks.methods.summary import Summary, chosen_rates, gap, gaps, summarise_experiment, untried
from benchmarks.methods.work import EVERY
from dipaco_p2p.errors import ConfigError

SEEDS = (0, 1)
USUAL, BEST = Rates(1.0, 0.7), Rates(4.0, 0.7)
LOSSES = {DENSE: 4.6, DENSE_OUTER: 4.5, RANDOM: 4.35, DILOCO: 4.34, KMEANS: 4.3}


def line(kind: str, method: str, seed: int, rates: Rates, loss: float) -> dict[str, Any]:
    one = job(method, seed=seed, rates=rates)
    report = {"loss": loss, "low": loss - 0.1, "high": loss + 0.1, "bits_per_byte": loss / 1.5}
    result: dict[str, Any] = {
        "report": report,
        "tune": {"loss": loss + 0.05},
        "curve": [[120, loss + 0.4], [240, loss + 0.1], [360, loss]],
        "agreement": {"2": 0.8, "4": 0.6},
        "training_text": loss - 0.1,
        "parameters": 1000,
    }
    if kind == "score":
        ways = ("oracle once", "once, token router", "all paths read along, every 64")
        kinds = [f"once, likelihood router ({name})" for name in ("plain", "matched", "balanced")]
        routed = {"once": report} | {way: report | {"loss": loss - 0.02} for way in (*ways, *kinds)}
        routed |= {f"every {every}": report | {"loss": loss - 0.03 - 0.01 / every} for every in EVERY}
        routed["every 64, looking 64 ahead"] = routed["every 64"] | {"loss": loss - 0.031}
        starved = {"distance": 0.2, "starved": 1, "empty": 0}
        result = {"routed": routed, "starvation": {"plain": starved, "matched": starved | {"distance": 0.0}}}
    return {"kind": kind, "key": one.key, "job": one.to_dict(), "result": result}


def results(losses: dict[str, float] = LOSSES, *, best: Rates = BEST) -> Results:
    """Every method with all rates that are tried, and both seeds with `best`, which no other rates come near."""
    lines = []
    for method, loss in losses.items():
        own = best if best in tried_first(method) else Rates(best.inner, 1.0)
        for rates in tried_first(method):
            worse = abs(rates.inner - own.inner) / 2 + abs(rates.outer - own.outer) / 2
            lines += [line("train", method, seed, rates, loss + worse + 0.01 * seed) for seed in SEEDS]
        if is_scored(method):
            lines += [line("score", method, seed, own, loss + 0.01 * seed) for seed in SEEDS]
    return {(found["kind"], found["key"]): found for found in lines}


def data() -> Data:
    arrays = [np.full(256, number, dtype=np.int32) for number in range(100)]
    return split_sequences(["law"] * 100, arrays, np.ones(100, dtype=np.int64))


def summary_of(found: Results) -> Summary:
    chosen = chosen_rates(list(LOSSES), found)
    made = summarise_experiment(found, data(), chosen, seeds=SEEDS, settings={})
    again: Summary = json.loads(json.dumps(made))
    return again


def test_the_rates_with_the_least_loss_on_tune_are_chosen_whatever_report_says():
    best = Rates(2.0, 1.0)
    found = results(best=best)
    for entry in found.values():
        if entry["kind"] == "train" and entry["job"].get("lr") == 0.5:
            entry["result"]["report"]["loss"] = 0.1
    assert chosen_rates(list(LOSSES), found) == dict.fromkeys(LOSSES, best)


def test_rates_that_diverge_are_not_chosen():
    found = results()
    found["train", job(KMEANS, seed=0, rates=BEST).key]["result"]["tune"]["loss"] = math.inf
    assert chosen_rates([KMEANS], found)[KMEANS] != BEST


def test_all_methods_are_tuned_with_the_same_effort_by_one_seed():
    tuned = [method for method in METHODS if method not in LIKE]
    inner = {tuple(sorted({rates.inner for rates in tried_first(method)})) for method in tuned}
    outer = {len({rates.outer for rates in tried_first(method)}) for method in tuned}
    assert len(inner) == 1 and outer == {1, 3}, "one where nothing takes an outer step"
    assert {one.seed for one in tuning(METHODS)} == {0} and {one.method for one in tuning(METHODS)} == set(tuned)


def test_the_search_ends_where_no_neighbour_of_the_best_is_untried():
    found = results()
    assert untried([KMEANS, RANDOM, DENSE], found) == []
    at_the_edge = results(best=Rates(8.0, 0.5))
    further = {(one.inner_lr, one.lr) for one in untried([KMEANS], at_the_edge)}
    assert further == {(16.0, 0.5), (8.0, 0.35)}
    for rates in further:
        better = line("train", KMEANS, 0, Rates(*rates), 4.0)
        at_the_edge["train", better["key"]] = better
    assert chosen_rates([KMEANS], at_the_edge)[KMEANS] in further
    assert {one.inner_lr for one in untried([DENSE], results(best=Rates(8.0, 0.7)))} == {16.0}
    assert neighbours(KMEANS, Rates(32.0, 2.0)) == [Rates(16.0, 2.0), Rates(32.0, 1.4)], "the ladders end there"


def test_methods_that_differ_in_routing_take_over_rates():
    assert needed(["2x2 product k-means"]) == [KMEANS, "2x2 product k-means"]
    chosen = chosen_rates(["2x2 product k-means"], results())
    assert chosen["2x2 product k-means"] == chosen[KMEANS] == BEST


def test_an_ablation_has_the_rates_of_what_it_changes():
    names = (
        "rule mean",
        "twice the steps, random routing",
        "twice the steps, DiLoCo",
        "batches of 32, dense + outer step",
    )
    assert [changed(name) for name in names] == [KMEANS, RANDOM, DILOCO, DENSE_OUTER]
    assert all(changed(name) in METHODS for name in ABLATIONS)


def test_gaps_are_of_perplexity_per_seed():
    summary = summary_of(results())
    assert gaps(summary, KMEANS, DENSE_OUTER) == pytest.approx([math.exp(-0.2) - 1] * 2)
    assert gaps(summary, KMEANS, KMEANS, routed="every 64") == pytest.approx([math.exp(-0.03 - 0.01 / 64) - 1] * 2)


def test_bars_are_met_in_all_seeds_or_missed():
    summary = summary_of(results())
    assert [bar["met"] for bar in summary["bars"]] == [True, True, True, True] and summary["beats_dense"] is True
    worse = summary_of(results(LOSSES | {KMEANS: 4.345}))
    assert [bar["met"] for bar in worse["bars"]] == [True, False, False, True] and worse["beats_dense"] is True
    assert summary_of(results(LOSSES | {KMEANS: 4.51}))["beats_dense"] is False


def test_without_the_comparison_nothing_is_said_about_it():
    summary = summary_of({key: entry for key, entry in results().items() if entry["job"]["method"] != DENSE_OUTER})
    assert summary["beats_dense"] is None and not summary["bars"][0]["met"]


def test_every_claim_has_a_verdict_and_untested_ones_say_so():
    found = {verdict.number: verdict for verdict in verdicts(summary_of(results()))}
    assert list(found) == list(range(1, 26))
    assert [found[number].verdict for number in (1, 8, 9, 10, 22)] == [HOLDS] * 5
    assert found[12].verdict == FAILS and "-0.32" in found[12].figures
    assert all(found[number].verdict == UNTESTED for number in (3, 5, 7, 11, 13, 25))
    assert all("test_" in found[number].figures for number in (23, 24))
    order = {verdict.number: verdict.verdict for verdict in verdicts(summary_of(results(LOSSES | {KMEANS: 4.4})))}
    assert order[1] == FAILS


def verdict_of(number: int, made_up: dict[str, float]) -> Verdict:
    """Of one claim, from the losses of both seeds of whatever it takes."""
    figures = {
        name: {
            str(seed): {"report": {"loss": loss}, "tune": {"loss": loss}, "training_text": loss - 0.1} for seed in SEEDS
        }
        for name, loss in made_up.items()
    }
    summary = {"seeds": list(SEEDS), "methods": {}, "ablations": figures}
    return verdicts(summary)[number - 1]


@pytest.mark.parametrize(("every", "verdict"), [(4.35, HOLDS), (4.295, HOLDS), (4.28, FAILS)])
def test_rounds_hold_if_every_step_is_not_better_by_more_than_a_per_cent(every: float, verdict: str) -> None:
    found = verdict_of(11, {KMEANS: 4.3, EVERY_STEP: every})
    assert found.verdict == verdict and f"rates: {math.exp(every - 4.3) - 1:+.1%}".replace("%", " %") in found.figures
    assert verdict_of(11, {KMEANS: 4.3}).verdict == UNTESTED


@pytest.mark.parametrize(
    ("all_text", "little_text", "verdict"), [(4.2, 4.6, HOLDS), (4.2, 4.4, FAILS), (4.4, 4.6, FAILS)]
)
def test_the_gain_of_more_paths_has_to_turn_with_little_text(all_text: float, little_text: float, verdict: str) -> None:
    made_up = {KMEANS: 4.3, "4x4 k-means": all_text, "5 % of the text": 4.5}
    assert verdict_of(2, made_up).verdict == UNTESTED
    found = verdict_of(2, made_up | {"4x4 k-means, 5 % of the text": little_text})
    assert found.verdict == verdict and "5 % of it" in found.figures


def test_an_outer_step_has_to_beat_adamw() -> None:
    assert verdict_of(22, {DENSE: 4.4, DENSE_OUTER: 4.3}).verdict == HOLDS
    found = verdict_of(22, {DENSE: 4.3, DENSE_OUTER: 4.31})
    assert found.verdict == FAILS and "own rates: +1.0 %" in found.figures


def test_the_large_grid_counts_where_it_was_run() -> None:
    private = {KMEANS: 4.3, "2x2 private ends": 4.2, "4x4 k-means": 4.3}
    assert verdict_of(4, private).verdict == HOLDS
    assert verdict_of(4, private | {"4x4 private ends": 4.4}).verdict == FAILS
    little = {"5 % of the text": 4.5, "5 % of the text, overlap of 2": 4.4}
    overlap = {KMEANS: 4.3, "2x2 overlap of 2": 4.4, "4x4 k-means": 4.3} | little
    assert verdict_of(17, overlap).verdict == HOLDS
    assert verdict_of(17, overlap | {"4x4 overlap of 2": 4.2}).verdict == HOLDS
    assert verdict_of(17, overlap | {"4x4 overlap of 2": 4.4}).verdict == FAILS


def test_every_ablation_and_method_is_a_job_of_its_own():
    keys = {job(name, seed=0, rates=USUAL).key for name in (*METHODS, *ABLATIONS)}
    assert len(keys) == len(METHODS) + len(ABLATIONS)
    assert job("2x2 k-means", seed=0, rates=USUAL).path_steps == 4 * STEPS
    assert (
        job(DILOCO, seed=0, rates=USUAL).path_steps == 4 * STEPS and job(DENSE, seed=0, rates=USUAL).path_steps == STEPS
    )


def test_dense_controls_have_about_the_parameters_of_their_grids():
    from benchmarks.methods.work import _parameters

    for control, grid in (
        ("dense, parameters of 2x2", KMEANS),
        ("dense, parameters of 4x4 + outer step", "4x4 k-means"),
    ):
        one, other = (_parameters(job(name, seed=0, rates=USUAL)) for name in (control, grid))
        assert one == pytest.approx(other, rel=0.02)


def test_the_tables_have_every_figure_and_hide_nothing():
    cells = cells_of(summary_of(results()))
    for method, loss in LOSSES.items():
        assert method in cells and f"{math.exp(loss):.2f}" in cells
    assert sum(cells.count(verdict) for verdict in (HOLDS, FAILS, UNTESTED)) == 25
    assert "missed" in cells_of(summary_of(results(LOSSES | {KMEANS: 4.345})))


def cells_of(summary: Summary) -> list[str]:
    tables = [each for each in told(summary) if isinstance(each, Table)]
    return [str(cell) for each in tables for column in each.columns for cell in column.cells]


def test_a_line_that_a_kill_cut_off_is_done_again(tmp_path: Path):
    folder = Folder(tmp_path)
    folder.open({"corpus": ["found"]})
    first, second = line("train", KMEANS, 0, USUAL, 4.3), line("train", KMEANS, 1, USUAL, 4.3)
    folder.append(first)
    with folder.results.open("a") as file:
        file.write(json.dumps(second)[:100])
    assert list(folder.read_results()) == [("train", first["key"])]
    folder.append(second)
    assert list(folder.read_results()) == [("train", first["key"]), ("train", second["key"])]


def test_a_folder_of_another_experiment_is_refused(tmp_path: Path):
    Folder(tmp_path).open({"corpus": ["found"]})
    Folder(tmp_path).open({"corpus": ["found"]})
    with pytest.raises(ConfigError, match="other settings"):
        Folder(tmp_path).open({"corpus": ["else"]})


def test_a_run_that_diverged_is_told_as_such_and_breaks_no_page() -> None:
    assert gap(15978.5, 4.0) == math.inf and shown([gap(15978.5, 4.0), gap(4.0, 4.0)]) == "diverged / +0.0 %"
    summary: Summary = {"seeds": [0], "methods": {}, "ablations": {"attacked": {"0": {"report": {"loss": 15978.5}}}}}
    assert _ppls(summary, "attacked") == ["diverged"] and _ppls(summary, "not run") == ["-"]
