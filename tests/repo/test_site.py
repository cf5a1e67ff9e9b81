"""The site of docs/: every page has its place, dead links fail the build, and what is made from the code is on it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "docs/site")]
from site_harness import REPO, build_pages, build_site  # noqa: E402

generated = importlib.import_module("generated")
hooks = importlib.import_module("hooks")

PAGES = {path.relative_to(REPO / "docs").as_posix() for path in (REPO / "docs").rglob("*.md")}
LISTED = [page for pages in hooks.SECTIONS.values() for page in pages]
TO_COME = {"coordinator.md", "deploy.md", "recover.md", "volunteer.md"}
"""Pages with a place that somebody else writes: they may be there or not."""


# -- which pages there are


def test_every_page_has_one_place_and_every_place_a_page() -> None:
    assert sorted(LISTED) == sorted(set(LISTED))
    assert set(LISTED) - set(hooks.BROUGHT) - TO_COME == PAGES - TO_COME


def test_a_page_that_is_not_written_yet_is_left_out_of_the_menu(tmp_path: Path) -> None:
    (tmp_path / "index.md").touch()
    assert hooks.navigation(tmp_path) == [{"Start": ["index.md"]}, {"Reference": ["changelog.md", "contributing.md"]}]


@pytest.mark.slow
def test_the_site_can_be_built_and_asks_nobody_for_anything(tmp_path: Path) -> None:
    done = build_site(tmp_path / "site")
    assert done.returncode == 0, done.stdout
    built = {
        path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()
    }
    assert {name.removesuffix(".md") + ".html" for name in PAGES | set(hooks.BROUGHT)} <= built
    assert [name for name in built if name.endswith(".py") or "__pycache__" in name] == []
    fetched = re.compile(r"""(?:<(?:script|img|iframe)[^>]*\ssrc|<link[^>]*\shref|url\()\s*=?\s*["']?(?:https?:)?//""")
    texts = {
        name: (tmp_path / "site" / name).read_text(encoding="utf-8")
        for name in built
        if name.endswith((".html", ".css"))
    }
    assert [name for name, text in texts.items() if fetched.search(text)] == []
    assert f"dipaco-p2p {hooks.__version__}" in texts["index.html"]
    assert "dipaco-peer join" in texts["reference.html"] and "<td>16 MiB</td>" in texts["reference/limits.html"]
    assert [name for name, text in texts.items() if "generated: " in text] == []
    links = (tmp_path / hooks.LINKS_FILE).read_text()
    assert "https://arxiv.org/abs/2403.10616" in links


@pytest.mark.slow
def test_what_is_wrong_on_a_page_fails_the_build_by_name(tmp_path: Path) -> None:
    done = build_pages(
        tmp_path,
        {
            "index.md": "# A\n\n[gone](gone.md) [place](join.md#nowhere) [here](#not-here)\n",
            "join.md": "# B\n\n[half](http://example.com) [odd](https://exa_mple)\n\n<!-- generated: pie -->\n",
            "stray.md": "# C\n",
        },
    )
    assert done.returncode != 0
    for word in ("gone.md", "#nowhere", "#not-here", "http://example.com", "exa_mple", "'pie'", "stray.md"):
        assert word in done.stdout, (word, done.stdout)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("https://arxiv.org/abs/1", ""),
        ("https://en.wikipedia.org/wiki/A_(b)#c", ""),
        ("http://example.com", "not https"),
        ("https://localhost/x", "no name"),
        ("https://example.com:port/", "ort"),
    ],
)
def test_a_link_to_another_site_is_checked_for_its_form(target: str, problem: str) -> None:
    found = hooks.problem_of(target)
    assert problem in found and bool(problem) == bool(found)


def test_a_link_into_the_code_becomes_its_text_and_one_to_a_page_stays() -> None:
    text = "[`a/`](../dipaco_p2p/a) [b](b.md#c) ![d](e/d.svg) [changes](../CHANGELOG.md)"
    assert hooks.LINK.sub(hooks._inside, text) == "`a/` [b](b.md#c) ![d](e/d.svg) [changes](changelog.md)"
    deep = hooks._inside(hooks.LINK.match("[changes](../../CHANGELOG.md)"), depth=1)
    assert deep == "[changes](../changelog.md)"
    top = "[a](docs/a.md#b) [c](CONTRIBUTING.md) [d](peers/) [e](https://example.com)"
    moved = hooks.LINK.sub(hooks._from_the_top, top)
    assert moved == "[a](a.md#b) [c](contributing.md) [d](../peers/) [e](https://example.com)"


def test_the_footer_tells_what_is_known() -> None:
    assert hooks.footer("1.2", "abc of 2026-01-02") == "dipaco-p2p 1.2 · commit abc of 2026-01-02 · Apache 2.0"
    assert hooks.footer("1.2", "") == "dipaco-p2p 1.2 · Apache 2.0"
    assert hooks.commit(Path("no such folder")) == ""


# -- what is made from the code


def test_every_table_of_transitions_is_on_the_page_of_concepts() -> None:
    found = {
        name
        for path in (REPO / "dipaco_p2p").rglob("*.py")
        for name in re.findall(r"^(\w+)_TRANSITIONS\b.*=", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert {"CLAIM", "ROUND"} <= found
    shown = set(re.findall(r"generated: (\w+)s-machine", by_hand("concepts.md")))
    assert {name.lower() for name in found} == shown


# -- what is told of the run file, and of words


def by_hand(name: str) -> str:
    """A page as it is committed."""
    return (REPO / "docs" / name).read_text(encoding="utf-8")


def test_every_key_of_the_run_file_is_explained_by_what_it_is_for() -> None:
    told = set(re.findall(r"`(\w+)", by_hand("define.md")))
    assert [f"{key.table}.{key.name}" for key in generated.keys() if key.name not in told] == []


def test_every_key_of_the_run_file_has_a_default_and_a_meaning_in_the_reference() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .*? \| (.*) \|$", generated.run_keys(), flags=re.MULTILINE)
    assert [name for name, *_ in rows] == [key.name for key in generated.keys()]
    said = set(re.findall(r"^(\w+) = .*#", generated.template("my-run"), flags=re.MULTILINE))
    missing = [name for name, default, about in rows if default in ("", "``") or not (about.strip() or name in said)]
    assert missing == []


def test_every_ready_file_is_in_the_list_with_its_grid() -> None:
    rows = generated.ready_runs().splitlines()[2:]
    assert len(rows) == len(list((REPO / "bootstrap/runs").glob("*.toml")))
    assert next(row for row in rows if "`trunk-1x4.toml`" in row).count("| 4 |") == 1


def terms() -> list[str]:
    return re.findall(r"^\| ([a-z][a-z -]*) \| ", by_hand("glossary.md"), flags=re.MULTILINE)[1:]


def test_the_glossary_is_sorted_and_has_every_noun_of_the_style_card() -> None:
    assert terms() == sorted(terms()) and 30 < len(terms()) <= 40
    [nouns] = re.findall(
        r"One noun per thing.*?: (run,.*?)\.\n4\.", (REPO / "CONTRIBUTING.md").read_text(), flags=re.DOTALL
    )
    assert {" ".join(noun.split()) for noun in nouns.split(",")} <= set(terms())


def test_every_term_of_the_glossary_is_used_on_another_page() -> None:
    others = " ".join(
        path.read_text(encoding="utf-8") for path in (REPO / "docs").glob("*.md") if path.name != "glossary.md"
    )
    words = " ".join(re.sub(r"[*`]", "", others).lower().split())
    assert [term for term in terms() if not re.search(rf"\b{term}", words)] == []
