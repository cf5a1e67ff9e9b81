"""The leaderboard as a user meets it: beside a coordinator, killed and back, as files, made again, and by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import Program, Programs, children_of, eventually, refused, write_run

pytestmark = pytest.mark.libp2p
ROUNDS = 3
MODULES = 3


def link(coordinator: Program) -> str:
    """Where the page was last said to be; empty before it was."""
    return (re.findall(r"^leaderboard: (\S+)$", coordinator.said, re.MULTILINE) or [""])[-1]


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def rows(coordinator: Program, name: str) -> list[dict[str, Any]]:
    """A table of the API; empty while there is none."""
    try:
        found: list[dict[str, Any]] = asked(f"{link(coordinator)}api/v1/{name}.json")["rows"]
        return found
    except (OSError, ValueError):
        return []


def page_process(coordinator: Program) -> int:
    """The one child that is a leaderboard."""
    found = [pid for pid in children_of(coordinator.process.pid) if b"leaderboard" in commands(pid)]
    return found[0] if found else 0


def commands(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def verified(coordinator: Program, *, versions: int) -> bool:
    found = [row for row in rows(coordinator, "versions") if row["version"]]
    return len(found) == versions and all(row["mark"] == "verified" and row["loss_after"] for row in found)


def test_a_run_is_shown_while_it_lives_and_afterwards(programs: Programs, corpus: Path) -> None:
    run_file = write_run(programs.folder / "shown.toml", corpus, rounds=ROUNDS, min_paths=2, has_page=True)
    folder = programs.folder / "coordinator"
    coordinator = programs.coordinator(run_file, folder)
    address = coordinator.wait_address()["address"]
    eventually(lambda: link(coordinator), what=lambda: coordinator.said + coordinator.complaint)
    os.kill(page_process(coordinator), signal.SIGKILL)
    first = link(coordinator)
    volunteers = [programs.volunteer(address, name, "--evaluate") for name in ("one", "two")]
    assert [volunteer.wait(120) for volunteer in volunteers] == [0, 0], volunteers[0].complaint
    eventually(
        lambda: link(coordinator) != first and verified(coordinator, versions=ROUNDS * MODULES),
        within_s=60,
        what=lambda: f"{rows(coordinator, 'versions')} {coordinator.said}",
    )
    peers = {volunteer.wait_event("joined")["peer"] for volunteer in volunteers}
    credits = {row["peer"]: row["credit"] for row in rows(coordinator, "contributors")}
    assert peers == credits.keys()

    mine = programs.run("dipaco-peer", "me", address, "--home", str(volunteers[0].home))
    assert mine.wait() == 0, mine.complaint
    assert f"credit {credits[volunteers[0].wait_event('joined')['peer']]:,.0f}, recently" in mine.said
    assert "standing" in mine.said

    measured = programs.run("dipaco-peer", "evaluate", address, "--json")
    assert measured.wait() == 0, measured.complaint
    found = json.loads(measured.said)
    assert found["schema"] == "dipaco.evaluation/1" and found["round"] == ROUNDS
    assert found["paths"] and all(row["agrees"] for row in found["paths"])
    checks = rows(coordinator, "checks")
    assert checks and all(row["agrees"] and row["peer"] in peers for row in checks)
    assert coordinator.end() == 0, coordinator.complaint
    assert (folder / "leaderboard" / "leaderboard.log").exists()

    site = programs.folder / "site"
    exported = programs.run("dipaco-bootstrap", "leaderboard", "export", str(folder), str(site))
    assert exported.wait() == 0 and (site / "index.html").exists(), exported.complaint
    written = json.loads((site / "api/v1/contributors.json").read_text())["rows"]
    assert {row["peer"]: row["credit"] for row in written} == credits
    tables = programs.folder / "again.sqlite"
    again = programs.run("dipaco-bootstrap", "leaderboard", "rebuild", str(folder), str(tables))
    assert again.wait() == 0 and "versions to" in again.said, again.complaint
    refused(programs.run("dipaco-bootstrap", "leaderboard", "rebuild", str(folder), str(tables)), 2, "exists")
