"""Cheap rules that keep the repository portable and readable, each shown to find what it looks for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = (".ci", "dipaco_p2p", "peers", "bootstrap", "leaderboard", "simulation", "benchmarks", "tests", "docs")
TEXT = {".py", ".md", ".toml", ".txt", ".html", ".css", ".js", ".json", ".yml", ""}
PYTHON_LINES_MAX = 500

# Written in pieces, so that this file does not name them.
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.~-])/(" + "|".join(["work" + "/", "tmp/" + r"w\b", "root" + r"\b", "home" + r"/\w"]) + ")"
)
REGISTRIES = re.compile(
    "|".join(["pypi" + r"\.org", "pythonhosted" + r"\.org", "download" + r"\.pytorch\.org", "anaconda" + r"\.org"])
)
MARKDOWN_LINK = re.compile(r"\]\(<?([^)#\s>]+)(?:#[^)]*)?>?\)")


def text_files(root: Path) -> Iterator[Path]:
    """The files of the project under `root`, whether git knows them yet or not; not what tools leave beside them."""
    candidates = [*root.iterdir(), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    for path in sorted(candidates):
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
            yield path


def long_files(root: Path) -> Iterator[str]:
    for path in text_files(root):
        lines = path.read_text(encoding="utf-8").count("\n")
        if path.suffix == ".py" and lines > PYTHON_LINES_MAX:
            yield f"{path}: {lines} lines, more than {PYTHON_LINES_MAX}; cut it where its subject divides"


def paths_of_one_machine(root: Path) -> Iterator[str]:
    yield from matches(root, OF_ONE_MACHINE, "an absolute path that other machines do not have")


def registry_hosts(root: Path) -> Iterator[str]:
    yield from matches(root, REGISTRIES, "a package index is the installer's choice, not ours")


def matches(root: Path, pattern: re.Pattern[str], why: str) -> Iterator[str]:
    for path in text_files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if found := pattern.search(line):
                yield f"{path}:{number}: `{found[0]}`: {why}"


def broken_toml(root: Path) -> Iterator[str]:
    for path in text_files(root):
        if path.suffix == ".toml":
            try:
                tomllib.loads(path.read_text(encoding="utf-8"))
            except tomllib.TOMLDecodeError as error:
                yield f"{path}: {error}"


def broken_links(root: Path) -> Iterator[str]:
    for path in text_files(root):
        if path.suffix == ".md":
            for target in MARKDOWN_LINK.findall(path.read_text(encoding="utf-8")):
                if "://" not in target and not target.startswith("mailto:") and not (path.parent / target).exists():
                    yield f"{path}: links to {target}, which is not there"


def unlisted_packages(root: Path) -> Iterator[str]:
    """Packages that would be missing from an installation, and listed ones that do not exist."""
    listed = set(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    tops = ("dipaco_p2p", "peers", "bootstrap", "leaderboard")
    folders = {path.parent.relative_to(root) for top in tops for path in (root / top).rglob("*.py")}
    there = {".".join(folder.parts) for folder in folders}
    yield from (f"{name}: has Python files, is not in tool.setuptools.packages" for name in sorted(there - listed))
    yield from (f"{name}: is in tool.setuptools.packages, has no Python files" for name in sorted(listed - there))


Rule = Callable[[Path], Iterator[str]]
RULES: list[Rule] = [long_files, paths_of_one_machine, registry_hosts, broken_toml, broken_links, unlisted_packages]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule) -> None:
    assert not (found := list(rule(REPO))), "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (long_files, "peers/long.py", "pass\n" * (PYTHON_LINES_MAX + 1)),
        (paths_of_one_machine, "docs/log.md", "see `/" + "work/main`"),
        (paths_of_one_machine, "peers/cli.py", "KEYS = '/" + "root/.keys'"),
        (registry_hosts, "constraints.txt", "--index-url https://" + "pypi" + ".org/simple"),
        (broken_toml, "bootstrap/runs/tiny.toml", "levels = [2,"),
        (broken_links, "docs/index.md", "[the design](../docs/desing.md#layers)"),
        (unlisted_packages, "peers/web/pages.py", ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_breach_is_found(tmp_path: Path, rule: Rule, file: str, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.setuptools]\npackages = []")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    [found] = rule(tmp_path)
    assert found.startswith(str(tmp_path / file)) or rule is unlisted_packages


@pytest.mark.parametrize(
    "text", ["tests/root/", "`~/work/run`", "https://example.org/home/", "[this](log.md#one)", "/tmp/hivemind"]
)
def test_what_only_looks_like_a_breach_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.md").write_text(text)
    assert [found for rule in (paths_of_one_machine, registry_hosts, broken_links) for found in rule(tmp_path)] == []
