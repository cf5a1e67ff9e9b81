"""The owner's limit on the home folder: what stores write is counted first, and refused beyond it.

Rule 1: what is on the disk is measured again whenever the count reaches the limit, so that files which others removed
make room. Rule 2: then old data goes, until a tenth of the limit is free: unfinished transfers that nobody continues,
the blobs of other runs (their receipts, identity and history stay), old logs, and shards of paths that are not trained
here now; all of it can be fetched again. Rule 3: when that is not enough, the write is refused, and the volunteer
leaves as on a full disk, with exit code 5. Logs and the history are measured, and not refused: they are bounded.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dipaco_p2p.program import files
from dipaco_p2p.program.files import Disk, LimitReached

BLOCK = 4096
FREE_SHARE = 0.1
STALE_S = 600.0
"""An unfinished transfer that got no byte for so long is nobody's."""
MB = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """What must stay of a home folder."""

    runs: frozenset[str] = frozenset()
    """Names of the folders of runs that go on; without any, nothing of a run is removed."""
    spare: Iterable[Path] = field(default=())
    """Files of these that can be fetched again when they are needed."""


class Allowance:
    """How much of a limit a folder takes; from any thread."""

    def __init__(self, home: Path, limit_bytes: int, *, in_use: Callable[[], InUse] = InUse) -> None:
        self._home = home
        self._limit_bytes = limit_bytes
        self._in_use = in_use
        self._lock = threading.Lock()
        self._used_bytes = folder_bytes(home)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, length: int) -> None:
        """Room for `length` more bytes; raises LimitReached."""
        length = -(-length // BLOCK) * BLOCK
        with self._lock:
            if self._used_bytes + length > self._limit_bytes:
                self._make_room(length)
            self._used_bytes += length

    def measure(self) -> None:
        """Count what is there, with what others than stores have written."""
        with self._lock:
            self._used_bytes = folder_bytes(self._home)

    def _make_room(self, length: int) -> None:
        self._used_bytes = folder_bytes(self._home)
        wanted = self._limit_bytes - max(length, int(FREE_SHARE * self._limit_bytes))
        if self._used_bytes > wanted:
            prune(self._home, self._used_bytes - wanted, self._in_use())
            self._used_bytes = folder_bytes(self._home)
        if self._used_bytes + length > self._limit_bytes:
            used = f"{self._used_bytes / MB:,.1f} MB of the {self._limit_bytes / MB:,.1f} MB (`disk_gb`)"
            raise LimitReached(f"{used} that {self._home} may have are in use, and {length / MB:,.1f} MB more needed")


class LimitedDisk(Disk):
    """A disk that keeps an allowance."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._allowance.take(len(data))
        super().write(file, data)


@contextlib.contextmanager
def limited(allowance: Allowance) -> Iterator[None]:
    """All stores of this process keep the allowance while the block runs."""
    before, files.disk = files.disk, LimitedDisk(allowance)
    try:
        yield
    finally:
        files.disk = before


def folder_bytes(folder: Path) -> int:
    """What a folder takes of its disk."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def prune(home: Path, wanted_bytes: int, in_use: InUse) -> int:
    """Remove what can be spared, the least needed first, until `wanted_bytes` are free; how many are."""
    freed = 0
    for path in _spare(home, in_use):
        if freed >= wanted_bytes:
            break
        with contextlib.suppress(OSError):
            size = path.lstat().st_blocks * 512
            path.unlink()
            freed += size
    return freed


def _spare(home: Path, in_use: InUse) -> Iterator[Path]:
    now_s, runs = time.time(), home / "runs"
    for path in sorted(runs.glob("*/partial/*"), key=_age):
        if now_s - _age(path) > STALE_S:
            yield path
    if in_use.runs:
        others = sorted((run for run in runs.glob("*") if run.name not in in_use.runs), key=_age)
        for run in others:
            yield from itertools.chain(run.glob("blobs/*/*"), run.glob("partial/*"), run.glob("peer.log*"))
    yield from runs.glob("*/history.1.jsonl")
    yield from in_use.spare


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
