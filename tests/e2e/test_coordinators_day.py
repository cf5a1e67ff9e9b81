"""A coordinator's day: it freezes its run, lets it go on, takes a module back, bans a volunteer, and is restarted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import Program, Programs, breaches, eventually, free_port, refused, versions_of, write_run

pytestmark = [pytest.mark.libp2p, pytest.mark.slow]
MODULE = "L1.M0"


def done(programs: Programs, *words: str | Path) -> str:
    """What a command of the coordinator's owner says."""
    program = programs.run("dipaco-bootstrap", *words)
    assert program.wait() == 0, program.complaint
    return program.said


def log_of(programs: Programs, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done(programs, "decrees", folder, "--json"))
    return found


def wait_versions(coordinator: Program, least: int) -> None:
    def look() -> bool:
        found = versions_of(coordinator)
        return len(found) == 3 and min(found.values()) >= least

    eventually(look, within_s=90, what=lambda: f"{versions_of(coordinator)} {coordinator.complaint[-1000:]}")


def wait_doing(volunteer: Program, words: str) -> None:
    def look() -> bool:
        doing = volunteer.events("doing")
        return bool(doing) and words in doing[-1]["doing"]

    eventually(look, what=lambda: f"{volunteer.events('doing')[-3:]}")


def archived(coordinator: Program) -> dict[int, str]:
    """The digests of the module's versions."""
    return {event["version"]: event["digest"] for event in coordinator.events("archived") if event["module"] == MODULE}


def test_a_run_is_frozen_goes_on_is_taken_back_and_loses_a_volunteer(programs: Programs, corpus: Path) -> None:
    run_file = write_run(programs.folder / "day.toml", corpus, rounds=100_000, min_paths=2, port=free_port())
    folder = programs.folder / "coordinator"
    coordinator = programs.coordinator(run_file, folder)
    ticket = coordinator.wait_address()["ticket"]
    first, second = (programs.volunteer(ticket, name) for name in ("first", "second"))
    wait_versions(coordinator, 3)

    # Frozen: everybody rests, says why, and no version is made.
    assert "decree 1: freeze: a bad shard" in done(programs, "freeze", folder, "--reason", "a bad shard")
    for volunteer in (first, second):
        wait_doing(volunteer, "frozen by the coordinator: a bad shard")
    assert log_of(programs, folder)["frozen"] == "a bad shard"
    reached = versions_of(coordinator)
    preview = programs.run("dipaco-peer", "join", ticket, "--dry-run", "--home", programs.folder / "third")
    assert preview.wait() == 0 and "by the coordinator: a bad shard" in preview.said, preview.complaint
    assert programs.status(first)["frozen"] == "a bad shard"
    assert versions_of(coordinator) == reached

    # It goes on, and what was pushed late has its receipt.
    receipts = [len(volunteer.events("receipt")) for volunteer in (first, second)]
    done(programs, "unfreeze", folder)
    for volunteer, before in zip((first, second), receipts, strict=True):
        volunteer.wait_event("receipt", count=before + 2)
    wait_versions(coordinator, max(reached.values()) + 1)

    # One module goes back; what makes no sense changes nothing.
    refused(programs.run("dipaco-bootstrap", "unfreeze", folder), 2, "not frozen")
    refused(programs.run("dipaco-bootstrap", "rollback", MODULE, "9999999", folder, "--reason", "x"), 2, "cannot go")
    refused(programs.run("dipaco-bootstrap", "ban", "nobody", folder, "--reason", "x"), 2, "neither a peer id")
    said = done(programs, "rollback", MODULE, "1", folder, "--reason", "diverged")
    assert f"decree 3: rollback {MODULE}" in said

    def undone() -> int | None:
        return log_of(programs, folder)["decrees"][2]["version"]

    version = eventually(undone, what=lambda: str(archived(coordinator)))
    digests = archived(coordinator)
    assert digests[version] == digests[1] and version > 3
    wait_versions(coordinator, version + 2)

    # A ban while the coordinator is away: it is there after the restart, with all that was decreed before. What the
    # peer has done is taken out of the modules, and what the other one has done stays.
    done(programs, "freeze", folder, "--reason", "noise")
    assert coordinator.end() == 0, coordinator.complaint
    peer = second.events("joined")[0]["peer"]
    said = done(programs, "ban", f"...{peer[-6:]}", folder, "--undo", "--reason", "noise")
    assert "is not running" in said and f", rebuilt without ...{peer[-6:]} (not carried out yet): noise; " in said, said
    coordinator = programs.coordinator(run_file, folder)
    coordinator.wait_address()
    found = log_of(programs, folder)["decrees"]
    assert [row["act"] for row in found[:5]] == ["freeze", "unfreeze", "rollback", "freeze", "ban"]
    number = next(row["number"] for row in found[5:] if row["without"])  # of a module that both trained
    eventually(lambda: log_of(programs, folder)["decrees"][number - 1]["version"], what=lambda: str(found[5:]))
    done(programs, "unfreeze", folder)
    refused(second, 7, "has banned this volunteer: noise", peer)
    again = programs.run("dipaco-peer", "join", ticket, "--dry-run", "--home", second.home)
    refused(again, 7, "has banned this volunteer: noise")
    assert "by the coordinator: noise" in again.said
    wait_versions(coordinator, max(versions_of(coordinator).values()) + 2)

    assert first.end() == 0, first.complaint
    assert coordinator.end() == 0, coordinator.complaint
    verified = programs.run("dipaco-bootstrap", "verify", folder)
    assert verified.wait() == 0 and verified.said.count("to the bit") == 3, verified.said + verified.complaint
    assert breaches(folder, first, second) == []
