"""What the machine says: memory and threads, battery and idleness, who a process is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dipaco_p2p.core.model.microbatch import Fit
from dipaco_p2p.program.files import LOCK_NAME, folder_lock
from peers.config import PeerConfig
from peers.governor import machine
from peers.governor.machine import (
    NAME_CHARS_MAX,
    NEVER_MIN,
    free_bytes,
    idle_min,
    idle_of_sessions,
    idle_of_terminals,
    is_named,
    is_volunteer,
    name_of,
    on_battery,
    trainer_settings,
    training_threads,
)

MEMINFO = "MemTotal:       8000 kB\nMemFree:         500 kB\nMemAvailable:   3000 kB\n"


@pytest.mark.parametrize(
    ("wanted", "offered", "cores", "expected"),
    [
        (0, 8, 8, 7),
        (0, 3, 3, 2),
        (0, 2, 2, 2),
        (0, 1, 1, 1),
        (0, 1, 8, 1),  # OMP_NUM_THREADS says it, and leaves cores free already
        (0, 4, 8, 4),
        (5, 8, 8, 5),
        (8, 1, 8, 8),
    ],
)
def test_of_more_than_two_cores_one_is_left_unless_the_user_says(
    wanted: int, offered: int, cores: int, expected: int
) -> None:
    assert training_threads(wanted, offered=offered, cores=cores) == expected


def place(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return folder


def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert free_bytes(meminfo=meminfo, cgroup=tmp_path / "none") == 3000 * 1024
    unlimited = place(tmp_path, max="max\n", current="700000\n", stat="inactive_file 1000\n")
    assert free_bytes(meminfo=meminfo, cgroup=unlimited) == 3000 * 1024
    tight = place(tmp_path, max="1000000\n", current="700000\n", stat="anon 5\ninactive_file 100000\n")
    assert free_bytes(meminfo=meminfo, cgroup=tight) == 400_000
    over = place(tmp_path, max="1000\n", current="700000\n", stat="anon 5\n")
    assert free_bytes(meminfo=meminfo, cgroup=over) == 0


def test_where_nobody_says_what_is_free_it_is_not_known(tmp_path: Path) -> None:
    assert free_bytes(meminfo=tmp_path / "none", cgroup=tmp_path) is None


def test_the_flags_decide_what_every_trainer_gets(tmp_path: Path) -> None:
    asked = PeerConfig(home=tmp_path, micro_batch=3, checkpoint=True, eight_bit=False)
    settings = trainer_settings(asked)
    assert settings["micro"].fit(8) == Fit(3, is_checkpointed=True) and settings["eight_bit"] is False
    assert trainer_settings(PeerConfig(home=tmp_path))["eight_bit"] is None


NOW_S = 1_700_000_000.0


def supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "0"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Charging"}, "AC": {"type": "Mains", "online": "1"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "usb": {"type": "USB", "online": "1"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Full"}, "AC": {"type": "Mains", "online": "0"}}, False),
        ({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, False),
    ],
    ids=["desktop", "unplugged", "no mains shown", "charging", "by USB", "full", "a mouse"],
)
def test_a_battery_counts_when_it_is_the_machines_and_nothing_else_gives_power(
    tmp_path: Path, supplies: dict[str, dict[str, str]], expected: bool
) -> None:
    for name, values in supplies.items():
        supply(tmp_path, name, **values)
    assert on_battery(tmp_path) == expected
    assert not on_battery(tmp_path / "none")


def session(minutes: float | None, *, kind: str = "user", state: str = "active") -> dict[str, str]:
    hint = {"IdleHint": "no"} if minutes is None else {"IdleHint": "yes"}
    since_us = 0 if minutes is None else int((NOW_S - minutes * 60) * 1e6)
    return {"Class": kind, "State": state, "IdleSinceHint": str(since_us), **hint}


def test_the_session_that_was_used_last_counts() -> None:
    assert idle_of_sessions([session(30), session(7)], NOW_S) == pytest.approx(7)
    assert idle_of_sessions([session(30), session(None)], NOW_S) == 0.0
    assert idle_of_sessions([session(30), session(None, kind="greeter")], NOW_S) == pytest.approx(30)
    assert idle_of_sessions([session(30), session(None, state="closing")], NOW_S) == pytest.approx(30)
    assert idle_of_sessions([], NOW_S) == NEVER_MIN


def test_without_logind_the_terminal_that_was_read_last_counts(tmp_path: Path) -> None:
    assert idle_of_terminals(tmp_path, NOW_S) is None
    (tmp_path / "pts").mkdir()
    for name, minutes in (("0", 12), ("1", 3), ("ptmx", 0)):
        path = tmp_path / "pts" / name
        path.touch()
        os.utime(path, (NOW_S - minutes * 60, NOW_S))
    assert idle_of_terminals(tmp_path, NOW_S) == pytest.approx(3)


def test_loginctl_is_read_as_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, since_us=int((NOW_S - 600) * 1e6))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert idle_min(now_s=NOW_S) == pytest.approx(10)


def test_where_loginctl_fails_terminals_are_asked_and_without_any_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_sessions", lambda: None)
    assert idle_min(now_s=NOW_S, devices=tmp_path) is None


def fake(folder: Path, *, since_us: int) -> None:
    """A `loginctl` with a user's session and the greeter's."""
    script = folder / "loginctl"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1 $2" in\n'
        """  "list-sessions "*) echo '[{"session":"2","uid":1000},{"session":"c1","uid":42}]';;\n"""
        f'  "show-session 2") printf "Class=user\\nState=active\\nIdleHint=yes\\nIdleSinceHint={since_us}\\n";;\n'
        '  "show-session c1") printf "Class=greeter\\nState=online\\nIdleHint=no\\nIdleSinceHint=0\\n";;\n'
        "esac\n"
    )
    script.chmod(0o755)


HOLDER = """
import sys
from pathlib import Path
from dipaco_p2p.program.files import folder_lock
with folder_lock(Path(sys.argv[1]), hint=""):
    print("held", flush=True)
    sys.stdin.read()
"""
CAT = "/bin/cat"
OPENER = HOLDER.replace('folder_lock(Path(sys.argv[1]), hint="")', '(Path(sys.argv[1]) / "lock").open("r+")')


@contextmanager
def running(*command: str, executable: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that lives while the block does; it ends when its input does."""
    process = subprocess.Popen(command, executable=executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.communicate()


@contextmanager
def called(name: str) -> Iterator[int]:
    """The number of a process that was started under this name."""
    with running(name, executable=CAT) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("here\n")
        process.stdin.flush()
        assert process.stdout.readline() == "here\n", "only now it is surely what it was started as"
        yield process.pid


@contextmanager
def python(code: str, *arguments: str) -> Iterator[int]:
    """The number of a process that has done what it is there for."""
    with running(sys.executable, "-c", code, *arguments) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process.pid


def volunteers_home(folder: Path) -> Path:
    folder.mkdir()
    (folder / "identity.key").write_bytes(b"key")
    return folder


def test_a_process_that_holds_the_lock_of_a_home_is_a_volunteer(tmp_path: Path) -> None:
    home = volunteers_home(tmp_path / "home")
    assert not is_volunteer(os.getpid())
    with folder_lock(home, hint=""):
        assert is_volunteer(os.getpid())
    with python(HOLDER, str(home)) as pid:
        assert is_volunteer(pid) and not is_volunteer(os.getpid())
    assert not is_volunteer(pid), "it has ended"


def test_neither_a_name_nor_an_open_file_nor_another_lock_makes_a_volunteer(tmp_path: Path) -> None:
    home, other = volunteers_home(tmp_path / "home"), tmp_path / "other"
    (home / LOCK_NAME).touch()
    with python(OPENER, str(home)) as pid:
        assert not is_volunteer(pid), "open, and not locked"
        with folder_lock(home, hint=""):
            assert not is_volunteer(pid), "locked, and not by it"
    with python(HOLDER, str(other)) as pid:
        assert not is_volunteer(pid), "a folder without an identity"
    with called("dipaco-peer") as pid:
        assert name_of(pid) == "dipaco-peer" and not is_volunteer(pid)


@pytest.mark.parametrize("name", [r"Z:\games\Elden Ring\eldenring.exe", "/opt/games/eldenring.exe", "eldenring.exe"])
def test_a_program_goes_by_the_last_part_of_what_it_was_started_as(name: str) -> None:
    with called(name) as pid:
        assert name_of(pid) == "eldenring.exe"
        assert is_named(pid, frozenset({"eldenring.exe"}))
        assert is_named(pid, frozenset({Path(CAT).resolve().name})), "or by its file"
        assert not is_named(pid, frozenset({"elden"}))


def test_a_name_that_the_kernel_cut_off_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "comm").write_text("a-game-with-a-lo\n"[:15] + "\n")
    assert is_named(7, frozenset({"a-game-with-a-long-name"}))
    assert name_of(7) == "a-game-with-a-l"


def test_what_a_program_calls_itself_cannot_move_the_terminal_or_fill_it() -> None:
    with called('evil\x1b[2J"\n' + "x" * 200) as pid:
        shown = name_of(pid)
    assert shown.startswith("evil??2J??x") and len(shown) == NAME_CHARS_MAX
    assert name_of(2**22 + 1) == f"process {2**22 + 1}", "nobody says"


def test_we_are_this_process_and_those_that_it_started() -> None:
    with called("cat") as pid:
        assert {os.getpid(), pid} <= machine.ours()
    assert pid not in machine.ours()
