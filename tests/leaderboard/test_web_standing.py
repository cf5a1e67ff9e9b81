"""What judges and auditors found of whom is on the pages and in the data, and in words how each peer stands."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from test_web_pages import address_of, column, visible
from web_harness import SMALL, site, with_version

from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import DOUBTED_FOR, FORGERS_WAIT, Findings
from leaderboard.model import VersionRow
from leaderboard.web.api import API_TABLES
from leaderboard.web.export import export_site
from leaderboard.web.query import ROWS

[FORGER] = [row for row in SMALL.contributors if row.forged]
LATER = {"contributors": ["name", "team", "audits", "audit_credit"], "versions": ["audits", "without"]}
"""Columns that came after those for findings."""
[FOUND] = [row for row in SMALL.versions if row.findings.forged]


def terms(page: str) -> str:
    """The text of a page, with a space after each term of a list."""
    return visible(page.replace("</dt>", "</dt> "))


def found_in(row: VersionRow) -> str:
    """What the page of a version says was found."""
    with site(with_version(SMALL, FOUND, findings=row.findings)) as (client, _):
        page = client.get(address_of(FOUND)).text
    listed = re.findall(r'<dl class="terms" id="found">(.*?)</dl>', page, re.DOTALL)
    return terms(" ".join(listed)).strip()


def test_the_list_of_contributors_says_in_words_how_each_one_stands(client: TestClient) -> None:
    page = client.get("/contributors").text
    assert column(page, 7) == [row.standing.partition(":")[0] for row in SMALL.contributors]
    assert {"full", "on probation", "doubted", "waits"} <= set(column(page, 7))
    assert f'title="{FORGER.standing}"' in page
    strange = replace(SMALL, contributors=(replace(FORGER, standings=()),))
    with site(strange) as (client, _):
        assert column(client.get("/contributors").text, 7) == ["–"]


def test_the_page_of_a_contributor_says_how_it_stands_in_each_module(client: TestClient) -> None:
    text = terms(client.get(f"/contributors/{FORGER.peer}").text)
    assert f"could repeat {FORGER.repeated} works of this peer and found 1 forged" in text
    said = " ".join(f"{module} {words}" for module, words in FORGER.standings)
    assert said in text and "waits: nothing counts for 6 versions" in said


def test_a_contributor_of_whom_nothing_was_found_has_no_standing() -> None:
    row = replace(FORGER, repeated=0, forged=0, standings=())
    with site(replace(SMALL, contributors=(row,))) as (client, _):
        assert "Standing" not in visible(client.get(f"/contributors/{row.peer}").text)


def test_the_page_of_a_version_says_what_was_found_of_whom() -> None:
    found = FOUND.findings
    forged, withheld, failed, contradicted, repeated = (
        [f"...{peer[-6:]}" for peer in of]
        for of in (found.forged, found.withheld, found.failed, found.contradicted, found.repeated)
    )
    assert found_in(FOUND) == (
        f"✕ forged Auditors got another result: {forged[0]}"
        f" △ withheld Auditors could not get what they needed: {withheld[0]}"
        f" △ failed Judges found harm or too little gain: {failed[0]} (2 works)"
        f" △ contradicted Most others who repeated the work contradict what they said of it: {contradicted[0]}"
        f" ✓ repeated Auditors got the same result: {', '.join(repeated)}"
    )


def test_a_version_without_findings_has_no_list_of_them(client: TestClient) -> None:
    assert "<h2>Findings" in client.get(address_of(FOUND)).text
    row = next(row for row in SMALL.versions if row.findings == Findings())
    assert "<h2>Findings" not in client.get(address_of(row)).text


def test_a_long_list_of_findings_is_cut_and_says_so() -> None:
    peers = tuple(PeerId(f"{number:04}") for number in range(ROWS + 3))
    text = found_in(replace(FOUND, findings=Findings(repeated=(*peers, peers[-1]))))
    assert text.startswith("✓ repeated Auditors got the same result: ...0052 (2 works), ...0000, ...0001,")
    assert text.endswith(", ...0048 and 3 more")


def test_what_each_standing_means_is_said_once_for_all(client: TestClient) -> None:
    page = client.get("/run").text
    [said] = re.findall(r'<section id="standing">(.*?)</section>', page, re.DOTALL)
    assert re.findall(r"<dt>(.*?)</dt>", said) == ["full", "on probation", "not heard", "doubted", "waits", "expelled"]
    assert f"For {DOUBTED_FOR} versions its work" in said and f"For {FORGERS_WAIT} versions its work does not" in said
    for address in ("/contributors", f"/contributors/{FORGER.peer}", address_of(FOUND)):
        assert 'href="/run#standing"' in client.get(address).text


@pytest.mark.parametrize(
    ("name", "columns"),
    [("contributors", "repeated forged standing"), ("versions", "repeated failed withheld forged contradicted")],
)
def test_columns_for_findings_come_after_those_of_before(name: str, columns: str) -> None:
    names = [column.name for column in API_TABLES[name].columns]
    later = LATER.get(name, [])
    assert names[-len(later + columns.split()) :] == columns.split() + later and len(set(names)) == len(names)


def test_findings_and_standings_are_data_for_programs(client: TestClient) -> None:
    rows = client.get("/api/v1/contributors.json").json()["rows"]
    said = [(row["repeated"], row["forged"], row["standing"]) for row in rows]
    assert said == [(row.repeated, row.forged, row.standing) for row in SMALL.contributors]
    assert FORGER.standing.startswith("waits") and all(row.repeated for row in SMALL.contributors)
    versions = client.get("/api/v1/versions.json").json()["rows"]
    [found] = [row for row in versions if row["forged"]]
    counts = {kind: found[kind] for kind in ("failed", "withheld", "forged", "contradicted")}
    assert counts == {"failed": 2, "withheld": 1, "forged": 1, "contradicted": 1}
    assert found["repeated"] == len(FOUND.findings.repeated)


def test_a_static_copy_shows_them_too(tmp_path: Path) -> None:
    export_site(SMALL, tmp_path, now_s=SMALL.taken_s)
    assert FORGER.standing in (tmp_path / f"contributors/{FORGER.peer}.html").read_text()
    assert 'href="../run.html#standing"' in (tmp_path / f"contributors/{FORGER.peer}.html").read_text()
