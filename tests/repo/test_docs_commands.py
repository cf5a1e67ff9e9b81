"""What the documentation shows can be typed: its command lines and keys exist, and every command has an example.

Asked of the parser itself and of what `--help` prints, while the reference is made by typer's own generator.
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
from dipaco_p2p.strict import written
from peers.cli import app as peer_app
from peers.preferences.keys import Preferences

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "docs/site"))
generated = importlib.import_module("generated")

PROGRAMS = {"dipaco-peer": peer_app, "dipaco-bootstrap": bootstrap_app}
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")), REPO / "CONTRIBUTING.md"]
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


def help_of(title: str) -> str:
    """What `--help` prints on a terminal wide enough for every paragraph."""
    program, *words = title.split()
    wide = {"COLUMNS": "400", "NO_COLOR": "1"}
    return CliRunner().invoke(PROGRAMS[program], [*words, "--help"], env=wide).output


@pytest.mark.parametrize("title", COMMANDS)
def test_a_help_shows_every_word_and_breaks_no_paragraph(title: str) -> None:
    """A terminal could take words in brackets for colours, and show nothing in their place."""
    node, told = COMMANDS[title], help_of(title)
    texts = [node.help or "", node.epilog or "", *(getattr(one, "help", None) or "" for one in node.params)]
    paragraphs = [" ".join(each.replace("`", "").split()) for text in texts for each in text.split("\n\n")]
    assert [each for each in paragraphs if each not in told] == []


# -- the reference


@pytest.fixture(scope="module", params=PROGRAMS)
def sections(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """The sections of one program in the reference, by what is typed."""
    program = request.param
    text = generated.PARTS[f"{program.removeprefix('dipaco-')}-commands"]()
    found = re.findall(r"^### `(.*?)`$(.*?)(?=^### |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert len(dict(found)) == len(found)
    return program, dict(found)


def test_every_command_and_option_that_help_tells_is_in_the_reference(sections: tuple[str, dict[str, str]]) -> None:
    program, texts = sections
    commands = [title for title in COMMANDS if title.split()[0] == program]
    assert commands and list(texts) == commands
    for title in commands:
        rows = [re.split(r"\s{2,}", line.strip("│ *")) for line in help_of(title).splitlines()]
        cells = [cell for row in rows for cell in itertools.takewhile(lambda cell: cell.startswith("-"), row)]
        options = {option for cell in cells for option in re.split(r"[,/\s]+", cell) if option.startswith("--")}
        assert "--help" in options
        assert [option for option in sorted(options) if not re.search(rf"{option}[` ]", texts[title])] == []


# -- examples

EXAMPLE = re.compile(r"\s*\bExample: (.+?)(?=\.? Exit codes:|$)", re.MULTILINE)
"""What shows a command at work, in its docstring or its epilog: to the end of the line."""


def examples(text: str) -> list[str]:
    """The command lines that a docstring and an epilog show, without a full stop."""
    lines = (found.strip() for found in EXAMPLE.findall(text))
    return [line if line.endswith("..") else line.removesuffix(".") for line in lines]


@pytest.mark.parametrize("title", WITHOUT_GROUPS)
def test_the_help_of_every_command_has_an_example_that_can_be_typed(title: str) -> None:
    node = WITHOUT_GROUPS[title]
    lines = examples(f"{node.help or ''}\n{node.epilog or ''}")
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
    assert examples(text) == [example]


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


@pytest.mark.parametrize("page", [path.relative_to(REPO).as_posix() for path in PAGES if path.name != "log.md"])
def test_every_make_target_and_benchmark_of_a_page_exists(page: str) -> None:
    """But for the log, which says what was typed on its day."""
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
    hints = {written(name): hint for name, hint in typing.get_type_hints(kind).items()}
    fields = {written(field.name) for field in dataclasses.fields(kind)}
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
