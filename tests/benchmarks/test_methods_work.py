"""Tasks of the experiment on a tiny job: what they write, that they repeat, and that a wrong flag is one line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.methods import work
from benchmarks.methods.data import PARTS, Data, split_sequences
from benchmarks.methods.jobs import Job
from benchmarks.methods.plan import METHODS
from benchmarks.methods.routing import read_ahead, rerouted, shards
from benchmarks.methods.store import Folder, load_model, load_warm
from benchmarks.methods.work import EVERY, Bench, routed_nats, score, score_table, train, warm_up
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.routing.evaluate import counted_tokens
from dipaco_p2p.core.routing.features import token_counts
from dipaco_p2p.core.routing.unigram import tiny_router
from dipaco_p2p.errors import CorpusError

TINY = Job(method="tiny", seed=0, width=16, steps=2, round_steps=1)


def text() -> Data:
    """Two domains that share no token, and documents of one sequence."""
    generator = np.random.default_rng(0)
    names = ["low"] * 120 + ["high"] * 120
    arrays = [(generator.integers(0, 40, 256) + 500 * (name == "high")).astype(np.int32) for name in names]
    return split_sequences(names, arrays, np.full(1024, 2))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A folder after the warm-up."""
    folder = Folder(tmp_path_factory.mktemp("methods"))
    folder.open({})
    text().save(folder.data)
    bench = Bench(folder, fast=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "WARMUP_STEPS", 2)
        warm_up(bench, TINY)
    return bench


def test_the_warm_up_leaves_a_model_an_optimizer_and_features_of_all_text(bench: Bench):
    start, features = load_warm(bench.folder.warm(0, 16))
    assert {part: len(rows) for part, rows in features.items()} == {
        part: len(getattr(bench.data, part)) for part in features
    }
    assert "model.layers.3.mlp.up_proj.weight" in start.tensors and start.optimizer


def test_a_trained_job_gives_losses_of_all_parts_and_the_same_ones_again(bench: Bench):
    first, again = (train(bench, TINY) for _ in range(2))
    assert {name: value for name, value in first.items() if name != "wall_s"} == {
        name: value for name, value in again.items() if name != "wall_s"
    }
    assert first["curve"][-1] == [2, first["report"]["loss"]]
    assert sum(first["shards"]) == len(bench.data.train) and min(first["shards"]) > 0
    assert set(first["domains"]) == {"low", "high"} and first["path_steps"] == 8


@pytest.mark.parametrize("outer", ["all", "every step"])
def test_a_job_that_diverges_has_infinite_losses(bench: Bench, outer: str):
    found = train(bench, dataclasses.replace(TINY, inner_lr=1e30, round_steps=2, outer=outer))
    assert found["tune"]["loss"] == found["report"]["loss"] == math.inf


def test_routers_of_a_job_that_tiny_models_route_count_tokens_too(bench: Bench):
    tiny = dataclasses.replace(TINY, routing="tiny")
    plain, both = bench.router_features(TINY), bench.router_features(tiny)
    for part in PARTS:
        np.testing.assert_array_equal(both[part][:, :16], plain[part])
        assert (both[part][:, 16:].sum(axis=1) == 32).all()
    train(bench, tiny)
    assert "once, likelihood router (matched)" in score(bench, tiny)["routed"]


def test_scoring_agrees_with_the_loss_that_training_reported(bench: Bench):
    trained = train(bench, TINY)
    scored = score(bench, TINY)["routed"]
    assert scored["once"]["loss"] == pytest.approx(trained["report"]["loss"], rel=1e-6)
    assert {f"every {every}" for every in EVERY} < scored.keys()
    assert all(scored["oracle once"]["loss"] <= scored[way]["loss"] for way in scored if way.startswith("once"))


def test_a_table_of_scores_holds_what_each_path_says(bench: Bench):
    train(bench, TINY)
    paths, assigned, router = load_model(bench.folder.model(TINY), TINY)
    report = bench.data.report
    table = score_table(TINY, paths, report)
    assert table.shape == (len(report), 14, 4) and router is not None and len(assigned) == len(report)
    for path in range(4):
        nats = routed_nats(TINY, paths.__getitem__, report, np.full(len(report), path))
        np.testing.assert_allclose(table[:, :, path].sum(axis=1), nats, rtol=1e-6)
    assert counted_tokens(256) == 14 * 16


def test_tiny_models_find_texts_of_different_words_in_parts_of_equal_size():
    generator = np.random.default_rng(0)
    kinds = generator.integers(0, 4, 90)
    tokens = {name: generator.integers(0, 40, (90, 64)) + 100 * kinds[:, None] for name in ("train", "report")}
    start = generator.integers(0, 4, 90)
    job = dataclasses.replace(TINY, grid="flat 4")
    counts = token_counts(tokens["report"][:, :32], vocab_size=job.model.vocab_size)
    router = tiny_router(job.model, tokens["train"], start, seed=0)
    by_first = router.assign(np.concatenate([np.zeros((90, 16), dtype=np.float32), counts], axis=1))
    ahead = read_ahead(job, tokens, start)
    assert ahead["train"].shape == (90, 1)
    for found in (by_first, ahead["report"][:, 0]):
        assert len({(kind, path) for kind, path in zip(kinds, found, strict=True)}) == 4


def cut_by(bench: Bench, job: Job) -> list[Shard]:
    return shards(job, bench.first_routes(job), bench.data.train)


def test_overlap_and_less_text_change_shards_as_they_say(bench: Bench):
    count = len(bench.data.train)
    changes: list[tuple[dict[str, Any], int]] = [
        ({}, count),
        ({"overlap": 2}, 2 * count),
        ({"train_share": 0.5}, round(count / 2)),
        ({"routing": "random"}, count),
        ({"grid": "1"}, count),
    ]
    plain, _, _, random, one = sizes = [
        [len(shard.tokens) for shard in cut_by(bench, dataclasses.replace(TINY, **change))] for change, _ in changes
    ]
    assert [sum(each) for each in sizes] == [wanted for _, wanted in changes]
    assert len(one) == 1 and random != plain


def test_a_shard_smaller_than_a_batch_trains_by_repeating_and_an_empty_one_is_refused(bench: Bench) -> None:
    little = dataclasses.replace(TINY, train_share=0.1)
    assert 0 < min(len(shard.tokens) for shard in cut_by(bench, little)) < little.inner.batch
    assert train(bench, little)["path_steps"] == 8
    with pytest.raises(CorpusError, match="nothing to train on"):
        cut_by(bench, dataclasses.replace(TINY, train_share=0.01))


def test_a_job_at_every_step_gives_the_same_kinds_of_figures(bench: Bench) -> None:
    rounds, steps = (train(bench, dataclasses.replace(TINY, outer=how)) for how in ("all", "every step"))
    assert rounds.keys() == steps.keys() and rounds["path_steps"] == steps["path_steps"]
    assert rounds["report"]["loss"] != steps["report"]["loss"] and steps["agreement"] == {}


def test_re_sharding_sends_each_domain_to_the_path_that_is_best_at_it(bench: Bench):
    features, router = bench.warm(0, 16)[1], bench.data.router
    nats = np.full((len(router), 4), 5.0)
    nats[np.arange(len(router)), np.where(router.domains == 0, 2, 3)] = 4.0
    routes = rerouted(dataclasses.replace(TINY, balance="match"), features, nats, None)
    expected = np.where(bench.data.train.domains == 0, 2, 3)
    assert (routes.once("train") == expected).mean() > 0.7
    with pytest.raises(CorpusError, match="path 0 of 4"):
        shards(TINY, routes, bench.data.train)


def test_early_stopping_trains_on_what_it_does_not_look_at(bench: Bench):
    plain, stopped = (train(bench, dataclasses.replace(TINY, early_stop=on)) for on in (False, True))
    assert sum(stopped["shards"]) < sum(plain["shards"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "seeds"),
        (["--only", "no such method"], "no such method"),
        (["--corpus", "no/such/file.jsonl"], "no/such/file.jsonl"),
    ],
)
def test_a_wrong_flag_or_corpus_is_exit_code_2_and_says_what(arguments: list[str], message: str, tmp_path: Path):
    import typer

    from benchmarks.methods.__main__ import main

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")


def test_every_method_has_a_grid_that_can_be_built():
    for name, fields in METHODS.items():
        job = Job(method=name, seed=0, **fields)  # type: ignore[arg-type]
        assert sum(level.blocks for level in job.model.levels) == 4
        assert job.model.path_count * job.replicas in (1, 4, 16), name
