"""Who a process is: a volunteer by the lock that the kernel says it holds, a game by its name, nobody by its word."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dipaco_p2p.program.files import LOCK_NAME, folder_lock
from peers.governor import programs
from peers.governor.programs import NAME_CHARS_MAX, is_named, is_volunteer, name_of

HOLDER = """
import sys
from pathlib import Path
from dipaco_p2p.node.store import folder_lock
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
    monkeypatch.setattr(programs, "PROC", tmp_path)
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
        assert {os.getpid(), pid} <= programs.ours()
    assert pid not in programs.ours()
