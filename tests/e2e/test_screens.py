"""What the programs say: help, version, plain lines into a file, and a live panel on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from e2e_harness import Program, Programs, entry_command, eventually, spawn

from dipaco_p2p import __version__

ESCAPE = "\x1b"
PREVIEW = ["volunteer", "device", "memory", "disk", "at", "each", "admission"]
"""How the lines begin that say what a volunteer will use."""


@pytest.mark.parametrize("program", ["dipaco-peer", "dipaco-bootstrap"])
def test_version_is_said(programs: Programs, program: str) -> None:
    said = programs.run(program, "--version")
    assert (said.wait(), said.said.strip()) == (0, __version__)


@pytest.mark.parametrize(
    ("program", "commands"),
    [("dipaco-peer", ["join"]), ("dipaco-bootstrap", ["init", "start", "verify", "demo"])],
    ids=["peer", "bootstrap"],
)
def test_every_command_has_help_with_exit_codes(programs: Programs, program: str, commands: list[str]) -> None:
    top = programs.run(program, "--help")
    assert top.wait() == 0 and all(command in top.said for command in commands)
    for command in commands:
        said = programs.run(program, command, "--help")
        assert said.wait() == 0 and "Exit codes" in said.said, command


@pytest.mark.libp2p
def test_into_a_file_a_volunteer_says_plain_lines(programs: Programs, endless: Program) -> None:
    volunteer = programs.volunteer(endless.wait_address()["address"], "home")
    volunteer.wait_event("receipt", module="L0.M0")
    assert volunteer.end() == 0
    lines = volunteer.complaint.splitlines()
    for words in ("claimed P0-", "training", "receipt for L0.M0", "finishing", "left"):
        assert any(words in line for line in lines), f"{words}: {volunteer.complaint}"
    stamped = [re.match(r"\d\d:\d\d:\d\d ", line) is not None for line in lines]
    first = stamped.index(True)  # before that it says what it will use
    assert lines[0].startswith("run:") and [line.split()[0] for line in lines[1:first]] == PREVIEW
    assert all(stamped[first:]), volunteer.complaint
    assert ESCAPE not in volunteer.complaint


class Terminal:
    """The other end of a pseudo terminal: all that was written to it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._data = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def text(self) -> str:
        """Without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._data.decode(errors="replace"))

    @property
    def raw(self) -> str:
        return self._data.decode(errors="replace")

    def close(self) -> None:
        os.close(self.theirs)
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # EIO: nobody has the other end open
                return
            self._data += data


@contextmanager
def on_terminal(
    program: str, *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    terminal = Terminal()
    command = [*entry_command(program), *arguments]
    process = spawn(command, stdout=terminal.theirs, stderr=terminal.theirs, TERM="xterm-256color", **environment)
    try:
        yield process, terminal
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        terminal.close()


@pytest.mark.libp2p
@pytest.mark.parametrize("no_color", ["", "1"], ids=["colours", "NO_COLOR"])
def test_on_a_terminal_a_panel_lives_and_its_last_frame_stays(
    programs: Programs, endless: Program, no_color: str
) -> None:
    address = endless.wait_address()["address"]
    arguments = ("dipaco-peer", "join", address, "--home", str(programs.folder / "home"))
    with on_terminal(*arguments, NO_COLOR=no_color) as (process, terminal):
        eventually(lambda: re.search(r"receipts +[1-9]", terminal.text), what=lambda: terminal.text[-3000:])
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 0, terminal.text[-3000:]
        for row in ("doing", "path", "round", "loss", "receipts", "swarm"):
            assert row in terminal.text
        assert "P0-" in terminal.text, terminal.text[-3000:]
        last_frame = terminal.text[terminal.text.rindex("╭") :]
        assert "leaving" in last_frame or "left" in last_frame
        assert "╯" in last_frame and "The same command goes on" in last_frame, last_frame
        has_colours = re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.raw) is not None
        assert has_colours is not bool(no_color)
