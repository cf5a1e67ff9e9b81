"""What `build.py` says about the run file: every key with its default and bounds, and the files that are ready to use.

The words come from the comments of the template that `init` writes, or stand below the field of the dataclass.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts import REPO, bounds, documented, table

from bootstrap.runfile import _Layout, load_run_file, template

RUNS = "bootstrap/runs"
TABLE_LINE = re.compile(r"\[+([\w.]+)\]+\s*(?:#\s*(.*))?")
KEY_LINE = re.compile(r"(\w+) = (\"[^\"]*\"|[^#]+?)\s*(?:#\s*(.*))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the run file; `table` is what stands in brackets above it."""

    table: str
    name: str
    field: dataclasses.Field[Any]
    text: str


def keys(kind: type = _Layout, above: str = "") -> Iterator[Key]:
    """Every key that the run file may have, table by table."""
    hints, texts = typing.get_type_hints(kind), _texts(kind)
    for field in dataclasses.fields(kind):
        inner = _table_in(hints[field.name])
        if inner is None:
            yield Key(table=above, name=field.name, field=field, text=texts.get(field.name, ""))
        else:
            yield from keys(inner, f"{above}.{field.name}" if above else field.name)


def _table_in(hint: Any) -> type | None:
    kinds = [
        each for each in (hint, *typing.get_args(hint)) if isinstance(each, type) and dataclasses.is_dataclass(each)
    ]
    return kinds[0] if kinds else None


def _texts(kind: type) -> dict[str, str]:
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    pairs = ((statement, text) for statement, text in documented(tree.body) if isinstance(statement, ast.AnnAssign))
    return {statement.target.id: text for statement, text in pairs if isinstance(statement.target, ast.Name)}


def run_keys() -> str:
    """A heading and a table for each table of the run file, with the defaults of the template."""
    said = _said()
    parts = []
    for name in dict.fromkeys(key.table for key in keys()):
        brackets = f"[[{name}]]" if name == "model.levels" else f"[{name}]"
        parts.append(f"**`{brackets}`** {said.get((name, ''), ('', ''))[1]}".rstrip())
        rows = []
        for key in keys():
            if key.table == name:
                default, comment = said.get((name, key.name), ("", ""))
                rows.append((f"`{key.name}`", f"`{default}`", bounds(key.field), key.text or comment))
        parts.append(table(("key", "default", "allowed", "meaning"), rows))
    return "\n\n".join(parts)


def _said() -> dict[tuple[str, str], tuple[str, str]]:
    """Default and comment of every key in the template, by table and key; under no key the comment of the table."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    where = ""
    for line in template("my-run").splitlines():
        if match := TABLE_LINE.fullmatch(line):
            where = match[1]
            found.setdefault((where, ""), ("", match[2] or ""))
        elif match := KEY_LINE.fullmatch(line):
            found.setdefault((where, match[1]), (match[2], match[3] or ""))
    return found


def ready_runs(root: Path = REPO) -> str:
    """The run files that come with the program: what each is for, its grid and its rounds."""
    rows = []
    for path in sorted((root / RUNS).glob("*.toml")):
        run = load_run_file(path).run
        first = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        given = ", ".join(f"`[{name}]`" for name in tomllib.loads(path.read_text(encoding="utf-8")) if name != "run")
        rounds = f"{run.warmup.rounds} + {run.rounds.rounds}"
        rows.append((f"`{path.name}`", first, str(run.topology), str(run.model.path_count), rounds, given))
    return table(("file", "what it is", "grid", "paths", "rounds: warm-up + grid", "tables that differ"), rows)
