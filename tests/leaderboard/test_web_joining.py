"""How one joins, on the first page: the line, the link, and a code of the link; on the server and in a static copy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import segno
from web_harness import SMALL, site

from dipaco_p2p.node.doorplate import DOORPLATE
from dipaco_p2p.node.entry import read_entry
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.ticket import SeedPlace, Ticket, write_ticket
from leaderboard.program import join_line
from leaderboard.web import drawings
from leaderboard.web.export import export_site
from leaderboard.web.text import CHARS_MAX

MANY = 14
"""Seeds of a ticket that is nearly as long as tickets can be."""
KEYS = [Signer(bytes([number]) * 32).public_key for number in range(MANY)]
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{Signer(bytes(32)).peer}"


def ticket(seeds: int = 1) -> str:
    places = tuple(SeedPlace(place="/ip4/203.0.113.7/tcp/31337", key=key) for key in KEYS[:seeds])
    return write_ticket(Ticket(run="ab" * 32, coordinator=KEYS[0], seeds=places, name="home"))


def overview(join: str, state: str = "training") -> str:
    with site(replace(SMALL, join=join, state=state)) as (client, _):
        return client.get("/").text


def require_whole(page: str, word: str) -> None:
    """The page shows a line with this ticket, its link and its code."""
    assert f"dipaco-peer join {word}</pre>" in page
    [link] = re.findall(r'href="(dipaco:[^"]+)"', page)
    assert link == f"dipaco://{word}" and read_entry(link) == read_entry(word)
    [(size, path)] = re.findall(
        r'<svg class="qr" viewBox="0 0 (\d+) \1" role="img" aria-label="[^"]+"><path d="(.*?)"', page
    )
    assert drawn(path, int(size)) == [list(row) for row in segno.make_qr(link).matrix_iter(border=4)]


def drawn(path: str, size: int) -> list[list[int]]:
    """The modules that a path fills."""
    modules = [[0] * size for _ in range(size)]
    assert re.fullmatch(r"(M\d+ \d+h\d+v1h-\d+z)+", path)
    for x, y, width, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", path):
        assert width == back
        for place in range(int(x), int(x) + int(width)):
            modules[int(y)][place] = 1
    return modules


@pytest.mark.parametrize("seeds", [1, MANY])
def test_a_ticket_is_a_line_a_link_and_a_code_however_long_it_is(seeds: int) -> None:
    word = ticket(seeds)
    assert (len(word) > CHARS_MAX) is (seeds > 1)
    require_whole(overview(f"dipaco-peer join {word}"), word)


@pytest.mark.parametrize(
    "line",
    [f"dipaco-peer join {ADDRESS}", f"dipaco-peer join {ticket()[:-1]}", f"{ticket()} or {ticket(2)}"],
    ids=["address", "typo", "two"],
)
def test_a_line_without_one_good_ticket_is_shown_as_it_is(line: str) -> None:
    page = overview(line)
    assert f"{line}</pre>" in page and "dipaco://" not in page and 'class="qr"' not in page


def test_nothing_is_said_of_joining_without_a_line_or_after_the_end() -> None:
    for page in (overview(""), overview(f"dipaco-peer join {ticket()}", state="complete")):
        assert 'id="join"' not in page and "dipaco-peer join dipaco" not in page


def test_a_static_copy_shows_it_too(tmp_path: Path) -> None:
    export_site(replace(SMALL, join=f"dipaco-peer join {ticket()}"), tmp_path / "copy", now_s=SMALL.taken_s)
    require_whole((tmp_path / "copy/index.html").read_text(), ticket())


def test_the_code_is_made_once_for_all_pages_and_snapshots() -> None:
    line = f"dipaco-peer join {ticket(3)}"
    with site(replace(SMALL, join=line)) as (client, held):
        client.get("/")
        before = drawings.qr_code.cache_info().misses
        held.snapshot = replace(SMALL, join=line, taken_s=SMALL.taken_s + 600)
        assert 'class="qr"' in client.get("/").text
    assert drawings.qr_code.cache_info().misses == before


def test_the_line_comes_from_the_ticket_or_from_the_folder_of_a_coordinator_and_tells_no_address(
    tmp_path: Path,
) -> None:
    line = f"dipaco-peer join {ticket()}"
    assert join_line(ticket()) == join_line(f"dipaco://{ticket()}") == line and join_line(ADDRESS) == ""
    assert join_line(str(tmp_path)) == ""
    for told, expected in ((ticket(), line), ("", ""), ("rm -rf ~", ""), (None, "")):
        (tmp_path / DOORPLATE).write_text(json.dumps({"ticket": told, "address": ADDRESS}))
        assert join_line(str(tmp_path)) == expected
    (tmp_path / DOORPLATE).write_text("[")
    assert join_line(str(tmp_path)) == ""
