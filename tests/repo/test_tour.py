"""The tour of the code (docs/tour.md) leads somewhere: its files and names exist, in its order, within its length."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TOUR = REPO / "docs/tour.md"
LINES_MAX = 1500
ORDER = ("Topology", "The outer step", "Claims", "Rounds", "The volunteer", "The leader", "The leaderboard")
SECTION = re.compile(r"^## (\d)\. ([^:]+): .*?$\n\n((?:- .*\n)+)", re.MULTILINE)
STOP = re.compile(r"- \[`([^`]+)`\]\(\.\./([^)]+)\): (.+)")


def stops() -> Iterator[tuple[str, str]]:
    """Every file of the tour with every name in it that is to be read, in order."""
    for _, _, items in SECTION.findall(TOUR.read_text(encoding="utf-8")):
        for item in items.splitlines():
            found = STOP.fullmatch(item)
            assert found and found[1] == found[2], f"not `- [`file`](../file): `name`, ...`: {item}"
            yield from ((found[1], name) for name in re.findall(r"`([^`]+)`", found[3]))


def lines_of(file: str, name: str, root: Path = REPO) -> set[int]:
    """The lines of a class, function or method; of a table of constants nothing counts. Raises LookupError."""
    if not (root / file).is_file():
        raise LookupError(f"no file {file}")
    node: ast.AST = ast.parse((root / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        inner = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part]
        if not inner:
            raise LookupError(f"no `{name}` in {file}")
        node = inner[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    return set(range(node.lineno, node.end_lineno + 1))


def test_the_sections_follow_the_story() -> None:
    sections = SECTION.findall(TOUR.read_text(encoding="utf-8"))
    assert [(number, title) for number, title, _ in sections] == [(str(n), t) for n, t in enumerate(ORDER, start=1)]


@pytest.mark.parametrize(("file", "name"), list(stops()))
def test_every_stop_of_the_tour_is_there(file: str, name: str) -> None:
    assert lines_of(file, name)


def test_the_stops_in_a_file_stand_in_the_order_in_which_they_are_read() -> None:
    """Top to bottom: a tour that jumps about in a file would say that the file tells its story in another order."""
    begins: dict[str, list[int]] = {}
    for file, name in stops():
        begins.setdefault(file, []).append(min(lines_of(file, name)))
    assert [file for file, lines in begins.items() if lines != sorted(lines)] == []


def test_the_tour_fits_into_one_sitting() -> None:
    read: dict[str, set[int]] = {}
    for file, name in stops():
        read.setdefault(file, set()).update(lines_of(file, name))
    assert sum(map(len, read.values())) <= LINES_MAX


@pytest.mark.parametrize(
    ("file", "name", "problem"),
    [("a.py", "Gone", "no `Gone`"), ("a.py", "One.gone", "no `One.gone`"), ("b.py", "One", "no file b.py")],
)
def test_a_stop_that_moved_is_found(tmp_path: Path, file: str, name: str, problem: str) -> None:
    (tmp_path / "a.py").write_text("class One:\n    def step(self):\n        pass\n")
    assert lines_of("a.py", "One.step", tmp_path) == {2, 3}
    with pytest.raises(LookupError, match=re.escape(problem)):
        lines_of(file, name, tmp_path)
