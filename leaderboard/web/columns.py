"""The tables of the API: one description of each column gives JSON, CSV, the published schema and the documentation.

Names and types of columns are a promise: columns are added at the end, and anything else makes a new `VERSION`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..model import (
    CheckRow,
    ContributorRow,
    LossRow,
    ModuleRow,
    PathRow,
    RoundRow,
    Snapshot,
    StageInfo,
    VersionRow,
)
from . import text
from .book import Book, Credited

VERSION = 1
"""Of all tables together."""

R = TypeVar("R")
Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """One column; lists of ids are one text with spaces between them, in CSV and JSON alike."""

    name: str
    kind: str
    """`string`, `integer`, `number` or `boolean`, as JSON Schema says."""
    about: str
    get: Callable[[R], Any]
    may_be_null: bool = False

    def cell(self, row: R) -> Cell:
        """What is shown of `row`: text is cleaned, and what is no number is null."""
        value = self.get(row)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if self.kind == "string":
            return text.clean(" ".join(map(str, value)) if isinstance(value, tuple) else str(value))
        return bool(value) if self.kind == "boolean" else int(value) if self.kind == "integer" else float(value)


@dataclass(frozen=True, slots=True)
class Table(Generic[R]):
    """One table of the API."""

    name: str
    about: str
    columns: tuple[Column[R], ...]
    rows: Callable[[Book], Iterable[R]]

    @property
    def schema(self) -> str:
        """What a document says that it is."""
        return f"dipaco-leaderboard/{self.name}/{VERSION}"


def _text(name: str, about: str, get: Callable[[R], Any], *, null: bool = False) -> Column[R]:
    return Column(name, "string", about, get, null)


def _whole(name: str, about: str, get: Callable[[R], Any], *, null: bool = False) -> Column[R]:
    return Column(name, "integer", about, get, null)


def _number(name: str, about: str, get: Callable[[R], Any], *, null: bool = False) -> Column[R]:
    return Column(name, "number", about, get, null)


def _flag(name: str, about: str, get: Callable[[R], Any]) -> Column[R]:
    return Column(name, "boolean", about, get)


def _checks(attribute: str) -> tuple[Column[Any], ...]:
    """Who stands for a loss, as the row's `attribute` says; all null where there is none."""

    def part(name: str) -> Callable[[Any], Any]:
        return lambda row: getattr(getattr(row, attribute), name, None)

    return (
        _text("loss_mark", "`verified` or `receipted`: who stands for the loss.", part("mark"), null=True),
        _whole("checks_agree", "Measurements by others that gave the same.", part("agree"), null=True),
        _whole("checks_differ", "Measurements by others that did not.", part("differ"), null=True),
    )


Stage = tuple[Snapshot, StageInfo]

RUN: Table[Stage] = Table(
    "run",
    "The stages of the run, the open one last.",
    (
        _text("run", "The run's name.", lambda row: row[0].run.name),
        _text("origin", "The id of the run: that of its first stage.", lambda row: row[0].run.origin),
        _text("coordinator", "The peer whose signature opens the run.", lambda row: row[0].run.coordinator),
        _text("stage", "The stage's id.", lambda row: row[1].id),
        _text("name", "`warmup` or `grid`.", lambda row: row[1].name),
        _text("grid", "Modules per level, as in 2x2.", lambda row: row[1].grid),
        _whole("modules", "Modules of the stage.", lambda row: row[1].modules),
        _whole("paths", "Paths of the stage.", lambda row: row[1].paths),
        _whole("rounds", "Rounds of the stage.", lambda row: row[1].rounds),
        _whole("steps", "Inner steps of a round.", lambda row: row[1].steps),
        _whole("parameters", "Of all modules together.", lambda row: row[1].parameters),
    ),
    lambda book: [(book.snapshot, stage) for stage in book.snapshot.run.stages],
)

SETTINGS: Table[tuple[str, str]] = Table(
    "settings",
    "The run file.",
    (
        _text("key", "Section and key.", lambda row: row[0]),
        _text("value", "Its value.", lambda row: row[1]),
    ),
    lambda book: book.snapshot.run.settings,
)

OVERVIEW: Table[Book] = Table(
    "overview",
    "One row: the run at this moment.",
    (
        _text("state", "`training`, `complete` or `waiting`.", lambda row: row.snapshot.state),
        _number("taken_s", "Unix time that the figures are of.", lambda row: row.snapshot.taken_s),
        _number("heard_s", "Unix time when the swarm last answered.", lambda row: row.snapshot.heard_s, null=True),
        _text("stage", "The open stage.", lambda row: row.snapshot.run.stage.id),
        _whole("round", "The version that every module of it has.", lambda row: row.round),
        _whole("rounds", "How many rounds it has.", lambda row: row.snapshot.run.stage.rounds),
        _whole("paths", "Paths of the open stage.", lambda row: row.snapshot.run.stage.paths),
        _whole("paths_covered", "Paths that a live peer claims.", lambda row: row.snapshot.paths_covered),
        _whole("peers_alive", "Peers that said so lately.", lambda row: row.snapshot.peers_alive),
        _whole("peers_training", "Peers that train.", lambda row: row.snapshot.peers_training),
        _number("best_loss", "Routed loss of the best round.", lambda r: r.best.loss if r.best else None, null=True),
        _whole("best_round", "That round.", lambda row: row.best.version if row.best else None, null=True),
        _text("best_stage", "Its stage.", lambda row: row.best.stage if row.best else None, null=True),
        _number("credit_total", "Credit of all contributors.", lambda row: row.snapshot.credit_total),
        _whole("versions", "Versions that contributions made.", lambda row: row.made),
        _whole("contributors", "Peers with a share in a version.", lambda row: row.workers),
        _whole("records_refused", "Records not believed.", lambda row: sum(row.snapshot.refused.values())),
    ),
    lambda book: [book],
)

MODULES: Table[ModuleRow] = Table(
    "modules",
    "The modules of the open stage, now.",
    (
        _text("module", "Its name.", lambda row: row.module),
        _whole("version", "Its newest version.", lambda row: row.version),
        _text("digest", "The digest of that version.", lambda row: row.digest),
        _number("loss", "Nats per token on held-out text; signed.", lambda row: row.loss, null=True),
        _text("leader", "The peer that leads it.", lambda row: row.leader, null=True),
        _text("mirrors", "The peers that keep a copy.", lambda row: row.mirrors),
        _whole("term", "How often the group changed.", lambda row: row.term),
        _whole("paths", "Paths through it.", lambda row: row.paths),
        _whole("open_contributions", "In its open round.", lambda row: row.open_contributions),
    ),
    lambda book: book.snapshot.modules,
)

VERSIONS: Table[VersionRow] = Table(
    "versions",
    "Every version of every module, by stage, module and number.",
    (
        _text("stage", "The stage's id.", lambda row: row.stage),
        _text("module", "The module's name.", lambda row: row.module),
        _whole("version", "Its number; 0 is what the stage began with.", lambda row: row.version),
        _text("digest", "The digest of its parameters.", lambda row: row.digest),
        _text("parent", "The digest of its parent; empty for version 0.", lambda row: row.parent),
        _text("mark", "`verified`, `receipted` or `claimed`.", lambda row: row.mark),
        _text("author", "The peer that led the module.", lambda row: row.author),
        _text("cosigners", "The peers that made it again, or keep it, and signed so.", lambda row: row.cosigners),
        _whole("term", "The term that it was made in.", lambda row: row.term),
        _whole("snapshot_bytes", "Size of the parameters.", lambda row: row.snapshot_bytes),
        _whole("update_bytes", "Size of the update from the parent.", lambda row: row.update_bytes),
        _number("lr", "Outer learning rate.", lambda row: row.lr),
        _number("momentum", "Outer momentum.", lambda row: row.momentum),
        _number("clip_norm", "Greater contributions were scaled to it.", lambda row: row.clip_norm, null=True),
        _flag("is_fresh", "Whether the parent's outer state was lost.", lambda row: row.is_fresh),
        _number("loss_before", "Nats per token, a round before; signed.", lambda row: row.loss_before, null=True),
        _number("loss_after", "Nats per token, at this version; signed.", lambda row: row.loss_after, null=True),
        _number("made_s", "Unix time when it was judged, or first seen.", lambda row: row.made_s, null=True),
        _whole("contributors", "Peers with a share in it.", lambda row: row.contributors),
        _whole("contributions", "Contributions in it.", lambda row: len(row.shares)),
        _whole("tokens", "Tokens of these.", lambda row: row.tokens),
        *_checks("loss_checks"),
    ),
    lambda book: book.snapshot.versions,
)

CONTRIBUTIONS: Table[Credited] = Table(
    "contributions",
    "Every contribution that a version counts: what all credit is the sum of.",
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
)

ROUNDS: Table[RoundRow] = Table(
    "rounds",
    "The whole grid after each round; signed by the coordinator.",
    (
        _text("stage", "The stage's id.", lambda row: row.stage),
        _whole("version", "The round: of every module.", lambda row: row.version),
        _whole("sharding", "Whose router sent documents to paths.", lambda row: row.sharding),
        _number("loss", "Nats per token, each document routed once.", lambda row: row.loss),
        _whole("tokens", "Tokens that it was measured on.", lambda row: row.tokens),
        _number("at_s", "Unix time of the signature.", lambda row: row.at_s),
        *_checks("checks"),
    ),
    lambda book: book.snapshot.rounds,
)

PATHS: Table[PathRow] = Table(
    "paths",
    "The paths of the open stage, now.",
    (
        _text("path", "Its name: a module per level.", lambda row: row.path),
        _text("state", "`training`, `free` or `done`.", lambda row: row.state),
        _whole("round", "The version that all its modules have.", lambda row: row.round),
        _text("peers", "The peers that claim it.", lambda row: row.peers),
        _number("loss", "Nats per token on held-out text.", lambda row: row.loss, null=True),
        _whole("best_round", "The round that it is served with.", lambda row: row.best_round, null=True),
        _number("covered_s", "Unix time since when it is so.", lambda row: row.covered_s, null=True),
        *_checks("checks"),
    ),
    lambda book: book.snapshot.paths,
)

CONTRIBUTORS: Table[ContributorRow] = Table(
    "contributors",
    "Peers whose work is in a version, or who take part now, by rank.",
    (
        _whole("rank", "By recent credit.", lambda row: row.rank),
        _text("peer", "Its id.", lambda row: row.peer),
        _number("credit", "Credit of all its contributions.", lambda row: row.credit),
        _number("recent", "Credit a day, lately.", lambda row: row.recent),
        _whole("tokens", "Tokens of its contributions.", lambda row: row.tokens),
        _whole("contributions", "Contributions that versions count.", lambda row: row.contributions),
        _whole("lost", "Contributions with a receipt that none counts.", lambda row: row.lost),
        _whole("versions", "Versions that count any of them.", lambda row: row.versions),
        _text("paths", "Paths that it trained.", lambda row: row.paths),
        _number("last_s", "Unix time when it was last heard of.", lambda row: row.last_s, null=True),
        _flag("is_alive", "Whether it says that it is.", lambda row: row.is_alive),
        _text("doing", "What it says that it does; its own word.", lambda row: text.word(row.doing)),
        _whole("rejected", "Contributions that leaders say they refused.", lambda row: row.rejected),
        _whole("checks", "Losses that it measured again.", lambda row: row.checks),
    ),
    lambda book: book.snapshot.contributors,
)

LOSSES: Table[LossRow] = Table(
    "losses",
    "Contributions that no version counts: lost after a receipt, or refused, as a leader says.",
    (
        _text("stage", "The stage's id.", lambda row: row.stage),
        _text("module", "The module that it was for.", lambda row: row.module),
        _whole("round", "The round that it was for.", lambda row: row.round),
        _text("contribution", "Its id.", lambda row: row.contribution),
        _text("peer", "Who made it.", lambda row: row.peer),
        _text("kind", "`lost` or `rejected`.", lambda row: row.kind),
        _text("reason", "Why.", lambda row: row.reason),
        _text("claimed_by", "The leader whose word that is; empty if records say it.", lambda row: row.claimed_by),
    ),
    lambda book: book.snapshot.losses,
)

CHECKS: Table[CheckRow] = Table(
    "checks",
    "Losses of paths that others than the coordinator measured again; each signed by who did.",
    (
        _text("stage", "The stage's id.", lambda row: row.stage),
        _whole("version", "The round: of every module.", lambda row: row.version),
        _text("path", "The path.", lambda row: row.path),
        _text("peer", "Who measured.", lambda row: row.peer),
        _number("loss", "Nats per token, as measured.", lambda row: row.loss),
        _whole("tokens", "Tokens that it was measured on.", lambda row: row.tokens),
        _number("published", "Nats per token, as the coordinator signed.", lambda row: row.published),
        _flag("agrees", "Whether the two are the same within the tolerance.", lambda row: row.agrees),
        _flag("is_independent", "Whether no work of the peer on this path is counted.", lambda row: row.is_independent),
        _number("at_s", "Unix time on its clock.", lambda row: row.at_s),
    ),
    lambda book: book.snapshot.checks,
)

TABLES: dict[str, Table[Any]] = {
    table.name: table
    for table in (
        RUN,
        SETTINGS,
        OVERVIEW,
        MODULES,
        VERSIONS,
        CONTRIBUTIONS,
        ROUNDS,
        PATHS,
        CONTRIBUTORS,
        LOSSES,
        CHECKS,
    )
}
