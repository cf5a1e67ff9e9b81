"""The whole site as files for any web host, or for no host at all: open `index.html`.

It is written beside its place and moved there when it is whole, so that a reader never meets half of it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dipaco_p2p.errors import ConfigError

from ..model import Snapshot
from . import query
from .api import API_TABLES, csv_document, json_document, pages_of, rows_of, schema_document
from .book import Book
from .links import file_of, static_links
from .site import STATIC, Site

MARKER = ".dipaco-leaderboard"
"""Stands in a copy: only a folder that has it, or that is empty, is replaced."""


def export_site(snapshot: Snapshot, folder: Path, *, now_s: float) -> None:
    """Write the site of `snapshot` to `folder`, in place of an earlier copy there.

    Raises ConfigError if something else is there.
    """
    target = folder.absolute()
    require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        made = Path(beside) / "site"
        for file, text in files_of(snapshot, now_s=now_s):
            path = made / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
        shutil.copytree(STATIC, made / "static")
        (made / MARKER).write_text("A copy of a leaderboard; `export` replaces this folder.\n", encoding="utf-8")
        if target.exists():
            target.rename(Path(beside) / "before")
        made.rename(target)


def files_of(snapshot: Snapshot, *, now_s: float) -> Iterator[tuple[str, str]]:
    """Every file that is made, but not those of `static/`: its name, with slashes, and its text."""
    book = Book(snapshot)
    for address, page in _addresses(book):
        file = file_of(address)
        numbered = file if page == 1 else f"{file.removesuffix('.html')}-{page}.html"
        _, name, *key = address.split("/")
        site = Site(book, static_links(file), now_s=now_s)
        text = site.page(name=name, key="/".join(key), asked={"page": str(page)})
        assert text is not None, address
        yield numbered, text
    yield from _documents(book)
    yield "api/v1/schema.json", schema_document()


def _addresses(book: Book) -> Iterator[tuple[str, int]]:
    """Every page of the server, and the number of each page of a list."""
    yield from ((address, 1) for address in ("/", "/modules", "/paths", "/run", "/api"))
    lists: dict[str, Sequence[object]] = {"/versions": book.newest, "/contributors": book.snapshot.contributors}
    lists["/decrees"] = book.snapshot.decrees
    lists |= {f"/modules/{name}": book.by_module.get(name, ()) for name in book.names}
    lists |= {f"/contributors/{peer}": book.credited(peer) for peer in book.contributors}
    for address, rows in lists.items():
        yield from ((address, page) for page in range(1, query.pages_of(rows) + 1))
    for version in book.by_address:
        yield f"/versions/{version}", 1
        yield f"/lineage/{version}", 1


def _documents(book: Book) -> Iterator[tuple[str, str]]:
    """Every table as JSON and CSV, each page a file."""
    for name, table in API_TABLES.items():
        rows = rows_of(table, book)
        for page in range(1, pages_of(rows) + 1):
            stem = f"api/v1/{name}{f'-{page}' if page > 1 else ''}"
            following = f"{name}-{page + 1}.json" if page < pages_of(rows) else None
            yield f"{stem}.json", json_document(table, book, rows, page=page, next_page=following)
            yield f"{stem}.csv", csv_document(table, rows, page=page)


def require_replaceable(target: Path) -> None:
    """Raise ConfigError if something else than an earlier copy is there."""
    if target.exists() and not (target.is_dir() and ((target / MARKER).exists() or not any(target.iterdir()))):
        hint = "name a folder that is new, empty, or an earlier copy of a leaderboard"
        raise ConfigError(f"{target} holds something else", hint=hint)
