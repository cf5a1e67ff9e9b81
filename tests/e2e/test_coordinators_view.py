"""A coordinator and a volunteer as processes: what the commands say of both, the metrics, the logs."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import Program, Programs, eventually, refused, write_run

from dipaco_p2p.program.control.place import find_socket

pytestmark = pytest.mark.libp2p


def asked(programs: Programs, coordinator: Program, what: str) -> dict[str, Any]:
    """The document that `dipaco-bootstrap WHAT --json` prints."""
    done = programs.run("dipaco-bootstrap", what, coordinator.home, "--json")
    assert done.wait() == 0, done.complaint
    found: dict[str, Any] = json.loads(done.said)
    assert found["schema"] == f"dipaco.coordinator.{what}/1"
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def test_a_coordinator_is_looked_at_scraped_and_read(programs: Programs, corpus: Path) -> None:
    run_file = write_run(programs.folder / "seen.toml", corpus, rounds=100_000, min_paths=1, heartbeat_ttl_s=5.0)
    port = free_port()
    more = ("--metrics", str(port), "--log-format", "json")
    coordinator = programs.coordinator(run_file, programs.folder / "seen", *more)
    peer = coordinator.wait_address()["peer"]
    assert f"metrics: http://127.0.0.1:{port}/metrics" in coordinator.said
    path = find_socket(coordinator.home)
    assert path is not None and stat.S_IMODE(path.stat().st_mode) == 0o600

    alone = asked(programs, coordinator, "status")
    assert (alone["state"], alone["pid"], alone["volunteers_alive"]) == ("waiting", coordinator.process.pid, 0)
    assert alone["folder"] == str(coordinator.home) and alone["disk_used_bytes"] > 0
    volunteer = programs.volunteer(coordinator.wait_address()["ticket"], "one", "--log-format", "json")
    volunteer.wait_event("leads")
    volunteer.wait_event("receipt", count=4)

    def is_seen() -> dict[str, Any] | None:
        found = asked(programs, coordinator, "status")
        is_there = found["volunteers_training"] and found["modules_led"] == found["modules"] == 3
        return found if is_there and found["contributions_counted"] and found["judged_round"] else None

    found = eventually(is_seen, what=lambda: volunteer.complaint[-2000:])
    assert (found["state"], found["paths"], found["paths_covered"], found["seeds_alive"]) == ("training", 2, 1, 1)
    assert found["round"] > 0 and found["judged_perplexity"] > 1 and found["bytes_down"] > 0

    # One alone goes from path to path, and between two it has none. When its heartbeat is late, the seed node leads for
    # a while.
    def is_at_work() -> dict[str, Any] | None:
        peers = {each["role"]: each for each in asked(programs, coordinator, "peers")["peers"]}
        one = peers["volunteer"]
        return peers if one["path"] and len(one["leads"]) == 3 else None

    def is_claimed() -> list[dict[str, Any]] | None:
        paths = asked(programs, coordinator, "paths")["paths"]
        return paths if any(each["is_covered"] for each in paths) else None

    peers = eventually(is_at_work, what=lambda: volunteer.complaint[-2000:])
    assert peers["seed"]["peer"] == peer and peers["volunteer"]["peer"] != peer
    one = peers["volunteer"]
    assert one["heartbeat_age_s"] < 10
    paths = eventually(is_claimed, what=lambda: volunteer.complaint[-2000:])
    [claimed] = [each for each in paths if each["is_covered"]]
    assert claimed["claimants"][0]["peer"] == one["peer"] and len(paths) == 2

    def is_led() -> list[dict[str, Any]] | None:
        modules = asked(programs, coordinator, "modules")["modules"]
        return modules if {each["leader"] for each in modules} == {one["peer"]} else None

    modules = eventually(is_led, what=lambda: volunteer.complaint[-2000:])
    assert len(modules) == 3 and all(each["newest"] > 0 for each in modules)

    text = scraped(port)
    assert (
        "dipaco_coordinator_volunteers_alive 1.0\n" in text
        and 'dipaco_coordinator_module_final_version{module="' in text
    )
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "metrics"], input=text.encode(), capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")

    assert volunteer.end() == 0 and coordinator.end() == 0, coordinator.complaint
    for log in (coordinator.home / "seed.log", *volunteer.home.glob("runs/*/peer.log")):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines and all(list(line)[:4] == ["time", "level", "logger", "message"] for line in lines)
    refused(programs.run("dipaco-bootstrap", "status", coordinator.home), 3, "no coordinator runs", "start")
    assert find_socket(coordinator.home) is None


def test_a_run_is_read_from_the_folder_of_a_coordinator_at_work(programs: Programs, endless: Program) -> None:
    folder, out = endless.home, programs.folder
    volunteer = programs.volunteer(endless.wait_address()["ticket"], "at-work")
    volunteer.wait_event("receipt", count=4)
    for words, said in (
        (("generate", folder, "a text", "--max-tokens", "4"), ""),
        (("export", folder, "--path", "P0-0", "--to", out / "path"), "wrote P0-0 to "),
        (("verify", folder), "to the bit"),
        (("ticket", folder), "dipaco1"),
        (("leaderboard", "export", folder, out / "pages"), "index.html"),
    ):
        done = programs.run("dipaco-bootstrap", *words)
        assert done.wait() == 0 and said in done.said, done.said + done.complaint
    before = len(volunteer.events("receipt"))
    volunteer.wait_event("receipt", count=before + 2)
    assert volunteer.end() == 0 and endless.process.poll() is None, volunteer.complaint
