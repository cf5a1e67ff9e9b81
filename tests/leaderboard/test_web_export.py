"""A static copy is whole: every link leads to a file that is there, from any folder, and it replaces only a copy."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from jsonschema import Draft202012Validator
from web_harness import LONGER, SMALL

from dipaco_p2p.errors import ConfigError
from leaderboard.web.api import API_TABLES
from leaderboard.web.export import MARKER, export_site


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host") / "some" / "where"
    export_site(LONGER, folder, now_s=LONGER.taken_s)
    return folder


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in {"href", "src", "action"}]
        self.ids |= {value or "" for name, value in attrs if name == "id"}


def read(path: Path) -> _Links:
    parser = _Links()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def test_every_link_leads_to_a_file_of_the_copy_and_every_file_is_linked(copy: Path) -> None:
    waiting, seen, broken = [copy / "index.html"], {copy / "index.html"}, []
    while waiting:
        page = waiting.pop()
        for link in read(page).found:
            name, _, anchor = unquote(link).partition("#")
            target = Path(os.path.normpath(page.parent / name)) if name else page
            if not name.startswith("/") and "://" not in name and target.is_file() and target.is_relative_to(copy):
                if anchor and anchor not in read(target).ids:
                    broken.append(f"{page}: {link}")
                if target not in seen and target.suffix == ".html":
                    waiting.append(target)
                seen.add(target)
            elif not link.startswith("dipaco://"):
                broken.append(f"{page}: {link}")
    assert not broken
    there = {path for path in copy.rglob("*") if path.is_file() and path.name != MARKER}
    further_pages = {path for path in there if path.parent.name == "v1" and "-" in path.stem}
    assert there - seen - further_pages == set()


def test_the_copy_holds_every_page_of_every_list(copy: Path) -> None:
    assert len(list((copy / "versions").rglob("*.html"))) == len(LONGER.versions)
    assert len(list(copy.glob("versions*.html"))) == -(-len(LONGER.versions) // 50)
    assert {f"{row.peer}.html" for row in LONGER.contributors} <= {
        path.name for path in (copy / "contributors").iterdir()
    }


def test_the_documents_of_the_copy_keep_to_their_schema_and_lead_on(copy: Path) -> None:
    validator = Draft202012Validator(json.loads((copy / "api/v1/schema.json").read_text()))
    for name in API_TABLES:
        rows, following = 0, f"{name}.json"
        while following:
            document = json.loads((copy / "api/v1" / following).read_text())
            validator.validate(document)
            rows, following = rows + len(document["rows"]), document["next"]
        assert rows == document["rows_total"]
        assert (copy / f"api/v1/{name}.csv").exists()


def test_a_copy_takes_the_place_of_an_earlier_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    export_site(LONGER, folder, now_s=LONGER.taken_s)
    export_site(SMALL, folder, now_s=SMALL.taken_s)
    assert SMALL.run.origin in (folder / "run.html").read_text()
    assert not (folder / "versions/L1.M0/25.html").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="something else"):
        export_site(SMALL, tmp_path, now_s=SMALL.taken_s)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_copy_that_fails_half_way_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    export_site(SMALL, folder, now_s=SMALL.taken_s)
    monkeypatch.setattr("leaderboard.web.export._documents", lambda book: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_site(LONGER, folder, now_s=LONGER.taken_s)
    assert SMALL.run.origin in (folder / "run.html").read_text() and list(tmp_path.iterdir()) == [folder]


def test_a_copy_does_not_ask_for_more(copy: Path) -> None:
    text = (copy / "index.html").read_text()
    assert "data-poll-s" not in text and "A copy of" in text and "<form" not in (copy / "versions.html").read_text()
