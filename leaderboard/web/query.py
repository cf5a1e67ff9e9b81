"""What a reader asks of a list: filters, an order, a page. Whatever else stands in the address is not looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.protocol.signing import PeerId

from ..model import ContributorRow, VersionRow
from .book import Book

QUERY_BYTES_MAX = 512
"""Of everything behind the question mark."""
VALUE_CHARS_MAX = 80
PAGE_MAX = 1_000_000
ROWS = 50
"""Rows of one page of a list."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Order(Generic[R]):
    """A column that a list can be sorted by; None comes last, whichever way."""

    label: str
    key: Callable[[R], Any]
    is_descending: bool = True
    """Which way first."""


VERSION_ORDERS: Mapping[str, Order[VersionRow]] = {
    "age": Order("Age", lambda row: row.made_s),
    "module": Order("Module", lambda row: (row.module, row.version), is_descending=False),
    "version": Order("Version", lambda row: row.version),
    "after": Order("Loss after", lambda row: row.loss_after, is_descending=False),
    "contributors": Order("Contributors", lambda row: row.contributors),
    "tokens": Order("Tokens", lambda row: row.tokens),
    "bytes": Order("Bytes", lambda row: row.snapshot_bytes),
    "mark": Order("Mark", lambda row: row.mark),
}
CONTRIBUTOR_ORDERS: Mapping[str, Order[ContributorRow]] = {
    "rank": Order("Rank", lambda row: row.rank, is_descending=False),
    "recent": Order("Recent", lambda row: row.recent),
    "credit": Order("Credit", lambda row: row.credit),
    "tokens": Order("Tokens", lambda row: row.tokens),
    "contributions": Order("Counted", lambda row: row.contributions),
    "lost": Order("Not counted", lambda row: row.lost),
    "seen": Order("Last seen", lambda row: row.last_s),
}
FILTERS = ("module", "mark", "stage", "peer")
WHO = "who"
"""Of contributors: the end of an id, or a part of a name or team."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question that makes sense; `asked` is how it is written in an address, without the page."""

    sort: str
    is_descending: bool
    page: int
    filters: Mapping[str, str]
    first: str
    """The order that nobody needs to ask for, and which way it goes."""
    first_is_descending: bool

    @property
    def asked(self) -> dict[str, str]:
        return self.sorted_by(self.sort, self.is_descending)

    def sorted_by(self, sort: str, is_descending: bool) -> dict[str, str]:
        """The same question in another order, from its first page."""
        if (sort, is_descending) == (self.first, self.first_is_descending):
            return dict(self.filters)
        return {**self.filters, "sort": sort, "order": "desc" if is_descending else "asc"}


def query_of(asked: Mapping[str, str], orders: Mapping[str, Order[Any]], filters: Sequence[str] = ()) -> Query:
    """Read a question; raises ConfigError for an order or page that does not exist."""
    first = next(iter(orders))
    sort = asked.get("sort") or first
    if sort not in orders:
        raise ConfigError("no such order of the list", hint=f"sort by one of: {', '.join(orders)}")
    way = asked.get("order") or ("desc" if orders[sort].is_descending else "asc")
    if way not in {"asc", "desc"}:
        raise ConfigError("an order is `asc` or `desc`")
    given = {name: asked[name].strip()[:VALUE_CHARS_MAX] for name in filters if asked.get(name, "").strip()}
    return Query(
        sort=sort,
        is_descending=way == "desc",
        page=page_of(asked),
        filters=given,
        first=first,
        first_is_descending=orders[first].is_descending,
    )


def page_of(asked: Mapping[str, str]) -> int:
    """The number of the page, from 1; raises ConfigError."""
    said = asked.get("page") or "1"
    if not (said.isascii() and said.isdigit() and len(said) <= 7 and 1 <= int(said) <= PAGE_MAX):
        raise ConfigError("no such page of the list", hint="pages are whole numbers from 1 on")
    return int(said)


def ordered(rows: Sequence[R], query: Query, orders: Mapping[str, Order[R]]) -> list[R]:
    """`rows` as the question wants them; equal ones keep their order."""
    key = orders[query.sort].key
    known = [row for row in rows if key(row) is not None]
    unknown = [row for row in rows if key(row) is None]
    return sorted(known, key=key, reverse=query.is_descending) + unknown


def asked_versions(book: Book, query: Query) -> list[VersionRow]:
    """The versions that the question asks for, in its order; `book.newest` or its reverse where that is by age."""
    rows = [row for row in book.newest if _is_asked(book, row, query.filters)]
    if query.sort == "age":
        return rows if query.is_descending else rows[::-1]
    return ordered(rows, query, VERSION_ORDERS)


def asked_contributors(book: Book, query: Query) -> list[ContributorRow]:
    """The contributors that the question asks for, in its order."""
    who = query.filters.get(WHO, "")
    found = [row for row in book.snapshot.contributors if ends_with(row.peer, who) or _is_called(row, who)]
    return ordered(found, query, CONTRIBUTOR_ORDERS)


def ends_with(peer: PeerId, end: str) -> bool:
    """Whether `end` is the end of an id, as it was typed or as pages and commands show it: `...W7HCKx`."""
    bare = end.lstrip(".…")
    return peer.endswith(bare) and (bare != "" or end == "")


def _is_called(row: ContributorRow, who: str) -> bool:
    return any(who.casefold() in said.casefold() for said in (row.name, row.team))


def _is_asked(book: Book, row: VersionRow, filters: Mapping[str, str]) -> bool:
    peer = filters.get("peer", "")
    return (
        filters.get("module", str(row.module)) == str(row.module)
        and filters.get("mark", row.mark) == row.mark
        and filters.get("stage", book.stage_name(row.stage)) == book.stage_name(row.stage)
        and (not peer or any(ends_with(share.peer, peer) for share in row.shares))
    )


def slice_of(rows: Sequence[R], page: int, rows_max: int = ROWS) -> Sequence[R]:
    """One page of `rows`."""
    return rows[(page - 1) * rows_max : page * rows_max]


def pages_of(rows: Sequence[object], rows_max: int = ROWS) -> int:
    """How many pages `rows` fill: at least one."""
    return max(1, -(-len(rows) // rows_max))
