"""The pages show what the Snapshot says, in the order that is asked for, and never more than that."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from starlette.testclient import TestClient
from web_harness import LONGER, PAGES, SMALL, newest_judged, pages_of, site

from benchmarks.leaderboard.synthetic import snapshot_of
from bootstrap.runfile import ArchiveConfig
from leaderboard.model import Mark, VersionRow
from leaderboard.web.app import HEADERS


@pytest.mark.parametrize("address", pages_of(SMALL))
def test_every_page_is_there_with_its_name_and_one_heading(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text.count("<h1") == 1 and SMALL.run.name in answer.text


@pytest.mark.parametrize(
    "address", [*pages_of(SMALL), "/metrics", "/healthz", "/api/v1/run.json", "/none", "/static/site.css"]
)
def test_every_answer_carries_the_headers_that_keep_a_reader_safe(client: TestClient, address: str) -> None:
    for answer in (client.get(address), client.head(address), client.post(address)):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_the_site_only_reads(client: TestClient, method: str) -> None:
    answer = client.request(method, "/")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("address", ["/versions?module=" + "x" * 600, "/" + "x" * 300])
def test_an_address_beyond_the_bound_is_refused(client: TestClient, address: str) -> None:
    assert client.get(address).status_code == 414


@pytest.mark.parametrize(
    "address",
    [
        "/versions/" + "0" * 64,
        "/versions/L1.M0/99",
        "/versions/grid/L1.M0/99",
        "/modules/L9.M9",
        "/contributors/nobody",
        "/lineage/qqq",
        "/qqq",
    ],
)
def test_what_is_not_there_is_not_found_and_the_question_is_not_repeated(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 404 and "Not found" in answer.text
    assert address.split("/")[-1] not in visible(answer.text)


@pytest.mark.parametrize("query", ["sort=evil", "order=up", "page=0", "page=-1", "page=x", "page=99999999", "page=²"])
def test_a_question_without_sense_is_answered_with_what_is_wrong(client: TestClient, query: str) -> None:
    answer = client.get(f"/versions?{query}")
    assert answer.status_code == 400 and "Invalid request" in answer.text


def test_a_page_behind_the_last_one_is_not_found() -> None:
    with site(LONGER) as (client, _):
        assert client.get("/versions?page=3").status_code == 200
        assert client.get("/versions?page=300").status_code == 404


def test_versions_are_sorted_as_asked_and_what_is_not_known_comes_last(client: TestClient) -> None:
    for order, is_reverse in (("asc", False), ("desc", True)):
        cells = column(client.get(f"/versions?sort=after&order={order}").text, 2)
        known = [float(cell) for cell in cells if cell != "–"]
        assert known == sorted(known, reverse=is_reverse)
    all_cells = [cell for page in (1, 2) for cell in column(client.get(f"/versions?sort=after&page={page}").text, 2)]
    assert len(all_cells) == len(SMALL.versions)
    assert "–" in all_cells and all_cells.index("–") == len(all_cells) - all_cells.count("–")


def test_filters_choose_by_module_stage_mark_and_contributor(client: TestClient) -> None:
    peer = SMALL.contributors[0].peer
    for query, count in (
        ("module=L1.M1", sum(str(row.module) == "L1.M1" for row in SMALL.versions)),
        ("mark=claimed", sum(row.mark is Mark.CLAIMED for row in SMALL.versions)),
        ("stage=warmup", sum(row.stage == SMALL.run.stages[0].id for row in SMALL.versions)),
        (f"peer={peer[-8:]}", SMALL.contributors[0].versions),
        (f"peer=...{peer[-6:]}", SMALL.contributors[0].versions),
        ("peer=...", 0),
        ("module=L1.M1&mark=claimed&stage=warmup", 0),
    ):
        found = re.search(r"([\d,]+) versions? that match", client.get(f"/versions?{query}").text)
        assert found is not None and int(found[1]) == count, query


def test_a_sorted_list_keeps_its_filter_and_a_page_keeps_both() -> None:
    with site(LONGER) as (client, _):
        text = client.get("/versions?stage=grid&sort=tokens&order=asc").text
    assert 'href="/versions?stage=grid&amp;sort=after&amp;order=asc"' in text
    assert 'href="/versions?stage=grid&amp;sort=tokens&amp;order=asc&amp;page=2"' in text


def test_every_line_that_makes_up_the_credit_of_a_contributor_is_on_its_page(client: TestClient) -> None:
    row = SMALL.contributors[0]
    text = client.get(f"/contributors/{row.peer}").text
    for version in SMALL.versions:
        for share in version.shares:
            assert (share.contribution[:8] in text) == (share.peer == row.peer)
        for audit in version.audits:
            assert (audit.work[:8] in text) == (audit.peer == row.peer)
    assert row.audits == 1 and f"of it {row.audit_credit:,.0f} for 1 audit" in text
    assert f"{row.credit:,.0f}" in text and row.peer in text


def test_a_version_says_its_whole_digest_its_parent_and_how_to_check_it(client: TestClient) -> None:
    row = newest_judged(SMALL)
    text = client.get(f"/versions/{row.module}/{row.version}").text
    assert row.digest in text and row.parent in text and f'href="/versions/{row.module}/{row.version - 1}"' in text
    assert "dipaco-bootstrap verify FOLDER" in text
    assert all(share.contribution[:8] in text for share in row.shares)


def test_of_verify_the_pages_promise_no_more_than_an_archive_keeps(client: TestClient) -> None:
    assert ArchiveConfig().rounds == 2
    for address in ("/run", address_of(SMALL.versions[-1])):
        text = visible(client.get(address).text)
        assert "each version whose contributions are still kept, by default those of the last two rounds" in text


def test_every_version_has_a_page_of_its_own_that_names_those_with_the_same_parameters(client: TestClient) -> None:
    pages = {row: client.get(address_of(row)).text for row in SMALL.versions}
    for row, text in pages.items():
        stage = "warmup" if row.stage == SMALL.run.stages[0].id else "grid"
        assert f"<h1>{row.module} version {row.version} <small>{stage}</small></h1>" in text
    assert len({row.digest for row in pages}) < len(pages), "some have the same parameters"
    first = next(row for row in pages if row.stage == SMALL.run.stages[1].id and str(row.module) == "L2.M1")
    text = pages[first]
    assert "L2.M0 version 7 (warmup), L2.M0 version 0 (grid)." in visible(text)
    assert 'href="/versions/warmup/L2.M0/7"' in text and 'href="/versions/L2.M0/0"' in text


def test_a_list_leads_to_each_version(client: TestClient) -> None:
    text = client.get("/versions?module=L2.M1").text
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    lines = [re.findall(r'href="/versions/L2.M1/(\d+)"', line) for line in body.split("<tr>")[1:]]
    assert lines == [[str(n)] * 2 for n in range(12, -1, -1)], "by its number and by its digest"


@pytest.mark.parametrize("name", ["versions", "lineage"])
def test_an_address_of_before_leads_to_the_first_version_with_those_parameters(client: TestClient, name: str) -> None:
    back = next(row for row in SMALL.versions if row.rollback)
    for row, to in ((newest_judged(SMALL), address_of(newest_judged(SMALL))), (back, "/versions/L2.M1/6")):
        answer = client.get(f"/{name}/{row.digest}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (302, to.replace("versions", name))


def address_of(row: VersionRow) -> str:
    """Where its page is."""
    return f"/versions/{'warmup/' if row.stage == SMALL.run.stages[0].id else ''}{row.module}/{row.version}"


def test_the_lineage_of_a_first_version_goes_on_into_the_stage_before(client: TestClient) -> None:
    first = next(row for row in SMALL.versions if row.stage == SMALL.run.stages[1].id and row.version == 1)
    text = visible(client.get(f"/lineage/{first.module}/1").text)
    assert f"{first.module} version 4" in text and f"{first.module} version 0" in text
    assert f"{first.module} version 6" in text, "the warm-up's last but one"


def test_lost_and_rejected_work_is_marked_on_the_plot_of_its_module(client: TestClient) -> None:
    loss = SMALL.losses[-1]
    text = client.get(f"/modules/{loss.module}").text
    assert f"<title>round {loss.round}: {loss.kind}</title>" in text and loss.contribution[:8] in text


@pytest.mark.parametrize("address", PAGES)
def test_old_figures_are_called_old_on_every_page(address: str) -> None:
    with site(age_s=500) as (client, held):
        assert "These figures are old" in client.get(address).text
        held.snapshot = replace(SMALL, heard_s=held.clock.now_s())
        assert "These figures are old" not in client.get(address).text


def test_the_last_figures_of_a_complete_run_do_not_grow_old() -> None:
    with site(replace(SMALL, state="complete"), age_s=1e7) as (client, _):
        assert "These figures are old" not in client.get("/").text
        assert client.get("/healthz").json() == {"state": "ok"}


def test_versions_stand_in_the_order_of_rounds_though_they_are_judged_in_another() -> None:
    late = [replace(row, made_s=None if row.version % 2 else SMALL.taken_s - row.version) for row in SMALL.versions]
    with site(replace(SMALL, versions=tuple(late))) as (client, _):
        numbers = [int(cell) for cell in column(client.get("/versions?stage=grid").text, 1)]
        reverse = [int(cell) for cell in column(client.get("/versions?stage=grid&sort=age&order=asc").text, 1)]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == 12
    assert reverse == sorted(reverse) and reverse[0] == 0


def test_figures_grow_old_while_the_same_snapshot_stands() -> None:
    with site() as (client, held):
        before = client.get("/")
        held.clock._now_s += 500  # noqa: SLF001
        after = client.get("/", headers={"If-None-Match": before.headers["etag"]})
    assert "These figures are old" not in before.text
    assert after.status_code == 200 and "These figures are old" in after.text


@pytest.mark.parametrize("address", PAGES)
def test_before_the_first_snapshot_every_page_says_so(address: str) -> None:
    with site(None) as (client, _):
        assert "Nothing collected yet" in client.get(address).text


def test_a_run_that_has_just_begun_has_pages_with_words_instead_of_empty_tables() -> None:
    bare = replace(
        SMALL, heard_s=None, state="waiting", modules=(), paths=(), rounds=(), versions=(), losses=(), contributors=()
    )
    with site(bare) as (client, _):
        for address in PAGES:
            answer = client.get(address)
            assert answer.status_code == 200 and "<tbody>\n  </tbody>" not in answer.text


def test_a_page_that_has_not_changed_costs_no_body_and_a_new_snapshot_does() -> None:
    with site() as (client, held):
        etag = client.get("/versions").headers["etag"]
        same = client.get("/versions", headers={"If-None-Match": etag})
        held.snapshot = snapshot_of(5)
        new = client.get("/versions", headers={"If-None-Match": etag})
    assert (same.status_code, same.content) == (304, b"") and new.status_code == 200


def test_a_newer_snapshot_of_the_same_minute_leaves_the_list_as_it_was() -> None:
    with site() as (client, held):
        etag = client.get("/versions").headers["etag"]
        held.snapshot = replace(SMALL, taken_s=SMALL.taken_s // 60 * 60 + 59)
        assert client.get("/versions", headers={"If-None-Match": etag}).status_code == 304


def test_health_follows_the_age_of_the_figures() -> None:
    for snapshot, age_s, expected in ((SMALL, 1.0, "ok"), (SMALL, 500.0, "stale"), (None, 0.0, "empty")):
        with site(snapshot, age_s=age_s) as (client, _):
            answer = client.get("/healthz")
        assert answer.json() == {"state": expected} and (answer.status_code == 200) == (expected == "ok")


def test_no_page_holds_a_style_or_script_of_its_own_or_an_address_elsewhere(client: TestClient) -> None:
    for address in pages_of(SMALL):
        text = client.get(address).text
        assert "<style" not in text and " style=" not in text and not re.search(r"\son\w+=", text)
        assert re.findall(r"<script[^>]*>", text) == ['<script src="/static/site.js" defer>']
        assert set(re.findall(r"[\w.+-]*://", text)) == ({"dipaco://"} if address == "/" else set())


def test_answers_are_kept_only_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaderboard.web.app.KEPT_BYTES_MAX", 60_000)
    with site(LONGER) as (client, _):
        first = client.get("/versions?page=1").text
        for page in range(2, 4):
            client.get(f"/versions?page={page}")
        assert client.get("/versions?page=1").text == first


def column(page: str, number: int) -> list[str]:
    """The text of one column of the list of a page."""
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [visible(re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)[number]).strip() for row in rows]


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def visible(page: str) -> str:
    """The text of a page."""
    parser = _Text()
    parser.feed(page)
    return re.sub(r"\s+", " ", "".join(parser.parts))
