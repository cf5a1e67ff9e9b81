"""Leftovers: what is found is ours and dead, what lives or is somebody else's stays."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from peers.doctor.facts import Leftovers
from peers.doctor.leftovers import find_leftovers, remove

P2PD = "/venv/site-packages/hivemind/hivemind_cli/p2pd"


class Machine:
    """Folders in place of /proc, /dev/shm and /tmp."""

    def __init__(self, root: Path) -> None:
        self.proc, self.shm, self.sockets = root / "proc", root / "shm", root / "tmp"
        for folder in (self.proc, self.shm, self.sockets):
            folder.mkdir()

    def process(self, pid: int, *command: str, parent: int = 1, maps: str = "", state: str = "S") -> None:
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_text("\0".join(command) + "\0")
        (folder / "stat").write_text(f"{pid} (a (b) c) {state} {parent} 0 0")
        (folder / "maps").write_text(maps)

    def segment(self, name: str) -> Path:
        (self.shm / name).write_bytes(b"x")
        return self.shm / name

    def found(self) -> Leftovers:
        return find_leftovers(proc=self.proc, shm=self.shm, sockets=self.sockets)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_segment_is_dead_when_its_maker_is_gone_and_nobody_maps_it(machine: Machine) -> None:
    machine.process(10, "/usr/bin/python3")
    machine.process(11, "/usr/bin/python3", maps="7f-80 rw-s 00000000 00:19 5 /dev/shm/torch_99_1_2\n")
    machine.segment("torch_10_1_0")  # its maker lives
    machine.segment("torch_99_1_2")  # another process still uses it
    machine.segment("sem.other")
    machine.segment("torch_99_notes")
    dead = machine.segment("torch_99_1_3")
    assert machine.found() == Leftovers(segments=(dead,))


def test_a_daemon_is_an_orphan_when_its_parent_is_no_python_program(machine: Machine) -> None:
    key = "-id=/data/identity.key"
    machine.process(1, "/sbin/init")
    machine.process(20, "/venv/bin/python", "/venv/bin/dipaco-peer")
    machine.process(21, P2PD, key, parent=20)
    machine.process(22, P2PD, key, parent=1)
    machine.process(23, P2PD, "-id=/data/of-another-program.pem", parent=1)
    machine.process(24, "/usr/bin/vim", "p2pd", key, parent=1)
    machine.process(25, P2PD, key, parent=1, state="Z")
    machine.process(26, P2PD, key, parent=4_000_000)  # gone in between: left alone
    assert machine.found().daemons == (22,)


def test_a_daemon_of_a_python_that_is_process_one_of_a_container_is_no_orphan(machine: Machine) -> None:
    machine.process(1, "/usr/bin/python3.11", "/usr/bin/dipaco-peer")
    machine.process(2, P2PD, "-id=/data/identity.key", parent=1)
    assert machine.found() == Leftovers()


def test_a_socket_that_somebody_listens_at_stays(machine: Machine) -> None:
    live, dead = machine.sockets / "hivemind-a.sock", machine.sockets / "hivemind-b.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as gone:
        listener.bind(str(live))
        listener.listen()
        gone.bind(str(dead))
        gone.close()
        assert machine.found() == Leftovers(sockets=(dead,))


def test_what_is_of_another_user_is_not_ours(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.segment("torch_99_1_3")
    machine.process(1, "/sbin/init")
    machine.process(22, P2PD, "-id=/data/identity.key")
    assert machine.found().count == 2
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert machine.found() == Leftovers()


def test_removing_takes_what_was_found_and_survives_what_is_gone(machine: Machine) -> None:
    dead = machine.segment("torch_99_1_3")
    found = machine.found()
    assert remove(found) == found and not dead.exists()
    assert remove(found) == Leftovers()
