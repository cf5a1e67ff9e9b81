"""Evaluating a finished run and its dense control: the same sequences, the same tokens, the archive's own bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap.archives.early_stopping import stopped_evaluation
from bootstrap.archives.evaluator import Evaluator, append_evaluation, score_table
from bootstrap.demo_report import train_dense
from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.model.shards import decode_shard
from dipaco_p2p.core.model.transformer import PathModel, load_modules
from dipaco_p2p.core.routing.evaluate import losses, routed_once
from dipaco_p2p.core.routing.features import features
from dipaco_p2p.core.routing.router import decode_router
from dipaco_p2p.errors import IntegrityError, Interrupted
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import ShardRef
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.best_rounds import best_rounds, read_evaluations


@pytest.fixture
def run(finished: tuple[Run, Path]) -> Run:
    return finished[0]


@pytest.fixture
def store(finished: tuple[Run, Path]) -> Store:
    return Store(finished[1])


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

    sequences = evaluator.held_out["validation"].tokens
    router = decode_router(evaluator.blob(run.manifest.router.digest)) if run.manifest.router else None
    assert router is not None
    assigned = router.assign(features(evaluator.frozen(), sequences[:, :PREFIX_TOKENS]))
    assert set(assigned.tolist()) == {0, 1, 2, 3}
    model, nats = PathModel(run.config.model), 0.0
    for number in range(4):
        load_modules(model, flats(number))
        nats += losses(model, sequences[assigned == number]).sum()
    found = evaluator.evaluate(2).routed
    assert found.tokens == len(sequences) * (run.config.model.context - PREFIX_TOKENS)
    assert found.loss == pytest.approx(nats / found.tokens, abs=1e-6)


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
    def blob(digest: str) -> bytes:
        return store.get(digest) or b""

    tokens = np.concatenate([_shard(store, ref) for ref in run.manifest.shards])
    control = train_dense(run, blob, tokens)
    assert control.steps == run.config.rounds.rounds * run.config.inner.steps
    assert control.evaluation.tokens == evaluator.evaluate(0).routed.tokens
    assert control.evaluation.loss < evaluator.evaluate(0).routed.loss
    assert train_dense(run, blob, tokens) == control, "the same every time"
    with pytest.raises(Interrupted):
        train_dense(run, blob, tokens, is_stopped=lambda: True)


def row(version: int, holdout: dict[str, float | None], *, sharding: int = 0) -> dict[str, Any]:
    """A judged round of paths with two tokens each, whose validation loss is ten times the round."""
    paths = {path: {"loss": 10.0 * version, "tokens": 2, "holdout_loss": loss} for path, loss in holdout.items()}
    return {"version": version, "sharding": sharding, "paths": paths}


def test_each_path_is_served_with_its_best_round_on_the_holdout_since_the_last_sharding() -> None:
    rows = [
        row(0, {"P0": 0.1, "P1": 0.1}),  # before the last sharding: the holdout went to other paths
        row(1, {"P0": 5.0, "P1": 5.0}, sharding=1),
        row(2, {"P0": 3.0, "P1": 7.0}, sharding=1),
        row(3, {"P0": 4.0, "P1": 5.0}, sharding=1),
    ]
    assert best_rounds(rows) == {"P0": 2, "P1": 3}
    stopped = stopped_evaluation(rows)
    assert stopped is not None and stopped.tokens == 4 and stopped.loss == 25.0
    assert best_rounds([row(1, {"P0": 2.0}), row(2, {"P0": None})]) == {"P0": 2}, "without a holdout: the newest"
    assert stopped_evaluation([]) is None


def test_a_path_that_diverged_is_served_from_before() -> None:
    nan = math.nan
    assert best_rounds([row(1, {"P0": nan}), row(2, {"P0": 2.0}), row(3, {"P0": nan})]) == {"P0": 2}
    assert best_rounds([row(2, {"P0": nan}), row(1, {"P0": nan})]) == {"P0": 2}, "nothing is better: the newest"


def test_a_round_is_judged_by_the_same_router_whenever_that_is(
    run: Run, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = evaluator.evaluate(2)
    monkeypatch.setattr(type(run), "sharding_at", lambda self, round_number: 1 if round_number >= 2 else 0)
    assert evaluator.evaluate(2) == before and before.sharding == 0


def test_a_line_that_was_cut_off_costs_only_its_own_round(tmp_path: Path, evaluator: Evaluator) -> None:
    path = tmp_path / "evaluations.jsonl"
    append_evaluation(path, evaluator.evaluate(0))
    whole = path.read_bytes()
    append_evaluation(path, evaluator.evaluate(1))
    path.write_bytes(path.read_bytes()[: len(whole) + 30])
    assert [row["version"] for row in read_evaluations(path)] == [0]
    append_evaluation(path, evaluator.evaluate(2))
    assert [row["version"] for row in read_evaluations(path)] == [0, 2]
    path.write_bytes(whole + b"\xff\xfe\n7\n[]\n")
    assert [row["version"] for row in read_evaluations(path)] == [0]


def test_a_finished_run_is_judged_by_every_way_to_route_it(evaluator: Evaluator) -> None:
    found = score_table(evaluator, 2, evaluator.held_out["validation"].tokens)
    once = routed_once(found, evaluator.assign("validation", 0, version=2)).sum()
    assert once == pytest.approx(evaluator.evaluate(2).routed.nats_total)


def _shard(store: Store, ref: ShardRef) -> Any:
    data = store.get(ref.blob.digest)
    assert data is not None
    return decode_shard(data, vocab_size=258, context=72).tokens
