"""The built site in a real browser: wide and narrow, light and dark, from a server and from the disk."""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("leaderboard", "bootstrap", "e2e"))]
from browser_harness import axe_findings, started_browser, watch  # noqa: E402
from playwright.sync_api import expect  # noqa: E402
from site_harness import build_site  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

PAGES = ("index.html", "concepts.html", "reference.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the screen of the tests."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The built site: its folder, and where a server gives it out."""
    folder = tmp_path_factory.mktemp("built") / "site"
    done = build_site(folder)
    assert done.returncode == 0, done.stdout
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_pages_fit_can_be_read_by_everybody_and_ask_nobody(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    with started_browser() as browser:
        for width, scheme, root in ((360, "dark", address), (1280, "light", f"file://{folder}")):
            with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:
                watched = watch(context, root)
                for name in PAGES:
                    watched.page.goto(f"{root}/{name}")
                    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width, f"{name}: too wide"
                    watched.page.screenshot(path=tmp_path / f"{width}-{name}.png", full_page=True)
                    # The theme is not ours: what is slight in it stays.
                    found = [e for e in axe_findings(watched.page) if e["impact"] in {"serious", "critical"}]
                    nodes = [(each["id"], [node["html"][:200] for node in each["nodes"]][:3]) for each in found]
                    assert not nodes, (name, scheme, nodes)
                    watched.check()


def test_the_search_finds_a_page_without_asking_anybody(site: tuple[Path, str]) -> None:
    _, address = site
    with started_browser() as browser, browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        watched = watch(context, address)
        watched.page.goto(f"{address}/index.html")
        box = watched.page.get_by_placeholder("Search")
        box.click()
        box.press_sequentially("cosignature", delay=50)  # the theme looks when a key is let go
        found = watched.page.locator(".md-search-result__list")
        expect(found).to_contain_text("cosignature", ignore_case=True, timeout=60_000)  # a worker reads the index first
        # Letters that come before it has done so are warned of on the console, by the theme, and answered later.
        assert [problem for problem in watched.problems if problem.startswith("asked for")] == []
