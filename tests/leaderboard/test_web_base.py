"""The site below a path: behind a proxy that passes the prefix on, and behind one that takes it away."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient
from web_harness import SMALL, pages_of

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import ConfigError
from leaderboard.places import check_base
from leaderboard.web.app import HEADERS, make_app

BASE = "/runs/board"


@pytest.fixture
def client() -> TestClient:
    clock = ManualClock(SMALL.taken_s + 1)
    return TestClient(make_app(lambda: SMALL, clock=clock, base=BASE), follow_redirects=False)


@pytest.mark.parametrize(
    "address", ["/", "/versions?sort=after", pages_of(SMALL)[-1], "/api/v1/run.json", "/metrics", "/static/site.css"]
)
def test_it_is_the_same_site_whether_the_prefix_is_there_or_not(client: TestClient, address: str) -> None:
    whole, cut = client.get(f"{BASE}{address}"), client.get(address)
    assert whole.status_code == 200 and whole.content == cut.content
    assert {name: whole.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize("address", ["/", "/versions", pages_of(SMALL)[-1]])
def test_every_link_stays_below_the_prefix_and_leads_somewhere(client: TestClient, address: str) -> None:
    text = client.get(f"{BASE}{address}").text
    links = {urljoin(f"{BASE}{address}", link) for link in re.findall(r'(?:href|src|action)="([^"#]+)', text)}
    links = {link for link in links if not link.startswith("dipaco://")}
    assert links and all(link.startswith(f"{BASE}/") for link in links), links
    for link in sorted(links)[:8]:
        assert client.get(link).status_code == 200, link


def test_the_prefix_alone_leads_to_the_overview(client: TestClient) -> None:
    answer = client.get(BASE)
    assert (answer.status_code, answer.headers["location"]) == (308, f"{BASE}/")


def test_what_is_not_there_is_not_found_there_either(client: TestClient) -> None:
    assert client.get(f"{BASE}/qqq").status_code == 404
    assert client.get(f"{BASE}board/versions").status_code == 404
    assert set(client.get(f"{BASE}/api/v1/nothing.json").json()) == {"error"}


@pytest.mark.parametrize("base", ["", "/board", "/a/b-c_d/e.f"])
def test_a_path_is_a_base(base: str) -> None:
    check_base(base)


@pytest.mark.parametrize(
    "base", ["board", "/", "/board/", "//x", "/a b", "/<script>", "/../x", "/" + "x" * 200, "http://x"]
)
def test_anything_else_is_none(base: str) -> None:
    with pytest.raises(ConfigError, match="not a path for a site"):
        check_base(base)
