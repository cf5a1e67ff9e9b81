"""What a case is: a question with one answer, which is found in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Figures = dict[str, object]
"""What a case has found, by name; JSON. `ok` is whether it is as wanted, where something is wanted."""
Found = Mapping[str, Figures]
"""What a part's cases have found, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every case is told."""

    folder: Path
    """Where everything is kept."""
    device: str
    is_small: bool
    """Sizes for a CPU, that say nothing but that it works; nothing is compiled, and no time means anything."""

    def steps(self, count: int) -> int:
        """So many, or two."""
        return 2 if self.is_small else count


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question."""

    name: str
    limit_s: float
    """When it is ended; it is not begun with less than half of that left."""
    ask: Callable[[Bench], Figures]
    is_small_too: bool = True
    """Whether it has a small size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Cases about one thing, in order of importance."""

    name: str
    about: str
    cases: tuple[Case, ...]
    rows: Callable[[Found], list[str]]
    """The lines of the page, in Markdown."""


def table(*rows: tuple[object, ...]) -> list[str]:
    """A table in Markdown; the first row is its head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return [lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:], ""]


def verdict(figures: Figures) -> str:
    """Whether it is as wanted, in a word."""
    return {True: "yes", False: "**NO**"}.get(bool(figures["ok"]), "") if "ok" in figures else ""


def number(figures: Figures, name: str) -> float:
    """A figure that is a number."""
    value = figures[name]
    assert isinstance(value, (int, float)), (name, value)
    return float(value)
