"""The database of a leaderboard: its tables, and how a database of an older program becomes one of this.

`records` holds signed documents and is the only source of every figure: all that is in it can be had again from a
coordinator's folder (rebuild.py). The other tables hold what was observed: it cannot be had again, and no figure of a
version or of credit rests on it. `PRAGMA user_version` is the number of migrations that were done.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit

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
-- Which texts of `records` and `witnessed` were checked by this very program (prints.py).
CREATE TABLE prints (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    print BLOB NOT NULL,
    PRIMARY KEY (kind, id)
) STRICT, WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (FIRST, SECOND)
"""Only ever added to: databases that exist have done the first ones."""


def open_database(path: Path | None, *, migrations: Sequence[str] = MIGRATIONS) -> sqlite3.Connection:
    """The database at `path`, made if it is not there and brought up to date; None for one in memory.

    Any thread may use it, one at a time. Raises EnvironmentUnfit when the disk refuses, and ConfigError for a database
    of a newer program or a file that is none.
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
            raise ConfigError(f"{path} is no database: {error}", hint="choose another file") from None
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
