"""What `build.py` puts into the documentation, made from tables, dataclasses, constants, calls and commands.

Every function gives markdown. What cannot be asked of the running code (the text below a field, the words of a
refusal) is read from its source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from dipaco_p2p import errors
from dipaco_p2p.protocol.reasons import Reason

S = typing.TypeVar("S", bound=StrEnum)
E = typing.TypeVar("E", bound=StrEnum)

REPO = Path(__file__).resolve().parents[1]
CODE = ("dipaco_p2p", "peers", "bootstrap")

PASSING_FILE = "dipaco_p2p/protocol/reasons.py"
LIMIT_FOLDERS = ("dipaco_p2p/protocol", "dipaco_p2p/swarm", "dipaco_p2p/runtime")
NOT_LIMITS = ("dipaco_p2p/swarm/memory.py", "dipaco_p2p/runtime/control/")
"""Not between peers: the swarm of the tests, and what a command says to the program beside it."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table; bars and line breaks in cells are made harmless."""
    lines = [[_cell(text) for text in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def parsed(root: Path, folder: str) -> Iterator[tuple[str, ast.Module]]:
    """Every Python file under `folder`, by its path from `root`, in order."""
    for path in sorted((root / folder).rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def documented(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Each statement with the string that stands below it, as this project documents fields and constants."""
    for statement, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        text = below.value.value if is_text else ""  # type: ignore[attr-defined]
        yield statement, " ".join(text.split()) if isinstance(text, str) else ""


def machine(transitions: Mapping[tuple[S, E], S]) -> str:
    """A transition table as a mermaid diagram."""
    start = next(iter(transitions))[0]
    lines = [f"    [*] --> {start.name}"]
    lines += [f"    {state.name} --> {to.name}: {event}" for (state, event), to in transitions.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def fields(kinds: Iterable[type]) -> str:
    """A heading, the docstring and a table of fields for each dataclass."""
    return "\n\n".join(map(_fields_of, kinds))


def _fields_of(kind: type) -> str:
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    known = {field.name: field for field in dataclasses.fields(kind)}
    rows = []
    for statement, text in documented(tree.body):
        name = statement.target.id if isinstance(statement, ast.AnnAssign) else ""  # type: ignore[union-attr]
        if name in known:
            kind_text = ast.unparse(statement.annotation)  # type: ignore[attr-defined]
            rows.append((f"`{name}`", f"`{kind_text}`", bounds(known[name]), text))
    return f"**{kind.__name__}.** {' '.join((kind.__doc__ or '').split())}\n\n" + table(
        ("field", "type", "bounds", "meaning"), rows
    )


def bounds(field: dataclasses.Field[Any]) -> str:
    """What a field may hold beyond its type."""
    low, high, choices = (field.metadata.get(name) for name in ("low", "high", "choices"))
    if choices:
        return " or ".join(f"`{choice}`" for choice in choices)
    parts = [f"≥ {low:g}" if low is not None else "", f"≤ {_power(high)}" if high is not None else ""]
    return ", ".join(filter(None, parts))


def _power(value: float) -> str:
    is_power = isinstance(value, int) and value > 2**16 and value & (value - 1) == 0
    return f"2^{value.bit_length() - 1}" if is_power and isinstance(value, int) else f"{value:g}"


def refusals(root: Path = REPO) -> str:
    """Every reason that a peer may give, what it says with it, and where; read from the calls that make them."""
    said: dict[str, dict[str, set[str]]] = {str(reason): {} for reason in Reason}
    for folder in CODE:
        for file, tree in parsed(root, folder):
            for reason, message in _refusals_in(tree):
                said.setdefault(reason, {}).setdefault(message, set()).add(Path(file).name)
    passing = _passing(root)
    rows = []
    for reason, messages in sorted(said.items()):
        words = "; ".join(filter(None, sorted(messages))) or "the error itself"
        where = ", ".join(sorted(set().union(*messages.values())))
        rows.append((f"`{reason}`", "yes" if reason in passing else "", words, where))
    return table(("reason", "another try helps", "what is said with it", "in"), rows)


def _refusals_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        local = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name == "Refused" and isinstance(node, ast.Call):
                given = next((word.value for word in node.keywords if word.arg == "reason"), ast.Constant("refused"))
                yield from ((reason, _message(node.args[0], local)) for reason in _reasons(given, local))
            elif name == "Verdict" and isinstance(node, ast.Call) and len(node.args) == 2:
                yield from ((reason, _message(node.args[1], local)) for reason in _reasons(node.args[0], local))


def _reasons(value: ast.expr, local: Mapping[str, ast.expr]) -> list[str]:
    if isinstance(value, ast.IfExp):
        return _reasons(value.body, local) + _reasons(value.orelse, local)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "Reason":
        return [str(Reason[value.attr])]
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [value.value]
    return _reasons(local[value.id], {}) if isinstance(value, ast.Name) and value.id in local else []


def _message(value: ast.expr, local: Mapping[str, ast.expr]) -> str:
    """The text with its values left out; empty for what is not written there."""
    if isinstance(value, ast.Name) and value.id in local:
        return _message(local[value.id], {})
    if isinstance(value, ast.Constant):
        return str(value.value)
    parts = value.values if isinstance(value, ast.JoinedStr) else []
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def _passing(root: Path) -> set[str]:
    """The reasons after which a push is tried again."""
    tree = ast.parse((root / PASSING_FILE).read_text(encoding="utf-8"))
    sets = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PASSING"
    ]
    return {
        reason for value in sets if isinstance(value, ast.Set) for item in value.elts for reason in _reasons(item, {})
    }


OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Pow: operator.pow,
}


def limits(root: Path = REPO) -> str:
    """Every numeric constant of the layers between peers, with the text that stands below it."""
    known: dict[str, float] = {}
    rows = []
    for _ in range(2):  # the second time with what other files define
        rows = list(_limits(root, known))
    return table(("constant", "value", "where", "meaning"), rows)


def _limits(root: Path, known: dict[str, float]) -> Iterator[tuple[str, str, str, str]]:
    for folder in LIMIT_FOLDERS:
        for file, tree in parsed(root, folder):
            for statement, text in documented(tree.body):
                name = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
                value = _number(statement.value, known) if name.isupper() else None  # type: ignore[attr-defined]
                if value is not None and not name.startswith("_") and not file.startswith(NOT_LIMITS):
                    known[name] = value
                    yield f"`{name}`", _readable(name, value), file.removeprefix("dipaco_p2p/"), text


def _number(value: ast.expr, known: Mapping[str, float]) -> float | None:
    if isinstance(value, ast.Constant):
        return value.value if type(value.value) in (int, float) else None  # type: ignore[return-value]
    if isinstance(value, ast.Name):
        return known.get(value.id)
    if isinstance(value, ast.BinOp) and type(value.op) in OPERATORS:
        left, right = _number(value.left, known), _number(value.right, known)
        return None if left is None or right is None else OPERATORS[type(value.op)](left, right)
    return None


def _readable(name: str, value: float) -> str:
    if "BYTES" in name and value >= 1024:
        unit, letters = (2**20, "MiB") if value >= 2**20 else (1024, "KiB")
        return f"{value / unit:g} {letters}"
    if isinstance(value, int) and value > 2**30:
        return f"2^{value.bit_length() - 1}" if value & (value - 1) == 0 else f"2^{value.bit_length()} - 1"
    return f"{value:g} s" if name.endswith("_S") or "_S_" in name else f"{value}"


def exit_codes() -> str:
    """The exit codes of both programs, from the tree of errors."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DipacoError)]
    meaning: dict[int, list[str]] = {errors.EXIT_OK: ["Finished."]}
    for kind in kinds:
        if kind is errors.DipacoError:
            meaning[kind.exit_code] = ["Anything else that went wrong; of `demo`: a promise that did not hold."]
        elif "exit_code" in vars(kind):
            meaning.setdefault(kind.exit_code, []).append(" ".join((kind.__doc__ or "").split()))
    meaning[errors.EXIT_SECOND_INTERRUPT] = ["Left at once, at the second Ctrl-C."]
    return table(("code", "meaning"), ((str(code), " ".join(texts)) for code, texts in sorted(meaning.items())))
