"""A grid that grows while it is trained: in one process, in virtual time, from the decree to the verified chains."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_harness import write_corpus
from stages_harness import Home, run_file
from tiny_run import SEED_NUMBER, signer
from virtual_time import eventually, play

from bootstrap.archives.verify import verify_stages
from bootstrap.control.decrees import Decreeing, decrees_in, read_levels, told
from bootstrap.control.requests import Control, Request
from bootstrap.folder import write_stage
from bootstrap.genesis.growth import grow
from bootstrap.runfile import RunFile
from dipaco_p2p.config import RoundsConfig, RoutingConfig
from dipaco_p2p.core.routing.router import decode_router
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import check_next_stage
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.manifest import STAGES
from dipaco_p2p.topology import Topology
from dipaco_p2p.use.folder import GRID, RunFolder
from leaderboard.database import Database
from leaderboard.model import Mark
from leaderboard.program import load_stages, rebuild, stored_snapshot

ROUNDS = RoundsConfig(rounds=12, min_paths=1, deadline_s=20.0, grace_s=1.0)
PLAIN = RoutingConfig()


async def decreed(home: Home, levels: str, **what: Any) -> dict[str, Any]:
    """What `dipaco-bootstrap grow` does to a coordinator that runs."""
    assert home.seed is not None
    control = Control()
    home.seed.add_verbs(control)
    answer = control.answer(Request(ask="grow", levels=read_levels(levels), **what))
    return answer if isinstance(answer, dict) else await answer


def problems(folder: RunFolder) -> list[str]:
    return [f"{report.stage} {report.module}: {report.problem}" for report in verify_stages(folder) if report.problem]


def test_a_grid_grows_twice_in_a_run_that_goes_on_while_volunteers_die_at_each_change(
    tmp_path: Path, corpus: Path
) -> None:
    home = Home(tmp_path, run_file(corpus, rounds=ROUNDS, routing=RoutingConfig(reshard_rounds=(1, 11))))

    async def scenario() -> None:
        home.start()
        await home.join(1, 2, 3, 4)
        await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 2)
        row = await decreed(home, "1,4")
        assert told(row) == f"decree 1: grow to 1x4 after round {row['to']}"
        home.network.kill(signer(1).peer)
        await eventually(lambda: min(home.heads("grid-2").values(), default=0) >= 1)
        await decreed(home, "2x4")
        home.network.kill(signer(2).peer)
        await eventually((home.folder / "grid-3" / "finished.json").exists, limit_s=4000)
        await home.close()

    play(scenario)
    folder = RunFolder(home.folder)
    warmup, grid, second, third = folder.stages()
    assert [str(run.topology) for run in (grid, second, third)] == ["1x2", "1x4", "2x4"]
    assert grid.rounds + second.rounds + third.rounds == ROUNDS.rounds, "growing makes the run no longer"
    assert [run.is_last_stage for run in (warmup, grid, second, third)] == [False, False, False, True]
    assert set(home.heads("grid-3").values()) == {third.rounds}
    assert third.first_step(0) == (2 + grid.rounds + second.rounds) * grid.config.inner.steps
    assert [run.config.routing.reshard_rounds for run in (second, third)] == [
        (11 - grid.rounds,),
        (11 - grid.rounds - second.rounds,),
    ]
    assert problems(folder) == []
    with closing(Database.open(None)) as database:
        rebuild(home.folder, database)
        page = stored_snapshot(database, load_stages(database), now_s=1.0)
    assert page is not None and page.state == "complete" and page.refused == {}
    assert [stage.name for stage in page.run.stages] == ["warmup", "grid", "grid-2", "grid-3"]
    assert [(row.act, row.levels, row.to) for row in page.decrees] == [
        ("grow", "1x4", grid.rounds),
        ("grow", "2x4", second.rounds),
    ]
    assert {row.mark for row in page.versions} == {Mark.VERIFIED}
    left = [event for event in read_history(next(home.homes.glob(f"volunteer-3/runs/{grid.id[:16]}*/history.jsonl")))]
    assert any(event["ev"] == "left" and event["complete"] and event["grows"] for event in left)


def ended_by_growth(folder: Path, **what: Any) -> tuple[Path, RunFile]:
    """The folder of a coordinator whose grid has just ended by decree, and its run file."""
    file = run_file(write_corpus(folder / "corpus.jsonl"), rounds=ROUNDS, routing=PLAIN)
    home = Home(folder, file)

    async def scenario() -> None:
        home.start()
        await home.join(1, 2)
        await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 1)
        await decreed(home, "1,4", version=4, **what)
        await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 4)
        await home.close()

    play(scenario)
    shutil.rmtree(home.folder / "grid-2", ignore_errors=True)
    return home.folder, file


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunFile]:
    return ended_by_growth(tmp_path_factory.mktemp("grown"))


def copied(ended: tuple[Path, RunFile], tmp_path: Path) -> tuple[RunFolder, RunFile]:
    shutil.copytree(ended[0], tmp_path / "run")
    return RunFolder(tmp_path / "run"), ended[1]


def test_every_new_module_begins_as_its_parent_ended_and_whoever_makes_it_again_makes_the_same(
    ended: tuple[Path, RunFile], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    folder, file = copied(ended, tmp_path / "a")
    grown = grow(file, folder, signer(SEED_NUMBER))
    grid = folder.open(GRID)
    assert grid is not None and grown.manifest.follows == grid.id and grown.manifest.spent == 4
    check_next_stage(grid, grown)
    assert problems(folder) == []
    assert {ref.state is None for ref in grown.manifest.genesis} == {False}
    assert len({ref.blob.digest for ref in grown.manifest.genesis if ref.module.level}) == 2
    store = folder.store("grid-2")
    router = decode_router(store.get(grown.manifest.router.digest) or b"") if grown.manifest.router else None
    assert router is not None and router.path_count == 4
    sizes = [ref.sequences for ref in grown.manifest.shards]
    assert max(sizes) <= 1.3 * min(sizes), "shards stay near equal"
    (tmp_path / "b").mkdir()
    again, _ = copied(ended, tmp_path / "b")
    assert grow(file, again, signer(SEED_NUMBER)).id == grown.id


def forged(run: Run, *, module: int, state: bool) -> Run:
    """The same stage, in which one module begins as another one's parent did, or with another's outer state."""
    refs = list(run.manifest.genesis)
    other = refs[-1 if module < len(refs) - 2 else 1]
    refs[module] = replace(refs[module], **({"state": other.state} if state else {"blob": other.blob}))
    return Run(seal(signer(SEED_NUMBER), replace(run.manifest, genesis=tuple(refs))))


@pytest.mark.parametrize(
    ("state", "words"), [(False, "its version 0 is"), (True, "its outer state is not the one with which L1.M0 ended")]
)
def test_a_module_that_does_not_begin_as_its_parent_ended_is_found_by_verify(
    ended: tuple[Path, RunFile], tmp_path: Path, state: bool, words: str
) -> None:
    folder, file = copied(ended, tmp_path)
    run = forged(grow(file, folder, signer(SEED_NUMBER)), module=1, state=state)
    write_stage(folder.store("grid-2"), run.sealed)
    found = problems(RunFolder(folder.root))
    assert len(found) == 1 and found[0].startswith("fork L1.M0: ") and words in found[0]


def test_a_stage_that_is_not_the_one_decreed_is_not_believed(ended: tuple[Path, RunFile], tmp_path: Path) -> None:
    folder, file = copied(ended, tmp_path)
    grown, grid = grow(file, folder, signer(SEED_NUMBER)), folder.open(GRID)
    assert grid is not None
    changes: Sequence[dict[str, Any]] = [
        {"spent": 5},
        {"follows": "ab" * 32},
        {"origin": grid.id},
        {"stage": STAGES[3]},
        {"config": replace(grown.manifest.config, seed=5)},
    ]
    for change in changes:
        other = Run(seal(signer(SEED_NUMBER), replace(grown.manifest, **change)))
        with pytest.raises(IntegrityError, match="does not follow"):
            check_next_stage(grid, other)


def stopped(folder: RunFolder) -> Decreeing:
    """What may be decreed while the coordinator does not run."""
    run, store = folder.require()
    return Decreeing(decrees_in(folder, run), signer(SEED_NUMBER), run, SeedArchive(run, store).ledgers)


def test_what_cannot_grow_is_refused_in_one_line(ended: tuple[Path, RunFile], tmp_path: Path) -> None:
    folder, _ = copied(ended, tmp_path)
    with pytest.raises(ConfigError, match="a growth to 1x4 after round 4 is decreed already"):
        stopped(folder).issue(Request(ask="grow", levels=(1, 8)), at_s=1.0)
    for number in folder.store("decrees").documents("decree-"):
        folder.store("decrees").drop_document(number)
    for levels, words in [
        ((1, 1), "level 1 has 2 modules, and cannot have 1"),
        ((1, 2, 2), "3 levels, but the run has 2"),
        ((1, 2), "the grid is 1x2 already"),
        ((60, 60), "sequences, which 3600 paths cannot share"),
        ((1, 4), "the coordinator is not running"),
    ]:
        with pytest.raises(ConfigError, match=words):
            stopped(RunFolder(folder.root)).issue(Request(ask="grow", levels=levels), at_s=1.0)
    with pytest.raises(ConfigError, match="does not say how many modules"):
        read_levels("1,two")


def test_a_growth_too_soon_too_late_or_in_the_warm_up_is_refused(tmp_path: Path, corpus: Path) -> None:
    home = Home(tmp_path, run_file(corpus, rounds=replace(ROUNDS, rounds=4), routing=PLAIN))

    async def scenario() -> None:
        home.start()
        with pytest.raises(ConfigError, match="still in its warm-up"):
            await eventually(lambda: home.seed is not None and home.seed.stage() is not None)
            await decreed(home, "1,4")
        await home.join(1, 2)
        await eventually(lambda: min(home.heads(GRID).values(), default=0) >= 1)
        for at in (1, 2, 4):
            with pytest.raises(ConfigError, match=f"cannot grow after round {at}|no round is left"):
                await decreed(home, "1,4", version=at)
        await home.volunteers_done()
        with pytest.raises(ConfigError, match="the newest version is 4 of 4: no round is left"):
            await decreed(home, "1,4")
        await home.close()

    play(scenario)


def test_parents_stand_side_by_side_and_none_is_without_a_child() -> None:
    before, after = Topology((1, 2, 3)), Topology((2, 4, 5))
    parents = [
        [after.parent(module, before).index for module in after.modules() if module.level == n] for n in range(3)
    ]
    assert parents == [[0, 0], [0, 0, 1, 1], [0, 0, 1, 1, 2]]
    assert {after.parent_path(path, before) for path in after.paths()} == set(before.paths())
    assert np.prod(after.widths) == after.path_count
