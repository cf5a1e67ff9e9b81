"""The pages: what each one shows of a Book, and the template that draws it. The server and the static copy share them.

Texts of others are cleaned in one place, `_finalize`, which every expression of every template passes through; the
templates escape them then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.protocol.credit import DAY_S, HALF_LIFE_S
from dipaco_p2p.protocol.judgement import TOLERANCE_NATS
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import DOUBTED_FOR, FORGERS_WAIT, KINDS, UNHEARD_FOR
from dipaco_p2p.ticket import WORD, WORD_CHARS_MAX, read_ticket

from ..model import Mark, Snapshot, VersionRow
from ..words import side_by_side
from . import drawings, text
from .api import API_TABLES, ROWS_MAX
from .book import Book
from .links import Links
from .query import (
    CONTRIBUTOR_ORDERS,
    FILTERS,
    ROWS,
    VERSION_ORDERS,
    WHO,
    Query,
    asked_contributors,
    asked_versions,
    page_of,
    pages_of,
    query_of,
    slice_of,
)

STALE_AFTER_S = 120.0
"""The swarm is asked every few seconds; after this long without an answer every page says so."""
JOIN_CHARS_MAX = WORD_CHARS_MAX + text.CHARS_MAX
"""Of the line to join with: a cut ticket is of no use to anybody."""
LATEST = 8
"""Versions and contributors on the overview."""
CHECKS_MAX = 100
"""Measurements on the page of a version; all of them are in the data."""
NAVIGATION = (
    ("overview", "Overview"),
    ("versions", "Versions"),
    ("modules", "Modules"),
    ("paths", "Paths"),
    ("contributors", "Contributors"),
    ("decrees", "Decrees"),
    ("run", "Run"),
    ("api", "Data"),
)
TEXT_FILTERS = (
    *("count", "whole", "size", "loss", "gain", "perplexity", "share", "word", "short_digest", "short_peer"),
    *("age", "age_exact", "span", "lasting", "moment", "machine_time"),
)
"""Functions of text.py that templates use."""
TEMPLATES = Path(__file__).parent / "templates"
STATIC = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pager:
    """Where in a list a page stands."""

    page: int
    pages: int
    rows: int
    address: str
    """The list that it is of."""
    query: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How one joins, in three ways."""

    line: Markup
    """A command."""
    link: Markup
    """To the ticket in that line; empty for a line without a ticket."""
    code: drawings.Code | None
    """The link for a camera."""


class Site:
    """Every page of one Book, with the addresses of one place; a page that does not exist is None."""

    def __init__(self, book: Book, links: Links, *, now_s: float, poll_s: float = 0.0) -> None:
        self._book = book
        self._links = links
        self._poll_s = poll_s
        self._now_s = now_s

    def page(self, *, name: str = "", key: str = "", asked: Mapping[str, str]) -> str | None:
        """What stands at `/name` or `/name/key`; `asked` is the rest of the address. Raises ConfigError for a wrong
        query."""
        if key:
            numbered = {"modules": self.module, "contributors": self.contributor}
            single = {"versions": self.version, "lineage": self.lineage}
            if name in numbered:
                return numbered[name](key, page_of(asked))
            return single[name](key) if name in single else None
        lists = {"versions": self.versions, "contributors": self.contributors, "decrees": self.decrees}
        if name in lists:
            return lists[name](asked)
        plain = {"": self.overview, "modules": self.modules, "paths": self.paths, "run": self.run, "api": self.api}
        return plain[name]() if name in plain else None

    def overview(self) -> str:
        book = self._book
        latest = [row for row in book.newest[:LATEST] if row.version]
        return self._draw(
            "overview",
            joining=joining(book.snapshot.join) if book.snapshot.state != "complete" else None,
            plot=round_plot(book),
            grid=drawings.grid(book),
            latest=latest,
            leaders=book.snapshot.contributors[:LATEST],
            decrees=book.snapshot.decrees[: -LATEST - 1 : -1],
            written=side_by_side(book.snapshot.words.samples),
            data=("overview", "rounds", "decrees", "samples"),
        )

    def versions(self, asked: Mapping[str, str]) -> str | None:
        """The list that `asked` asks for; raises ConfigError if it makes no sense."""
        query = query_of(asked, VERSION_ORDERS, FILTERS)
        rows = asked_versions(self._book, query)
        shown = {"orders": VERSION_ORDERS, "marks": tuple(Mark), "data": ("versions", "contributions")}
        return self._list("versions", rows, query.page, "versions", query, **shown)

    def version(self, address: str) -> str | None:
        row = self._book.by_address.get(address)
        if row is None:
            return None
        checks, losses = self._book.checks_of(row), self._book.losses_of(row)
        return self._draw(
            "version",
            row=row,
            others=self._book.same(row),
            parent=self._book.parent(row) if row.parent else None,
            checks=checks[:CHECKS_MAX],
            checks_all=len(checks),
            losses=losses[:ROWS],
            losses_all=len(losses),
            found=found_of(row),
            nav="versions",
        )

    def lineage(self, address: str) -> str | None:
        row = self._book.by_address.get(address)
        if row is None:
            return None
        return self._draw("lineage", row=row, graph=drawings.lineage(self._book, row), nav="versions")

    def modules(self) -> str:
        return self._draw("modules", data=("modules",))

    def module(self, name: str, page: int = 1) -> str | None:
        if name not in self._book.names:
            return None
        losses = self._book.losses_of_modules.get(name, ())
        rows = tuple(reversed(self._book.by_module.get(name, ())))
        return self._list(
            "module",
            rows,
            page,
            f"modules/{name}",
            name=name,
            now=self._book.modules.get(name),
            plots=module_plots(self._book, name),
            losses=losses[-ROWS:],
            losses_all=len(losses),
            nav="modules",
        )

    def paths(self) -> str:
        return self._draw("paths", heat=drawings.heat(self._book.snapshot.paths), data=("paths",))

    def contributors(self, asked: Mapping[str, str]) -> str | None:
        """The list that `asked` asks for; raises ConfigError if it makes no sense."""
        query = query_of(asked, CONTRIBUTOR_ORDERS, (WHO,))
        rows = asked_contributors(self._book, query)
        shown = {"orders": CONTRIBUTOR_ORDERS, "data": ("contributors", "contributions")}
        return self._list("contributors", rows, query.page, "contributors", query, **shown)

    def contributor(self, peer: str, page: int = 1) -> str | None:
        row = self._book.contributors.get(peer)
        if row is None:
            return None
        credited, losses = self._book.credited(peer), self._book.losses_of_peers.get(peer, ())
        audits = self._book.audits(peer)
        return self._list(
            "contributor",
            credited,
            page,
            f"contributors/{peer}",
            row=row,
            credit=sum(share.credit for _, share in credited),
            audits=audits[:ROWS],
            plot=earned_plot(self._book, peer),
            losses=losses[:ROWS],
            losses_all=len(losses),
            nav="contributors",
        )

    def decrees(self, asked: Mapping[str, str]) -> str | None:
        """The list, the newest first; raises ConfigError for a page that makes no sense."""
        rows = self._book.snapshot.decrees[::-1]
        return self._list("decrees", rows, page_of(asked), "decrees", data=("decrees",))

    def run(self) -> str:
        return self._draw(
            "run",
            half_life_d=f"{HALF_LIFE_S / DAY_S:g}",
            tolerance=f"{TOLERANCE_NATS:g}",
            doubted_for=DOUBTED_FOR,
            unheard_for=UNHEARD_FOR,
            forgers_wait=FORGERS_WAIT,
            data=("run", "settings"),
        )

    def api(self) -> str:
        return self._draw("api", tables=API_TABLES.values(), rows_max=ROWS_MAX)

    def problem(self, title: str, message: str) -> str:
        """What is shown instead of a page that does not exist."""
        return self._draw("problem", title=title, message=message, nav="")

    def _list(
        self, template: str, rows: Sequence[Any], page: int, address: str, query: Query | None = None, **shown: Any
    ) -> str | None:
        """One page of the list at `address`; None behind its last one."""
        asked = query.asked if query is not None else {}
        pager = Pager(page=page, pages=pages_of(rows), rows=len(rows), address=address, query=asked)
        if page > pager.pages:
            return None
        return self._draw(template, rows=slice_of(rows, page), pager=pager, query=query, **shown)

    def _draw(self, template: str, /, **shown: Any) -> str:
        book = self._book
        frame = {
            "book": book,
            "snapshot": book.snapshot,
            "links": self._links,
            "poll_s": self._poll_s,
            "is_stale": is_stale(book.snapshot, self._now_s),
            "nav": template,
            "data": (),
        }
        return environment().get_template(f"{template}.html").render(frame | shown)


def empty_page(links: Links, *, poll_s: float) -> str:
    """What every page shows before there is anything."""
    shown = {"links": links, "poll_s": poll_s, "nav": "", "data": (), "is_stale": False, "snapshot": None, "book": None}
    return environment().get_template("empty.html").render(shown)


@lru_cache(maxsize=8)
def joining(line: str) -> Joining | None:
    """What to show of the line that whoever runs this site gave; None without one."""
    if not line:
        return None
    shown = Markup.escape(text.clean(line, JOIN_CHARS_MAX))
    words = dict.fromkeys(word.lower() for word in WORD.findall(line))
    ticket = next(iter(words)) if len(words) == 1 else ""
    try:
        read_ticket(ticket)
    except DipacoError:
        return Joining(line=shown, link=Markup(""), code=None)
    link = f"dipaco://{ticket}"
    return Joining(line=shown, link=Markup(link), code=drawings.qr_code(link))


def is_stale(snapshot: Snapshot, now_s: float) -> bool:
    """Whether the figures are too old to be called those of now; those of a complete run are its last ones."""
    if snapshot.state == "complete":
        return False
    return snapshot.heard_s is None or now_s - snapshot.heard_s > STALE_AFTER_S


def found_of(row: VersionRow) -> list[tuple[str, list[tuple[PeerId, int]], int]]:
    """The kinds of findings of a version: of whom, with how many works, and how many more peers there are."""
    counts = {kind: Counter(getattr(row.findings, kind)) for kind in KINDS}
    return [(kind, of.most_common(ROWS), max(0, len(of) - ROWS)) for kind, of in counts.items() if of]


def round_plot(book: Book) -> drawings.Plot | None:
    """Loss of the whole grid by round, one stage after the other."""
    points: list[drawings.Point] = []
    before: dict[str, int] = {}
    for row in book.snapshot.rounds:
        if row.stage not in before:
            before[row.stage] = int(points[-1].x) if points else 0
        name = f"{book.stage_name(row.stage)} round {row.version}"
        points.append(drawings.Point(x=before[row.stage] + row.version, y=row.loss, name=name))
    marks = [
        drawings.Mark(
            x=before[row.stage] + row.version,
            kind="rollback",
            label=f"{book.stage_name(row.stage)} round {row.version}, {row.module} {back.told}",
        )
        for row in book.rolled_back
        if row.stage in before and (back := row.rollback) is not None
    ]
    borders = [(float(x), book.stage_name(stage)) for stage, x in before.items()]
    return drawings.loss_plot(points, marks, title="Loss by round", borders=borders[1:])


def earned_plot(book: Book, peer: str) -> drawings.Plot | None:
    """All credit of `peer` by round, one stage after the other, from the round before its first work on."""
    before, rounds = {}, 0
    for stage in book.snapshot.run.stages:
        before[stage.id], rounds = rounds, rounds + stage.rounds
    earned: defaultdict[tuple[int, str], float] = defaultdict(float)
    credits = [(row, share.credit) for row, share in book.credited(peer)]
    credits += [(row, audit.credit) for row, audit in book.audits(peer)]
    for row, credit in credits:
        if row.stage in before:
            name = f"{book.stage_name(row.stage)} round {row.version}"
            earned[before[row.stage] + row.version, name] += credit
    if not earned:
        return None
    points = [drawings.Point(x=min(earned)[0] - 1, y=0.0, name="the round before")]
    for (x, name), credit in sorted(earned.items()):
        points.append(drawings.Point(x=x, y=points[-1].y + credit, name=name))
    borders = [(float(x), book.stage_name(stage)) for stage, x in before.items() if points[0].x < x < points[-1].x]
    return drawings.credit_plot(points, borders=borders)


def module_plots(book: Book, name: str) -> list[drawings.Plot]:
    """One per stage in which the module has two judged versions."""
    versions = book.by_module.get(name, ())
    found = (_module_plot(book, name, stage, versions) for stage in dict.fromkeys(row.stage for row in versions))
    return [plot for plot in found if plot is not None]


def _module_plot(book: Book, name: str, stage: str, versions: Sequence[VersionRow]) -> drawings.Plot | None:
    points = [
        drawings.Point(x=row.version, y=row.loss_after, name=f"version {row.version}")
        for row in versions
        if row.stage == stage and row.loss_after is not None
    ]
    marks = [
        drawings.Mark(
            x=loss.round, kind="lost" if loss.kind == "lost" else "rejected", label=f"round {loss.round}: {loss.kind}"
        )
        for loss in book.losses_of_modules.get(name, ())
        if loss.stage == stage
    ] + [
        drawings.Mark(x=row.version, kind="rollback", label=f"version {row.version} {row.rollback.is_now}")
        for row in versions
        if row.stage == stage and row.rollback is not None
    ]
    return drawings.loss_plot(points, marks, title=f"Loss by version, stage {book.stage_name(stage)}")


@cache
def environment() -> Environment:
    """Templates that escape, clean, and do not let a misspelt name pass."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update({name: getattr(text, name) for name in TEXT_FILTERS})
    made.globals.update(navigation=NAVIGATION)
    return made


def _finalize(value: Any) -> Any:
    """Our own markup and numbers as they are, all other text cleaned."""
    return text.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
