"""What is lost, late or counted as zero in the benchmark of lost work is what its cases say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tiny_run import MODEL, initial

from benchmarks.lost_work.cases import CASES, Case, LossyGrid, job_of, missing_paths, untrained_path
from benchmarks.lost_work.report import ELSEWHERE, PAIRS, cases_table, pairs_table, percents
from benchmarks.lost_work.training import own_documents
from benchmarks.methods.grid import Grid, WarmStart
from benchmarks.methods.jobs import Job
from dipaco_p2p.config import InnerConfig, ModelConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.inner import StepReport
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.core.shards import Shard
from dipaco_p2p.topology import ModuleId, PathId

SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyJob(Job):
    """Two steps a round."""

    @property
    def model(self) -> ModelConfig:
        return MODEL

    @property
    def inner(self) -> InnerConfig:
        return InnerConfig(steps=self.round_steps, batch=2, warmup_steps=1)


def grid_of(case: Case | None) -> Grid:
    flats, optimizer = initial()
    tensors: dict[str, Floats] = {}
    for level, flat in enumerate(flats):
        tensors |= module_layout(MODEL, level).split(flat)
    generator = np.random.default_rng(0)
    shards = [Shard(tokens=generator.integers(0, 99, (6, 72)).astype(np.int32)) for _ in range(4)]
    job, start = (
        TinyJob(method="tiny", seed=SEED, steps=4, round_steps=2),
        WarmStart(tensors=tensors, optimizer=optimizer),
    )
    if case is None:
        return Grid(job, start, shards, fast=False)
    return LossyGrid(job, start, shards, case=case, fast=False)


def on_step(report: StepReport) -> bool:
    return True


def params(grid: Grid, module: ModuleId) -> Floats:
    return grid.states[module].params


def after(case: Case | None, rounds: int) -> Grid:
    grid = grid_of(case)
    for number in range(rounds):
        grid.round(number, on_step)
    return grid


def only(monkeypatch: pytest.MonkeyPatch, lost: dict[int, list[int]]) -> None:
    """These paths miss these rounds."""
    monkeypatch.setattr(
        "benchmarks.lost_work.cases.missing_paths", lambda case, draw, number, paths: lost.get(number, [])
    )


ALL = [ModuleId(0, 0), ModuleId(1, 0), ModuleId(1, 1), ModuleId(2, 0), ModuleId(2, 1)]


def test_the_lots_of_a_draw_are_the_same_for_every_rule() -> None:
    lossy = [case for case in CASES if case.lost == 0.3]
    assert len(lossy) >= 4
    for number in range(6):
        assert len({tuple(missing_paths(case, 2, number, 4)) for case in lossy}) == 1
    found = [missing_paths(lossy[0], draw, number, 4) for draw in range(20) for number in range(20)]
    assert 0.25 < np.mean([len(lost) / 4 for lost in found]) < 0.35


def test_a_path_that_is_never_trained_misses_every_round() -> None:
    case = next(case for case in CASES if case.untrained)
    for draw in range(5):
        assert all(missing_paths(case, draw, number, 4) == [untrained_path(draw, 4)] for number in range(6))


def test_with_nothing_lost_it_is_the_grid_of_the_experiment() -> None:
    plain, clean = after(None, 2), after(CASES[0], 2)
    assert all((params(plain, module) == params(clean, module)).all() for module in ALL)


def test_what_is_left_out_changes_its_own_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, {0: [0]})
    clean, lossy = after(None, 1), after(Case(name="left out"), 1)
    changed = {module for module in ALL if (params(clean, module) != params(lossy, module)).any()}
    assert changed == set(PathId((0, 0, 0)).modules())


def test_what_counts_as_zero_shortens_the_step_and_keeps_its_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two equal shards: left out, the other's gradient as it is; as zero, alpha = 1/2 of it times sqrt(2)."""
    only(monkeypatch, {0: [0]})
    start, module = grid_of(None), ModuleId(1, 0)
    left, zero = (after(Case(name="x", zero=is_zero), 1) for is_zero in (False, True))
    steps = [params(start, module) - params(grid, module) for grid in (left, zero)]
    assert np.linalg.norm(steps[1]) / np.linalg.norm(steps[0]) == pytest.approx(np.sqrt(0.5), rel=0.02)
    assert steps[0] @ steps[1] / np.linalg.norm(steps[0]) / np.linalg.norm(steps[1]) > 0.99


def test_a_late_contribution_comes_with_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, {0: [0]})
    seen: list[dict[ModuleId, list[str]]] = []
    honest = Grid.step

    def step(self: Grid, arrived: dict[ModuleId, list[object]], number: int) -> None:
        seen.append({module: [c.share.path for c in found] for module, found in arrived.items()})  # type: ignore[attr-defined]
        honest(self, arrived, number)  # type: ignore[arg-type]

    monkeypatch.setattr(Grid, "step", step)
    after(Case(name="late", is_late=True), 2)
    trunk = ModuleId(0, 0)
    names = [str(path) for path in MODEL.topology.paths()]
    assert seen[0][trunk] == names[1:] and sorted(seen[1][trunk]) == sorted([names[0], *names])


def test_a_module_for_which_nothing_came_stays_or_coasts(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, {1: [0, 1]})
    module = ModuleId(1, 0)
    before = after(Case(name="one round"), 1)
    stays, coasts = (after(Case(name="x", momentum=has), 2) for has in (False, True))
    assert (params(stays, module) == params(before, module)).all()
    assert (params(coasts, module) != params(before, module)).any()
    zero = after(Case(name="x", zero=True), 2)
    assert (params(zero, module) == params(stays, module)).all()


def test_every_pair_of_rules_is_of_cases_that_are_run() -> None:
    names = {case.name for case in CASES} | {case.name + ELSEWHERE for case in CASES if case.untrained}
    assert {name for pair in PAIRS for name in pair} <= names


def test_costs_are_taken_within_a_draw() -> None:
    assert percents([50.0, 100.0], [55.0, 90.0]) == pytest.approx([10.0, -10.0])
    found = {case.name: [50.0, 60.0, 70.0] for case in CASES}
    found |= {case.name + ELSEWHERE: [50.0, 60.0, 70.0] for case in CASES if case.untrained}
    assert cases_table(found).row_count == len(found) and pairs_table(found).row_count == len(PAIRS)


def test_the_projects_own_text_is_its_files_and_no_hidden_ones(tmp_path: Path) -> None:
    for name in ("a.py", "docs/b.md", ".git/c.py", "x/.venv/d.py", "e.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = own_documents(tmp_path)
    assert [(document.source, document.domain) for document in found] == [("a.py", "code"), ("docs/b.md", "documents")]


def test_a_draw_is_a_job_of_its_own() -> None:
    assert job_of(1) != job_of(2) and job_of(1).rounds == 6 and replace(job_of(1), seed=2) == job_of(2)
