"""The table of calls in docs/protocol.md, made from the classes that describe them (node/calls.py, swarm/calls.py)."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator
from typing import Any

from parts import bounds, documented, table

from dipaco_p2p.node.calls import CALLS
from dipaco_p2p.node.items import Page
from dipaco_p2p.swarm.api import Reply


def table_of_calls() -> str:
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
