"""Who a process is, as the kernel tells in /proc: its names, and whether it is a volunteer like this one.

A volunteer holds the lock of its home, a folder with an identity, for as long as it lives; that a process holds the
lock of a file that it has open stands in /proc/<pid>/fdinfo (proc_pid_fdinfo(5)). What a process calls itself is not
believed. The kernel shows this of processes of the same user in the same container; a volunteer of another user or
container looks like any other program, and a coordinator of the same user like a volunteer.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from dipaco_p2p.program.files import LOCK_NAME

from .usage import PROC, descendants

KEY_NAME = "identity.key"
NAME_CHARS_MAX = 40
COMM_CHARS_MAX = 15
"""The kernel keeps no more of a name in `comm`."""
_ODD = re.compile(r"[^\w.+ -]")
"""A program may call itself anything; what is shown and logged are these letters."""


def ours(pid: int | None = None) -> frozenset[int]:
    """This process and those that it started."""
    pid = os.getpid() if pid is None else pid
    return frozenset([pid, *descendants(pid)])


def name_of(pid: int) -> str:
    """What people call it: `eldenring.exe`; `process 1234` where nobody says."""
    name = _called(pid) or _comm(pid)
    return _ODD.sub("?", name)[:NAME_CHARS_MAX].strip() or f"process {pid}"


def is_named(pid: int, names: frozenset[str]) -> bool:
    """Whether it goes by one of `names`, in small letters: its command, its program file, or what the kernel shows."""
    executable = ""
    with contextlib.suppress(OSError):
        executable = _last_part(os.readlink(PROC / str(pid) / "exe"))
    found = {_called(pid).lower(), executable.lower(), _comm(pid).lower()} - {""}
    return bool(found & (names | {name[:COMM_CHARS_MAX] for name in names}))


def is_volunteer(pid: int) -> bool:
    """Whether it holds the lock of a volunteer's home."""
    with contextlib.suppress(OSError):
        return any(_locks_home(pid, opened) for opened in (PROC / str(pid) / "fd").iterdir())
    return False


def _locks_home(pid: int, opened: Path) -> bool:
    with contextlib.suppress(OSError):
        target = Path(os.readlink(opened))
        if target.name == LOCK_NAME and (target.parent / KEY_NAME).is_file():
            return "\nlock:" in (PROC / str(pid) / "fdinfo" / opened.name).read_text()
    return False


def _called(pid: int) -> str:
    """The last part of the path that it was started with, in the style of Linux or, under Wine, of Windows."""
    with contextlib.suppress(OSError):
        return _last_part((PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace"))
    return ""


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    return ""


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]
