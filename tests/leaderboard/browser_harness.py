"""A site on a port of its own, and a page of a real browser that notes everything a reader must never meet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, sync_playwright
from web_harness import Held

from benchmarks.leaderboard.__main__ import served as served_at
from dipaco_p2p.clock import ManualClock
from leaderboard.model import Snapshot

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO = "no Chromium was found; on Debian: apt-get install chromium; elsewhere name one in DIPACO_BROWSER"
VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
  violations.push(event.violatedDirective + " " + event.blockedURI));
"""


@contextmanager
def started_browser() -> Iterator[Browser]:
    """A headless Chromium; the test is skipped where there is none."""
    found = os.environ.get("DIPACO_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        if found is None and not own.exists():
            pytest.skip(HOW_TO)
        # A container has no sandbox of its own for it, and what it opens is only this site.
        browser = playwright.chromium.launch(executable_path=found or own, args=["--no-sandbox"])
        yield browser
        browser.close()


def axe_findings(page: Page) -> list[dict[str, Any]]:
    """What axe-core finds on a page that makes it harder to read for somebody, however little.

    Told only of violations, it leaves out the descriptions of every element that passed: half of its time.
    """
    found: list[dict[str, Any]] = Axe().run(page, options={"resultTypes": ["violations"]})["violations"]
    return found


@dataclass(slots=True)
class Served:
    """A running site, and what it shows."""

    held: Held
    address: str

    def show(self, snapshot: Snapshot) -> None:
        """From the next request on."""
        self.held.snapshot = snapshot


@contextmanager
def served(snapshot: Snapshot | None) -> Iterator[Served]:
    """A site on a free port of this machine."""
    held = Held(snapshot, ManualClock(snapshot.taken_s + 1 if snapshot else 0.0))
    with served_at(lambda: held.snapshot, held.clock) as port:
        yield Served(held, f"http://127.0.0.1:{port}")


@dataclass(slots=True)
class Watched:
    """A page, and what went wrong on it."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Nothing went wrong so far."""
        violations = self.page.evaluate("window.violations")
        assert not self.problems and not violations, [*self.problems, *violations]


@contextmanager
def looking(browser: Browser, inside: str, **options: Any) -> Iterator[Watched]:
    """A new page in a context of its own; at the end nothing may have gone wrong on it."""
    with browser.new_context(**options) as context:
        watched = watch(context, inside)
        yield watched
        watched.check()


def watch(context: BrowserContext, inside: str) -> Watched:
    """A new page that is kept from leaving addresses that begin with `inside`."""
    watched = Watched(context.new_page())
    page = watched.page
    page.add_init_script(VIOLATIONS)

    def on_request(route: Route) -> None:
        if route.request.url.startswith((inside, "data:")):
            route.continue_()
        else:
            watched.problems.append(f"asked for {route.request.url}")
            route.abort()

    def on_console(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            watched.problems.append(f"{message.type}: {message.text}")

    page.route("**/*", on_request)
    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.problems.append(f"script: {error}"))
    return watched
