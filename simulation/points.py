"""The fault points that the programs pass, read from their sources."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("dipaco_p2p", "peers", "bootstrap", "simulation")


@functools.cache
def fault_points() -> tuple[str, ...]:
    """All names that `reach` is called with, sorted. Raises ValueError for one that is no literal."""
    found = {name for package in PACKAGES for path in (ROOT / package).rglob("*.py") for name in _points(path)}
    return tuple(sorted(found))


def _points(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "reach":
            continue
        [name] = node.args
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            raise ValueError(f"{path}:{node.lineno}: a fault point must be a literal text")
        yield name.value
