"""The check in tests/conftest.py, run in a pytest of its own on tests that do leave something."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
WAITS = "import signal; signal.pause()"


@pytest.fixture
def token() -> Iterator[str]:
    """A word for the names of files that a test leaves outside its own folder; whatever holds it is removed."""
    word = f"leftover{uuid.uuid4().hex}"
    yield word
    for folder in (Path("/tmp"), Path("/dev/shm")):
        for path in folder.glob(f"*{word}*"):
            path.unlink()


def run_session(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a session with one test of this `body`, which may use subprocess, sys and Path."""
    shutil.copy(CONFTEST, folder)
    lines = [
        "import subprocess, sys",
        "from pathlib import Path",
        "def test_it():",
        *(f"    {line}" for line in body.splitlines()),
    ]
    (folder / "test_it.py").write_text("\n".join(lines))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--leftover-grace-s=0.2",
        f"--rootdir={folder}",
    ]
    streams: dict[str, int] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run([*command, str(folder)], text=True, cwd=folder, timeout=200, **streams)


def test_a_session_that_leaves_nothing_passes(tmp_path: Path) -> None:
    result = run_session(
        tmp_path, f"subprocess.run([sys.executable, '-c', 'pass'], check=True)\nassert Path({str(tmp_path)!r}).exists()"
    )
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout


def test_a_child_that_lives_on_fails_the_session(tmp_path: Path) -> None:
    result = run_session(tmp_path, f"sys.child = subprocess.Popen([sys.executable, '-c', {WAITS!r}])")
    assert (result.returncode, end_what_is_left(result)) == (1, 1), result.stdout


def test_an_orphan_in_a_session_of_its_own_fails_the_session(tmp_path: Path) -> None:
    """Its parent is gone and it has left the process group: only the mark in its environment tells."""
    starts_it = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}], start_new_session=True)"
    result = run_session(tmp_path, f"subprocess.run([sys.executable, '-c', {starts_it!r}], check=True)")
    assert (result.returncode, end_what_is_left(result)) == (1, 1), result.stdout


@pytest.mark.parametrize("name", ["/tmp/hivemind-p2pd-{}.sock", "/dev/shm/torch_0_{}"])
def test_a_socket_or_shared_memory_that_stays_fails_the_session(tmp_path: Path, token: str, name: str) -> None:
    result = run_session(tmp_path, f"Path({name.format(token)!r}).touch()")
    assert result.returncode == 1
    assert name.format(token) in result.stdout
    assert "1 passed, 1 error" in result.stdout


def test_the_socket_of_somebody_else_is_not_held_against_the_session(tmp_path: Path, token: str) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS, token]) as other:
        result = run_session(tmp_path, f"Path('/tmp/hivemind-p2pd-{token}.sock').touch()")
        other.kill()
    assert result.returncode == 0, result.stdout


def test_of_two_workers_the_last_looks_for_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other one may be in the middle of a test that has killed something, and has not swept up after it yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    functions = runpy.run_path(str(CONFTEST))
    first, second = (functions["join_crew"]("a run") for _ in range(2))
    alone = functions["join_crew"]("another run")
    assert [functions["leave_crew"](each) for each in (first, alone, second, None)] == [False, True, True, True]
    assert list(tmp_path.iterdir()) == []


def end_what_is_left(result: subprocess.CompletedProcess[str]) -> int:
    """Kill the processes that the output of a session lists as left (in CI twice); how many they were."""
    left = {int(pid) for pid in re.findall(r"^  process (\d+):", result.stdout, flags=re.MULTILINE)}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)
