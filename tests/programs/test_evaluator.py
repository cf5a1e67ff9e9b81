"""Evaluating a finished run and its dense control: the same sequences, the same tokens, the archive's own bits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from runtime_harness import finished_run

from bootstrap.archive import SeedArchive
from bootstrap.baseline import train_dense
from bootstrap.evaluator import Evaluator, append_evaluation, read_evaluations
from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.codec import decode_module
from dipaco_p2p.core.evaluate import evaluate_routed
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.topology import ModuleId


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Store]:
    folder = tmp_path_factory.mktemp("finished")
    return finished_run(folder), Store(folder / "seed")


@pytest.fixture
def run(finished: tuple[Run, Store]) -> Run:
    return finished[0]


@pytest.fixture
def store(finished: tuple[Run, Store]) -> Store:
    return finished[1]


@pytest.fixture
def evaluator(run: Run, store: Store) -> Evaluator:
    return Evaluator(run, store, SeedArchive(run, store))


def test_the_routed_loss_is_that_of_the_core(run: Run, store: Store, evaluator: Evaluator) -> None:
    archive = SeedArchive(run, store)

    def flat(module: ModuleId) -> Floats:
        data = store.get(archive.ledgers[module].versions[1].document.digest)
        assert data is not None
        return decode_module(data, run.layout(module))

    def flats(number: int) -> list[Floats]:
        return [flat(module) for module in run.topology.path(number).modules()]

    sequences = np.concatenate(list(evaluator.sequences.values()))
    numbers = [[run.topology.number(path)] * len(rows) for path, rows in evaluator.sequences.items()]
    expected = evaluate_routed(flats, run.config.model, sequences, np.concatenate(numbers))
    found = evaluator.evaluate(2).routed
    assert found.tokens == expected.tokens == len(sequences) * (run.config.model.context - PREFIX_TOKENS)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)


def test_training_lowers_the_loss_from_that_of_guessing(evaluator: Evaluator) -> None:
    first, last = evaluator.evaluate(0).routed.loss, evaluator.evaluate(2).routed.loss
    assert first == pytest.approx(math.log(258), abs=0.1)
    assert last < first - 0.05


def test_every_module_is_judged_by_the_paths_through_it(run: Run, evaluator: Evaluator) -> None:
    found = evaluator.evaluate(2)
    assert found.modules[ModuleId(0, 0)] == found.routed
    for level in (1, 2):
        halves = [found.modules[ModuleId(level, index)] for index in (0, 1)]
        assert sum(half.tokens for half in halves) == found.routed.tokens
        assert math.fsum(half.nats_total for half in halves) == pytest.approx(found.routed.nats_total)


def test_a_round_is_complete_when_all_modules_have_it(run: Run, store: Store) -> None:
    archive = SeedArchive(run, store)
    evaluator = Evaluator(run, store, archive)
    assert evaluator.complete_version() == 2
    ledger = archive.ledgers[ModuleId(2, 1)]
    ledger.versions = ledger.versions[:1]
    assert evaluator.complete_version() == 1


def test_a_missing_snapshot_is_told(run: Run, store: Store) -> None:
    archive = SeedArchive(run, store)
    evaluator = Evaluator(run, store, archive)
    name = archive.ledgers[ModuleId(1, 1)].versions[0].document.digest
    data = store.get(name)
    assert data is not None
    store.drop(name)
    try:
        with pytest.raises(IntegrityError, match=name[:8]):
            evaluator.evaluate(1)
    finally:
        store.put(data)


def test_evaluations_are_kept_and_read_in_order(tmp_path: Path, evaluator: Evaluator) -> None:
    path = tmp_path / "evaluations.jsonl"
    assert read_evaluations(path) == []
    for version in (2, 0, 2):
        append_evaluation(path, evaluator.evaluate(version))
    rows = read_evaluations(path)
    assert [row["version"] for row in rows] == [0, 2]
    assert rows[1] == evaluator.evaluate(2).to_dict()


def test_the_dense_control_takes_the_same_steps_on_the_same_sequences(
    run: Run, store: Store, evaluator: Evaluator
) -> None:
    done: list[int] = []
    control = train_dense(run, store, evaluator, on_progress=done.append)
    assert done == [1, 2] and control.steps == run.config.rounds.rounds * run.config.inner.steps
    assert control.evaluation.tokens == evaluator.evaluate(0).routed.tokens
    assert control.evaluation.loss < evaluator.evaluate(0).routed.loss
    assert train_dense(run, store, evaluator) == control, "the same every time"
