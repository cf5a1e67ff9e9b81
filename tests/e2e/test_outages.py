"""What a run survives: a leader that sleeps, a lost seed node, everybody killed at once, a disk that is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import (
    Program,
    Programs,
    address_at,
    breaches,
    copy_prepared,
    eventually,
    free_port,
    refused,
    stopped,
    versions_of,
    write_run,
)
from netns import NEEDS_ROOT

pytestmark = [pytest.mark.libp2p, pytest.mark.slow]
MODULES = ("L0.M0", "L1.M0", "L1.M1")


class Endless:
    """A coordinator of a run that never ends, in a folder of this test's own, at a port that stays."""

    def __init__(self, programs: Programs, corpus: Path, prepared: Path) -> None:
        self._programs = programs
        port, name = free_port(), "endless"
        self._run_file = write_run(programs.folder / f"{name}.toml", corpus, rounds=100_000, min_paths=1, port=port)
        self.folder = copy_prepared(prepared, programs.folder / "coordinator")
        self.coordinator = self.start()
        self.address = self.coordinator.wait_address()["address"]
        self.run = self.coordinator.wait_address()["run"]

    def start(self) -> Program:
        """For the first time, or again."""
        self.coordinator = self._programs.coordinator(self._run_file, self.folder)
        return self.coordinator

    def volunteers(self, *names: str) -> list[Program]:
        return [self._programs.volunteer(self.address, name) for name in names]

    def wait_versions(self, more: int) -> None:
        """Until the archive has so many more of every module."""
        before = versions_of(self.coordinator)
        eventually(
            lambda: all(versions_of(self.coordinator).get(m, 0) >= before.get(m, 0) + more for m in MODULES),
            what=lambda: f"{before} {versions_of(self.coordinator)} {self.coordinator.complaint[-1000:]}",
        )


@pytest.fixture
def endless_run(programs: Programs, corpus: Path, endless_prepared: tuple[Path, Path]) -> Endless:
    return Endless(programs, corpus, endless_prepared[1])


def end_all(*started: Program) -> None:
    for program in started:
        assert program.end() == 0, program.complaint


def made(program: Program, module: str) -> list[int]:
    """The versions of a module that this program made as its leader."""
    return [event["version"] for event in program.events("version") if event["module"] == module]


def test_a_leader_that_slept_past_its_expiry_makes_no_second_chain(endless_run: Endless) -> None:
    volunteers = endless_run.volunteers("first", "second")
    for volunteer in volunteers:
        volunteer.wait_event("receipt")
    leader = eventually(lambda: next((v for v in volunteers if v.events("leads")), None))
    [other] = [volunteer for volunteer in volunteers if volunteer is not leader]
    lead = leader.events("leads")[-1]
    module, others = lead["module"], (other, endless_run.coordinator)
    with stopped(leader):
        eventually(
            lambda: any(e["term"] > lead["term"] for p in others for e in leads(p, module)),
            what=lambda: other.complaint[-1000:],
        )
        # The coordinator leads only until a volunteer asks, so whoever took over may not be who goes on.
        before = sum(len(made(p, module)) for p in others)
        eventually(
            lambda: sum(len(made(p, module)) for p in others) >= before + 2, what=lambda: other.complaint[-1000:]
        )
    leader.wait_event("receipt", count=len(leader.events("receipt")) + 1)
    endless_run.wait_versions(1)
    end_all(*volunteers, endless_run.coordinator)
    assert breaches(endless_run.folder, *volunteers) == []


def leads(program: Program, module: str) -> list[dict[str, Any]]:
    return [event for event in program.events("leads") if event["module"] == module]


def test_without_the_seed_node_training_goes_on_and_a_newcomer_joins_through_a_volunteer(
    programs: Programs, endless_run: Endless
) -> None:
    port = free_port()
    known = programs.volunteer(endless_run.address, "known", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
    [other] = endless_run.volunteers("other")
    for volunteer in (known, other):
        volunteer.wait_event("receipt", count=2)
    # A module that the seed node owns alone waits for it: nobody else may say who owns it next.
    eventually(lambda: owned((known, other)) == set(MODULES), what=lambda: known.complaint[-1000:])
    endless_run.coordinator.kill()
    for volunteer in (known, other):
        volunteer.wait_event("receipt", count=len(volunteer.events("receipt")) + 4)
    address = address_at(known, port)
    newcomer = programs.volunteer(address, "newcomer", "--run", endless_run.run[:16])
    newcomer.wait_event("receipt", count=2)
    seed_node = endless_run.start().wait_address()["peer"]
    endless_run.wait_versions(2)
    volunteers = (known, other, newcomer)
    end_all(*volunteers, endless_run.coordinator)
    assert breaches(endless_run.folder, *volunteers) == []
    # They were never apart from each other: what they did alone stays, but for what only the lost one had.
    told = [event for program in (*volunteers, endless_run.coordinator) for event in program.events("expired")]
    alone = {r["id"] for volunteer in volunteers for r in volunteer.events("receipt") if r["holders"] == [seed_node]}
    assert {event["id"]: event["reason"] for event in told if event["id"] not in alone} == {}


def owned(volunteers: Sequence[Program]) -> set[str]:
    """The modules that one of these leads or has led: so a volunteer is in the group."""
    return {event["module"] for volunteer in volunteers for event in volunteer.events("leads")}


def test_after_everybody_was_killed_and_one_disk_lost_the_run_goes_on_with_all_that_had_a_receipt(
    programs: Programs, endless_run: Endless
) -> None:
    before = endless_run.volunteers("first", "second")
    for volunteer in before:
        volunteer.wait_event("receipt", count=4)
    heads = versions_of(endless_run.coordinator)
    for program in (endless_run.coordinator, *before):
        program.kill()
    unlucky = before[0]
    saved = programs.folder / "saved"
    shutil.copytree(unlucky.home / "runs", saved / "runs", ignore=shutil.ignore_patterns("blobs", "documents"))
    shutil.rmtree(unlucky.home)
    endless_run.start().wait_address()
    assert all(versions_of(endless_run.coordinator)[module] >= heads[module] for module in heads)
    after = endless_run.volunteers("first", "second")
    assert_goes_on(endless_run, after)
    end_all(*after, endless_run.coordinator)
    remembered = Program(unlucky.process, unlucky.out, unlucky.err, saved)
    assert breaches(endless_run.folder, *after, remembered) == []


def assert_goes_on(run: Endless, volunteers: list[Program]) -> None:
    for volunteer in volunteers:
        volunteer.wait_event("receipt", count=len(volunteer.events("receipt")) + 1)
    run.wait_versions(1)


@contextlib.contextmanager
def small_disk(folder: Path, *, size: str) -> Iterator[Path]:
    """A disk of its own (tmpfs); gone afterwards."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the space there is."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0
    return ballast


@NEEDS_ROOT
def test_a_volunteer_whose_disk_fills_up_says_so_and_leaves_and_with_space_goes_on(
    programs: Programs, endless: Program
) -> None:
    address = endless.wait_address()["address"]
    witness = programs.volunteer(address, "witness")
    with small_disk(programs.folder / "disk", size="32m") as disk:
        arguments = ("join", address, "--home", disk / "home")
        volunteer = programs.start("dipaco-peer", *arguments, home=disk / "home")
        volunteer.wait_event("receipt", count=2)
        ballast = fill(disk)
        refused(volunteer, 5, "no space left", "free some space")
        ballast.unlink()
        assert not list(disk.rglob("*.tmp"))
        again = programs.start("dipaco-peer", *arguments, home=disk / "home")
        again.wait_event("receipt", count=len(volunteer.events("receipt")) + 2)
        assert again.end() == 0, again.complaint
    witness.wait_event("receipt", count=len(witness.events("receipt")) + 1)
    assert witness.end() == 0, witness.complaint
