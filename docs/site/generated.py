"""The parts of the site that are made from the code while it is built: nothing of them is committed.

A page of docs/ says `<!-- generated: NAME -->` where such a part stands; NAME is a key of `PARTS`. The line in italics
below is for readers of the page in the repository. Every function gives markdown. Texts come from docstrings, from the
strings below fields and constants, and from typer's own generator.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from bootstrap.runfile import _Layout, load_run_file, template
from dipaco_p2p import errors
from dipaco_p2p.node.calls import CALLS
from dipaco_p2p.node.items import Page
from dipaco_p2p.protocol import decrees, documents, invitations, judgement, keeping, liveness, records
from dipaco_p2p.protocol import judgement as checks
from dipaco_p2p.protocol.claims import CLAIM_TRANSITIONS
from dipaco_p2p.protocol.reasons import PASSING, Reason
from dipaco_p2p.protocol.rounds import ROUND_TRANSITIONS
from dipaco_p2p.strict import written
from dipaco_p2p.swarm.api import Reply
from peers.preferences.layers import template as preferences

MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$(?:\n\*Made from the code.*\*$)?", re.MULTILINE)
REPO = Path(__file__).resolve().parents[2]
NOT_BETWEEN_PEERS = ("core/", "program/", "swarm/memory.py")
"""Of dipaco_p2p/: the arithmetic, what one process does on its machine, and the swarm of the tests."""

RECORDS = (records.Record, liveness.Heartbeat, liveness.Claim, liveness.Head)
DOCUMENTS = (
    documents.BlobRef,
    documents.Contribution,
    documents.Receipt,
    documents.ModuleVersion,
    documents.Share,
    judgement.Judgement,
    judgement.ModuleLoss,
    judgement.PathLoss,
    checks.Check,
    keeping.KeepersCount,
    keeping.KeeperCount,
    documents.Rejection,
    decrees.Decree,
    decrees.ShownDecree,
    invitations.Invitation,
    documents.Manifest,
    documents.ShardRef,
    documents.GenesisRef,
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table; bars and line breaks in cells are made harmless."""
    lines = [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands(program: str, module: str) -> str:
    """Every command of a program as a section of its own, by `typer utils docs`."""
    command = [sys.executable, "-m", "typer", module, "utils", "docs", "--name", program]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return re.sub(r"^#+ (?=`)", "### ", done.stdout, flags=re.MULTILINE).strip()


def machine(transitions: Mapping[tuple[StrEnum, StrEnum], StrEnum]) -> str:
    """A transition table; the machine starts in the state of its first row."""
    rows = ((f"`{state.name}`", str(event), f"`{to.name}`") for (state, event), to in transitions.items())
    return table(("in", "when", "goes to"), rows)


def documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Each name that is assigned, with the string that stands below it, as this project documents fields."""
    for statement, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            yield ast.unparse(target), " ".join(str(below.value.value).split()) if is_text else ""


def texts_of(kind: type) -> dict[str, str]:
    """What stands below each field of a dataclass and of those that it extends, or below each member of an enum."""
    found: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, kind.__bases__):
        found |= texts_of(base)
    [tree] = ast.parse(inspect.getsource(kind)).body
    return found | dict(documented(tree.body))


def fields(kinds: Iterable[type]) -> str:
    """For each dataclass its docstring, and a table of its fields."""
    return "\n\n".join(map(_fields_of, kinds))


def _fields_of(kind: type) -> str:
    texts = texts_of(kind)
    rows = [
        (f"`{one.name}`", f"`{one.type}`", bounds(one), texts.get(one.name, "")) for one in dataclasses.fields(kind)
    ]
    head = ("field", "type", "bounds", "meaning")
    return f"**{kind.__name__}.** {' '.join((kind.__doc__ or '').split())}\n\n{table(head, rows)}"


def bounds(field: dataclasses.Field[Any]) -> str:
    """What a field may hold beyond its type."""
    low, high, choices, items = (field.metadata.get(name) for name in ("low", "high", "choices", "items"))
    if choices:
        return " or ".join(f"`{choice}`" for choice in choices)
    least, most = ([f"≥ {low:g}"] if low is not None else []), ([f"≤ {_power(high)}"] if high is not None else [])
    return ", ".join([*least, *most, *([f"≤ {items} items"] if items is not None else [])])


def _power(value: float) -> str:
    is_power = isinstance(value, int) and value > 2**16 and value & (value - 1) == 0
    return f"2^{int(value).bit_length() - 1}" if is_power else f"{value:g}"


def calls() -> str:
    """Every call: who serves it, the fields of its request and reply with what they mean, its own reasons to refuse."""
    rows = []
    for method, kind in CALLS.items():
        reply = typing.get_args(kind.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        asked = f"{_words(kind)} {_fields(kind)}"
        rows.append(
            (f"`{method}`", kind.SERVED_BY, asked, _reply(reply), ", ".join(f"`{one}`" for one in kind.REFUSES))
        )
    return table(("method", "served by", "request", "reply", "refusals of its own"), rows)


def _reply(kind: Any) -> str:
    if typing.get_origin(kind) is Page:
        return f"`{{}}`, body: page of {typing.get_args(kind)[0].KIND}s"
    if kind is Reply:
        return "`{}`, body: as the request says"
    return _fields(kind) or "`{}`"


def _words(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _fields(kind: type) -> str:
    return "; ".join(f"`{name}`{limits}{': ' + text if text else ''}".rstrip(".") for name, limits, text in _told(kind))


def _told(kind: type) -> Iterator[tuple[str, str, str]]:
    """The fields that go over the wire, with their bounds and the text below each; those of a base first."""
    for one in reversed(kind.__mro__):
        if "__dataclass_fields__" in vars(one):
            [tree] = ast.parse(inspect.getsource(one)).body
            assert isinstance(tree, ast.ClassDef)
            for statement, text in documented(tree.body):
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                    name = ast.unparse(statement.target)
                    limits = bounds(vars(one)["__dataclass_fields__"][name])
                    yield name.rstrip("_"), f" ({limits})" if limits else "", text


def reasons() -> str:
    """Every reason to refuse, and after which of them another try helps."""
    texts = texts_of(Reason)
    known = [(str(reason), texts.get(reason.name, "")) for reason in Reason]
    rows = ((f"`{reason}`", "yes" if reason in PASSING else "", text) for reason, text in sorted(known))
    return table(("reason", "another try helps", "meaning"), rows)


def limits(root: Path = REPO / "dipaco_p2p") -> str:
    """Every numeric constant of the rooms between peers, with the text that stands below it."""
    files = sorted(root.glob("*/**/*.py"))
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    shown = {file: tree for file, tree in trees.items() if not file.startswith(NOT_BETWEEN_PEERS)}
    known: dict[str, float] = {}
    for _ in range(2):  # the second time with what other files define
        rows = [row for file, tree in shown.items() for row in _limits_of(file, tree, known)]
    return table(("constant", "value", "where", "meaning"), rows)


def _limits_of(file: str, tree: ast.Module, known: dict[str, float]) -> Iterator[tuple[str, str, str, str]]:
    texts = dict(documented(tree.body))
    for node in tree.body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) and isinstance(node, ast.Assign):
            value = _number(node.value, known)
            if value is not None:
                known[name] = value
                yield f"`{name}`", _readable(name, value), file, texts[name]


def _number(node: ast.expr, known: Mapping[str, float]) -> float | None:
    """The value of an expression of numbers and of names that are known."""
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}}, dict(known))
    except Exception:  # a call, another name: not a plain number
        return None
    return value if type(value) in (int, float) else None


def _readable(name: str, value: float) -> str:
    if "BYTES" in name and value >= 1024:
        return f"{value / 2**20:g} MiB" if value >= 2**20 else f"{value / 1024:g} KiB"
    if isinstance(value, int) and value > 2**30:
        return f"2^{value.bit_length() - 1}" if value & (value - 1) == 0 else f"2^{value.bit_length()} - 1"
    return f"{value:g} s" if name.endswith("_S") or "_S_" in name else f"{value}"


FAILED = "Any other failure. Of `demo`: a promise did not hold; of `evaluate`: a loss differs from the published one."


def exit_codes() -> str:
    """The exit codes of both programs, from the tree of errors."""
    meaning: dict[int, list[str]] = {errors.EXIT_OK: ["Finished."]}
    for kind in vars(errors).values():
        if kind is errors.DipacoError:
            meaning[kind.exit_code] = [FAILED]
        elif isinstance(kind, type) and issubclass(kind, errors.DipacoError) and "exit_code" in vars(kind):
            meaning.setdefault(kind.exit_code, []).append(" ".join((kind.__doc__ or "").split()))
    meaning[errors.EXIT_SECOND_INTERRUPT].append("Or left at once, at the second Ctrl-C.")
    return table(("code", "meaning"), ((str(code), " ".join(texts)) for code, texts in sorted(meaning.items())))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the run file; `table` is what stands in brackets above it."""

    table: str
    name: str
    field: dataclasses.Field[Any]
    text: str


def keys(kind: type = _Layout, above: str = "") -> Iterator[Key]:
    """Every key that the run file may have, table by table."""
    hints, texts = typing.get_type_hints(kind), texts_of(kind)
    tables: list[tuple[type, str]] = []
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], written(field.name)
        inner = next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)
        if inner is None:
            yield Key(table=above, name=name, field=field, text=texts.get(field.name, ""))
        else:
            tables.append((inner, f"{above}.{name}" if above else name))
    for inner, name in tables:
        yield from keys(inner, name)


def run_keys() -> str:
    """A heading and a table for each table of the run file: default, bounds and meaning of every key."""
    tables_written = tomllib.loads(template("my-run"))
    tables: dict[str, list[tuple[str, str, str, str]]] = {}
    for key in keys():
        found: Any = tables_written
        for name in [*key.table.split("."), key.name]:
            found = (found[0] if isinstance(found, list) else found)[name]
        row = (f"`{key.name}`", f"`{json.dumps(found)}`", bounds(key.field), key.text)
        tables.setdefault(key.table, []).append(row)
    head = ("key", "default", "allowed", "meaning")
    return "\n\n".join(f"**`[{name}]`**\n\n{table(head, rows)}" for name, rows in tables.items())


def ready_runs() -> str:
    """The run files that come with the program: what each is for, its grid and its rounds."""
    rows = []
    for path in sorted((REPO / "bootstrap/runs").glob("*.toml")):
        run, text = load_run_file(path).run, path.read_text(encoding="utf-8")
        given = ", ".join(f"`[{name}]`" for name in tomllib.loads(text) if name != "run")
        rounds = f"{run.warmup.rounds} + {run.rounds.rounds}"
        first = text.splitlines()[0].removeprefix("# ")
        rows.append((f"`{path.name}`", first, str(run.topology), str(run.model.path_count), rounds, given))
    return table(("file", "what it is", "grid", "paths", "rounds: warm-up + grid", "tables that differ"), rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "claims-machine": lambda: machine(CLAIM_TRANSITIONS),
    "rounds-machine": lambda: machine(ROUND_TRANSITIONS),
    "calls": calls,
    "refusals": reasons,
    "limits": limits,
    "records": lambda: fields(RECORDS),
    "documents": lambda: fields(DOCUMENTS),
    "grant": lambda: fields([documents.Grant]),
    "exit-codes": exit_codes,
    "peer-commands": lambda: commands("dipaco-peer", "peers.cli"),
    "bootstrap-commands": lambda: commands("dipaco-bootstrap", "bootstrap.cli"),
    "run-file": lambda: f"```toml\n{template('my-run').strip()}\n```",
    "run-keys": run_keys,
    "ready-runs": ready_runs,
    "preferences": lambda: f"```toml\n{preferences().strip()}\n```",
}


def fill(markdown: str) -> str:
    """A page with its generated parts; raises KeyError for one that nobody makes."""
    return MARK.sub(lambda found: PARTS[found[1]](), markdown)
