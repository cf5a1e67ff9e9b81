"""Reading and writing the tables of schema.py: the only file that speaks SQL to them.

One connection, used by one thread at a time; a batch of writes is one transaction. What a database says is believed no
more than what a peer says: it comes in through the same door. Only the signatures of a text that this program has
checked and kept itself are not checked at every start (prints.py).
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dipaco_p2p.errors import IntegrityError, WrongRun
from dipaco_p2p.node.run import Run, open_run
from dipaco_p2p.node.stages import check_next_stage
from dipaco_p2p.protocol.documents import Contribution, Grant, ModuleVersion, Receipt, Rejection
from dipaco_p2p.protocol.judgement import Check, Judgement
from dipaco_p2p.topology import ModuleId

from .prints import Prints
from .refusals import Refusals
from .schema import open_database
from .tables import Stage, Write

D = TypeVar("D", Check, Contribution, Grant, Judgement, ModuleVersion, Receipt, Rejection)

HEARTBEATS_MAX = 10_000
WITNESSED_MAX = 500_000

STATEMENTS = {
    "record": "INSERT OR REPLACE INTO records (kind, id, run, module, number, sealed) VALUES (?, ?, ?, ?, ?, ?)",
    "judgement": "INSERT OR REPLACE INTO records (kind, id, run, module, number, sealed)"
    " VALUES ('judgement', ?, ?, '', ?, ?)",
    "drop": "DELETE FROM records WHERE kind = ? AND id = ?",
    "witness": "INSERT OR IGNORE INTO witnessed (kind, id, run, module, number, sealed) VALUES (?, ?, ?, ?, ?, ?)",
    "seen": "INSERT OR IGNORE INTO first_seen (id, at_s) VALUES (?, ?)",
    "heartbeat": "INSERT OR REPLACE INTO heartbeats (peer, role, doing, at_s) VALUES (?, ?, ?, ?)",
    "no claims": "DELETE FROM claims WHERE run = ?",
    "claim": "INSERT OR REPLACE INTO claims (run, path, peer, since_s) VALUES (?, ?, ?, ?)",
    "no heads": "DELETE FROM heads WHERE run = ?",
    "head": "INSERT OR REPLACE INTO heads (run, module, leader, version, digest, term) VALUES (?, ?, ?, ?, ?, ?)",
    "path": "INSERT OR REPLACE INTO path_states (run, path, state, since_s) VALUES (?, ?, ?, ?)",
    "refused": "INSERT OR REPLACE INTO refused (reason, count) VALUES (?, ?)",
    "heard": "INSERT OR REPLACE INTO heard (one, at_s) VALUES (1, ?)",
    "print": "INSERT OR REPLACE INTO prints (kind, id, print) VALUES (?, ?, ?)",
}
SIGNED = {"record", "judgement", "witness"}
"""Statements that write the text of a signed document, which comes last."""
WITH_PRINTS = "LEFT JOIN prints USING (kind, id)"
PRUNE = (
    f"DELETE FROM heartbeats WHERE peer NOT IN (SELECT peer FROM heartbeats ORDER BY at_s DESC LIMIT {HEARTBEATS_MAX})",
    f"DELETE FROM witnessed WHERE place <= (SELECT max(place) FROM witnessed) - {WITNESSED_MAX}",
    "DELETE FROM first_seen WHERE id NOT IN (SELECT id FROM records WHERE kind = 'version')",
    "DELETE FROM prints"
    " WHERE (kind, id) NOT IN (SELECT kind, id FROM records UNION ALL SELECT kind, id FROM witnessed)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was observed before this program was started, as far as it is still of use."""

    last_seen_s: Mapping[str, float] = field(default_factory=dict)
    """By peer."""
    path_states: Mapping[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    """By run and path: the state, and since when."""
    refused: Mapping[str, int] = field(default_factory=dict)
    heard_s: float | None = None


class Database:
    """The tables of one leaderboard."""

    def __init__(self, connection: sqlite3.Connection, prints: Prints) -> None:
        self._connection = connection
        self._prints = prints
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path | None, *, has_prints: bool = True) -> Database:
        """The database at `path`, None for one in memory; raises as `open_database`. Without prints nothing is kept
        beside it, and every signature is checked at every start."""
        return cls(open_database(path), Prints.beside(path if has_prints else None))

    def close(self) -> None:
        """Let go of the file; nothing is pending."""
        with self._lock:
            self._connection.close()

    def write(self, writes: Sequence[Write]) -> None:
        """Do all of `writes`, or nothing; raises sqlite3.Error when the disk refuses."""
        with self._transaction() as connection:
            for name, values in writes:
                connection.execute(STATEMENTS[name], values)
                print_ = _print_of(self._prints, name, values)
                if print_ is not None:
                    connection.execute(STATEMENTS["print"], print_)

    def prune(self) -> None:
        """Forget the oldest observations beyond the bounds; raises sqlite3.Error."""
        with self._transaction() as connection:
            for statement in PRUNE:
                connection.execute(statement)

    def load(self, refusals: Refusals) -> list[Stage]:
        """All stages that are here, the first one first. Raises WrongRun for those of another protocol, and
        IntegrityError for manifests that do not belong together."""
        runs = [open_run(value) for value, _ in self._sealed("records", "manifest")]
        for before, after in zip(runs, runs[1:], strict=False):
            check_next_stage(before, after)
        return [self._load_stage(run, refusals) for run in runs]

    def require_run(self, run: Run) -> None:
        """Raise WrongRun if the database is of another run."""
        known = [open_run(value).origin for value, _ in self._sealed("records", "manifest")]
        if known and run.origin not in known:
            message = f"the database is of run:{known[0][:8]}, not of {run.name}"
            raise WrongRun(message, hint="give each run a database of its own")

    def observed(self) -> Observed:
        """What was observed earlier."""
        with self._lock:
            execute = self._connection.execute
            heard = execute("SELECT at_s FROM heard").fetchone()
            return Observed(
                last_seen_s=dict(execute("SELECT peer, at_s FROM heartbeats")),
                path_states={
                    (run, path): (state, since_s)
                    for run, path, state, since_s in execute("SELECT run, path, state, since_s FROM path_states")
                },
                refused=dict(execute("SELECT reason, count FROM refused")),
                heard_s=heard[0] if heard else None,
            )

    def dump(self, table: str) -> list[tuple[Any, ...]]:
        """All rows of a table, sorted: two databases with the same rows give equal lists."""
        assert table.isidentifier(), table
        with self._lock:
            return sorted(self._connection.execute(f"SELECT * FROM {table}"))

    def _load_stage(self, run: Run, refusals: Refusals) -> Stage:
        stage = Stage(run, refusals)
        for module in run.topology.modules():
            stage.take_grants(module, self._read("witnessed", Grant, run, refusals, module))
            versions = self._read("records", ModuleVersion, run, refusals, module)
            stage.take_versions(module, versions, now_s=0.0)
            for number, said, is_checked in self._cosignatures(run, module):
                stage.cosign(module, number, said, is_checked=is_checked)
            stage.take_receipts(module, self._read("witnessed", Receipt, run, refusals, module))
            stage.take_rejections(module, self._read("witnessed", Rejection, run, refusals, module))
        stage.take_judgements(self._read("records", Judgement, run, refusals))
        stage.take_checks(self._read("witnessed", Check, run, refusals))
        stage.take_contributions(self._read("records", Contribution, run, refusals))
        stage.take_contributions(self._overdue(stage, refusals))
        stage.forget_writes()
        with self._lock:
            stage.first_seen = dict(self._connection.execute("SELECT id, at_s FROM first_seen"))
        return stage

    def _overdue(self, stage: Stage, refusals: Refusals) -> list[Any]:
        found = self._read("witnessed", Contribution, stage.run, refusals)
        overdue = set(stage.overdue())
        return [sealed for sealed in found if sealed.id in overdue]

    def _read(
        self, table: str, kind: type[D], run: Run, refusals: Refusals, module: ModuleId | None = None
    ) -> list[Any]:
        values = self._sealed(table, kind.KIND, run.id, module)
        found = (
            refusals.read_again(kind, value, known) if known is not None else refusals.read(kind, value)
            for value, known in values
        )
        return [sealed for sealed in found if sealed is not None]

    def _sealed(
        self, table: str, kind: str, run: str | None = None, module: ModuleId | None = None
    ) -> Iterator[tuple[Any, str | None]]:
        """Stored texts as values, in the order of their numbers; and the id of one whose signature was checked here."""
        where, values = ["kind = ?"], [kind]
        for name, value in {"run": run, "module": module}.items():
            if value is not None:
                where.append(f"{name} = ?")
                values.append(str(value))
        order = "number, id" if table == "records" else "place"
        query = f"SELECT id, sealed, print FROM {table} {WITH_PRINTS} WHERE {' AND '.join(where)} ORDER BY {order}"
        with self._lock:
            rows = self._connection.execute(query, values).fetchall()
        holds = self._prints.holds
        yield from ((_value(text), id_ if holds(kind, id_, text, print_) else None) for id_, text, print_ in rows)

    def _cosignatures(self, run: Run, module: ModuleId) -> Iterable[tuple[int, dict[str, Any], bool]]:
        where = "WHERE kind = 'cosignature' AND run = ? AND module = ?"
        query = f"SELECT id, number, sealed, print FROM witnessed {WITH_PRINTS} {where}"
        with self._lock:
            rows = self._connection.execute(query, (run.id, str(module))).fetchall()
        holds = self._prints.holds
        found = ((number, _value(text), holds("cosignature", id_, text, print_)) for id_, number, text, print_ in rows)
        return [(number, said, is_checked) for number, said, is_checked in found if isinstance(said, dict)]

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


def _print_of(prints: Prints, statement: str, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The row of `prints` for a text that was checked and is written now; None for what is no signed text."""
    if statement not in SIGNED:
        return None
    kind, id_ = ("judgement", values[0]) if statement == "judgement" else values[:2]
    print_ = prints.of(kind, id_, values[-1])
    return (kind, id_, print_) if print_ is not None else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise IntegrityError("the database was damaged: a record is no JSON") from None
