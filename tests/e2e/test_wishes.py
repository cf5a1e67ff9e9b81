"""A volunteer's wishes, as a user gives them: a schedule, limits and a file, to the real programs."""

from __future__ import annotations

import json
import time
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


def test_a_file_is_obeyed_and_its_mistakes_are_one_line(programs: Programs, endless: Program) -> None:
    address, wishes = endless.wait_address()["address"], programs.folder / "wishes.toml"
    wishes.write_text("[limits]\nup_mbits = 3\n")
    refused(programs.volunteer(address, "home", "--config", str(wishes)), 2, "`up_mbits`", "did you mean `up_mbit`?")
    wishes.write_text("[limits]\ndisk_gb = 0.0001\n")
    refused(programs.volunteer(address, "home", "--config", str(wishes)), 5, "`disk_gb`", "0.1 MB", "raise")
    assert taken(programs.folder / "home" / "runs") < 2e5


def test_a_month_that_is_used_up_is_refused_before_anybody_is_asked(programs: Programs, endless: Program) -> None:
    home = programs.folder / "used"
    home.mkdir()
    (home / "month.json").write_text(json.dumps({"month": time.strftime("%Y-%m"), "bytes": 2 * 10**9}))
    volunteer = programs.volunteer(endless.wait_address()["address"], "used", "--month-gb", "1.5")
    refused(volunteer, 5, "2.00 GB of the 1.5 GB of this month", "it goes on from 01 ")
    assert not (home / "runs").exists()


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


def taken(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
