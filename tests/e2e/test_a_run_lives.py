"""A run as a new user would try it: started, joined, killed here and there, and finished all the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import (
    Program,
    Programs,
    children_of,
    copy_prepared,
    eventually,
    free_port,
    is_running,
    refused,
    stuck_at,
    versions_of,
    write_run,
)

from dipaco_p2p.ticket import Ticket, read_ticket

pytestmark = pytest.mark.libp2p
MODULES = {"L0.M0", "L1.M0", "L1.M1"}


def wait_last_version(coordinator: Program, last: int) -> None:
    eventually(
        lambda: versions_of(coordinator) == dict.fromkeys(MODULES, last),
        within_s=60,
        what=lambda: f"{versions_of(coordinator)} {coordinator.complaint[-1000:]}",
    )


def test_a_run_loses_a_volunteer_gets_another_finishes_and_verifies(
    programs: Programs, short_run: tuple[Path, Path]
) -> None:
    run_file, prepared = short_run
    folder = copy_prepared(prepared, programs.folder / "coordinator")
    coordinator = programs.coordinator(run_file, folder)
    address = coordinator.wait_address()["address"]
    victim, survivor = (programs.volunteer(address, name) for name in ("victim", "survivor"))
    victim.wait_event("receipt")
    victim.kill()
    newcomer = programs.volunteer(address, "newcomer")
    assert (survivor.wait(), newcomer.wait()) == (0, 0), survivor.complaint + newcomer.complaint
    wait_last_version(coordinator, 4)
    assert coordinator.end() == 0, coordinator.complaint
    claimed = {event["path"] for volunteer in (survivor, newcomer) for event in volunteer.events("claimed")}
    assert victim.events("claimed")[0]["path"] in claimed
    assert survivor.events("left", stage="warmup")[0]["complete"], "it came from the warm-up, without a restart"

    verified = programs.run("dipaco-bootstrap", "verify", folder)
    # The chains of the warm-up's two modules, and those of the grid's.
    assert verified.wait() == 0 and verified.said.count("to the bit") == 2 + len(MODULES), verified.complaint
    payload = counted_payload(folder)
    payload.write_bytes(payload.read_bytes()[:-1] + bytes([payload.read_bytes()[-1] ^ 1]))
    refused(programs.run("dipaco-bootstrap", "verify", folder), 8, "1 of 5 chains", "damaged")


def test_a_volunteer_that_does_not_listen_trains_and_leads_nothing(
    programs: Programs, short_run: tuple[Path, Path]
) -> None:
    run_file, prepared = short_run
    coordinator = programs.coordinator(run_file, copy_prepared(prepared, programs.folder / "coordinator"))
    address = coordinator.wait_address()["address"]
    listening = programs.volunteer(address, "listening")
    silent = programs.volunteer(address, "silent", "--no-listen")
    assert (listening.wait(), silent.wait()) == (0, 0), listening.complaint + silent.complaint
    wait_last_version(coordinator, 4)
    assert silent.events("receipt") and not silent.events("leads")
    assert len({event["path"] for volunteer in (listening, silent) for event in volunteer.events("claimed")}) == 2
    last = "the run is complete: 4 rounds"
    eventually(lambda: last in coordinator.said, what=lambda: coordinator.said + coordinator.complaint)
    for number in range(1, 5):
        assert f"round {number} of 4: validation perplexity " in coordinator.said
    eventually(lambda: "finished model, routed once" in coordinator.said, what=lambda: coordinator.said)
    assert [event["from_round"] for event in coordinator.events("sharded")] == [2, 4]
    again = programs.run("dipaco-peer", "join", "--no-listen", "--home", silent.home)
    assert again.wait() == 0 and " is complete; for another run give its ticket" in again.complaint, again.complaint
    assert coordinator.end() == 0, coordinator.complaint


def test_a_coordinator_that_is_killed_at_the_fork_comes_back_and_the_volunteers_move_into_the_grid(
    programs: Programs, corpus: Path, short_run: tuple[Path, Path]
) -> None:
    _, prepared = short_run
    port = free_port()
    run_file = write_run(programs.folder / "short.toml", corpus, rounds=4, min_paths=2, warmup_rounds=1, port=port)
    folder = copy_prepared(prepared, programs.folder / "coordinator")
    with stuck_at(folder / "tokenizer.json") as is_forking:  # the first file that a fork reads
        coordinator = programs.coordinator(run_file, folder)
        before = coordinator.wait_address()
        volunteers = [programs.volunteer(before["address"], name) for name in ("first", "second")]
        eventually(is_forking, within_s=60, what=lambda: coordinator.complaint)
        waiting = "waiting for the coordinator to open the grid"
        eventually(
            lambda: all(waiting in each.said for each in volunteers), within_s=90, what=lambda: volunteers[0].complaint
        )
        coordinator.kill()
    assert not (folder / "grid").exists()
    again = programs.coordinator(run_file, folder)
    assert door(again.wait_address()) == door(before) and join_line(coordinator) == join_line(again)
    for volunteer in volunteers:
        assert volunteer.wait(150) == 0, volunteer.complaint
        assert volunteer.events("left", stage="warmup")[0]["complete"] and volunteer.events("left")[0]["complete"]
        assert volunteer.events("receipt")
    wait_last_version(again, 4)
    assert again.end() == 0, again.complaint
    assert programs.run("dipaco-bootstrap", "verify", folder).wait() == 0


def door(plate: dict[str, str]) -> dict[str, object]:
    """What `address.json` says, but for the volunteers that its ticket names: these come and go."""
    return plate | {"ticket": seed_alone(plate["ticket"])}


def join_line(coordinator: Program) -> Ticket:
    [line] = [line for line in coordinator.said.splitlines() if line.startswith("dipaco-peer join")]
    return seed_alone(line.split()[-1])


def seed_alone(text: str) -> Ticket:
    ticket = read_ticket(text)
    return replace(ticket, seeds=ticket.seeds[:1])


def counted_payload(folder: Path) -> Path:
    """Of a contribution that a version counts: work of whoever was killed may count nowhere."""
    folder = folder / "grid"
    version = json.loads(min((folder / "documents").glob("version-*.json")).read_bytes())
    contribution = version["document"]["shares"][0]["contribution"]
    document = json.loads((folder / "documents" / f"contribution-{contribution}.json").read_bytes())
    digest = document["document"]["payload"]["digest"]
    return folder / "blobs" / digest[:2] / digest


def test_a_coordinator_that_is_killed_comes_back_as_itself_and_the_run_goes_on(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    _, prepared = endless_prepared
    run_file = write_run(programs.folder / "endless.toml", corpus, rounds=100_000, min_paths=1, port=free_port())
    folder = copy_prepared(prepared, programs.folder / "coordinator")
    coordinator = programs.coordinator(run_file, folder)
    before = coordinator.wait_address()
    volunteers = [programs.volunteer(before["address"], name) for name in ("first", "second")]
    for volunteer in volunteers:
        volunteer.wait_event("receipt")
    coordinator.kill()
    again = programs.coordinator(run_file, folder)
    assert door(again.wait_address()) == door(before)
    assert join_line(coordinator) == join_line(again)
    # The run has no end; what counts is that every module gets new versions that the archive has, by both volunteers.
    reached = versions_of(again)
    eventually(
        lambda: all(versions_of(again).get(module, 0) >= reached.get(module, 0) + 2 for module in MODULES),
        what=lambda: f"{reached} {versions_of(again)}",
    )
    for volunteer in volunteers:
        volunteer.wait_event("receipt", count=len(volunteer.events("receipt")) + 2)
        assert volunteer.end() == 0, volunteer.complaint
    assert again.end() == 0


def test_a_killed_volunteer_leaves_no_daemon_and_comes_back_as_itself(programs: Programs, endless: Program) -> None:
    address = endless.wait_address()["address"]
    volunteer = programs.volunteer(address, "home")
    volunteer.wait_event("round", count=2)
    daemons = volunteer.kill()
    assert len(daemons) == 1
    eventually(lambda: not any(map(is_running, daemons)), within_s=10, what=lambda: f"{daemons}")
    before = volunteer.events()
    again = programs.volunteer(address, "home")
    eventually(lambda: len(again.events("joined")) == 2, what=lambda: again.complaint)
    assert len({event["peer"] for event in again.events("joined")}) == 1
    again.wait_event("receipt", count=len(volunteer.events("receipt")) + 1)
    known = sum(event["ev"] == "state" and event["source"] == "ours" for event in before)
    again.wait_event("state", count=known + 1, source="ours")  # it goes on from what is on its disk
    assert len(again.events()) > len(before)
    assert again.end() == 0


def test_hivemind_s_own_program_joins_the_same_dht(endless: Program, tmp_path: Path) -> None:
    address = endless.wait_address()["address"]
    command = [sys.executable, "-m", "hivemind.hivemind_cli.run_dht", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        foreign = subprocess.Popen(
            [*command, "--initial_peers", address], stdout=file, stderr=file, start_new_session=True
        )
    daemons: list[int] = []
    try:
        eventually(lambda: "2 DHT nodes" in log.read_text(), what=log.read_text)
        daemons = [grandchild for child in children_of(foreign.pid) for grandchild in children_of(child)]
    finally:  # it forks, so it is ended as a group
        os.killpg(foreign.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            foreign.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(foreign.pid, signal.SIGKILL)
        foreign.wait()
    eventually(lambda: not any(map(is_running, daemons)), what=lambda: f"{daemons}")
