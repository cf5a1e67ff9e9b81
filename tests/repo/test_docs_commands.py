"""What the documentation shows can be typed: its command lines and keys exist, and every command has an example.

Asked of the parser itself and of what `--help` prints, while docs/reference.md is made from the annotations.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import shlex
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bootstrap import runfile
from bootstrap.cli import app as bootstrap_app
from peers.cli import app as peer_app
from peers.preferences.keys import Preferences

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "docs"))
build = importlib.import_module("build")
listed = importlib.import_module("commands")

PROGRAMS = {"dipaco-peer": peer_app, "dipaco-bootstrap": bootstrap_app}
PAGES = [*build.pages(), REPO / "CONTRIBUTING.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
ENDS = {"|", ">", "&&", ";", "||", "&"}
"""Where a shell ends the command line."""
FILES = (runfile._Layout, Preferences)
"""What TOML files of this project may say."""

Member = Any
"""A command or group as typer made it."""


def tree(title: str, node: Member) -> Iterator[tuple[str, Member]]:
    """A command and everything below it, by what is typed."""
    yield title, node
    for name, inner in getattr(node, "commands", {}).items():
        if not inner.hidden:
            yield from tree(f"{title} {name}", inner)


ROOTS = {name: typer.main.get_command(app) for name, app in PROGRAMS.items()}
COMMANDS = dict(pair for name, root in ROOTS.items() for pair in tree(name, root))
WITHOUT_GROUPS = {
    title: node for title, node in COMMANDS.items() if " " not in title or not getattr(node, "commands", {})
}


def problem_of(line: str) -> str:
    """What is wrong with a command line of this project; empty if nothing is."""
    words = shlex.split(line, comments=True)
    words = words[: next((place for place, word in enumerate(words) if word in ENDS), len(words))]
    title, node, words = words[0], ROOTS[words[0]], words[1:]
    while True:
        parser = node.make_parser(node.context_class(node, info_name=title, resilient_parsing=False))
        try:
            _, words, _ = parser.parse_args(list(words))
        except Exception as error:
            return f"{title}: {error}"
        inner = getattr(node, "commands", {})
        if not inner or not words:
            return f"{title}: too much: {words}" if words else ""
        if words[0] not in inner:
            return f"{title}: no command `{words[0]}`"
        title, node, words = f"{title} {words[0]}", inner[words[0]], words[1:]


def shown(text: str, *, starts: tuple[str, ...]) -> Iterator[str]:
    """The lines of console blocks and the pieces of inline code that begin with one of the words."""
    blocks = [found[2] for found in FENCE.finditer(text) if found[1] in {"console", "sh", "bash", "shell"}]
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", "").splitlines()]
    for piece in [*lines, *INLINE.findall(FENCE.sub("", text))]:
        if piece.split(" ")[0] in starts and "[OPTIONS]" not in piece:
            yield piece


# -- the reference


@pytest.mark.parametrize("title", COMMANDS)
def test_every_command_and_option_that_help_tells_is_in_the_reference(title: str) -> None:
    text = (REPO / "docs/reference.md").read_text(encoding="utf-8")
    sections = re.findall(rf"^### `{title}`$.*?(?=^###? |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert len(sections) == 1, f"{len(sections)} sections"
    program, *words = title.split()
    told = CliRunner().invoke(PROGRAMS[program], [*words, "--help"], env={"COLUMNS": "400", "NO_COLOR": "1"}).output
    rows = [re.split(r"\s{2,}", line.strip("│ *")) for line in told.splitlines()]
    cells = [cell for row in rows for cell in itertools.takewhile(lambda cell: cell.startswith("-"), row)]
    options = {option for cell in cells for option in re.split(r"[,/\s]+", cell) if option.startswith("--")}
    own = {"--help", "--install-completion", "--show-completion"}
    assert "--help" in options
    assert [option for option in sorted(options - own) if not re.search(rf"`{option}[ `]", sections[0])] == []


def test_the_tree_of_commands_is_walked_to_its_leaves() -> None:
    outer, inner = typer.Typer(), typer.Typer(help="Inside.")
    inner.command("deep-one", epilog="Example: x in deep-one 3")(_deep)
    inner.command(hidden=True)(_hidden)
    outer.add_typer(inner, name="in")
    found = list(listed.commands("x", outer))
    assert [command.title for command in found] == ["x", "x in", "x in deep-one"]
    text = listed.command_line("x", outer)
    assert "$ x in deep-one 3" in text and "| `--level N` | How deep. | `2` |" in text and "Inside." in text
    assert "x in deep-one [OPTIONS] [NAME]" in text


def _deep(
    name: typing.Annotated[str, typer.Argument(help="Whose.")] = "a",
    level: typing.Annotated[int | None, typer.Option(help="How deep.")] = 2,
) -> None:
    """Go deep."""


def _hidden() -> None:
    """Nobody is told."""


# -- examples


@pytest.mark.parametrize("title", WITHOUT_GROUPS)
def test_the_help_of_every_command_has_an_example_that_can_be_typed(title: str) -> None:
    node = WITHOUT_GROUPS[title]
    lines = listed.examples(f"{node.help or ''}\n{node.epilog or ''}")
    assert lines, f"neither the docstring nor the epilog of `{title}` says `Example: {title} ...`"
    assert [line for line in lines if title not in line] == []
    assert [problem for line in lines if line.startswith(title) and (problem := problem_of(line))] == []


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("Example: x go a...\n\nExit codes: 0 done.", "x go a..."),
        ("Goes. Example: x go --fast\n", "x go --fast"),
        ("Example: x go. Exit codes: 0 done.", "x go"),
        ("Exit codes: 0 done;\n2 not. Example: x go b.toml", "x go b.toml"),
    ],
)
def test_an_example_is_found_wherever_a_help_has_it(text: str, example: str) -> None:
    assert listed.examples(text) == [example]


# -- what pages show


@pytest.mark.parametrize("page", [path.relative_to(REPO).as_posix() for path in PAGES])
def test_every_command_line_of_a_page_can_be_typed(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    lines = shown(text, starts=tuple(ROOTS))
    # A sentence may name an option without a value: `dipaco-bootstrap start --dir`.
    assert [problem for line in lines if (problem := problem_of(line)) and problem_of(f"{line} X")] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("dipaco-peer jion ADDRESS", "no command `jion`"),
        ("dipaco-peer join ADDRESS --upmbit 3", "--upmbit"),
        ("dipaco-peer join ADDRESS more", "too much"),
        ("dipaco-bootstrap leaderboard serve ADDRESS --dirr x", "--dirr"),
        ("dipaco-bootstrap init a.toml --name", "--name"),
    ],
)
def test_a_command_line_that_does_not_exist_is_found(line: str, problem: str) -> None:
    assert problem in problem_of(line)


def test_a_command_line_is_found_where_pages_show_them() -> None:
    text = (
        "Say `dipaco-peer me X`.\n\n```console\n$ dipaco-peer join X  # now\nother\n```\n```text\ndipaco-peer no\n```\n"
    )
    lines = list(shown(text, starts=("dipaco-peer",)))
    assert lines == ["dipaco-peer join X  # now", "dipaco-peer me X"]
    assert [problem_of(line) for line in lines] == ["", ""]


@pytest.mark.parametrize("page", [path.relative_to(REPO).as_posix() for path in PAGES])
def test_every_make_target_and_benchmark_of_a_page_exists(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE))
    missing = []
    for line in shown(text, starts=("make", "python")):
        words = shlex.split(line, comments=True)
        missing += [word for word in words[1:] if words[0] == "make" and word.isalpha() and word not in targets]
        named = words[2] if words[:2] == ["python", "-m"] else ""
        if named.startswith(("benchmarks.", "simulation")):
            path = REPO / named.replace(".", "/")
            missing += [] if path.is_dir() or path.with_suffix(".py").exists() else [named]
    assert not missing


# -- keys of files


def unknown_keys(kind: Any, mapping: dict[str, Any], where: str = "") -> list[str]:
    """The keys of a TOML table, and of those in it, that the dataclass does not know."""
    fields, hints = {field.name for field in dataclasses.fields(kind)}, typing.get_type_hints(kind)
    found = [f"{where}{key}" for key in mapping if key not in fields]
    for key in fields & set(mapping):
        inner = next(
            (each for each in (hints[key], *typing.get_args(hints[key])) if dataclasses.is_dataclass(each)), None
        )
        items = mapping[key] if isinstance(mapping[key], list) else [mapping[key]]
        if inner is not None:
            found += [name for item in items for name in unknown_keys(inner, item, f"{where}{key}.")]
    return found


@pytest.mark.parametrize("page", [path.relative_to(REPO).as_posix() for path in PAGES])
def test_every_key_in_a_block_of_toml_exists(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    blocks = [tomllib.loads(found[2]) for found in FENCE.finditer(text) if found[1] == "toml"]
    for block in blocks:
        assert min((unknown_keys(kind, block) for kind in FILES), key=len) == []


def test_a_key_that_does_not_exist_is_found() -> None:
    block = tomllib.loads("[model]\nwidht = 3\n[[model.levels]]\nblock = 2\n[node]\nport = 0\n")
    assert unknown_keys(runfile._Layout, block) == ["model.widht", "model.levels.block"]
