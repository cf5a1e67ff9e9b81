"""A run in which a module was taken back, as the leaderboard reads it from the coordinator's folder."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from runtime_harness import World
from tiny_run import SEED_NUMBER, make_run, signer, tiny_config
from virtual_time import eventually, play
from web_harness import SMALL

from bootstrap.folder import write_stage
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.store import Store
from dipaco_p2p.topology import ModuleId
from leaderboard.model import Mark, RollbackRow
from leaderboard.program import export
from leaderboard.rows import decree_rows
from leaderboard.web.book import Book
from leaderboard.web.drawings import lineage

ROUNDS, MODULE = 6, ModuleId(1, 0)


def test_a_rollback_of_a_rollback_and_one_that_was_overtaken_are_told_apart(tmp_path: Path) -> None:
    run = make_run(Store(tmp_path), tiny_config())
    decrees, coordinator = Decrees(run), signer(SEED_NUMBER)
    for to, after in ((1, 4), (5, 6), (2, 7), (3, 7)):
        values = {"stage": run.id, "module": MODULE, "to": to, "after": after, "reason": "a test"}
        decrees.issue(coordinator, "rollback", at_s=0.0, **values)
    decrees.issue(coordinator, "rollback", at_s=0.0, **{**values, "module": ModuleId(2, 1)})
    [row, *_] = SMALL.versions
    versions = [
        replace(row, version=version, rollback=RollbackRow(decree=decree, to=to, reason="a test", at_s=0.0))
        for decree, to, version in ((1, 1, 5), (2, 5, 7), (4, 3, 8))
    ]
    found = [(row.to, row.version, row.ended_by) for row in decree_rows(decrees.log, versions)]
    assert found == [(1, 5, 2), (5, 7, 3), (2, None, 4), (3, 8, None), (3, None, None)]


def rolled_back(folder: Path) -> Path:
    """A complete run, whose module went back to version 1 once."""

    async def scenario() -> None:
        async with World(folder, config=tiny_config(rounds=ROUNDS)) as world:
            volunteers = [world.join(number) for number in (1, 2, 3, 4)]
            ledger = world.seed.archive.ledgers[MODULE]
            await eventually(lambda: ledger.head.version >= 2)
            values = {"stage": world.run.id, "module": MODULE, "to": 1, "after": ledger.head.version}
            decrees = world.seed.node.decrees
            decrees.issue(signer(SEED_NUMBER), "rollback", at_s=0.0, reason="a test", **values)
            for volunteer in volunteers:
                await volunteer.done()
            write_stage(Store(folder / "grid"), world.run.sealed)

    play(scenario)
    for kind in ("documents", "blobs"):
        for path in (folder / "seed" / kind).rglob("*"):
            target = folder / "grid" / kind / path.relative_to(folder / "seed" / kind)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    return folder


def test_a_version_that_took_a_module_back_is_verified_and_pages_are_drawn(tmp_path: Path) -> None:
    folder = rolled_back(tmp_path / "run")
    (folder / "decrees" / "documents").mkdir(parents=True)
    for path in (folder / "seed" / "documents").glob("decree-*.json"):
        (folder / "decrees" / "documents" / path.name).write_bytes(path.read_bytes())
    snapshot = asyncio.run(export(str(folder), tmp_path / "page", expected=None))
    rows = {row.version: row for row in snapshot.versions if row.module == MODULE}
    assert sorted(rows) == list(range(ROUNDS + 1)) and {row.mark for row in rows.values()} == {Mark.VERIFIED}
    [undone] = [row for row in rows.values() if row.version and not row.shares]
    assert undone.rollback == RollbackRow(decree=1, to=1, reason="a test", at_s=0.0)
    [decree] = snapshot.decrees
    assert (decree.act, decree.module, decree.to, decree.version) == ("rollback", MODULE, 1, undone.version)
    assert undone.version > 2 and undone.digest == rows[1].digest and undone.tokens == 0
    if undone.version < ROUNDS:
        graph = lineage(Book(snapshot), rows[undone.version + 1])
        around = [node.row.version for node in graph.versions]
        assert around == sorted(around, reverse=True) and undone.version in around, "none is skipped"
    for version in (1, undone.version):
        assert f"version {version} " in (tmp_path / "page" / "versions" / str(MODULE) / f"{version}.html").read_text()
