"""A run from its corpus to the finished grid: warm-up, fork and re-sharding, in one process and in virtual time.

And the coordinator dies: between stages, before and after each write of the fork, and before a re-sharding.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from e2e_harness import write_corpus
from serving_harness import written
from stages_harness import RESHARDED_ONCE, Home, play_whole, run_file
from tiny_run import SEED_NUMBER, signer
from virtual_time import eventually, play

import dipaco_p2p.node.store
import dipaco_p2p.owner.archive
from bootstrap.archives.verify import verify_fork, verify_stages
from bootstrap.control.requests import Control
from bootstrap.control.requests import Request as Ask
from bootstrap.coordinator.stage import SeedStage
from bootstrap.genesis.prepare import fork, prepare
from bootstrap.runfile import RunFile
from bootstrap.use.generate import Request
from dipaco_p2p.canonical import digest
from dipaco_p2p.config import RoundsConfig, RoutingConfig, WarmupConfig
from dipaco_p2p.core.routing.router import decode_router
from dipaco_p2p.errors import ConfigError, CorpusError
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Findings, Standings
from dipaco_p2p.use.best_rounds import read_evaluations
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder
from dipaco_p2p.use.served import open_folder


class Died(Exception):
    """What stops a coordinator in these tests."""


def test_volunteers_go_from_the_warm_up_into_the_grid_and_to_new_shards_without_a_restart(
    tmp_path: Path, corpus: Path
) -> None:
    home = Home(tmp_path, run_file(corpus))
    play_whole(home)
    assert set(home.heads(WARMUP).values()) == {2} and set(home.heads(GRID).values()) == {3}
    folder = RunFolder(home.folder)
    grid = folder.open(GRID)
    assert grid is not None and [sealed.document.from_round for sealed in grid.shardings] == [1, 3]
    assert [report.problem for report in verify_stages(folder)] == [""] * 5
    scored = [event for event in read_history(home.folder / GRID / "history.jsonl") if event["ev"] == "scored"]
    assert {(event["path"], event["sharding"]) for event in scored} == {
        (path, number) for path in ("P0-0", "P0-1") for number in (1, 2)
    }
    rows = read_evaluations(home.folder / GRID / "evaluations.jsonl")
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    finished = json.loads((home.folder / GRID / "finished.json").read_text())
    once, oracle = finished["routing"]["routed once"], finished["routing"]["best path by hindsight"]
    assert oracle["perplexity"] <= once["perplexity"] < 300 and once["bits_per_byte"] > 0


def test_a_run_can_be_routed_by_tiny_models_from_its_first_shards_to_what_it_writes(
    tmp_path: Path, corpus: Path
) -> None:
    routing = RoutingConfig(first="tiny", reshard_rounds=(1, 3))
    home = Home(tmp_path, run_file(corpus, routing=routing))
    play_whole(home)
    folder = RunFolder(home.folder)
    grid, store = folder.open(GRID), folder.store(GRID)
    assert grid is not None and [report.problem for report in verify_stages(folder)] == [""] * 5
    refs = [grid.manifest.router, *(sealed.document.router for sealed in grid.shardings)]
    routers = [decode_router(store.get(ref.digest) or b"", width=16 + 300) for ref in refs if ref is not None]
    fronts = [np.abs(router.weights[:, :16]).sum() for router in routers]
    assert fronts[0] == 0 and min(fronts[1:]) > 0, "the first reads tokens only, those of the paths' scores both"
    assert all(np.abs(router.weights[:, 16:]).sum() > 0 for router in routers)
    request = Request(prompt="the path of a text that is longer than its first tokens " * 3, tokens_max=8, every=32)
    assert asyncio.run(written(open_folder(folder), request)).text
    finished = json.loads((home.folder / GRID / "finished.json").read_text())
    assert finished["routing"]["routed once"]["perplexity"] < 300


async def test_a_decree_is_answered_before_the_swarm_has_heard_of_it(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, stuck = asyncio.Event(), asyncio.Event()

    async def say(self: SeedStage) -> None:
        heard.set()
        await stuck.wait()

    monkeypatch.setattr(SeedStage, "say", say)
    home, control = Home(tmp_path, run_file(corpus)), Control()
    home.start()
    assert home.seed is not None
    home.seed.add_verbs(control)
    await eventually(lambda: home.seed is not None and home.seed.stage() is not None)

    async def ask(request: Ask) -> dict[str, Any]:
        answer = control.answer(request)
        return answer if isinstance(answer, dict) else await answer

    async with asyncio.timeout(1.0):
        assert (await ask(Ask(ask="freeze", reason="a test")))["number"] == 1
        assert (await ask(Ask(ask="decrees")))["frozen"] == "a test"
        await heard.wait()
    await home.close()


async def test_contributions_say_which_sharding_they_were_trained_on(tmp_path: Path, corpus: Path) -> None:
    home = Home(tmp_path, run_file(corpus, rounds=RoundsConfig(rounds=4, min_paths=2), routing=RESHARDED_ONCE))
    home.start()
    await home.join(1, 2)
    await home.volunteers_done()
    await home.close()
    archive = RunFolder(home.folder).store(GRID)
    found = [json.loads(archive.read_document(name) or b"")["document"] for name in archive.documents("contribution-")]
    assert {document["sharding"] for document in found if document["base_version"] == 0} == {0}
    assert {document["sharding"] for document in found if document["base_version"] == 3} == {1}


async def test_the_coordinator_dies_after_the_warm_up_and_the_volunteers_wait_for_it(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, run_file(corpus))

    def struck(*_: Any) -> Any:
        raise Died

    monkeypatch.setattr("bootstrap.coordinator.seed.fork", struck)
    home.start()
    await home.join(1, 2)
    await eventually(lambda: set(home.heads(WARMUP).values()) == {2})
    await asyncio.sleep(10)
    await home.die()
    assert home.heads(GRID) == {}
    monkeypatch.undo()
    await asyncio.sleep(30)
    home.start()
    await home.volunteers_done()
    await home.close()
    assert set(home.heads(GRID).values()) == {3}


async def test_who_slept_through_the_end_of_a_stage_goes_on_in_the_next_though_the_coordinator_was_restarted(
    tmp_path: Path, corpus: Path
) -> None:
    """A restarted coordinator shows the stage that is over, and says nothing in it."""
    rounds = RoundsConfig(rounds=30, min_paths=2)
    home = Home(tmp_path, run_file(corpus, warmup=WarmupConfig(rounds=6), rounds=rounds, routing=RoutingConfig()))
    home.start()
    await home.join(1, 2, 3)
    await eventually(lambda: min(home.heads(WARMUP).values(), default=0) == 2)
    asleep = signer(3).peer
    home.network.freeze(asleep)
    await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 2, limit_s=600)
    await home.die()
    home.start()
    await asyncio.sleep(60)
    home.network.thaw(asleep)
    await eventually(lambda: "grid" in said(home, 3, "joined"), limit_s=60)
    await home.close()


def said(home: Home, number: int, name: str) -> list[Any]:
    """The stages of a volunteer's events of this name."""
    paths = (home.homes / f"volunteer-{number}" / "runs").glob("*/history.jsonl")
    return [event["stage"] for path in paths for event in read_history(path) if event["ev"] == name]


async def test_the_coordinator_dies_before_a_re_sharding_and_training_goes_on(tmp_path: Path, corpus: Path) -> None:
    home = Home(tmp_path, run_file(corpus, routing=RESHARDED_ONCE))
    home.start()
    await home.join(1, 2)
    await eventually(lambda: set(home.heads(GRID).values()) == {1})
    await home.die()
    await asyncio.sleep(60)
    home.start()
    await home.volunteers_done()
    await eventually(home.is_over)
    await home.close()
    assert set(home.heads(GRID).values()) == {3}
    grid = RunFolder(home.folder).open(GRID)
    assert grid is not None and len(grid.shardings) == 1


async def test_a_coordinator_that_was_away_signs_what_it_missed_before_it_measures_any_of_it(
    tmp_path: Path, corpus: Path
) -> None:
    rounds = RoundsConfig(rounds=12, min_paths=2, staleness=0)
    home = Home(tmp_path, run_file(corpus, rounds=rounds, routing=RoutingConfig()))
    home.start()
    await home.join(1, 2)
    await eventually(lambda: min(home.heads(GRID).values(), default=0) == 2, limit_s=600)
    await home.die()
    path = home.folder / GRID / "history.jsonl"
    before = len(list(read_history(path)))
    await asyncio.sleep(60)
    home.start()
    await eventually(home.is_over)
    await home.close()
    events = [event for event in read_history(path)][before:]
    judged = [at for at, event in enumerate(events) if event["ev"] == "judged"]
    archived = {event["module"]: event["version"] for event in events[: judged[0]] if event["ev"] == "archived"}
    assert len(judged) > 8 and min(archived.values()) >= 11 and len(archived) == 3


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunFile]:
    """The folder of a coordinator whose warm-up has just ended."""
    folder = tmp_path_factory.mktemp("warm")
    file = run_file(write_corpus(folder / "corpus.jsonl"))
    home = Home(folder, file)

    async def scenario() -> None:
        home.start()
        await home.join(1)
        await eventually(lambda: set(home.heads(WARMUP).values()) == {2})
        await home.close()

    play(scenario)
    shutil.rmtree(home.folder / GRID, ignore_errors=True)
    return home.folder, file


def test_a_fork_interrupted_at_any_write_comes_to_the_same_grid(
    warmed_up: tuple[Path, RunFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = warmed_up
    expected = fork(file, copied(source, tmp_path / "whole"), signer(SEED_NUMBER)).id
    writes = 0
    for stop_at in range(1, 60, 3):
        folder = copied(source, tmp_path / f"stopped-{stop_at}")
        writes = interrupted(monkeypatch, stop_at, lambda folder=folder: fork(file, folder, signer(SEED_NUMBER)))
        if writes < stop_at:
            break
        assert not folder.has(GRID)
        assert fork(file, RunFolder(folder.root), signer(SEED_NUMBER)).id == expected
    assert writes >= 8, "a fork writes many files"


def test_a_run_keeps_its_text_whatever_the_run_file_says_of_the_corpus_later(
    warmed_up: tuple[Path, RunFile], tmp_path: Path
) -> None:
    """The same file by another path is another `source`, too."""
    source, file = warmed_up
    expected = fork(file, copied(source, tmp_path / "as-it-was"), signer(SEED_NUMBER)).id
    moved = replace(file, corpus=replace(file.corpus, source=str(tmp_path / "nowhere")))
    folder = copied(source, tmp_path / "moved")
    assert fork(moved, folder, signer(SEED_NUMBER)).id == expected
    assert (folder.root / "tokenizer.json").exists()


def test_the_grid_begins_with_the_warm_ups_head_in_every_module(
    warmed_up: tuple[Path, RunFile], tmp_path: Path
) -> None:
    source, file = warmed_up
    folder = copied(source, tmp_path / "run")
    grid, warmup = fork(file, folder, signer(SEED_NUMBER)), folder.open(WARMUP)
    assert warmup is not None and grid.manifest.origin == warmup.id
    for ref in grid.manifest.genesis:
        level = next(module for module in warmup.topology.modules() if module.level == ref.module.level)
        assert ref.blob.digest == Ledger(warmup, folder.store(WARMUP), level).head.digest
    assert not [report for report in verify_stages(folder) if report.problem]


def test_the_grid_names_who_worked_in_the_warm_up(warmed_up: tuple[Path, RunFile], tmp_path: Path) -> None:
    source, file = warmed_up
    folder = copied(source, tmp_path / "run")
    grid, warmup = fork(file, folder, signer(SEED_NUMBER)), folder.open(WARMUP)
    assert warmup is not None
    archive = SeedArchive(warmup, folder.store(WARMUP))
    assert set(grid.manifest.workers) == set(archive.workers()) != set()
    for workers, problems in (((signer(77).peer,), len(grid.manifest.genesis)), ((), 0)):
        other = Run(seal(signer(SEED_NUMBER), replace(grid.manifest, workers=workers)))
        found = [report.problem for report in verify_fork(other, archive, warmup)]
        assert len(found) == problems and all("peers worked" in problem for problem in found)
    peers = tuple(sorted(signer(number).peer for number in range(70, 73)))
    for wrong in (peers[::-1], (peers[0], peers[0]), (PeerId("nobody"),), peers * 100):
        with pytest.raises(ConfigError):
            replace(grid.manifest, workers=wrong)


def test_a_manifest_names_those_with_most_works_whose_word_counts(
    warmed_up: tuple[Path, RunFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dipaco_p2p.owner.archive, "WORKERS_MAX", 2)
    folder = copied(warmed_up[0], tmp_path / "run")
    warmup, peers = folder.open(WARMUP), sorted(signer(number).peer for number in range(70, 75))
    assert warmup is not None
    archive, standings = SeedArchive(warmup, folder.store(WARMUP)), Standings()
    contradicted = Findings.of(contradicted=[(peers[3], digest(b"work"))])
    standings.add(1, authors=peers, findings=contradicted)

    def named(*works: int) -> tuple[PeerId, ...]:
        count = Counter(dict(zip(peers, works, strict=True)))
        archive.ledgers = {
            module: cast(Ledger, SimpleNamespace(workers=count, standings=standings)) for module in works_on
        }
        return archive.workers_named()

    works_on = warmup.topology.modules()
    assert named(1, 5, 1, 7, 3) == (peers[1], peers[4])
    assert named(1, 1, 1, 1, 1) == (peers[0], peers[1])


def test_a_prepared_folder_is_opened_and_another_run_file_refused(
    warmed_up: tuple[Path, RunFile], tmp_path: Path
) -> None:
    source, file = warmed_up
    folder = copied(source, tmp_path / "run")
    assert prepare(file, folder, signer(SEED_NUMBER)).manifest.stage == WARMUP
    grid = fork(file, folder, signer(SEED_NUMBER))
    assert prepare(file, folder, signer(SEED_NUMBER)).id == grid.id
    with pytest.raises(ConfigError, match="another run file"):
        prepare(replace(file, run=replace(file.run, seed=5)), folder, signer(SEED_NUMBER))


def test_fewer_documents_than_paths_is_one_clear_line(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "small.jsonl", documents=12)
    with pytest.raises(CorpusError, match="12 documents"):
        prepare(run_file(corpus), RunFolder(tmp_path), signer(SEED_NUMBER))


def interrupted(monkeypatch: pytest.MonkeyPatch, stop_at: int, work: Callable[[], object]) -> int:
    """Do `work` until its write number `stop_at`, which fails; how many writes were tried."""
    write = dipaco_p2p.program.files.write_atomically
    writes = 0

    def strike(path: Path, *parts: bytes, **how: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == stop_at:
            raise Died
        write(path, *parts, **how)

    with monkeypatch.context() as patch, contextlib.suppress(Died):
        patch.setattr(dipaco_p2p.node.store, "write_atomically", strike)
        work()
    return writes


def copied(source: Path, target: Path) -> RunFolder:
    shutil.copytree(source, target)
    return RunFolder(target)
