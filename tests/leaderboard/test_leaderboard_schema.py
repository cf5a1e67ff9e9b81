"""The database is made, brought up to date, and refused when it cannot be used."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from leaderboard_harness import COORDINATOR, MODULE, Bench, dump

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from leaderboard import database as database_module
from leaderboard.database import MIGRATIONS, STATEMENTS, Database, migrate, open_database

OLDER = ("CREATE TABLE notes (id TEXT PRIMARY KEY, text TEXT NOT NULL) STRICT;",)
NEWER = (*OLDER, "ALTER TABLE notes ADD COLUMN at_s REAL NOT NULL DEFAULT 0;", "CREATE TABLE more (id TEXT) STRICT;")


def version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def shape(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return sorted(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def test_an_empty_file_becomes_a_database_and_stays_one(tmp_path: Path) -> None:
    for _ in range(2):
        connection = open_database(tmp_path / "db.sqlite")
        assert version(connection) == len(MIGRATIONS)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        connection.close()


def test_every_table_is_strict() -> None:
    connection = open_database(None)
    tables = connection.execute("SELECT name, strict FROM pragma_table_list WHERE schema = 'main'").fetchall()
    assert {name for name, strict in tables if not strict} == {"sqlite_schema"}
    connection.close()


def test_a_database_of_an_older_program_keeps_its_rows(tmp_path: Path) -> None:
    old = open_database(tmp_path / "db.sqlite", migrations=OLDER)
    old.execute("INSERT INTO notes VALUES ('one', 'kept')")
    old.close()
    now = open_database(tmp_path / "db.sqlite", migrations=NEWER)
    assert version(now) == 3 and now.execute("SELECT * FROM notes").fetchall() == [("one", "kept", 0.0)]
    fresh = open_database(None, migrations=NEWER)
    assert shape(now) == shape(fresh)
    now.close()
    fresh.close()


def test_a_database_from_before_decrees_keeps_its_records_and_takes_decrees(tmp_path: Path) -> None:
    bench, path = Bench(tmp_path / "bench"), tmp_path / "db.sqlite"
    bench.take(*bench.chain(2)[0])
    bench.stage.take_judgements([bench.judgement(1, "0" * 64)])
    with closing(Database(open_database(path, migrations=MIGRATIONS[:3]))) as before:
        before.write(bench.stage.drain())
        kept = dump(before, "records")
    with closing(Database.open(path)) as now:
        assert dump(now, "records") == kept and {row[0] for row in kept} == {"manifest", "version", "judgement"}
        bench.stage.decrees.issue(COORDINATOR, "freeze", at_s=1.0, reason="a test")
        now.write(bench.stage.drain())
        [stage] = now.load(bench.refusals)
    assert stage.decrees.is_frozen and stage.chains[MODULE].head.version == 2


def test_a_database_from_before_names_keeps_its_peers_and_takes_names(tmp_path: Path) -> None:
    path, before = (
        tmp_path / "db.sqlite",
        "INSERT INTO heartbeats (peer, role, doing, at_s) VALUES ('old', 'x', '', 7.0)",
    )
    with closing(open_database(path, migrations=MIGRATIONS[:4])) as connection:
        connection.execute(before)
    with closing(Database.open(path)) as now:
        now.write([("heartbeat", ("new", "volunteer", "", 8.0, "Ada", "Analysts"))])
        now.write([("heartbeat", ("evil", "volunteer", "", 9.0, "\x1b[2J", "x" * 10_000))])
        found = now.observed()
    assert found.last_seen_s == {"old": 7.0, "new": 8.0, "evil": 9.0}
    assert found.names == {"new": ("Ada", "Analysts"), "evil": ("", "")}


@pytest.mark.parametrize("begin", range(len(MIGRATIONS)))
def test_whichever_program_made_it_the_tables_are_the_same(begin: int) -> None:
    old, fresh = open_database(None, migrations=MIGRATIONS[:begin]), open_database(None)
    migrate(old)
    assert shape(old) == shape(fresh)
    old.close()
    fresh.close()


def test_a_migration_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    broken = (*OLDER, "CREATE TABLE half (id TEXT) STRICT; CREATE TABLE notes (id TEXT);")
    open_database(tmp_path / "db.sqlite", migrations=OLDER).close()
    with pytest.raises(EnvironmentUnfit):
        open_database(tmp_path / "db.sqlite", migrations=broken)
    again = open_database(tmp_path / "db.sqlite", migrations=OLDER)
    assert version(again) == 1 and [name for name, _ in shape(again)] == ["notes"]
    again.close()


def test_a_database_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    newer = (*MIGRATIONS, "CREATE TABLE more (id TEXT) STRICT;")
    open_database(tmp_path / "db.sqlite", migrations=newer).close()
    with pytest.raises(ConfigError, match=f"of version {len(newer)}, this program knows {len(MIGRATIONS)}"):
        open_database(tmp_path / "db.sqlite")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db.sqlite").write_bytes(b"something else" * 1000)
    with pytest.raises(ConfigError, match="not a database"):
        open_database(tmp_path / "db.sqlite")
    with pytest.raises(EnvironmentUnfit):
        open_database(tmp_path / "missing" / "db.sqlite")


def test_a_batch_of_writes_is_done_whole_or_not_at_all(database: Database) -> None:
    with pytest.raises(sqlite3.Error):
        database.write([("heard", (1.0,)), ("heartbeat", ("peer", "volunteer", None, 1.0))])
    assert dump(database, "heard") == []


def test_observations_are_pruned_to_the_newest(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        database_module,
        "PRUNE",
        tuple(one.replace("10000", "3").replace("500000", "4") for one in database_module.PRUNE),
    )
    database.write([("heartbeat", (f"peer-{n}", "volunteer", "", float(n), "", "")) for n in range(10)])
    database.write([("witness", ("receipt", f"id-{n}", "run", "L0.M0", n, "{}")) for n in range(10)])
    database.write([("seen", ("gone", 1.0))])
    database.prune()
    assert [row[0] for row in dump(database, "heartbeats")] == ["peer-7", "peer-8", "peer-9"]
    assert [row[2] for row in dump(database, "witnessed")] == [f"id-{n}" for n in range(6, 10)]
    assert dump(database, "first_seen") == []


def test_every_statement_fits_the_tables() -> None:
    connection = open_database(None)
    for statement in STATEMENTS.values():
        connection.execute(f"EXPLAIN {statement}", (None,) * statement.count("?"))
    connection.close()
