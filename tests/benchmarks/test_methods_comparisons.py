"""What is lost, late, counted as zero or estimated in the comparisons is what their names say; costs are of a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from methods_harness import made_up_shards, start, tiny_job
from tiny_run import MODEL

from benchmarks.methods import grid as methods_grid
from benchmarks.methods.comparisons import (
    CLEAN,
    COMPARISONS,
    COMPRESSION_LONG,
    ELSEWHERE,
    ESTIMATES,
    FLOAT32,
    FLOAT32_SHORT,
    LOST_WORK,
    MUON,
    OFF,
    OVERLAP,
    OverlappedGrid,
    costs_table,
    curve_table,
    curves_of,
    pairs_table,
    percents,
    rivals_table,
    rounds_to,
    sent_table,
    tables,
)
from benchmarks.methods.data import own_documents
from benchmarks.methods.grid import Arrived, Grid, missing, untrained_path
from dipaco_p2p.core.arrays import Floats, from_bfloat16
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.optimizer import BUFFER, MEAN, SEPARATOR, is_hidden
from dipaco_p2p.core.outer.compress import Sent
from dipaco_p2p.topology import ModuleId, PathId

ALL = MODEL.topology.modules()
ON = next(name for name in ESTIMATES if name.startswith("on"))


def after(rounds: int, **changes: object) -> Grid:
    """The grid of a job with these changes after some rounds."""
    job = tiny_job(steps=8, **changes)
    kind = OverlappedGrid if job.estimate else Grid
    grid = kind(job, start(), made_up_shards(job), fast=False)
    for number in range(rounds):
        grid.round(number)
    return grid


def same(one: Grid, other: Grid, module: ModuleId) -> bool:
    return np.array_equal(one.states[module].params, other.states[module].params)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Makes these paths miss these rounds."""

    def lose(lost: dict[int, list[int]]) -> None:
        monkeypatch.setattr(
            methods_grid, "missing", lambda job, number: [place in lost.get(number, []) for place in range(4)]
        )

    return lose


# -- what is lost


def test_the_lots_of_a_seed_are_the_same_for_every_rule() -> None:
    lossy = [jobs[0] for jobs in LOST_WORK.jobs([2]).values() if jobs[0].drop == 0.3]
    assert len(lossy) >= 4
    for number in range(6):
        assert len({tuple(missing(job, number)) for job in lossy}) == 1
    found = [missing(replace(lossy[0], seed=seed), number) for seed in range(20) for number in range(20)]
    assert 0.25 < np.mean(found) < 0.35


def test_a_path_that_is_never_trained_misses_every_round() -> None:
    for job in LOST_WORK.jobs(range(5))["one path never trained, left out"]:
        alone = [place == untrained_path(job) for place in range(4)]
        assert sum(alone) == 1 and all(missing(job, number) == alone for number in range(6))


def test_what_is_left_out_changes_its_own_modules_only(only) -> None:
    clean = after(1)
    only({0: [0]})
    assert {module for module in ALL if not same(clean, after(1), module)} == set(PathId((0, 0, 0)).modules())


def test_what_counts_as_zero_shortens_the_step_and_keeps_its_direction(only) -> None:
    """Of two shards: left out, the other's gradient as it is; as zero, alpha of it, rescaled by both."""
    only({0: [0]})
    before, module = after(0), ModuleId(1, 0)
    left, zero = (
        before.states[module].params - after(1, zero=is_zero, weighted=False).states[module].params
        for is_zero in (False, True)
    )
    assert np.linalg.norm(zero) / np.linalg.norm(left) == pytest.approx(np.sqrt(0.5), rel=0.02)
    assert left @ zero / np.linalg.norm(left) / np.linalg.norm(zero) > 0.99


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_a_late_contribution_comes_with_the_next_round(only, monkeypatch: pytest.MonkeyPatch, weight: float) -> None:
    only({0: [0]})
    seen: list[dict[ModuleId, list[tuple[str, int]]]] = []
    honest = Grid.step

    def step(self: Grid, arrived: Arrived, number: int) -> None:
        seen.append({module: [(c.share.path, c.share.tokens) for c in found] for module, found in arrived.items()})
        honest(self, arrived, number)

    monkeypatch.setattr(Grid, "step", step)
    after(2, late=weight)
    trunk, names = ModuleId(0, 0), [str(path) for path in MODEL.topology.paths()]
    assert [path for path, _ in seen[0][trunk]] == names[1:]
    late, *others = seen[1][trunk]
    assert [path for path, _ in others] == names and late == (names[0], round(weight * others[0][1]))


def test_a_module_for_which_nothing_came_stays_or_coasts(only) -> None:
    only({1: [0, 1]})
    module = ModuleId(1, 0)
    before, stays, coasts, zero = after(1), after(2), after(2, coasts=True), after(2, zero=True)
    assert same(stays, before, module) and same(zero, before, module) and not same(coasts, before, module)


# -- estimates of the next version


def test_every_estimate_gives_the_first_version_and_other_ones_after_it() -> None:
    names = ["", *ESTIMATES]
    first, *others = (after(1, estimate=name) for name in names)
    assert all(same(first, other, module) for other in others for module in ALL)
    later = [after(3, estimate=name) for name in names]
    assert not any(same(one, other, ALL[0]) for place, one in enumerate(later) for other in later[:place])


def test_a_round_begins_with_the_last_version_and_the_own_outer_gradient() -> None:
    begun, grid = after(0).flats(0), after(1, estimate=ON)
    starts: list[Floats] = grid.starts(0)
    [worker] = grid._workers[0]
    for before, own, begins in zip(begun, worker.own, starts, strict=True):
        np.testing.assert_allclose(begins, before - grid.job.lr * (1 + grid.job.momentum) * own, atol=1e-5)


# -- what is compared


@pytest.mark.parametrize("name", COMPARISONS)
def test_variations_are_jobs_of_their_own_from_one_start(name: str) -> None:
    comparison = COMPARISONS[name]
    jobs = [job for found in comparison.jobs([0, 1]).values() for job in found]
    assert len({job.key for job in jobs}) == len(jobs) == 2 * len(comparison.variations)
    assert {(job.rounds, job.model.context, job.model.width) for job in jobs} == {(comparison.rounds, 128, 32)}
    names = {*comparison.variations, *(n + ELSEWHERE for n, f in comparison.variations.items() if f.get("untrained"))}
    assert {*comparison.references, *(each for pair in comparison.pairs for each in pair)} <= names


def cells(found, column: int) -> list[str]:
    return list(found.columns[column].cells)


def test_costs_are_taken_within_a_seed() -> None:
    assert percents([math.log(50), math.log(100)], [math.log(55), math.log(90)]) == pytest.approx([10.0, -10.0])
    compared = replace(OVERLAP, references=(OFF,))
    assert cells(costs_table(compared, {OFF: [5.0, 4.0], ON: [5.1, 4.3]}), 3) == ["+0.0000", "+0.2000"]


def test_the_best_of_the_references_is_what_others_are_held_against() -> None:
    losses: dict[str, Sequence[float]] = {FLOAT32: [5.0, 4.0], FLOAT32_SHORT: [4.9, 4.2], "other": [5.1, 4.3]}
    assert cells(costs_table(COMPRESSION_LONG, losses), 5) == ["+0.1000", "+0.2000", "+0.3000"]
    curves = {FLOAT32: [{5: 4.0, 10: 3.2}], FLOAT32_SHORT: [{5: 4.1, 10: 3.1}], "other": [{5: 4.5, 10: 3.4}]}
    shown = curve_table(COMPRESSION_LONG, curves)
    assert [column.header for column in shown.columns] == ["", "5", "10"]
    assert [cells(shown, place)[2] for place in (1, 2)] == ["+0.400", "+0.300"]


def test_losses_are_shown_by_rounds_and_elsewhere_in_a_row_of_its_own() -> None:
    results = {CLEAN: [{"curve": [[30, 4.5], [60, 4.0]]}], "x": [{"curve": [[60, 4.2]], "elsewhere": {"loss": 4.1}}]}
    curves = curves_of(results, steps=30)
    assert curves == {CLEAN: [{1: 4.5, 2: 4.0}], "x": [{2: 4.2}], "x" + ELSEWHERE: [{2: 4.1}]}
    whole = {name: [{6: 4.0}] for name in (*LOST_WORK.variations, *(pair[0] for pair in LOST_WORK.pairs))}
    assert [shown.row_count for shown in tables(LOST_WORK, whole)] == [len(whole), len(LOST_WORK.pairs)]
    assert pairs_table(LOST_WORK, {name: [4.0, 4.1] for name in whole}).row_count == len(LOST_WORK.pairs)


def test_what_rounds_sent_is_shown_where_the_loss_is() -> None:
    comparison = replace(COMPRESSION_LONG, rounds=4, points=2)
    told = [Sent(captured=number / 10, owed=float(number)) for number in range(1, 5)]
    shown = sent_table(comparison, {"sparse": told, FLOAT32: []})
    assert [column.header for column in shown.columns] == ["", "2", "4"]
    assert [cells(shown, place) for place in range(3)] == [["sparse"], ["20%, 200%"], ["40%, 400%"]]


def test_the_projects_own_text_is_its_files_and_no_hidden_ones(tmp_path: Path) -> None:
    for name in ("a.py", "docs/b.md", ".git/c.py", "x/.venv/d.py", "e.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = own_documents(tmp_path)
    assert [(document.source, document.domain) for document in found] == [("a.py", "code"), ("docs/b.md", "documents")]


# -- two optimizers


def test_muon_and_adamw_are_tuned_on_one_grid() -> None:
    assert MUON.rivals is not None
    adamw, muon = ([MUON.variations[name] for name in group] for group in MUON.rivals)
    assert [{**fields, "optimizer": "muon"} for fields in adamw] == muon and len(muon) >= 6


def test_muon_begins_with_the_mean_gradient_of_the_warm_up() -> None:
    assert not same(after(1, optimizer="muon"), after(1), ALL[1]), "another optimizer, another version"
    job = tiny_job(optimizer="muon")
    flats, text = start().flats(job.model), made_up_shards(job)[0]
    warm = InnerLoop(replace(job.inner, optimizer="adamw"), 8, job.model, device="cpu", seed=0)
    warm.run(flats, text, first_step=0, steps=2)
    grid = Grid(job, replace(start(), optimizer=warm.state_bytes()), made_up_shards(job), fast=False)
    [worker] = grid._workers[0]
    kept, begun = warm.state(), worker._loop.state()
    name = next(name for name, p in worker._loop.path.named_parameters() if is_hidden(name, p))
    mean = kept.moment(f"{name}{SEPARATOR}{MEAN}").numpy()
    found = from_bfloat16(begun.values[f"{name}{SEPARATOR}{BUFFER}"].reshape(-1)).reshape(mean.shape)
    assert np.any(mean) and np.allclose(found, mean, rtol=1e-2)


def test_how_long_a_rival_takes_lies_on_straight_lines() -> None:
    assert rounds_to(2.5, {2: 4.0, 4: 3.0, 6: 2.0}) == pytest.approx(5.0)
    assert rounds_to(4.5, {2: 4.0, 4: 3.0}) == 2 and math.isinf(rounds_to(1.0, {2: 4.0, 4: 3.0}))


def test_each_group_of_rivals_counts_with_its_best() -> None:
    comparison = replace(COMPARISONS["muon"], rounds=4, steps=10)
    curves = {"a": [{2: 4.0, 4: 3.0}], "b": [{2: 5.0, 4: 3.5}], "c": [{2: 3.5, 4: 2.5}], "d": [{2: 9.0, 4: 8.0}]}
    shown = rivals_table(comparison, (("a", "b"), ("c", "d")), curves)
    cells = [list(column.cells)[0] for column in shown.columns]
    tokens = 3 * 10 * 8 * 128
    assert cells == ["0", "a", "3.0000", f"{4 * 10 * 8 * 128:,}", "c", "2.5000", f"{tokens:,}, 75%"]
