"""The versions around one version, and what went into each, as a graph that reads from the newest down.

Drawn as one line of versions with the contributions of each on a branch that joins it, narrow enough for a phone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..model import ShareRow, VersionRow
from .book import Book

AROUND = 3
"""Versions shown before and after the one in question."""
SHARES_MAX = 12
"""Contributions drawn of one version; the rest are counted."""
ROW, WIDTH, TRUNK, BRANCH = 30, 340, 16, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionNode:
    """One version on the line."""

    row: VersionRow
    y: int
    is_asked: bool
    """Whether the graph is about this one."""
    is_parent: bool
    """Whether a version above names it as its parent; the line ends at the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareNode:
    """One contribution on its branch, or the count of those that are not drawn."""

    y: int
    into_y: int
    share: ShareRow | None
    more: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Everything at its place."""

    versions: tuple[VersionNode, ...]
    shares: tuple[ShareNode, ...]
    height: int
    width: int = WIDTH
    trunk: int = TRUNK
    branch: int = BRANCH


def lineage(book: Book, row: VersionRow) -> Graph:
    """The graph around `row`."""
    chain = [*reversed(list(_after(book, row))), row, *_before(book, row)]
    versions, shares, y = [], [], ROW // 2
    for place, version in enumerate(chain):
        is_last = place == len(chain) - 1
        versions.append(VersionNode(row=version, y=y, is_asked=version is row, is_parent=not is_last))
        into_y, y = y, y + ROW
        for node in _shares(version, y, into_y):
            shares.append(node)
            y += ROW
    return Graph(versions=tuple(versions), shares=tuple(shares), height=y - ROW // 2)


def _after(book: Book, row: VersionRow) -> Iterator[VersionRow]:
    """Its child in the same module and stage, and that one's."""
    rows = book.by_module.get(str(row.module), ())
    for _ in range(AROUND):
        found = next((each for each in rows if _follows(each, row)), None)
        if found is None:
            return
        yield found
        row = found


def _follows(child: VersionRow, row: VersionRow) -> bool:
    return child.parent == row.digest and (child.stage, child.version) == (row.stage, row.version + 1)


def _before(book: Book, row: VersionRow) -> Iterator[VersionRow]:
    for _ in range(AROUND):
        found = _parent(book, row)
        if found is None:
            return
        yield found
        row = found


def _parent(book: Book, row: VersionRow) -> VersionRow | None:
    """The version that `row` names; for the first one of a later stage, the one with the same parameters before it."""
    if not row.parent:
        return next((each for each in book.same(row) if each.version), None)
    before = (each for each in book.by_module.get(str(row.module), ()) if _follows(row, each))
    if (found := next(before, None)) is not None:  # by its place: a rollback has the digest of an earlier version
        return found
    begun = (each for each in book.begun.get(row.parent, ()) if each.module == row.module and _follows(row, each))
    return next(begun, None) or book.by_digest.get(row.parent)


def _shares(version: VersionRow, y: int, into_y: int) -> Iterator[ShareNode]:
    shown = version.shares[:SHARES_MAX]
    for place, share in enumerate(shown):
        yield ShareNode(y=y + place * ROW, into_y=into_y, share=share)
    if more := len(version.shares) - len(shown):
        yield ShareNode(y=y + len(shown) * ROW, into_y=into_y, share=None, more=more)
