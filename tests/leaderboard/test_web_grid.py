"""The grid as a picture, the heat of its paths, and finding a contributor."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_web_pages import column
from web_harness import SMALL, site

from benchmarks.leaderboard.synthetic import SMALL as SMALL_SHAPE
from benchmarks.leaderboard.synthetic import snapshot_of
from dipaco_p2p.topology import ModuleId, PathId
from leaderboard.model import PathRow, PathState, Snapshot
from leaderboard.web.book import Book
from leaderboard.web.drawings import FIFTHS, HEAT_FROM, MODULES_MAX, TEXT_WIDTH_MIN, WIDTH, grid, heat
from leaderboard.web.export import export_site


def with_grid(width: int, *, levels: int = 2, changed: dict[ModuleId, dict[str, Any]] | None = None) -> Snapshot:
    """As many modules in each level, and all paths of the first and last level's product, of which the last is free."""
    some_path, some_module = SMALL.paths[0], replace(SMALL.modules[0], version=7, leader=SMALL.contributors[0].peer)
    modules = tuple(
        replace(some_module, module=module, **(changed or {}).get(module, {}))
        for module in (ModuleId(level, number) for level in range(levels) for number in range(width))
    )
    ids = [PathId((a, *[0] * (levels - 2), b)) for a in range(width) for b in range(width)]
    trained = [replace(some_path, path=path, state=PathState.TRAINING, loss=float(n)) for n, path in enumerate(ids)]
    return replace(SMALL, modules=modules, paths=(*trained[:-1], replace(trained[-1], state=PathState.FREE)))


def kinds(rows: Snapshot) -> dict[str, str]:
    found = grid(Book(rows))
    assert found is not None
    return {str(cell.row.module): cell.kind for cell in found.cells}


def test_a_module_is_coloured_by_how_far_it_is_behind_and_by_who_leads_it() -> None:
    a, b, c = ModuleId(0, 0), ModuleId(1, 0), ModuleId(1, 1)
    found = kinds(with_grid(2, changed={a: {"version": 6}, b: {"version": 4}, c: {"leader": None}}))
    assert found == {"L0.M0": "behind", "L0.M1": "newest", "L1.M0": "late", "L1.M1": "alone"}


def test_in_a_run_that_is_complete_nobody_needs_to_lead() -> None:
    rows = with_grid(2, changed={ModuleId(1, 1): {"leader": None}})
    assert set(kinds(replace(rows, state="complete")).values()) == {"newest"}


@pytest.mark.parametrize(("width", "levels"), [(1, 1), (2, 2), (16, 2), (5, 3), (MODULES_MAX, 2)])
def test_no_cell_overlaps_another_or_leaves_the_picture(width: int, levels: int) -> None:
    one = replace(SMALL, modules=SMALL.modules[:1], paths=())
    found = grid(Book(one if levels == 1 else with_grid(width, levels=levels)))
    assert found is not None and len(found.cells) == width * levels
    for cell, following in zip(found.cells, found.cells[1:], strict=False):
        assert following.y > cell.y or following.x > cell.x + cell.width
    assert all(0 <= cell.x and cell.x + cell.width <= found.width <= WIDTH for cell in found.cells)
    assert all(0 <= cell.y and cell.y + found.cell_height <= found.height for cell in found.cells)
    assert all(cell.has_text == (cell.width >= TEXT_WIDTH_MIN) for cell in found.cells)
    assert found.cells[0].has_text == (width <= 16)


def test_a_pair_of_modules_has_one_line_and_a_free_path_another_kind() -> None:
    found = grid(Book(with_grid(16)))
    assert found is not None
    assert found.trained.count("M") == 16 * 16 - 1 and found.free.count("M") == 1
    through = grid(Book(with_grid(3, levels=3)))  # nine paths go through one module of the middle
    assert through is not None and through.trained.count("M") + through.free.count("M") == 3 + 3


def test_a_level_that_is_too_wide_or_not_known_is_not_drawn() -> None:
    assert grid(Book(with_grid(MODULES_MAX + 1))) is None
    with site(replace(SMALL, modules=(), paths=())) as (client, _):
        assert 'class="grid"' not in client.get("/").text


def test_the_overview_says_what_the_picture_shows() -> None:
    with site(with_grid(4)) as (client, _):
        page = client.get("/").text
    assert 'aria-label="2 levels of 4, 4 modules, 8 in all; 16 paths, 1 of them free"' in page
    assert page.count("<rect") == 8 + 1, "and one in the legend, for the only kind there is"
    assert "a path that nobody trains now" in page


def losses_of(rows: list[tuple[PathRow, int]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row, fifth in rows:
        found.setdefault(fifth, []).append(-1.0 if row.loss is None else row.loss)
    return found


def test_fifths_go_by_rank_and_a_path_without_a_loss_has_none() -> None:
    rows = with_grid(10).paths
    rows = (*rows[:-1], replace(rows[-1], loss=None))
    found = losses_of(heat(rows))
    assert set(found) == {0, *range(1, FIFTHS + 1)} and found[0] == [-1.0]
    assert all(19 <= len(found[fifth]) <= 20 for fifth in range(1, FIFTHS + 1))
    assert all(max(found[fifth]) < min(found[fifth + 1]) for fifth in range(1, FIFTHS))
    assert losses_of(heat([replace(row, loss=2.0) for row in rows])) == {1: [2.0] * 100}, "equal ones are alike"
    assert losses_of(heat([replace(row, loss=None) for row in rows])) == {0: [-1.0] * 100}


def test_few_paths_have_no_heat_map_and_many_lead_to_their_cards() -> None:
    assert heat(with_grid(5).paths) == [] and len(with_grid(5).paths) < HEAT_FROM
    with site(with_grid(16)) as (client, _):
        page = client.get("/paths").text
    targets = re.findall(r'<a href="#(P[\d-]+)"', page)
    assert len(targets) == 256 and all(page.count(f'id="{target}"') == 1 for target in targets)


ROW = next(row for row in SMALL.contributors if row.name and row.team)


def found_by(who: str, snapshot: Snapshot = SMALL) -> list[str]:
    with site(snapshot) as (client, _):
        answer = client.get("/contributors", params={"who": who})
    assert answer.status_code == 200
    return [text.split()[0] for text in column(answer.text, 1)]


@pytest.mark.parametrize("who", [ROW.peer, ROW.peer[-6:], ROW.name, ROW.name.upper()[:-1], ROW.team[1:]])
def test_a_contributor_is_found_by_id_name_and_team(who: str) -> None:
    found = found_by(who)
    assert any(ROW.peer.endswith(text.lstrip(".…")) for text in found)
    assert len(found) < len(SMALL.contributors)


def test_whoever_is_not_there_is_not_found_and_all_are_there_without_a_question() -> None:
    with site() as (client, _):
        nobody = client.get("/contributors", params={"who": "q" * 30}).text
    assert "No contributor matches" in nobody and "<table" not in nobody
    assert len(found_by("  ")) == min(50, len(SMALL.contributors))


def test_a_page_that_was_asked_for_keeps_the_question() -> None:
    many = snapshot_of(shape=replace(SMALL_SHAPE, contributors=120))
    rows = tuple(replace(row, name=f"Ada {place}") for place, row in enumerate(many.contributors))
    with site(replace(many, contributors=rows)) as (client, _):
        page = client.get("/contributors", params={"who": "ada"}).text
    assert "who=ada" in page and "120 contributors that match." in page


def test_a_static_copy_has_no_form(tmp_path: Path) -> None:
    export_site(SMALL, tmp_path / "copy", now_s=SMALL.taken_s)
    assert "<form" not in (tmp_path / "copy" / "contributors.html").read_text("utf-8")
