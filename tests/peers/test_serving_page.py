"""The page of `dipaco-peer serve` in a real browser: it talks, shows which path speaks and why, and runs no markup."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from browser_harness import axe_findings, looking, started_browser
from playwright.sync_api import Browser, Page, expect
from serve_harness import serving
from serving_harness import CONTEXT, ROUNDS, Served, make_served

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(served: Served) -> Iterator[str]:
    with serving(str(served.root)) as (_, found):
        yield found.removesuffix("v1")


def say(page: Page, text: str) -> None:
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Your text").fill(text)
    page.get_by_role("button", name="Send").click()
    page.locator("[aria-busy]").wait_for(state="detached")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_fits_talks_and_shows_which_path_speaks_and_why(
    browser: Browser, address: str, served: Served, width: int, scheme: str
) -> None:
    with looking(browser, address, viewport={"width": width, "height": 800}, color_scheme=scheme) as watched:
        page = watched.page
        page.goto(address)
        expect(page.locator("#model option")).to_have_text(["auto", *map(str, served.run.topology.paths())])
        page.get_by_role("spinbutton", name="Most tokens").fill("8")
        say(page, MARKUP)
        expect(page.locator(".user .said")).to_have_text(MARKUP)
        assert page.locator(".said *").count() == 0  # text, not markup
        expect(page.locator(".assistant .said")).not_to_be_empty()
        path, *others = [item.split("\n")[0] for item in page.locator(".why li").all_inner_texts()]
        assert {path, *others} == {str(path) for path in served.run.topology.paths()}
        expect(page.locator(".why .path")).to_have_text(path)
        scores = [float(found) for found in page.locator(".why li span:last-child").all_inner_texts()]
        assert scores == sorted(scores, reverse=True)
        expect(page.locator(".assistant .why")).to_contain_text(f"L0.M0 version {ROUNDS}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert axe_findings(page) == []


def test_a_path_can_be_taken_a_text_routed_again_and_a_long_talk_goes_on(browser: Browser, address: str) -> None:
    with looking(browser, address) as watched:
        page = watched.page
        page.goto(address)
        page.get_by_role("spinbutton", name="Most tokens").fill("30")
        page.get_by_label("Path").select_option("P0-1-1")
        say(page, "a")
        expect(page.locator(".why .path")).to_have_text("P0-1-1")
        assert page.locator(".why li").count() == 0
        page.get_by_role("button", name="New conversation").click()
        assert page.locator(".turn").count() == 0
        page.get_by_label("Path").select_option("auto")
        page.get_by_label("Route again every").select_option("16")
        page.get_by_label("continue the text").check()
        say(page, "the path of the prompt")
        assert page.locator(".why .path").all_inner_texts()[1].endswith(", from token 16 on")
        page.get_by_label("continue the text").uncheck()
        for _ in range(4):  # more than a context together
            say(page, "b" * (CONTEXT // 3))
        expect(page.locator("#problem")).to_be_hidden()
        watched.problems.clear()  # the browser notes each request that was refused


def test_a_problem_is_told_and_a_key_can_be_given(browser: Browser, served: Served) -> None:
    with serving(str(served.root), key="a long word") as (_, found), looking(browser, found[:-2]) as watched:
        page = watched.page
        page.goto(found.removesuffix("v1"))
        expect(page.locator("#problem")).to_contain_text("no key, or a wrong one")
        page.get_by_label("Key").fill("a long word")
        page.get_by_label("Key").press("Tab")
        expect(page.locator("#problem")).to_be_hidden()
        say(page, "b" * 9 * CONTEXT)
        expect(page.locator("#problem")).to_contain_text(f"a path sees {CONTEXT}")
        watched.problems.clear()


def test_a_text_can_be_stopped(browser: Browser, address: str) -> None:
    with looking(browser, address) as watched:
        page = watched.page
        page.goto(address)
        page.get_by_role("spinbutton", name="Most tokens").fill("4096")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Your text").fill("the path")
        page.get_by_label("Your text").press("Enter")
        expect(page.locator(".assistant .said")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_no_other_page_may_hold_it_or_give_it_scripts(address: str) -> None:
    for name in ("", "page.js", "page.css"):
        policy = httpx2.get(address + name).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
