"""The database of a leaderboard: its tables, how an older one is brought up to date, and all SQL that is spoken to it.

`records` holds signed documents and is the only source of every figure: all that is in it can be had again from a
coordinator's folder (program.py). The other tables hold what was observed: it cannot be had again, and no figure of a
version or of credit rests on it.

One connection, used by one thread at a time; a batch of writes is one transaction. A database is believed no more than
a peer: what it holds comes in through the same door, and every signature is checked at every start.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.run import Run, open_run
from dipaco_p2p.node.stages import check_next_stage
from dipaco_p2p.protocol.decrees import Decree
from dipaco_p2p.protocol.documents import Contribution, Grant, ModuleVersion, Receipt, Rejection
from dipaco_p2p.protocol.judgement import Check, Judgement
from dipaco_p2p.protocol.names import clean_name
from dipaco_p2p.topology import ModuleId
from leaderboard.chains import Refusals

from .ledger import Stage, Write

BUSY_TIMEOUT_S = 10.0

FIRST = """
CREATE TABLE records (
    kind TEXT NOT NULL CHECK (kind IN ('manifest', 'version', 'contribution', 'judgement')),
    id TEXT NOT NULL,
    run TEXT NOT NULL,
    module TEXT NOT NULL,
    number INTEGER NOT NULL,
    sealed TEXT NOT NULL,
    PRIMARY KEY (kind, id)
) STRICT;
CREATE UNIQUE INDEX one_version ON records (run, module, number) WHERE kind = 'version';
CREATE UNIQUE INDEX one_judgement ON records (run, number) WHERE kind = 'judgement';
CREATE INDEX by_run ON records (run, kind, module, number);

-- Observations. Signed, but only leaders have them, and only while they lead: receipts, the contributions that these
-- name, grants, and the cosignatures of mirrors.
CREATE TABLE witnessed (
    place INTEGER PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('receipt', 'contribution', 'grant', 'cosignature')),
    id TEXT NOT NULL,
    run TEXT NOT NULL,
    module TEXT NOT NULL,
    number INTEGER NOT NULL,
    sealed TEXT NOT NULL,
    UNIQUE (kind, id)
) STRICT;
CREATE INDEX witnessed_by_run ON witnessed (run, kind);
-- Observations: when a version was first seen here.
CREATE TABLE first_seen (
    id TEXT PRIMARY KEY,
    at_s REAL NOT NULL
) STRICT;
-- Observations: what peers said of themselves, each one's newest word.
CREATE TABLE heartbeats (
    peer TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    doing TEXT NOT NULL,
    at_s REAL NOT NULL
) STRICT;
CREATE TABLE claims (
    run TEXT NOT NULL,
    path TEXT NOT NULL,
    peer TEXT NOT NULL,
    since_s REAL NOT NULL,
    PRIMARY KEY (run, path, peer)
) STRICT;
CREATE TABLE heads (
    run TEXT NOT NULL,
    module TEXT NOT NULL,
    leader TEXT NOT NULL,
    version INTEGER NOT NULL,
    digest TEXT NOT NULL,
    term INTEGER NOT NULL,
    PRIMARY KEY (run, module)
) STRICT;
-- Observations: since when a path is in its state.
CREATE TABLE path_states (
    run TEXT NOT NULL,
    path TEXT NOT NULL,
    state TEXT NOT NULL,
    since_s REAL NOT NULL,
    PRIMARY KEY (run, path)
) STRICT;
-- Observations: records that were not believed, by reason.
CREATE TABLE refused (
    reason TEXT PRIMARY KEY,
    count INTEGER NOT NULL
) STRICT;
-- Observations: when the swarm last answered.
CREATE TABLE heard (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    at_s REAL NOT NULL
) STRICT;
"""

SECOND = """
-- Observations also: what volunteers measured again, and what leaders said that they refused.
ALTER TABLE witnessed RENAME TO witnessed_before;
CREATE TABLE witnessed (
    place INTEGER PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('receipt', 'contribution', 'grant', 'cosignature', 'check', 'rejection')),
    id TEXT NOT NULL,
    run TEXT NOT NULL,
    module TEXT NOT NULL,
    number INTEGER NOT NULL,
    sealed TEXT NOT NULL,
    UNIQUE (kind, id)
) STRICT;
INSERT INTO witnessed SELECT * FROM witnessed_before;
DROP TABLE witnessed_before;
CREATE INDEX witnessed_by_run ON witnessed (run, kind);
-- Which texts of `records` and `witnessed` were checked by this very program.
CREATE TABLE prints (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    print BLOB NOT NULL,
    PRIMARY KEY (kind, id)
) STRICT, WITHOUT ROWID;
"""

THIRD = """
-- Nothing reads these: every signature is checked at every start, and who claims and leads is asked for anew.
DROP TABLE prints;
DROP TABLE claims;
DROP TABLE heads;
"""

FOURTH = """
-- Decrees are records as well; their run is that of the first stage.
ALTER TABLE records RENAME TO records_before;
DROP INDEX one_version;
DROP INDEX one_judgement;
DROP INDEX by_run;
CREATE TABLE records (
    kind TEXT NOT NULL CHECK (kind IN ('manifest', 'version', 'contribution', 'judgement', 'decree')),
    id TEXT NOT NULL,
    run TEXT NOT NULL,
    module TEXT NOT NULL,
    number INTEGER NOT NULL,
    sealed TEXT NOT NULL,
    PRIMARY KEY (kind, id)
) STRICT;
INSERT INTO records SELECT * FROM records_before;
DROP TABLE records_before;
CREATE UNIQUE INDEX one_version ON records (run, module, number) WHERE kind = 'version';
CREATE UNIQUE INDEX one_of_number ON records (kind, run, number) WHERE kind IN ('judgement', 'decree');
CREATE INDEX by_run ON records (run, kind, module, number);
"""

FIFTH = """
-- What peers call themselves: their newest word, which stays when they are gone.
ALTER TABLE heartbeats ADD COLUMN name TEXT NOT NULL DEFAULT '';
ALTER TABLE heartbeats ADD COLUMN team TEXT NOT NULL DEFAULT '';
"""

MIGRATIONS: tuple[str, ...] = (FIRST, SECOND, THIRD, FOURTH, FIFTH)
"""Only ever added to: databases that exist have done the first ones, as many as `PRAGMA user_version` says."""

D = TypeVar("D", Check, Contribution, Decree, Grant, Judgement, ModuleVersion, Receipt, Rejection)

HEARTBEATS_MAX = 10_000
WITNESSED_MAX = 500_000

STATEMENTS = {
    "record": "INSERT OR REPLACE INTO records (kind, id, run, module, number, sealed) VALUES (?, ?, ?, ?, ?, ?)",
    "drop": "DELETE FROM records WHERE kind = ? AND id = ?",
    "witness": "INSERT OR IGNORE INTO witnessed (kind, id, run, module, number, sealed) VALUES (?, ?, ?, ?, ?, ?)",
    "forget": "DELETE FROM witnessed WHERE kind = ? AND id = ?",
    "seen": "INSERT OR IGNORE INTO first_seen (id, at_s) VALUES (?, ?)",
    "heartbeat": "INSERT OR REPLACE INTO heartbeats (peer, role, doing, at_s, name, team) VALUES (?, ?, ?, ?, ?, ?)",
    "path": "INSERT OR REPLACE INTO path_states (run, path, state, since_s) VALUES (?, ?, ?, ?)",
    "refused": "INSERT OR REPLACE INTO refused (reason, count) VALUES (?, ?)",
    "heard": "INSERT OR REPLACE INTO heard (one, at_s) VALUES (1, ?)",
}
PRUNE = (
    f"DELETE FROM heartbeats WHERE peer NOT IN (SELECT peer FROM heartbeats ORDER BY at_s DESC LIMIT {HEARTBEATS_MAX})",
    f"DELETE FROM witnessed WHERE place <= (SELECT max(place) FROM witnessed) - {WITNESSED_MAX}",
    "DELETE FROM first_seen WHERE id NOT IN (SELECT id FROM records WHERE kind = 'version')",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was observed before this program was started, as far as it is still of use."""

    last_seen_s: Mapping[str, float]
    """By peer."""
    names: Mapping[str, tuple[str, str]]
    """By peer its name and team, of those that gave any."""
    path_states: Mapping[tuple[str, str], tuple[str, float]]
    """By run and path: the state, and since when."""
    refused: Mapping[str, int]
    heard_s: float | None


class Database:
    """The tables of one leaderboard."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path | None) -> Database:
        """The database at `path`, None for one in memory; raises as `open_database`."""
        return cls(open_database(path))

    def close(self) -> None:
        """Let go of the file; nothing is pending."""
        with self._lock:
            self._connection.close()

    def write(self, writes: Sequence[Write]) -> None:
        """Do all of `writes`, or nothing; raises sqlite3.Error when the disk refuses."""
        with self._transaction() as connection:
            for name, values in writes:
                connection.execute(STATEMENTS[name], values)

    def prune(self) -> None:
        """Forget the oldest observations beyond the bounds; raises sqlite3.Error."""
        with self._transaction() as connection:
            for statement in PRUNE:
                connection.execute(statement)

    def load(self, refusals: Refusals) -> list[Stage]:
        """All stages that are here, the first one first. Raises WrongRun for those of another protocol, and
        IntegrityError for manifests that do not belong together."""
        runs = [open_run(value) for value in self._sealed("records", "manifest")]
        for before, after in zip(runs, runs[1:], strict=False):
            check_next_stage(before, after)
        stages: list[Stage] = []
        for run in runs:
            stages.append(self._load_stage(run, refusals, stages[0].decrees if stages else None))
        return stages

    def observed(self) -> Observed:
        """What was observed earlier."""
        named = "SELECT peer, name, team FROM heartbeats WHERE name <> '' OR team <> ''"
        with self._lock:
            execute = self._connection.execute
            heard = execute("SELECT at_s FROM heard").fetchone()
            return Observed(
                last_seen_s=dict(execute("SELECT peer, at_s FROM heartbeats")),
                names={peer: (clean_name(name), clean_name(team)) for peer, name, team in execute(named)},
                path_states={
                    (run, path): (state, since_s)
                    for run, path, state, since_s in execute("SELECT run, path, state, since_s FROM path_states")
                },
                refused=dict(execute("SELECT reason, count FROM refused")),
                heard_s=heard[0] if heard else None,
            )

    def _load_stage(self, run: Run, refusals: Refusals, decrees: Decrees | None) -> Stage:
        stage = Stage(run, refusals, decrees)
        stage.take_decrees(self._read("records", Decree, run, refusals))
        for module in run.topology.modules():
            stage.take_grants(module, self._read("witnessed", Grant, run, refusals, module))
            versions = self._read("records", ModuleVersion, run, refusals, module)
            stage.take_versions(module, versions, now_s=0.0)
            for number, said in self._cosignatures(run, module):
                stage.cosign(module, number, said)
            stage.take_receipts(module, self._read("witnessed", Receipt, run, refusals, module))
            stage.take_rejections(module, self._read("witnessed", Rejection, run, refusals, module))
        stage.take_judgements(self._read("records", Judgement, run, refusals))
        stage.take_checks(self._read("witnessed", Check, run, refusals))
        stage.take_contributions(self._read("records", Contribution, run, refusals))
        overdue, receipted = set(stage.overdue()), self._read("witnessed", Contribution, run, refusals)
        stage.take_contributions(sealed for sealed in receipted if sealed.id in overdue)
        stage.forget_writes()
        with self._lock:
            stage.first_seen = dict(self._connection.execute("SELECT id, at_s FROM first_seen"))
        return stage

    def _read(
        self, table: str, kind: type[D], run: Run, refusals: Refusals, module: ModuleId | None = None
    ) -> list[Any]:
        values = self._sealed(table, kind.KIND, run.id, module)
        return [sealed for value in values if (sealed := refusals.read(kind, value)) is not None]

    def _sealed(self, table: str, kind: str, run: str | None = None, module: ModuleId | None = None) -> Iterator[Any]:
        """Stored texts as values, in the order of their numbers."""
        where, values = ["kind = ?"], [kind]
        for name, value in {"run": run, "module": module}.items():
            if value is not None:
                where.append(f"{name} = ?")
                values.append(str(value))
        order = "number, id" if table == "records" else "place"
        query = f"SELECT sealed FROM {table} WHERE {' AND '.join(where)} ORDER BY {order}"
        with self._lock:
            rows = self._connection.execute(query, values).fetchall()
        yield from (_value(text) for (text,) in rows)

    def _cosignatures(self, run: Run, module: ModuleId) -> list[tuple[int, dict[str, Any]]]:
        query = "SELECT number, sealed FROM witnessed WHERE kind = 'cosignature' AND run = ? AND module = ?"
        with self._lock:
            rows = self._connection.execute(query, (run.id, str(module))).fetchall()
        found = ((number, _value(text)) for number, text in rows)
        return [(number, said) for number, said in found if isinstance(said, dict)]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise IntegrityError("the database was damaged: a record is not valid JSON") from None


def open_database(path: Path | None, *, migrations: Sequence[str] = MIGRATIONS) -> sqlite3.Connection:
    """The database at `path`, made if it is not there and brought up to date; None for one in memory.

    Any thread may use it, one at a time. Raises EnvironmentUnfit when the disk refuses, and ConfigError for a database
    of a newer program or a file that is not a database.
    """
    try:
        connection = sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions begin where the code says so
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise EnvironmentUnfit(f"cannot open the database {path}: {error}", hint="choose another folder") from None
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # what a power cut takes back is asked for again
        migrate(connection, migrations)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise EnvironmentUnfit(f"cannot use the database {path}: {error}", hint="choose another folder") from None
        if isinstance(error, sqlite3.DatabaseError):
            raise ConfigError(f"{path} is not a database: {error}", hint="choose another file") from None
        raise
    return connection


def migrate(connection: sqlite3.Connection, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Do what was not done yet, each migration whole or not at all; raises ConfigError for a newer database."""
    done = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if done > len(migrations):
        message = f"the database is of version {done}, this program knows {len(migrations)}"
        raise ConfigError(message, hint="install the newer program again, or choose another file")
    for number, script in enumerate(migrations[done:], start=done + 1):
        try:
            connection.executescript(f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
