"""Disks that keep only what was synced: each process has its own, and a power cut takes back the rest.

SIGKILL loses nothing that was written, since the kernel has it; a power cut loses what no `sync` has covered: a file
may be empty or cut short, and a new name, or the removal of an old one, may not have happened.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dipaco_p2p.program import files
from dipaco_p2p.program.files import Disk, reach

from .virtual_time import WHO

CHANGES_MAX = 32
"""Of names that were not synced; the kernel writes older ones by itself."""


class Crashed(BaseException):
    """Raised where a process died. No program catches it: it is not an Exception."""


@dataclass(slots=True)
class Unsynced:
    """What a power cut could take back from one machine."""

    files: dict[Path, None] = field(default_factory=dict)
    names: deque[dict[Path, bytes | None]] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    """Changes of names in one folder: what was there before. Those of one change are lost together."""

    def cut_power(self, chance: random.Random) -> None:
        """Lose some of it."""
        for change in reversed(self.names):
            if chance.random() < 0.5:
                for path, before in change.items():
                    _restore(path, before)
        for path in self.files:
            if path.exists() and chance.random() < 0.5:
                data = path.read_bytes()
                path.write_bytes(data[: chance.randrange(len(data) + 1)])
        self.files.clear()
        self.names.clear()


class SimulatedDisk(Disk):
    """All machines' disks: which one is meant says the process that is running."""

    def __init__(self) -> None:
        self._unsynced: dict[str, Unsynced] = {}

    def of(self, name: str) -> Unsynced:
        """What the machine of this name has not synced."""
        return self._unsynced.setdefault(name, Unsynced())

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        mine = self._mine()
        half = len(data) // 2
        mine.files[_path(file)] = None
        super().write(file, data[:half])
        reach("write: in the middle")
        super().write(file, data[half:])

    def sync(self, file: BinaryIO) -> None:
        self._mine().files.pop(_path(file), None)

    def rename(self, old: Path, new: Path) -> None:
        mine = self._mine()
        is_document = old.suffix != ".tmp"
        mine.names.append({new: _bytes_of(new)} | ({old: _bytes_of(old)} if is_document else {}))
        super().rename(old, new)
        if old in mine.files:
            del mine.files[old]
            mine.files[new] = None

    def remove(self, path: Path, *, aside: Path) -> None:
        mine = self._mine()
        before = _bytes_of(path)
        if before is not None:
            mine.names.append({path: before})
            path.unlink()

    def sync_folder(self, path: Path) -> None:
        mine = self._mine()
        kept = [change for change in mine.names if next(iter(change)).parent != path] if mine.names else []
        if len(kept) < len(mine.names):
            mine.names.clear()
            mine.names.extend(kept)

    def _mine(self) -> Unsynced:
        """The running machine's; a dead one writes nothing any more."""
        process = WHO.get()
        if process is not None and process.is_dead:
            raise Crashed(process.name)
        return self.of(process.name if process else "")


@contextlib.contextmanager
def installed(disk: Disk):  # type: ignore[no-untyped-def]
    """Let all stores of this process use `disk` while the block runs."""
    before, files.disk = files.disk, disk
    try:
        yield disk
    finally:
        files.disk = before


def _path(file: BinaryIO) -> Path:
    name: Any = file.name  # what it was opened with
    return name if isinstance(name, Path) else Path(name)


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _restore(path: Path, before: bytes | None) -> None:
    if before is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(before)
