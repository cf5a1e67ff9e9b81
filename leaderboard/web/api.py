"""The API: its tables, as JSON and CSV documents, and the JSON Schema that the former keep.

One description of each column gives JSON, CSV, the published schema and the documentation. Names and types of columns
are a promise: columns are added at the end, and anything else makes a new `VERSION`. A document holds one page of a
table; `next` is the address of the page after it, beside this one.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from dipaco_p2p.protocol.decrees import ACTS

from . import query, text
from .book import Book

VERSION = 1
"""Of all tables together."""
ROWS_MAX = 1_000
"""Rows of one document."""
SCHEMA_ID = f"dipaco-leaderboard/{VERSION}"

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """One column; lists of ids are one text with spaces between them, in CSV and JSON alike."""

    kind: str
    """`string`, `integer`, `number` or `boolean`, as JSON Schema says."""
    name: str
    about: str
    get: Callable[[Any], Any] | None = None
    """None: the attribute of that name."""
    null: bool = False
    """Whether a cell may be null."""

    def cell(self, row: Any) -> Cell:
        """What is shown of `row`: text is cleaned, and what is not a number is null."""
        value = getattr(row, self.name) if self.get is None else self.get(row)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if self.kind == "string":
            return text.clean(" ".join(map(str, value)) if isinstance(value, tuple) else str(value))
        return bool(value) if self.kind == "boolean" else int(value) if self.kind == "integer" else float(value)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the API."""

    name: str
    about: str
    columns: tuple[Column, ...]
    rows: Callable[[Book], Iterable[Any]]

    @property
    def schema(self) -> str:
        """What a document says that it is."""
        return f"dipaco-leaderboard/{self.name}/{VERSION}"


_text, _whole, _number, _flag = (partial(Column, kind) for kind in ("string", "integer", "number", "boolean"))


def _checks(attribute: str) -> tuple[Column, ...]:
    """Who stands for a loss, as the row's `attribute` says; all null where there is none."""

    def part(name: str) -> Callable[[Any], Any]:
        return lambda row: getattr(getattr(row, attribute), name, None)

    return (
        _text("loss_mark", "`verified` or `receipted`: who stands for the loss.", part("mark"), null=True),
        _whole("checks_agree", "Measurements by others that gave the same.", part("agree"), null=True),
        _whole("checks_differ", "Measurements by others that did not.", part("differ"), null=True),
    )


_TABLES = (
    Table(
        "run",
        "The stages of the run, the open one last.",
        (
            _text("run", "The run's name.", lambda row: row[0].run.name),
            _text("origin", "The id of the run: that of its first stage.", lambda row: row[0].run.origin),
            _text("coordinator", "The peer whose signature opens the run.", lambda row: row[0].run.coordinator),
            _text("stage", "The stage's id.", lambda row: row[1].id),
            _text("name", "`warmup`, `grid`, `grid-2` and so on.", lambda row: row[1].name),
            _text("grid", "Modules per level, as in 2x2.", lambda row: row[1].grid),
            _whole("modules", "Modules of the stage.", lambda row: row[1].modules),
            _whole("paths", "Paths of the stage.", lambda row: row[1].paths),
            _whole("rounds", "Rounds of the stage.", lambda row: row[1].rounds),
            _whole("steps", "Inner steps of a round.", lambda row: row[1].steps),
            _whole("parameters", "Of all modules together.", lambda row: row[1].parameters),
        ),
        lambda book: [(book.snapshot, stage) for stage in book.snapshot.run.stages],
    ),
    Table(
        "settings",
        "The run file.",
        (
            _text("key", "Section and key.", lambda row: row[0]),
            _text("value", "Its value.", lambda row: row[1]),
        ),
        lambda book: book.snapshot.run.settings,
    ),
    Table(
        "overview",
        "One row: the run at this moment.",
        (
            _text("state", "`training`, `complete`, `frozen` or `waiting`.", lambda row: row.snapshot.state),
            _number("taken_s", "Unix time that the figures are of.", lambda row: row.snapshot.taken_s),
            _number("heard_s", "Unix time when the swarm last answered.", lambda row: row.snapshot.heard_s, null=True),
            _text("stage", "The open stage.", lambda row: row.snapshot.run.stage.id),
            _whole("round", "The version that every module of it has."),
            _whole("rounds", "How many rounds it has.", lambda row: row.snapshot.run.stage.rounds),
            _whole("paths", "Paths of the open stage.", lambda row: row.snapshot.run.stage.paths),
            _whole("paths_covered", "Paths that a live peer claims.", lambda row: row.snapshot.paths_covered),
            _whole("peers_alive", "Peers that said so lately.", lambda row: row.snapshot.peers_alive),
            _whole("peers_training", "Peers that train.", lambda row: row.snapshot.peers_training),
            _number(
                "best_loss", "Routed loss of the best round.", lambda r: r.best.loss if r.best else None, null=True
            ),
            _whole("best_round", "That round.", lambda row: row.best.version if row.best else None, null=True),
            _text("best_stage", "Its stage.", lambda row: row.best.stage if row.best else None, null=True),
            _number("credit_total", "Credit of all contributors.", lambda row: row.snapshot.credit_total),
            _whole("versions", "Versions that contributions made.", lambda row: row.made),
            _whole("contributors", "Peers with a share in a version.", lambda row: row.workers),
            _whole("records_refused", "Records not believed.", lambda row: sum(row.snapshot.refused.values())),
            _number(
                "frozen_s",
                "Unix time since when a decree has frozen the run.",
                lambda row: row.freeze.at_s if row.freeze else None,
                null=True,
            ),
            _text("frozen_reason", "Why.", lambda row: row.freeze.reason if row.freeze else None, null=True),
            _whole("peers_relayed", "Of those alive, dialled through relays.", lambda row: row.snapshot.peers_relayed),
            _text("about", "What the run is for, in the coordinator's words.", lambda row: row.snapshot.words.about),
            _whole("active", "Contributors that were heard of in the last 24 hours."),
            _number(
                "tokens_per_s",
                "Tokens that came into versions, over the last rounds.",
                lambda row: row.pace.tokens_per_s if row.pace else None,
                null=True,
            ),
            _number("time_left_s", "Seconds until the run ends, at the pace of its last rounds.", null=True),
        ),
        lambda book: [book],
    ),
    Table(
        "modules",
        "The modules of the open stage, now.",
        (
            _text("module", "Its name."),
            _whole("version", "Its newest version."),
            _text("digest", "The digest of that version."),
            _number("loss", "Nats per token on held-out text; signed.", null=True),
            _text("leader", "The peer that leads it.", null=True),
            _text("mirrors", "The peers that keep a copy."),
            _whole("term", "How often the group changed."),
            _whole("paths", "Paths through it."),
            _whole("open_contributions", "In its open round."),
        ),
        lambda book: book.snapshot.modules,
    ),
    Table(
        "versions",
        "Every version of every module, by stage, module and number.",
        (
            _text("stage", "The stage's id."),
            _text("module", "The module's name."),
            _whole("version", "Its number; 0 is what the stage began with."),
            _text("digest", "The digest of its parameters."),
            _text("parent", "The digest of its parent; empty for version 0."),
            _text("mark", "`verified`, `receipted` or `claimed`."),
            _text("author", "The peer that led the module."),
            _text("cosigners", "The peers that made it again, or keep it, and signed so."),
            _whole("term", "The term that it was made in."),
            _whole("snapshot_bytes", "Size of the parameters."),
            _whole("update_bytes", "Size of the update from the parent."),
            _number("lr", "Outer learning rate."),
            _number("momentum", "Outer momentum."),
            _number("clip_norm", "Greater contributions were scaled to it.", null=True),
            _flag("is_fresh", "Whether the parent's outer state was lost."),
            _number("loss_before", "Nats per token, a round before; signed.", null=True),
            _number("loss_after", "Nats per token, at this version; signed.", null=True),
            _number("made_s", "Unix time when it was judged, or first seen.", null=True),
            _whole("contributors", "Peers with a share in it."),
            _whole("contributions", "Contributions in it.", lambda row: len(row.shares)),
            _whole("tokens", "Tokens of these."),
            *_checks("loss_checks"),
            _whole(
                "decree",
                "The number of the decree that brought an earlier version back.",
                lambda row: row.rollback.decree if row.rollback else None,
                null=True,
            ),
            _whole("back_to", "That version.", lambda row: row.rollback.to if row.rollback else None, null=True),
            _whole("repeated", "Works that auditors could repeat.", lambda row: len(row.findings.repeated)),
            _whole(
                "failed", "Works that judges refused, as harm or too little gain.", lambda row: len(row.findings.failed)
            ),
            _whole("withheld", "Works that auditors could not have.", lambda row: len(row.findings.withheld)),
            _whole("forged", "Works that auditors found forged.", lambda row: len(row.findings.forged)),
            _whole("contradicted", "Audits that most others contradict.", lambda row: len(row.findings.contradicted)),
            _whole("audits", "Audits that it names.", lambda row: len(row.audits)),
            _text(
                "without",
                "Peers without whose work a decree had the versions after `back_to` rebuilt; else empty.",
                lambda row: " ".join(row.rollback.without) if row.rollback else "",
            ),
        ),
        lambda book: book.snapshot.versions,
    ),
    Table(
        "contributions",
        "Every contribution that a version counts: with the audits, what all credit is the sum of.",
        (
            _text("contribution", "Its id.", lambda row: row[1].contribution),
            _text("peer", "Who made it.", lambda row: row[1].peer),
            _text("stage", "The stage's id.", lambda row: row[0].stage),
            _text("module", "The module that it changed.", lambda row: row[0].module),
            _whole("version", "The version that counts it.", lambda row: row[0].version),
            _text("digest", "The digest of that version.", lambda row: row[0].digest),
            _text("path", "The path that was trained.", lambda row: row[1].path),
            _whole("base_version", "The version that training began from.", lambda row: row[1].base_version),
            _number("weight", "What it weighs in the version, of 1.", lambda row: row[1].weight),
            _whole("tokens", "Tokens trained.", lambda row: row[1].tokens),
            _number("credit", "Credit for it.", lambda row: row[1].credit),
            _number("loss", "Mean training loss, its author's word.", lambda row: row[1].loss, null=True),
            _whole("bytes", "Size of its payload.", lambda row: row[1].bytes, null=True),
            _whole("steps", "Inner steps of it.", lambda row: row[1].steps, null=True),
            _flag("has_receipt", "Whether the leader's receipt was seen.", lambda row: row[1].has_receipt),
        ),
        lambda book: ((row, share) for row in book.snapshot.versions for share in row.shares),
    ),
    Table(
        "audits",
        "Every audit that a version names: the other part of all credit.",
        (
            _text("work", "The id of the work that was repeated.", lambda row: row[1].work),
            _text("peer", "Who repeated it.", lambda row: row[1].peer),
            _text("stage", "The stage's id.", lambda row: row[0].stage),
            _text("module", "The module whose version names it.", lambda row: row[0].module),
            _whole("version", "That version.", lambda row: row[0].version),
            _text("digest", "The digest of that version.", lambda row: row[0].digest),
            _whole("tokens", "Tokens of the work, as they count.", lambda row: row[1].tokens),
            _number("credit", "Credit for it; 0 for one that earns nothing.", lambda row: row[1].credit),
        ),
        lambda book: ((row, audit) for row in book.snapshot.versions for audit in row.audits),
    ),
    Table(
        "rounds",
        "The whole grid after each round; signed by the coordinator.",
        (
            _text("stage", "The stage's id."),
            _whole("version", "The round: of every module."),
            _whole("sharding", "Whose router sent documents to paths."),
            _number("loss", "Nats per token, each document routed once."),
            _whole("tokens", "Tokens that it was measured on."),
            _number("at_s", "Unix time of the signature."),
            *_checks("checks"),
        ),
        lambda book: book.snapshot.rounds,
    ),
    Table(
        "paths",
        "The paths of the open stage, now.",
        (
            _text("path", "Its name: a module per level."),
            _text("state", "`training`, `free` or `done`."),
            _whole("round", "The version that all its modules have."),
            _text("peers", "The peers that claim it."),
            _number("loss", "Nats per token on held-out text.", null=True),
            _whole("best_round", "The round that it is served with.", null=True),
            _number("covered_s", "Unix time since when it is so.", null=True),
            *_checks("checks"),
        ),
        lambda book: book.snapshot.paths,
    ),
    Table(
        "contributors",
        "Peers whose work versions count or judge, or who take part now, by rank.",
        (
            _whole("rank", "By recent credit."),
            _text("peer", "Its id."),
            _number("credit", "Credit of all its contributions and audits."),
            _number("recent", "Credit a day, lately."),
            _whole("tokens", "Tokens of its contributions."),
            _whole("contributions", "Contributions that versions count."),
            _whole("lost", "Contributions with a receipt that none counts."),
            _whole("versions", "Versions that count any of them."),
            _text("paths", "Paths that it trained."),
            _number("last_s", "Unix time when it was last heard of.", null=True),
            _flag("is_alive", "Whether it says that it is."),
            _text("doing", "What it says that it does; its own word.", lambda row: text.word(row.doing)),
            _whole("rejected", "Contributions that leaders say they refused."),
            _whole("checks", "Losses that it measured again."),
            _whole("repeated", "Works of it that auditors could repeat, one for each module."),
            _whole("forged", "Works of it that auditors found forged, one for each module."),
            _text("standing", "Its gravest standing in a module of the open stage; empty without any."),
            _text("name", "What it calls itself, its own word; empty without one, and if a decree hides it."),
            _text("team", "Whom it says to work with; likewise."),
            _whole("audits", "Works of others that it repeated, and has credit for, one for each module."),
            _number("audit_credit", "So much of its credit is for them."),
        ),
        lambda book: book.snapshot.contributors,
    ),
    Table(
        "losses",
        "Contributions that no version counts: lost after a receipt, or refused, as a leader says.",
        (
            _text("stage", "The stage's id."),
            _text("module", "The module that it was for."),
            _whole("round", "The round that it was for."),
            _text("contribution", "Its id."),
            _text("peer", "Who made it."),
            _text("kind", "`lost` or `rejected`."),
            _text("reason", "Why."),
            _text("claimed_by", "The leader whose word that is; empty if records say it."),
        ),
        lambda book: book.snapshot.losses,
    ),
    Table(
        "checks",
        "Losses of paths that others than the coordinator measured again; each signed by who did.",
        (
            _text("stage", "The stage's id."),
            _whole("version", "The round: of every module."),
            _text("path", "The path."),
            _text("peer", "Who measured."),
            _number("loss", "Nats per token, as measured."),
            _whole("tokens", "Tokens that it was measured on."),
            _number("published", "Nats per token, as the coordinator signed."),
            _flag("agrees", "Whether the two are the same within the tolerance."),
            _flag("is_independent", "Whether no work of the peer on this path is counted."),
            _number("at_s", "Unix time on its clock."),
        ),
        lambda book: book.snapshot.checks,
    ),
    Table(
        "decrees",
        "The coordinator's orders about the run, the oldest first; each signed.",
        (
            _whole("number", "Its number, from 1 on."),
            _number("at_s", "Unix time on the coordinator's clock."),
            _text("act", f"{', '.join(f'`{act}`' for act in ACTS[:-1])} or `{ACTS[-1]}`."),
            _text("reason", "The coordinator's words; may be empty where something is undone."),
            _text("peer", "Who is banned, admitted, appointed or dismissed, or whose name it is about.", null=True),
            _text("stage", "Of a rollback or a growth: the stage's id; else empty."),
            _text("module", "Of a rollback: the module.", null=True),
            _whole("to", "The version whose parameters come back; of a growth, the last one before it.", null=True),
            _whole("version", "Of a rollback: the version that carries it out.", null=True),
            _whole("ended_by", "The number of the next decree about the same thing.", null=True),
            _text("levels", "Of a growth: the modules per level that follow, as in 2x4; else empty."),
            _text("corpus", "Of a growth that brings text: the digest of its sequences; else empty."),
            _text(
                "without",
                "Of a rollback that rebuilds the versions since: the peers without whose work; else empty.",
                lambda row: " ".join(row.without),
            ),
        ),
        lambda book: book.snapshot.decrees,
    ),
    Table(
        "samples",
        "What the model wrote after some rounds, the oldest first; the coordinator's word, signed by nobody.",
        (
            _text("stage", "The stage's id."),
            _whole("round", "The round: of every module."),
            _text("path", "The path that wrote it."),
            _text("prompt", "What it goes on from."),
            _text("text", "What it wrote."),
        ),
        lambda book: book.snapshot.words.samples,
    ),
)
API_TABLES = {table.name: table for table in _TABLES}


# -- documents


def rows_of(table: Table, book: Book) -> Sequence[Any]:
    """All rows of `table`, before they become cells."""
    rows: Iterable[Any] = table.rows(book)
    return rows if isinstance(rows, Sequence) else list(rows)


def json_document(table: Table, book: Book, rows: Sequence[Any], *, page: int, next_page: str | None) -> str:
    """One page of `rows` as JSON; `page` counts from 1."""
    document = {
        "schema": table.schema,
        "run": book.snapshot.run.origin,
        "page": page,
        "pages": pages_of(rows),
        "rows_total": len(rows),
        "next": next_page,
        "rows": [
            {column.name: column.cell(row) for column in table.columns} for row in query.slice_of(rows, page, ROWS_MAX)
        ],
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def csv_document(table: Table, rows: Sequence[Any], *, page: int) -> str:
    """One page of `rows` as CSV (RFC 4180), with a head; what is null is empty."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow([column.name for column in table.columns])
    for row in query.slice_of(rows, page, ROWS_MAX):
        writer.writerow([_plain(column.cell(row)) for column in table.columns])
    return out.getvalue()


def pages_of(rows: Sequence[Any]) -> int:
    """Documents that hold all of `rows`: at least one."""
    return query.pages_of(rows, ROWS_MAX)


@cache
def schema_document() -> str:
    """The schema of all JSON documents (JSON Schema, draft 2020-12)."""
    defs = {table.name: _table_schema(table) for table in API_TABLES.values()}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "schema.json",
        "title": "Tables of a dipaco-p2p leaderboard",
        "description": f"{SCHEMA_ID}. Columns are only ever added; anything else makes a new version.",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in defs],
        "$defs": defs,
    }
    return json.dumps(schema, indent=1) + "\n"


def _plain(cell: Cell) -> Cell:
    if isinstance(cell, bool):
        return str(cell).lower()
    return text.csv_cell(cell) if isinstance(cell, str) else cell


def _table_schema(table: Table) -> dict[str, Any]:
    row = {column.name: _column_schema(column) for column in table.columns}
    fields: dict[str, Any] = {
        "schema": {"const": table.schema},
        "run": {"type": "string", "description": "The id of the run."},
        "page": {"type": "integer", "minimum": 1},
        "pages": {"type": "integer", "minimum": 1},
        "rows_total": {"type": "integer", "minimum": 0},
        "next": {"type": ["string", "null"], "description": "The page after this one, beside it."},
        "rows": {"type": "array", "maxItems": ROWS_MAX, "items": _object(row)},
    }
    return {"title": table.name, "description": table.about, **_object(fields)}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _column_schema(column: Column) -> dict[str, Any]:
    return {"type": [column.kind, "null"] if column.null else column.kind, "description": column.about}
