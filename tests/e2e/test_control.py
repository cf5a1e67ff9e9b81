"""The commands against volunteers that run: pause, resume, finish, stop; and after one that was killed."""

from __future__ import annotations

import os
import stat
import tarfile
import time
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, children_of

from dipaco_p2p.program.control.place import find_socket

pytestmark = pytest.mark.libp2p

IDLE_SHARE_MAX = 0.25
"""Of one core, while it rests: the network's heartbeat and no more. Training takes all of it."""


def command(programs: Programs, volunteer: Program, *words: str, code: int = 0) -> str:
    """What `dipaco-peer` prints about a volunteer."""
    done = programs.run("dipaco-peer", *words, "--home", volunteer.home)
    assert done.wait() == code, done.said + done.complaint
    assert "Traceback" not in done.complaint
    return done.said + done.complaint


def cpu_s(pid: int) -> float:
    """What a process has computed so far, with its libp2p daemon."""
    ticks = 0
    for each in (pid, *children_of(pid)):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_paused_volunteer_lets_go_and_computes_nothing_then_goes_on_and_finishes(
    programs: Programs, endless: Program
) -> None:
    address = endless.wait_address()["address"]
    first = programs.volunteer(address, "first")
    first.wait_event("leads")
    first.wait_event("receipt")
    found = programs.status(first)
    assert found["state"] == "running" and found["pid"] == first.process.pid and found["receipts"] > 0
    assert found["bytes_up"] > 0 and found["run"] and found["home"] == str(first.home)
    path = first.events("claimed")[-1]["path"]

    assert "paus" in command(programs, first, "pause", "--for", "1d")
    first.wait_event("paused")
    moves = [event for event in first.events() if event["ev"] in ("claimed", "released")]
    assert moves[-1]["ev"] == "released"
    [log] = [path.read_text() for path in first.home.glob("runs/*/peer.log")]
    let_go = {event["module"] for event in first.events("handed_over") + first.events("deposed")}
    assert {event["module"] for event in first.events("leads")} <= let_go, log
    paused = programs.status(first)
    assert paused["state"] == "paused" and list(paused["pauses"]) == ["user"] and paused["leads"] == []
    before, cpu_before_s, began_s = len(first.events()), cpu_s(first.process.pid), time.monotonic()
    second = programs.volunteer(address, "second")  # alone, it goes from path to path
    second.wait_event("round", path=path)
    second.wait_event("receipt", count=6)
    share = (cpu_s(first.process.pid) - cpu_before_s) / (time.monotonic() - began_s)
    print(f"a paused volunteer takes {100 * share:.1f} % of one core")
    assert share < IDLE_SHARE_MAX and len(first.events()) == before

    receipts = len(first.events("receipt"))
    assert "running" in command(programs, first, "resume")
    first.wait_event("receipt", count=receipts + 2)
    assert programs.status(first)["state"] == "running"
    report = programs.folder / "report.tar.gz"
    command(programs, first, "bugreport", "--to", str(report))
    with tarfile.open(report) as archive:
        texts = [archive.extractfile(member).read().decode() for member in archive]  # type: ignore[union-attr]
    assert not any("127.0.0.1" in text or str(first.home) in text or "12D3KooW" in text for text in texts)
    assert any('"state": "running"' in text for text in texts) and any('"when": {' in text for text in texts)

    command(programs, first, "finish", "--wait")
    assert first.wait() == 0, first.complaint
    last = first.events("round")[-1]
    assert last["steps"] == 2 and not last["is_cut"], "all steps of its last round"
    # Not every round pushes both modules: what the other volunteer already has in an open round is not done again.
    assert any(event["base"] == last["round"] for event in first.events("receipt"))
    assert not list(first.home.glob("runs/*/outbox/documents/*.json")), "every push got its answer"
    assert first.events()[-1]["ev"] == "left"
    assert command(programs, first, "status", code=3).startswith("error: no volunteer runs in")
    command(programs, second, "stop")
    assert second.wait() == 0, second.complaint


def test_after_kill_9_a_stale_socket_is_nobody_and_the_next_volunteer_takes_it(
    programs: Programs, endless: Program
) -> None:
    address = endless.wait_address()["address"]
    first = programs.volunteer(address, "home")
    first.wait_event("claimed")
    socket = find_socket(first.home)
    assert socket is not None
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    assert "in use" in command(
        programs, first, "identity", "import", str(first.home / "identity.key"), "--force", code=5
    )
    first.kill()
    assert socket.exists()
    command(programs, first, "status", code=3)
    command(programs, first, "stop", code=3)
    again = programs.volunteer(address, "home")
    again.wait_event("receipt", count=len(first.events("receipt")) + 1)  # the first may have had one before it died
    assert programs.status(again)["pid"] == again.process.pid
    assert "has ended" in command(programs, again, "stop")
    assert again.wait() == 0, again.complaint
    assert not socket.exists() and again.events()[-1]["ev"] == "left"
    last = programs.volunteer(address, "home")
    last.wait_event("receipt", count=len(again.events("receipt")) + 1)
    command(programs, last, "stop", "--now")
    assert last.wait() == 130
    assert "Traceback" not in last.complaint
