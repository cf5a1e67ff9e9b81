"""The site in a real browser: wide and narrow, light and dark, by keyboard, without scripts, and while it changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_harness import Served, Watched, axe_findings, looking, served, started_browser, watch
from playwright.sync_api import Browser, Page, expect
from web_harness import FROZEN, LONGER, SMALL, newest_judged, pages_of, with_version

from dipaco_p2p.protocol.decrees import REASON_CHARS_MAX
from leaderboard.model import Snapshot
from leaderboard.web.export import export_site

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

WIDTHS = (360, 1280)
SCHEMES = ("light", "dark")
ALL_IN_VIEW = "[...document.querySelectorAll('.scroll')].every((table) => table.scrollWidth <= table.clientWidth)"
HIDDEN = """
window.isHidden = false;
Object.defineProperty(document, "hidden", { get: () => window.isHidden });
window.hide = (isHidden) => { window.isHidden = isHidden; document.dispatchEvent(new Event("visibilitychange")); };
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as found:
        yield found


@pytest.fixture
def small() -> Iterator[Served]:
    with served(SMALL) as found:
        yield found


@pytest.fixture
def watched(browser: Browser, small: Served) -> Iterator[Watched]:
    """A page that has not been anywhere yet; at the end nothing may have gone wrong on it."""
    with looking(browser, small.address) as found:
        yield found


def first_column(page: Page, number: int) -> list[str]:
    return page.locator(f"#list tbody tr > :nth-child({number})").all_inner_texts()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_page_fits_breaks_nothing_and_can_be_read_by_everybody(
    browser: Browser, small: Served, tmp_path: Path, width: int, scheme: str
) -> None:
    look: dict[str, Any] = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with looking(browser, small.address, **look) as watched:
        for number, address in enumerate(
            [*pages_of(SMALL), "/versions?module=L1.M1&sort=after", "/versions?module=no"]
        ):
            watched.page.goto(f"{small.address}{address}")
            assert watched.page.evaluate("document.documentElement.scrollWidth") <= width, f"{address} is too wide"
            assert width < 1280 or watched.page.evaluate(ALL_IN_VIEW), f"{address} hides columns"
            watched.page.screenshot(path=tmp_path / f"{number}-{width}-{scheme}.png", full_page=True)
            watched.check()
            require_accessible(watched.page, address)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_code_is_dark_on_light_in_both_schemes_and_the_link_can_be_copied(
    browser: Browser, small: Served, scheme: str
) -> None:
    with looking(browser, small.address, color_scheme=scheme) as watched:
        watched.page.goto(small.address)
        code = watched.page.get_by_role("img", name="The link as a QR code")
        expect(code).to_have_css("background-color", "rgb(255, 255, 255)")
        expect(code.locator("path")).to_have_css("fill", "rgb(0, 0, 0)")
        box = code.bounding_box()
        assert box is not None and box["width"] == box["height"] > 150
        expect(watched.page.locator("#join").get_by_role("button", name="Copy")).to_have_count(2)
        watched.check()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_long_reasons_of_decrees_fit_and_can_be_read_by_everybody(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    reason = "x" * REASON_CHARS_MAX
    rows = {
        row: {"rollback": replace(row.rollback, reason=reason)} for row in SMALL.versions if row.rollback is not None
    }
    snapshot = replace(
        FROZEN,
        decrees=tuple(replace(row, reason=reason) for row in FROZEN.decrees),
        versions=tuple(replace(row, **rows.get(row, {})) for row in SMALL.versions),
    )
    [back], banned = rows, next(row.peer for row in SMALL.decrees if row.act == "ban" and row.ended_by is None)
    version = f"{back.module}/{back.version}"
    look: dict[str, Any] = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with served(snapshot) as site, looking(browser, site.address, **look) as watched:
        for number, address in enumerate(
            ("/", "/decrees", f"/contributors/{banned}", f"/versions/{version}", f"/lineage/{version}")
        ):
            watched.page.goto(f"{site.address}{address}")
            assert reason in watched.page.content(), address
            assert watched.page.evaluate("document.documentElement.scrollWidth") <= width, f"{address} is too wide"
            watched.page.screenshot(path=tmp_path / f"{number}-{width}-{scheme}.png", full_page=True)
            require_accessible(watched.page, address)


@pytest.mark.parametrize("snapshot", [None, replace(SMALL, heard_s=SMALL.taken_s - 900)], ids=["empty", "stale"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_site_without_fresh_figures_says_so_and_can_be_read_by_everybody(
    browser: Browser, tmp_path: Path, snapshot: Snapshot | None, scheme: str
) -> None:
    with served(snapshot) as site, looking(browser, site.address, color_scheme=scheme) as watched:
        watched.page.goto(site.address)
        said = "These figures are old" if snapshot else "Nothing collected yet"
        expect(watched.page.get_by_text(said)).to_be_visible()
        watched.page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        require_accessible(watched.page, said)


def require_accessible(page: Page, name: str) -> None:
    """axe-core finds nothing."""
    found = axe_findings(page)
    assert not found, [(name, each["id"], each["help"], [node["html"] for node in each["nodes"]][:3]) for each in found]


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">red</p>')", "style-src"),
        ("fetch('https://elsewhere.example/').catch(() => 0)", "connect-src"),
        ("console.error('broken')", "broken"),
        ("setTimeout(() => { throw Error('thrown') })", "thrown"),
    ],
)
def test_what_must_never_happen_on_a_page_is_noticed(browser: Browser, small: Served, planted: str, found: str) -> None:
    with browser.new_context() as context:
        watched = watch(context, small.address)
        watched.page.goto(small.address)
        watched.check()
        watched.page.evaluate(f"() => {{ {planted} }}")
        watched.page.wait_for_function("new Promise((done) => setTimeout(() => done(true)))")
        with pytest.raises(AssertionError, match=found):
            watched.check()


def test_a_page_that_not_everybody_can_read_is_noticed(browser: Browser, small: Served) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(small.address)
        page.evaluate("document.querySelector('#now').append(document.createElement('button'), new Image())")
        with pytest.raises(AssertionError, match="button-name"):
            require_accessible(page, "planted")


def test_a_click_on_a_column_sorts_by_it_and_another_one_the_other_way(watched: Watched, small: Served) -> None:
    page = watched.page
    page.goto(f"{small.address}/versions?stage=grid")
    for order, is_reverse in (("ascending", False), ("descending", True)):
        page.get_by_role("link", name="Loss after").click()
        expect(page.get_by_role("columnheader", name="Loss after")).to_have_attribute("aria-sort", order)
        page.wait_for_load_state()
        losses = [float(text) for text in first_column(page, 3) if text != "–"]
        assert losses == sorted(losses, reverse=is_reverse)


def test_the_form_chooses_versions(watched: Watched, small: Served) -> None:
    page = watched.page
    page.goto(f"{small.address}/versions")
    page.get_by_label("Module").select_option("L1.M1")
    page.get_by_label("Mark").select_option("verified")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url(re.compile("module=L1.M1"))
    assert set(first_column(page, 1)) == {"L1.M1"}
    page.get_by_role("link", name="Show all").click()
    page.wait_for_url(re.compile("^((?!module=L1.M1).)*$"))
    assert len(set(first_column(page, 1))) > 1


def test_without_scripts_everything_but_the_live_update_works(browser: Browser, small: Served) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{small.address}/versions")
        page.get_by_role("link", name="Tokens").click()
        page.wait_for_url(re.compile("sort=tokens"))
        page.get_by_label("Module").select_option("L2.M0")
        page.get_by_role("button", name="Show").click()
        page.wait_for_url(re.compile("module=L2.M0"))
        assert {text.split()[0] for text in first_column(page, 1)} == {"L2.M0"} and "sort=tokens" in page.url
        page.locator("#list tbody a.id").last.click()
        expect(page.get_by_role("heading", name="Check it yourself")).to_be_visible()
        expect(page.get_by_role("button", name="Copy")).to_have_count(0)


def test_an_open_page_follows_the_run_without_being_loaded_again(watched: Watched, small: Served) -> None:
    page = watched.page
    page.clock.install()
    page.goto(f"{small.address}/versions?sort=after")
    page.get_by_role("link", name="Loss after").focus()
    page.evaluate("window.isSamePage = true")
    small.show(with_version(SMALL, newest_judged(SMALL), loss_after=1.2345))
    page.clock.run_for(11_000)
    expect(page.locator("#list tbody tr").first).to_contain_text("1.2345")
    assert page.evaluate("window.isSamePage") is True
    expect(page.get_by_role("link", name="Loss after")).to_be_focused()


def test_a_page_that_nobody_looks_at_does_not_ask(watched: Watched, small: Served) -> None:
    page, asked = watched.page, []
    page.add_init_script(HIDDEN)
    page.clock.install()
    page.goto(small.address)
    # Of the page itself: when the browser asks for the icon is its own business.
    page.on("request", lambda request: asked.append(request.url) if request.resource_type == "fetch" else None)
    page.evaluate("hide(true)")
    page.clock.run_for(600_000)
    assert asked == []
    small.show(replace(SMALL, credit_total=123_456_789.0))
    page.evaluate("hide(false)")
    expect(page.locator("#now")).to_contain_text("123 M")
    assert len(asked) == 1


def test_a_page_fills_when_the_first_snapshot_is_there(browser: Browser) -> None:
    with served(None) as site, looking(browser, site.address) as watched:
        watched.page.clock.install()
        watched.page.goto(f"{site.address}/versions")
        site.show(replace(SMALL, heard_s=1e12))
        watched.page.clock.run_for(11_000)
        expect(watched.page.get_by_role("heading", name="Versions")).to_be_visible()


def test_a_reader_is_told_when_the_server_is_gone_and_when_it_is_back(browser: Browser, small: Served) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        page.goto(small.address)
        page.route("**/*", lambda route: route.abort())
        notice = page.get_by_text("No connection.")
        for _ in range(2):
            # The page's own looks alone: the browser may ask late for the icon, too, and that fails as well.
            with page.expect_event("requestfailed", lambda request: request.resource_type == "fetch"):
                page.clock.run_for(20_000)
        expect(notice).to_be_visible()
        page.unroute("**/*")
        page.clock.run_for(160_000)
        expect(notice).to_be_hidden()


def test_a_reader_without_a_mouse_gets_to_the_content_and_into_a_wide_table(watched: Watched, small: Served) -> None:
    page = watched.page
    page.goto(f"{small.address}/versions")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "scroll":
            break
    expect(page.locator(".scroll")).to_be_focused()


def test_hostile_text_runs_nothing(browser: Browser) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    rows = tuple(replace(row, doing=evil) for row in SMALL.contributors)
    losses = tuple(replace(row, reason=evil) for row in SMALL.losses)
    snapshot = replace(SMALL, contributors=rows, losses=losses, refused={evil: 1}, join=evil, state=evil)
    with served(snapshot) as site, looking(browser, site.address) as watched:
        watched.page.on("dialog", lambda dialog: watched.problems.append("an alert"))
        for address in pages_of(snapshot):
            watched.page.goto(f"{site.address}{address}")
            watched.check()


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_a_copy_are_sorted_and_narrowed_without_a_server(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    export_site(LONGER, tmp_path / "site", now_s=LONGER.taken_s)
    look: dict[str, Any] = {"viewport": {"width": width, "height": 800}}
    with looking(browser, f"file://{tmp_path}/site/", **look) as watched:
        page = watched.page
        page.goto(f"file://{tmp_path}/site/versions.html")
        page.get_by_role("button", name="Loss after").click()
        figures = [float(text) for text in first_column(page, 3) if text != "–"]
        assert len(figures) > 10 and figures == sorted(figures, reverse=True)
        assert first_column(page, 3)[-1] == "–" or "–" not in first_column(page, 3)
        page.get_by_role("button", name="Loss after").press("Enter")
        figures = [float(text) for text in first_column(page, 3) if text != "–"]
        assert figures == sorted(figures)
        expect(page.locator("#list th[aria-sort]")).to_have_attribute("aria-sort", "ascending")
        page.get_by_label("Only rows with").fill("l2.m0 verified")
        expect(page.get_by_text("rows of this page")).to_be_visible()
        shown = page.locator("#list tbody tr:visible > th").all_inner_texts()
        assert shown and {text.split()[0] for text in shown} == {"L2.M0"}
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=tmp_path / f"narrowed-{width}.png", full_page=True)
        require_accessible(page, "a narrowed copy")
        page.get_by_label("Only rows with").fill("")
        expect(page.locator("#list tbody tr:visible")).to_have_count(50)


def test_tables_of_a_copy_stand_as_they_are_without_scripts(browser: Browser, tmp_path: Path) -> None:
    export_site(SMALL, tmp_path / "site", now_s=SMALL.taken_s)
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"file://{tmp_path}/site/versions.html")
        assert page.locator("#list tbody tr:visible").count() > 10
        expect(page.get_by_role("button")).to_have_count(0)
        expect(page.get_by_label("Only rows with")).to_have_count(0)


def test_a_copy_is_read_from_the_disk_alone(browser: Browser, tmp_path: Path) -> None:
    export_site(LONGER, tmp_path / "site", now_s=LONGER.taken_s)
    with looking(browser, f"file://{tmp_path}/site/") as watched:
        page = watched.page
        page.goto(f"file://{tmp_path}/site/index.html")
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Versions").click()
        page.get_by_role("link", name="After").click()
        page.locator("#list tbody a.id").last.click()
        page.get_by_role("link", name="See its lineage").click()
        expect(page.get_by_role("heading", name="Lineage")).to_be_visible()
