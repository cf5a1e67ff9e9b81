"""A ticket is all that a volunteer needs: whatever is wrong with some of its seeds, and when all of them are gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, address_at, copy_prepared, eventually, free_port, refused, write_run
from liars import clock_liar

from dipaco_p2p.protocol.signing import Signer, public_key_of
from dipaco_p2p.ticket import SeedPlace, read_ticket, write_ticket

pytestmark = pytest.mark.libp2p
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{Signer(bytes([9]) * 32).peer}"
DEAD = SeedPlace(place="/ip4/127.0.0.1/tcp/1", key=Signer(bytes([9]) * 32).public_key)
MODULES = {"L0.M0", "L1.M0", "L1.M1"}


def ticket_of(programs: Programs, folder: Path, *seeds: str) -> str:
    options = [word for seed in seeds for word in ("--seed", seed)]
    done = programs.run("dipaco-bootstrap", "ticket", folder, *options)
    assert done.wait() == 0, done.complaint
    return done.said.strip()


def led(*volunteers: Program) -> set[str]:
    return {event["module"] for volunteer in volunteers for event in volunteer.events("leads")}


def test_the_line_that_the_coordinator_prints_is_enough(programs: Programs, endless: Program) -> None:
    ticket = endless.wait_address()["ticket"]
    [line] = [line for line in endless.said.splitlines() if line.startswith("dipaco-peer join")]
    # By now it may name volunteers, too.
    told = read_ticket(line.split()[-1])
    assert replace(read_ticket(ticket), seeds=told.seeds) == told and told.seeds == read_ticket(ticket).seeds[:1]
    assert read_ticket(ticket_of(programs, endless.home)).seeds[:1] == told.seeds
    file = programs.folder / "invitation.txt"
    file.write_text(f"Please help:\n{line}\n")
    volunteer = programs.volunteer(str(file), "from-a-file")
    volunteer.wait_event("receipt")
    assert volunteer.end() == 0, volunteer.complaint
    assert "each round" in volunteer.complaint and "can be reached from outside" in volunteer.complaint


def test_a_dry_run_says_what_it_would_take_and_takes_nothing(programs: Programs, endless: Program) -> None:
    ticket = endless.wait_address()["ticket"]
    dry = programs.volunteer(ticket, "dry", "--dry-run", "--up-mbit", "3")
    assert dry.wait() == 0, dry.complaint
    for words in ("memory", "disk", "each round", "up 3 Mbit/s at most", "would be claimed"):
        assert words in dry.said, dry.said
    assert not (dry.home / "runs").exists() and "Traceback" not in dry.complaint


def test_a_dead_seed_and_one_with_another_clock_do_not_keep_a_volunteer_out(
    programs: Programs, endless: Program
) -> None:
    plate = endless.wait_address()
    with clock_liar(programs.folder, plate["address"], ahead_s=600.0) as liar:
        ticket = ticket_of(programs, endless.home, NOBODY, liar)
        volunteer = programs.volunteer(ticket, "past-them")
        volunteer.wait_event("receipt")
        assert volunteer.end() == 0, volunteer.complaint
        alone = write_ticket(replace(read_ticket(ticket), seeds=read_ticket(ticket).seeds[:2]))
        refused(programs.volunteer(alone, "no-way"), 5, "none of 2 addresses", "NTP")


def test_a_run_that_was_joined_is_joined_again_without_its_ticket(programs: Programs, endless: Program) -> None:
    plate = endless.wait_address()
    run, nobody = plate["run"], write_ticket(replace(read_ticket(plate["ticket"]), seeds=(DEAD,)))
    home = programs.folder / "forgetful"
    elsewhere = programs.run("dipaco-peer", "join", nobody, "--home", home)
    assert elsewhere.wait() == 4 and not (home / "last_run.json").exists(), "only what was found is remembered"
    dry = programs.volunteer(plate["address"], "forgetful", "--dry-run")
    assert dry.wait() == 0 and not (home / "last_run.json").exists()
    first = programs.volunteer(plate["address"], "forgetful")
    first.wait_event("receipt")
    assert first.end() == 0 and "taking" not in first.complaint, first.complaint
    assert json.loads((home / "last_run.json").read_bytes()) == {"ticket": plate["address"], "run": run}
    again = programs.start("dipaco-peer", "join", "--home", home, home=home)
    again.wait_event("joined", count=2)
    assert f"using run:{run[:8]}, as remembered in {home / 'last_run.json'}" in again.complaint
    for command in (("me",), ("doctor", "--no-listen")):
        asked = programs.run("dipaco-peer", *command, "--home", home)
        assert asked.wait() == 0 and f"using run:{run[:8]}" in asked.complaint, asked.said + asked.complaint
    assert again.end() == 0, again.complaint
    machine = programs.run("dipaco-peer", "doctor", "--machine", "--no-listen", "--home", home)
    assert machine.wait() == 0 and "taking" not in machine.complaint and "seed /" not in machine.said, machine.said
    lost = programs.run("dipaco-peer", "me", "--home", home, DIPACO_TICKET=nobody)
    refused(lost, 4, f"run:{run[:8]} `endless`, as DIPACO_TICKET says", "for another run give its ticket")
    lost = programs.run("dipaco-peer", "doctor", "--no-listen", "--home", home, DIPACO_TICKET=nobody)
    assert lost.wait() == 4 and "as DIPACO_TICKET says, cannot be reached" in lost.said, lost.said
    refused(programs.run("dipaco-peer", "join", "--home", home, "--run", "ff00ff00"), 6, f"run:{run[:8]}", "ff00ff00")


@pytest.mark.slow
def test_when_all_seeds_are_gone_the_ticket_leads_back_through_those_who_were_met(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    folder = copy_prepared(endless_prepared[1], programs.folder / "coordinator")
    run_file = write_run(programs.folder / "endless.toml", corpus, rounds=100_000, min_paths=1, port=free_port())
    coordinator = programs.coordinator(run_file, folder)
    ticket = coordinator.wait_address()["ticket"]
    port = free_port()
    # At the end it may wait for a leader that is gone: not for the whole of the usual grace time.
    staying = programs.volunteer(ticket, "staying", "--listen", f"/ip4/127.0.0.1/tcp/{port}", "--grace", "10")
    leaving = programs.volunteer(ticket, "leaving")
    for volunteer in (staying, leaving):
        volunteer.wait_event("receipt", count=2)
    met = leaving.home / "acquaintances.json"
    eventually(lambda: address_at(staying, port) in met.read_text(), what=met.read_text)
    assert list(json.loads(met.read_text())) == [coordinator.wait_address()["run"]]
    # A module that the seed node owns alone waits for it: nobody else may say who owns it next.
    eventually(lambda: led(staying, leaving) == MODULES, what=lambda: staying.complaint[-1000:])
    assert leaving.end() == 0, leaving.complaint
    coordinator.kill()
    again = programs.volunteer(ticket, "leaving")
    again.wait_event("joined", count=2)
    again.wait_event("receipt", count=len(leaving.events("receipt")) + 1)
    assert (again.end(), staying.end()) == (0, 0), again.complaint


def test_with_todays_ticket_newcomers_join_and_train_while_no_seed_is_alive(
    programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]
) -> None:
    """What the coordinator's folder prints, and what a volunteer prints: both name volunteers that have worked."""
    folder = copy_prepared(endless_prepared[1], programs.folder / "coordinator")
    run_file = write_run(programs.folder / "endless.toml", corpus, rounds=100_000, min_paths=1, port=free_port())
    coordinator = programs.coordinator(run_file, folder)
    plate = coordinator.wait_address()
    staying = [
        programs.volunteer(plate["address"], name, "--listen", f"/ip4/127.0.0.1/tcp/{free_port()}", "--grace", "10")
        for name in ("one", "two")
    ]
    for volunteer in staying:
        volunteer.wait_event("receipt", count=2)
    keys = {public_key_of(volunteer.wait_event("joined")["peer"]) for volunteer in staying}

    def named(file: Path) -> bool:
        return keys <= {seed.key for seed in read_ticket(json.loads(file.read_text())["ticket"]).seeds}

    for home in (folder, staying[0].home):
        eventually(lambda home=home: named(home / "address.json"), what=(home / "address.json").read_text)
    eventually(lambda: led(*staying) == MODULES, what=lambda: staying[0].complaint[-1000:])
    assert "the ticket now names volunteers" in coordinator.said
    coordinator.kill()
    told = programs.run("dipaco-peer", "ticket", "--home", staying[0].home)
    assert told.wait() == 0, told.complaint
    newcomers = [
        programs.volunteer(ticket, name)
        for name, ticket in (("third", ticket_of(programs, folder)), ("fourth", told.said.strip()))
    ]
    for newcomer in newcomers:
        newcomer.wait_event("receipt", count=2)
    account = programs.run("dipaco-peer", "me", ticket_of(programs, folder), "--home", newcomers[0].home)
    assert account.wait() == 0 and "volunteer 12D3Koo" in account.said, account.complaint
    # Of the seed alone, as it was printed at first: still refused, since nobody answers.
    first = coordinator.said.partition("dipaco-peer join ")[2].split()[0]
    refused(programs.volunteer(first, "too-late"), 4)
    assert [volunteer.end() for volunteer in (*newcomers, *staying)] == [0, 0, 0, 0], newcomers[0].complaint
