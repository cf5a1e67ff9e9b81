"""What the coordinator decreed is on the pages, in words: a freeze, bans, and versions that went back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from test_web_pages import visible
from web_harness import FREEZE, FROZEN, PAGES, SMALL, site

from leaderboard.model import DecreeRow, Snapshot
from leaderboard.web.export import export_site

[BACK] = [row for row in SMALL.versions if row.rollback is not None]
EVIL = "<script>alert(1)</script>"


def text_of(snapshot: Snapshot, address: str) -> str:
    with site(snapshot) as (client, _):
        answer = client.get(address)
    assert answer.status_code == 200
    return visible(answer.text)


def decrees_of(snapshot: Snapshot) -> list[str]:
    """The lines of the list, the newest first."""
    with site(snapshot) as (client, _):
        page = client.get("/decrees").text
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    return [visible(row.replace("</t", " </t")).strip() for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)]


def numbered(*acts: dict[str, object]) -> Sequence[DecreeRow]:
    rows = [{"number": n, "at_s": SMALL.taken_s - 600 + n, "reason": ""} | act for n, act in enumerate(acts, start=1)]
    return tuple(DecreeRow(**row) for row in rows)  # type: ignore[arg-type] # the fields of the caller


def test_a_frozen_run_says_so_since_when_and_why() -> None:
    text = text_of(FROZEN, "/")
    assert "Frozen by the coordinator" in text and "Since 2026-09-21 17:05 UTC: the disk of a leader is full." in text
    assert not re.search(r"\bTraining\b", text)


def test_a_run_that_goes_on_again_is_not_called_frozen() -> None:
    text = text_of(SMALL, "/")
    assert "Training" in text and "Frozen by" not in text and "froze the run" in text, "the decree is still listed"


def test_every_decree_is_listed_in_words_with_what_became_of_it() -> None:
    banned, other = (f"...{row.peer[-6:]}" for row in SMALL.decrees if row.act == "ban" and row.peer)
    assert [re.sub(r"2026\S* \S* UTC", "DATE", line) for line in decrees_of(FROZEN)] == [
        "8 ❙❙ froze the run the disk of a leader is full DATE in force",
        f"7 admitted {banned} again DATE in force",
        f"6 ✕ banned {other} its clock and its work are of another run DATE in force",
        "5 let the run go on DATE until decree 8",
        f"4 ↺ took back {BACK.module} to version 6 diverged after a bad shard DATE done: {BACK.module} version 9",
        "3 ❙❙ froze the run the loss of one module diverged DATE until decree 5",
        f"2 ✕ banned {banned} contributions of noise DATE until decree 7",
        f"1 appointed ...{SMALL.decrees[0].peer[-6:]} as a seed node DATE in force",  # type: ignore[index]
    ]


def test_a_rollback_that_is_not_carried_out_and_one_that_was_overtaken_say_so() -> None:
    back = {"act": "rollback", "stage": BACK.stage, "module": BACK.module}
    decrees = numbered({**back, "to": 3, "ended_by": 2}, {**back, "to": 2})
    newer, older = decrees_of(replace(SMALL, decrees=decrees))
    assert newer.endswith("not done yet") and older.endswith("until decree 2")


def test_a_banned_peer_is_called_banned_with_the_reason_and_one_admitted_again_is_not() -> None:
    admitted, banned = (row.peer for row in SMALL.decrees if row.act == "ban")
    assert "✕ banned" in text_of(SMALL, "/contributors")
    assert "by the coordinator since" in text_of(SMALL, f"/contributors/{banned}")
    assert "its clock and its work are of another run" in text_of(SMALL, f"/contributors/{banned}")
    assert "banned" not in text_of(SMALL, f"/contributors/{admitted}")


def test_a_rollback_is_a_mark_on_the_curves_and_in_the_lists_of_versions() -> None:
    with site() as (client, _):
        overview, module = client.get("/").text, client.get(f"/modules/{BACK.module}").text
        versions = client.get(f"/versions?module={BACK.module}").text
    said = f"grid round 9, {BACK.module} went back to version 6"
    assert f"<title>{said}</title>" in overview and f"By decree: {said}." in visible(overview)
    assert "<title>version 9 is version 6 again</title>" in module
    for page in (module, versions):
        assert visible(page).count("back to version 6") == 1
    # The warm-up's seven rounds are left of it; the line ends at the grid's round 11.
    [x] = re.findall(r'<line class="back" x1="([\d.]+)"', overview)
    [line] = re.findall(r'<polyline class="line" points="([^"]+)"', overview)
    assert float(x) == float(line.split()[-3].split(",")[0])


def test_a_version_that_went_back_says_why_and_is_not_called_the_first_of_a_stage() -> None:
    text = text_of(SMALL, f"/lineage/{BACK.module}/10")
    assert text.count("back to version 6 by decree: diverged after a bad shard") == 1
    text = text_of(SMALL, f"/versions/{BACK.module}/9")
    assert "Back to version 6 by decree 4 of 2026-09-21 16:52 UTC: diverged after a bad shard." in text
    assert "None: it was made by decree." in text
    assert "Back to" not in text_of(SMALL, f"/versions/{BACK.module}/6")


def test_a_version_that_was_rebuilt_says_without_whose_work() -> None:
    peer = next(row.peer for row in SMALL.decrees if row.act == "ban")
    assert peer is not None and BACK.rollback is not None
    back = replace(BACK, rollback=replace(BACK.rollback, without=(peer,)))
    decrees = tuple(replace(row, without=(peer,)) if row.act == "rollback" else row for row in SMALL.decrees)
    versions = tuple(back if row is BACK else row for row in SMALL.versions)
    rebuilt = replace(SMALL, versions=versions, decrees=decrees)
    text = text_of(rebuilt, f"/versions/{BACK.module}/9")
    assert "Rebuilt from version 6 on by decree 4" in text and "Back to" not in text
    assert f"without the contributions of ...{peer[-6:]}" in text
    assert "rebuilt from version 6 on by decree: diverged" in text_of(rebuilt, f"/lineage/{BACK.module}/10")
    assert f"to version 6, and rebuilt it without the work of ...{peer[-6:]}" in " ".join(decrees_of(rebuilt))
    assert f"grid round 9, {BACK.module} was rebuilt from version 6 on" in text_of(rebuilt, "/")


def test_a_curve_with_many_rollbacks_names_the_last_ones() -> None:
    changed = {
        row: {"rollback": BACK.rollback} for row in SMALL.versions if row.stage == BACK.stage and row.version > 6
    }
    versions = tuple(replace(row, **changed.get(row, {})) for row in SMALL.versions)
    text = text_of(replace(SMALL, versions=versions), "/")
    assert (
        text.count("went back to version") == len(changed) + 2 * 3 and f"{len(changed) - 3} earlier rollbacks." in text
    )


@pytest.mark.parametrize("address", [*PAGES, f"/modules/{BACK.module}"])
def test_words_of_a_decree_are_only_text(address: str) -> None:
    decrees = tuple(replace(row, reason=EVIL, act=EVIL if row.act == "admit" else row.act) for row in FROZEN.decrees)
    rollback = replace(BACK.rollback, reason=EVIL)  # type: ignore[type-var]
    versions = tuple(replace(row, rollback=rollback) if row is BACK else row for row in SMALL.versions)
    with site(replace(FROZEN, decrees=decrees, versions=versions)) as (client, _):
        assert EVIL not in client.get(address).text


def test_a_growth_is_told_on_the_first_page_while_its_stage_is_open_and_stays_in_the_list() -> None:
    growth = {"act": "grow", "stage": SMALL.run.stage.id, "to": 40, "levels": "4x4"}
    grows = replace(SMALL, decrees=numbered(growth))
    assert "After round 40 the grid grows to 4x4." in text_of(grows, "/")
    [line] = decrees_of(grows)
    assert "grows the grid to 4x4 after round 40" in line and line.endswith("in force")
    later = replace(SMALL, decrees=numbered({**growth, "stage": "ab" * 32}))
    assert "the grid grows" not in text_of(later, "/")
    assert "of the same text" not in line
    [line] = decrees_of(replace(SMALL, decrees=numbered({**growth, "corpus": "ab" * 32})))
    assert "with new text: losses before and after are not of the same text" in line


def test_decrees_are_data_for_programs(client: TestClient) -> None:
    rows = client.get("/api/v1/decrees.json").json()["rows"]
    assert [row["act"] for row in rows] == [row.act for row in SMALL.decrees]
    assert rows[3] == {
        "number": 4,
        "at_s": SMALL.decrees[3].at_s,
        "act": "rollback",
        "reason": "diverged after a bad shard",
        "peer": None,
        "stage": BACK.stage,
        "module": str(BACK.module),
        "to": 6,
        "version": 9,
        "ended_by": None,
        "levels": "",
        "corpus": "",
        "without": "",
    }
    versions = client.get("/api/v1/versions.json").json()["rows"]
    assert [(row["decree"], row["back_to"]) for row in versions if row["decree"] is not None] == [(4, 6)]


@pytest.mark.parametrize(("snapshot", "freeze"), [(SMALL, (None, None)), (FROZEN, (FREEZE.at_s, FREEZE.reason))])
def test_programs_are_told_of_a_freeze(snapshot: Snapshot, freeze: tuple[float | None, str | None]) -> None:
    with site(snapshot) as (client, _):
        [row] = client.get("/api/v1/overview.json").json()["rows"]
        metrics = client.get("/metrics").text
    assert (row["frozen_s"], row["frozen_reason"]) == freeze and row["state"] == snapshot.state
    assert f"dipaco_frozen {float(snapshot is FROZEN)}\n" in metrics


def test_a_static_copy_shows_them_too(tmp_path: Path) -> None:
    many = numbered(*[{"act": act} for _ in range(40) for act in ("freeze", "unfreeze")])
    export_site(replace(FROZEN, decrees=(*many, FREEZE)), tmp_path / "site", now_s=FROZEN.taken_s)
    assert "Frozen by the coordinator" in (tmp_path / "site/index.html").read_text()
    pages = [visible((tmp_path / f"site/decrees{number}.html").read_text()) for number in ("", "-2")]
    assert [page.count("let the run go on") for page in pages] == [25, 15]
