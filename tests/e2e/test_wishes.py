"""A volunteer's wishes, as a user gives them: a schedule and a name, to the real programs."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, eventually, refused

pytestmark = pytest.mark.libp2p


def test_outside_of_its_schedule_a_volunteer_stays_in_the_swarm_and_claims_nothing(
    programs: Programs, endless: Program
) -> None:
    later = datetime.now() + timedelta(hours=3)
    schedule = f"{later:%H:%M}-{later + timedelta(hours=1):%H:%M}"
    volunteer = programs.volunteer(endless.wait_address()["address"], "waits", "--schedule", schedule)
    assert volunteer.wait_event("paused")["detail"].startswith("schedule until")
    first = volunteer.wait_event("joined")
    assert volunteer.process.poll() is None and not volunteer.events("claimed")
    assert "paused for schedule until" in volunteer.complaint
    assert volunteer.end() == 0, volunteer.complaint
    assert volunteer.wait_event("left")["t"] >= first["t"]


def test_a_name_is_seen_by_all_until_a_decree_hides_it(programs: Programs, endless: Program) -> None:
    ticket = endless.wait_address()["ticket"]
    refused(
        programs.volunteer(ticket, "nobody", "--name", "\x1b[2J"), 2, "--name: a name is one line", "without U+001B"
    )
    volunteer = programs.volunteer(ticket, "named", "--name", " Ada ", "--team", "[red]Analysts")
    peer, words = volunteer.wait_event("joined")["peer"], "Ada, team [red]Analysts"
    assert f"{words}: shown to everybody beside your id" in volunteer.complaint

    def told(program: str, *arguments: str | Path) -> list[str]:
        done = programs.run(program, *arguments)
        assert done.wait() == 0, done.complaint
        return done.said.splitlines()

    def listed() -> list[str]:
        lines = told("dipaco-bootstrap", "peers", endless.home)
        return [line.rpartition("  ")[2] for line in lines if line.startswith(f"...{peer[-6:]} ")]

    eventually(lambda: listed() == [words])
    assert f"peer: ...{peer[-6:]} {words}" in told("dipaco-peer", "status", "--home", volunteer.home)
    assert f"shown beside this id: {words}" in told("dipaco-peer", "me", ticket, "--home", volunteer.home)
    told("dipaco-bootstrap", "hide-name", peer[-6:], endless.home, "--reason", "a test")
    assert listed() == ["-"]
    hidden = f"peer: ...{peer[-6:]} (the coordinator hides its name: a test)"
    eventually(lambda: hidden in told("dipaco-peer", "status", "--home", volunteer.home))
    shown = told("dipaco-peer", "me", ticket, "--home", volunteer.home)
    assert "shown without a name by the coordinator's decree: a test" in shown and not any(
        "Ada" in line for line in shown
    )
    assert volunteer.end() == 0, volunteer.complaint
