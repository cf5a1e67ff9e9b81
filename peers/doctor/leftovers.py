"""What dead processes of this program left on the machine, and how it is removed: only what surely is ours and dead.

A socket that nobody has bound; shared memory of torch whose maker is gone and which nobody maps; a libp2p daemon that
runs with a volunteer's or coordinator's key, and whose parent is no Python program any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from dipaco_p2p.swarm.hivemind.daemon import SOCKET_FOLDER, stale_sockets

from .facts import Leftovers

PROC, SHM = Path("/proc"), Path("/dev/shm")
DAEMON = "p2pd"
KEY_FILE = "identity.key"
_SEGMENT = re.compile(r"torch_(\d+)_\d+_\d+")


def find_leftovers(*, proc: Path = PROC, shm: Path = SHM, sockets: Path = SOCKET_FOLDER) -> Leftovers:
    """All of them, of the user who asks."""
    return Leftovers(
        sockets=tuple(sorted(stale_sockets(sockets))),
        segments=tuple(sorted(_dead_segments(proc, shm))),
        daemons=tuple(sorted(_orphans(proc))),
    )


def remove(left: Leftovers) -> Leftovers:
    """Remove them; what could be removed."""
    return Leftovers(
        sockets=tuple(path for path in left.sockets if _unlink(path)),
        segments=tuple(path for path in left.segments if _unlink(path)),
        daemons=tuple(pid for pid in left.daemons if _end(pid)),
    )


def _unlink(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _end(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGTERM)
        return True
    return False


def _dead_segments(proc: Path, shm: Path) -> Iterator[Path]:
    found = {path: name for path in shm.glob("torch_*") if (name := _SEGMENT.fullmatch(path.name))}
    dead = [path for path, name in found.items() if _is_mine(path) and not (proc / name[1]).exists()]
    if dead:
        mapped = "\n".join(_text(maps) for maps in proc.glob("[0-9]*/maps"))
        yield from (path for path in dead if path.name not in mapped)


def _orphans(proc: Path) -> Iterator[int]:
    for folder in proc.glob("[0-9]*"):
        command = _text(folder / "cmdline").split("\0")
        if Path(command[0]).name == DAEMON and _is_mine(folder) and any(KEY_FILE in word for word in command):
            parent = _parent(folder)
            if parent is not None and "python" not in _program(proc / str(parent)):
                yield int(folder.name)


def _parent(folder: Path) -> int | None:
    """The process id of the parent; None for a process that has just ended."""
    fields = _text(folder / "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[0] != "Z" else None


def _program(folder: Path) -> str:
    """What a process runs, in a word; Python if that cannot be read, so that nothing is ended by mistake."""
    return (_text(folder / "cmdline").split("\0")[0] or _text(folder / "comm") or "python").lower()


def _is_mine(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_uid == os.getuid()
    return False


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
