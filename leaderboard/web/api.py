"""The tables as JSON and CSV documents, and the JSON Schema that the former keep.

A document holds one page of a table. `next` is the address of the page after it, beside this one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from typing import Any

from .book import Book
from .columns import TABLES, VERSION, Cell, Column, Table
from .text import csv_cell

ROWS_MAX = 1_000
"""Rows of one document."""
SCHEMA_ID = f"dipaco-leaderboard/{VERSION}"


def rows_of(table: Table[Any], book: Book) -> Sequence[Any]:
    """All rows of `table`, before they become cells."""
    rows: Iterable[Any] = table.rows(book)
    return rows if isinstance(rows, Sequence) else list(rows)


def json_document(table: Table[Any], book: Book, rows: Sequence[Any], *, page: int, next_page: str | None) -> str:
    """One page of `rows` as JSON; `page` counts from 1."""
    document = {
        "schema": table.schema,
        "run": book.snapshot.run.origin,
        "page": page,
        "pages": pages_of(rows),
        "rows_total": len(rows),
        "next": next_page,
        "rows": [{column.name: column.cell(row) for column in table.columns} for row in _slice(rows, page)],
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def csv_document(table: Table[Any], rows: Sequence[Any], *, page: int) -> str:
    """One page of `rows` as CSV (RFC 4180), with a head; what is null is empty."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow([column.name for column in table.columns])
    for row in _slice(rows, page):
        writer.writerow([_plain(column.cell(row)) for column in table.columns])
    return out.getvalue()


def pages_of(rows: Sequence[Any]) -> int:
    """Documents that hold all of `rows`: at least one."""
    return max(1, -(-len(rows) // ROWS_MAX))


@cache
def schema_document() -> str:
    """The schema of all JSON documents (JSON Schema, draft 2020-12)."""
    defs = {table.name: _table_schema(table) for table in TABLES.values()}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "schema.json",
        "title": "Tables of a dipaco-p2p leaderboard",
        "description": f"{SCHEMA_ID}. Columns are only ever added; anything else makes a new version.",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in defs],
        "$defs": defs,
    }
    return json.dumps(schema, indent=1) + "\n"


def _slice(rows: Sequence[Any], page: int) -> Iterable[Any]:
    return islice(rows, (page - 1) * ROWS_MAX, page * ROWS_MAX)


def _plain(cell: Cell) -> Cell:
    if isinstance(cell, bool):
        return str(cell).lower()
    return csv_cell(cell) if isinstance(cell, str) else cell


def _table_schema(table: Table[Any]) -> dict[str, Any]:
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


def _column_schema(column: Column[Any]) -> dict[str, Any]:
    return {"type": [column.kind, "null"] if column.may_be_null else column.kind, "description": column.about}
