"""What a coordinator is told about a port, a folder or a disk that will not do; its run file: tests/bootstrap."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, refused, write_run

pytestmark = pytest.mark.libp2p


def start(programs: Programs, run_file: Path) -> Program:
    return programs.run("dipaco-bootstrap", "start", run_file, "--dir", run_file.parent / "run")


def test_demo_refuses_a_grid_that_is_none(programs: Programs) -> None:
    for grid in ("2xtwo", "0x2"):
        refused(programs.run("dipaco-bootstrap", "demo", "--grid", grid), 2, f"`{grid}`", "2x2")


def test_init_writes_what_start_takes_and_replaces_nothing(programs: Programs, tmp_path: Path) -> None:
    run_file = tmp_path / "mine.toml"
    written = programs.run("dipaco-bootstrap", "init", run_file, "--name", "mine")
    assert written.wait() == 0 and f"dipaco-bootstrap start {run_file}" in written.said
    before = run_file.read_bytes()
    refused(programs.run("dipaco-bootstrap", "init", run_file), 2, "already exists")
    assert run_file.read_bytes() == before
    # That it starts, without the minutes that its defaults take: it is read, and its port is tried.
    with socket.create_server(("127.0.0.1", 31337)):
        refused(start(programs, run_file), 5, "port 31337 is taken", "another port")


def test_a_folder_that_another_coordinator_uses_is_refused(programs: Programs, endless: Program) -> None:
    run_file, words = endless.home.parent / "endless.toml", f"`{endless.home}` is in use by another process"
    refused(programs.coordinator(run_file, endless.home), 5, words, "another --dir")
    assert endless.process.poll() is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a disk that is full takes the right to mount one")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", disk], check=True)


def test_a_full_disk_is_named_and_with_space_the_same_command_goes_on(
    programs: Programs, small_disk: Path, corpus: Path
) -> None:
    run_file = write_run(programs.folder / "full.toml", corpus, rounds=1, min_paths=1)
    refused(programs.coordinator(run_file, small_disk / "run"), 5, "no space left", "free some space")
    assert not (small_disk / "run" / "grid" / "documents" / "manifest.json").exists()
    assert not list(small_disk.rglob("*.tmp"))
    grow(small_disk)
    coordinator = programs.coordinator(run_file, small_disk / "run")
    coordinator.wait_address()
    assert coordinator.end() == 0


def test_a_volunteer_names_its_full_disk_and_with_space_the_same_command_goes_on(
    programs: Programs, small_disk: Path, endless: Program
) -> None:
    address = endless.wait_address()["address"]
    arguments = ("join", address, "--home", small_disk / "home")
    (small_disk / "ballast").write_bytes(bytes(32 * 1024))
    refused(programs.start("dipaco-peer", *arguments, home=small_disk / "home"), 5, "space", "free some space")
    grow(small_disk)
    volunteer = programs.start("dipaco-peer", *arguments, home=small_disk / "home")
    volunteer.wait_event("receipt")
    assert volunteer.end() == 0
