"""What peers call themselves is on the pages behind their ids, as text, and a decree takes it from them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from test_web_hostile import check
from test_web_pages import column, visible
from web_harness import SMALL, newest_judged, site

from dipaco_p2p.protocol.names import clean_name
from leaderboard.model import Snapshot
from leaderboard.web.api import API_TABLES
from leaderboard.web.export import export_site

NAMED = next(row for row in SMALL.contributors if row.name and row.team)
OTHER = next(row for row in SMALL.contributors if not row.name)
HOSTILE = (
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m",
    "\u202egnp.exe",
    "x" * 10_240,
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f 🇳🇱",
    "Z" + "\u0301" * 500,
    OTHER.peer[-6:],
    OTHER.peer,
    "=HYPERLINK(1)",
    "{{ 7 * 7 }}",
)


def named(name: str, team: str = "") -> Snapshot:
    """The same run, in which one contributor has this name, leads, trains, and claims a path."""
    row = replace(NAMED, name=name, team=team)
    versions = tuple(
        replace(each, author=row.peer, shares=tuple(replace(share, peer=row.peer) for share in each.shares[:1]))
        for each in SMALL.versions
    )
    return replace(
        SMALL,
        contributors=tuple(row if each is NAMED else each for each in SMALL.contributors),
        versions=versions,
        modules=tuple(replace(each, leader=row.peer) for each in SMALL.modules),
        paths=tuple(replace(each, peers=(row.peer,)) for each in SMALL.paths),
    )


def addresses() -> list[str]:
    row = newest_judged(SMALL)
    ones = (f"/contributors/{NAMED.peer}", f"/versions/{row.module}/{row.version}", f"/modules/{row.module}")
    return ["/", "/contributors", "/paths", "/modules", *ones]


def behind(page: str) -> list[str]:
    """What stands before each name: the text of the element that ends there."""
    return re.findall(r">([^<>]*)</(?:a|span)> <bdi", page)


@pytest.mark.parametrize("address", addresses())
def test_a_name_is_never_without_the_id_before_it(address: str) -> None:
    with site(named("Ada Nameless", "The <Team>")) as (client, _):
        page = client.get(address).text
    check(page)
    short = f"...{NAMED.peer[-6:]}"
    assert f"{short} Ada Nameless The <Team>" in visible(page)
    others = {f"...{row.peer[-6:]}" for row in SMALL.contributors if row.name or row.team}
    assert short in behind(page) and set(behind(page)) <= others
    assert page.count("Ada Nameless") == behind(page).count(short)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_hostile_name_is_text_on_its_line_or_nothing(text: str, is_clean: bool) -> None:
    """Whether it came through the door that all names come through, or past it."""
    name = clean_name(text) if is_clean else text
    with site(named(name, name)) as (client, _):
        for address in addresses():
            page = client.get(address).text
            check(page)
            assert f'title="{NAMED.peer}"' in page or NAMED.peer in page, "whoever it says to be, the id is its own"
            assert (
                "<script>alert" not in page and "\x1b" not in page and "\u202e" not in page and "\u0301" * 3 not in page
            )
        [row] = [row for row in client.get("/api/v1/contributors.json").json()["rows"] if row["peer"] == NAMED.peer]
        assert len(row["name"]) <= 512 and row["name"].isprintable()
        assert "\r\n=" not in (csv := client.get("/api/v1/contributors.csv").text) and ",=" not in csv


def test_two_with_one_name_are_told_apart_by_their_ids() -> None:
    both = tuple(replace(row, name="Ada", team="") for row in SMALL.contributors[:2])
    with site(replace(SMALL, contributors=both)) as (client, _):
        said = column(client.get("/contributors").text, 1)
    assert [line for line in said if line.endswith("Ada")] == [f"...{row.peer[-6:]} Ada" for row in both]


def test_who_has_no_name_is_shown_as_before(client: TestClient) -> None:
    row = next(row for row in SMALL.contributors if not row.name and not row.team)
    page = client.get(f"/contributors/{row.peer}").text
    assert f'<h1 id="who" data-live><span class="id">...{row.peer[-6:]}</span></h1>' in page


def test_names_are_data_for_programs_in_columns_at_the_end(client: TestClient) -> None:
    assert [column.name for column in API_TABLES["contributors"].columns][-4:-2] == ["name", "team"]
    rows = client.get("/api/v1/contributors.json").json()["rows"]
    assert [(row["name"], row["team"]) for row in rows] == [(row.name, row.team) for row in SMALL.contributors]
    assert any(row["name"] for row in rows)


def test_decrees_about_names_are_listed_in_words() -> None:
    acts = ({"act": "hide-name", "reason": "an insult", "ended_by": 2}, {"act": "show-name", "reason": ""})
    rows = [
        replace(SMALL.decrees[0], number=number, peer=NAMED.peer, **act)  # type: ignore[arg-type] # the fields above
        for number, act in enumerate(acts, start=1)
    ]
    with site(replace(SMALL, decrees=tuple(rows))) as (client, _):
        text = visible(client.get("/decrees").text)
    assert f"hid the name of ...{NAMED.peer[-6:]}" in text and "an insult" in text and "until decree 2" in text
    assert f"let ...{NAMED.peer[-6:]} be shown with its name again" in text


def test_a_static_copy_shows_names_too(tmp_path: Path) -> None:
    export_site(SMALL, tmp_path, now_s=SMALL.taken_s)
    page = (tmp_path / "contributors.html").read_text(encoding="utf-8")
    assert f"...{NAMED.peer[-6:]} {NAMED.name} {NAMED.team}" in visible(page)
