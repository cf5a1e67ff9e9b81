"""The tables for programs: JSON that keeps to its published schema, the same as CSV, page by page; and the metrics."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient
from web_harness import SMALL, site

from benchmarks.leaderboard.synthetic import Shape, snapshot_of
from leaderboard.web.api import API_TABLES, ROWS_MAX, schema_document
from leaderboard.web.app import metrics_text
from leaderboard.web.book import Book

MANY = snapshot_of(3, Shape(rounds=160, rounds_done=150, contributors=40))
"""More contributions than one document holds."""


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads(schema_document())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def all_rows(client: TestClient, name: str) -> list[dict[str, Any]]:
    """Every row of a table, from page to page, as a program would ask for them."""
    rows, following = [], f"{name}.json"
    while following:
        document = client.get(f"/api/v1/{following}").json()
        rows += document["rows"]
        following = document["next"]
    assert len(rows) == document["rows_total"]
    return rows


@pytest.mark.parametrize("name", API_TABLES)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_document_keeps_to_the_published_schema(name: str, seed: int, validator: Draft202012Validator) -> None:
    with site(snapshot_of(seed)) as (client, _):
        document = client.get(f"/api/v1/{name}.json").json()
    validator.validate(document)
    assert document["schema"] == f"dipaco-leaderboard/{name}/1" and document["rows"]


def test_the_schema_refuses_what_is_not_promised(client: TestClient, validator: Draft202012Validator) -> None:
    document = client.get("/api/v1/versions.json").json()
    assert client.get("/api/v1/schema.json").text == schema_document()
    row = document["rows"][0]
    for wrong in ({**row, "extra": 1}, {**row, "version": "1"}, {k: v for k, v in row.items() if k != "digest"}):
        assert not validator.is_valid({**document, "rows": [wrong]})


@pytest.mark.parametrize("name", API_TABLES)
def test_csv_says_the_same_as_json(client: TestClient, name: str) -> None:
    rows, answer = all_rows(client, name), client.get(f"/api/v1/{name}.csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    read = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(read) == len(rows)
    for said, row in zip(read, rows, strict=True):
        assert list(said) == list(row)
        assert all(same(said[key], value) for key, value in row.items())


def same(text: str, value: object) -> bool:
    if isinstance(value, bool):
        return text == str(value).lower()
    if isinstance(value, int | float):
        return float(text) == value
    return text == (value or "")


def test_a_table_of_several_pages_has_each_row_once() -> None:
    with site(MANY) as (client, _):
        rows = all_rows(client, "contributions")
        first = client.get("/api/v1/contributions.csv")
    expected = [share.contribution for row in MANY.versions for share in row.shares]
    assert len(expected) > 2 * ROWS_MAX and [row["contribution"] for row in rows] == expected
    assert first.headers["link"] == '<contributions.csv?page=2>; rel="next"'


def test_credit_of_contributors_is_the_sum_over_contributions_and_audits(client: TestClient) -> None:
    shares, audits = all_rows(client, "contributions"), all_rows(client, "audits")
    peers = all_rows(client, "contributors")
    [overview] = all_rows(client, "overview")
    for row in peers:
        credits = [sum(each["credit"] for each in rows if each["peer"] == row["peer"]) for rows in (shares, audits)]
        assert row["credit"] == pytest.approx(sum(credits)) and row["audit_credit"] == pytest.approx(credits[1])
        assert row["audits"] == sum(each["peer"] == row["peer"] for each in audits)
    assert sum(row["audits"] for row in peers) == len(audits) > 0
    assert overview["credit_total"] == pytest.approx(sum(row["credit"] for row in peers))


def test_what_is_no_number_is_null() -> None:
    losses = replace(SMALL, versions=(replace(SMALL.versions[-1], loss_after=float("inf"), made_s=float("nan")),))
    with site(losses) as (client, _):
        [row] = client.get("/api/v1/versions.json").json()["rows"]
        assert client.get("/versions").status_code == 200
    assert row["loss_after"] is None and row["made_s"] is None


def test_an_unchanged_document_costs_no_body_and_anybody_may_read_it(client: TestClient) -> None:
    answer = client.get("/api/v1/versions.json")
    again = client.get("/api/v1/versions.json", headers={"If-None-Match": f'"other", {answer.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("name", ["versions.xml", "nothing.json", "versions.json?page=2", "versions.json?page=x"])
def test_a_wrong_question_is_answered_in_json(client: TestClient, name: str) -> None:
    answer = client.get(f"/api/v1/{name}")
    assert answer.status_code in {400, 404} and set(answer.json()) == {"error"}


@pytest.mark.parametrize("address", ["/api/v1/versions.json", "/metrics"])
def test_before_the_first_snapshot_a_program_is_told_to_come_again(address: str) -> None:
    with site(None) as (client, _):
        answer = client.get(address)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"


# Metrics


@dataclass(frozen=True, slots=True)
class Read:
    """One metric, as the text says."""

    kind: str
    about: str
    samples: dict[str, float]


NAME = r"[a-z][a-z0-9_]*"
LABELS = rf'\{{{NAME}="(?:[^"\\\n]|\\[\\"n])*"(?:,{NAME}="(?:[^"\\\n]|\\[\\"n])*")*\}}'
SAMPLE = re.compile(rf"({NAME})({LABELS})? (NaN|[+-]Inf|-?[0-9.]+(?:e[+-]?[0-9]+)?)")


def read_metrics(text: str) -> dict[str, Read]:
    """A strict reading of Prometheus' text format: help, type, samples; each metric and each series once."""
    assert text.endswith("\n")
    found: dict[str, Read] = {}
    current = ""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            current, about = line.removeprefix("# HELP ").split(" ", 1)
            kind = next(lines).removeprefix(f"# TYPE {current} ")
            assert current not in found and kind in {"gauge", "counter"} and about.endswith(".")
            assert current.endswith("_total") == (kind == "counter"), current
            found[current] = Read(kind, about, {})
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None and match[1] == current, line
            assert (match[2] or "") not in found[current].samples, line
            found[current].samples[match[2] or ""] = float(match[3])
    assert all(metric.samples for metric in found.values())
    return found


def test_the_metrics_say_what_the_snapshot_says(client: TestClient) -> None:
    answer = client.get("/metrics")
    found = read_metrics(answer.text)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert found["dipaco_peers_alive"].samples == {"": SMALL.peers_alive}
    assert found["dipaco_credit_tokens_total"].samples[""] == pytest.approx(SMALL.credit_total)
    assert sum(found["dipaco_versions"].samples.values()) == len(SMALL.versions)
    assert found["dipaco_records_refused_total"].samples == {
        '{reason="bad-signature"}': 3,
        '{reason="malformed"}': 12,
    }
    assert len(found["dipaco_module_version"].samples) == len(SMALL.modules)


def test_labels_of_any_text_stay_one_line_and_two_that_read_the_same_are_one_series() -> None:
    hostile = {'a"b\\c\nd} 1': 2, "same\u202e": 3, "same": 4}
    found = read_metrics(metrics_text(Book(replace(SMALL, refused=hostile))))
    assert found["dipaco_records_refused_total"].samples == {
        '{reason="a\\"b\\\\c d} 1"}': 2,
        '{reason="same"}': 7,
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_promtool_finds_nothing_to_say_about_the_metrics(seed: int) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; on Debian: apt-get install prometheus")
    text = metrics_text(Book(snapshot_of(seed)))
    done = subprocess.run([promtool, "check", "metrics"], input=text.encode(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
