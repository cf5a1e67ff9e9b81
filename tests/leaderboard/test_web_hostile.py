"""What others wrote is shown as text, short, on its line, and nowhere as anything else."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from web_harness import PAGES, SMALL, newest_judged, site

from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Findings
from leaderboard.model import Snapshot
from leaderboard.web.export import export_site
from leaderboard.web.text import ACCENTS_MAX, CHARS_MAX, WORD_CHARS_MAX, clean, csv_cell, word
from leaderboard.words import Sample, Words

EVIL = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "https://evil.example/claim?free=1",
    "{{ 7 * 7 }}{% raw %}",
    "</title></textarea><script>alert(2)//",
    "\u202egnirts detrever\u202c",
    "zero\u200bwidth\u2060and\ufeffmarks",
    "a\x00b\x1b[31mc\x07\r\nd\te",
    "Z\u0300\u0301\u0302\u0303\u0304\u0305\u0306lgo",
    "x" * 100_000,
    '=HYPERLINK("https://evil.example")',
    "\ud800 half of a pair",
    "<!-- ",
    "]]>",
    "&lt;script&gt;",
)
ELEMENTS = frozenset(
    "a bdi body br button circle caption code dd desc details div dl dt em figcaption figure footer form g h1 h2 h3"
    " head header html input label li line link main meta nav ol option p path polyline pre progress rect script"
    " section select small span strong summary svg table tbody td text tfoot th thead time title tr tspan ul".split()
)


@pytest.mark.parametrize("text", EVIL)
def test_cleaned_text_is_short_visible_and_on_one_line(text: str) -> None:
    shown = clean(text)
    assert len(shown) <= CHARS_MAX and len(word(text)) <= WORD_CHARS_MAX
    assert not any(unicodedata.category(char)[0] == "C" or char in "\n\r\t\u2028\u2029" for char in shown)
    assert clean(shown) == shown
    shown.encode()


def test_a_letter_keeps_a_few_accents_and_other_scripts_are_left_alone() -> None:
    assert clean("Zoë नमस्ते 日本語 שלום") == unicodedata.normalize("NFC", "Zoë नमस्ते 日本語 שלום")
    marks = [char for char in clean(EVIL[11]) if unicodedata.combining(char)]
    assert len(marks) <= ACCENTS_MAX


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_cell_of_a_csv_is_a_formula(text: str) -> None:
    assert csv_cell(text)[0] not in "=+-@\t\r"


def hostile(text: str) -> Snapshot:
    """A Snapshot with `text` wherever somebody else's word could come in."""
    peer = PeerId(text)
    contributors = (
        replace(SMALL.contributors[0], peer=peer, doing=text, name=text, team=text),
        *SMALL.contributors[1:],
    )
    losses = tuple(replace(loss, reason=text, peer=peer, contribution=text) for loss in SMALL.losses)
    return replace(
        SMALL,
        run=replace(SMALL.run, name=text, settings=((text, text),)),
        state=text,
        refused={text: 1},
        versions=tuple(
            replace(row, author=peer, cosigners=(peer, peer), findings=Findings(forged=(peer,)))
            for row in SMALL.versions
        ),
        modules=tuple(replace(row, leader=peer, mirrors=(peer,)) for row in SMALL.modules),
        paths=tuple(replace(row, peers=(peer,)) for row in SMALL.paths),
        losses=losses,
        contributors=contributors,
        join=text,
        words=Words(about=text, samples=(Sample(stage=text, round=1, path=text, prompt=text, text=text),)),
    )


@pytest.mark.parametrize("text", EVIL)
def test_hostile_text_makes_no_element_no_attribute_and_no_link(text: str) -> None:
    row = newest_judged(SMALL)
    with site(hostile(text)) as (client, _):
        for address in (
            *PAGES,
            *(f"/{name}/{row.module}/{row.version}" for name in ("versions", "lineage")),
            f"/modules/{row.module}",
        ):
            answer = client.get(address)
            assert answer.status_code == 200
            check(answer.text)
            assert max(map(len, answer.text.splitlines())) < 20_000, "a long text was not cut"


TARGET = re.compile(r"(/(?!/)|#).*|dipaco://dipaco1[a-z0-9]+")
"""What a link may lead to: a place on these pages, or the run."""


class _Checker(HTMLParser):
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS, tag
        for name, value in attrs:
            assert not name.startswith("on") and name != "style", name
            if name in {"href", "src", "action"}:
                assert TARGET.fullmatch(value or ""), value

    def handle_data(self, data: str) -> None:
        assert not any(unicodedata.category(char) in {"Cf", "Cs", "Co"} for char in data)


def check(page: str) -> None:
    parser = _Checker()
    parser.feed(page)
    parser.close()


@pytest.mark.parametrize("text", EVIL)
def test_hostile_text_stays_one_value_in_the_api(text: str) -> None:
    with site(hostile(text)) as (client, _):
        for name in ("contributors", "losses", "modules", "paths", "settings", "run", "overview"):
            document = client.get(f"/api/v1/{name}.json").json()
            read = list(csv.DictReader(io.StringIO(client.get(f"/api/v1/{name}.csv").text)))
            assert len(read) == len(document["rows"])
            for value in texts(document["rows"]):
                assert value == clean(value) and len(value) <= CHARS_MAX
        assert client.get("/metrics").status_code == 200


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for each in value.values() for text in texts(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in texts(each))


def test_a_question_is_never_part_of_the_page_as_it_was_written(client: TestClient) -> None:
    for name in ("module", "stage", "mark", "peer"):
        answer = client.get("/versions", params={name: '"><script>alert(1)</script>'})
        check(answer.text)
        assert "<script>alert" not in answer.text


def test_a_hostile_id_does_not_write_outside_the_folder_of_a_copy(tmp_path: Path) -> None:
    snapshot = hostile("../../../escaped")
    export_site(snapshot, tmp_path / "site", now_s=snapshot.taken_s)
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_the_site_keeps_no_cookie_and_believes_no_host_name(client: TestClient) -> None:
    answer = client.get("/", headers={"Host": "evil.example", "X-Forwarded-Host": "evil.example"})
    assert answer.status_code == 200 and "evil" not in answer.text and "set-cookie" not in answer.headers
    assert "evil" not in json.dumps(dict(answer.headers))
