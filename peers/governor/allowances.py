"""What counts against the owner's limits: this month's traffic, and the home folder."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from pathlib import Path
from typing import BinaryIO

from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.program import files
from dipaco_p2p.program.files import Disk, LimitReached, wait_removed, write_atomically

from ..preferences.keys import GB
from ..preferences.schedule import next_month_s

log = logging.getLogger(__name__)

FILE_NAME = "month.json"
SAVE_BYTES = 10**6


class MonthAccount:
    """The account of one home."""

    def __init__(self, home: Path, *, now_s: float, zone: tzinfo | None = None, limit_gb: float | None = None) -> None:
        self._path = home / FILE_NAME
        self._zone = zone
        self._limit_gb = limit_gb
        self._month, self._bytes = self._load()
        self._counter = 0
        """What the swarm had counted at the last look."""
        self._saved_bytes = self._bytes
        self._turn(now_s)

    @property
    def used_bytes(self) -> int:
        return self._bytes

    @property
    def share(self) -> float:
        """How much of the monthly traffic is used; 0 without a limit."""
        return 0.0 if self._limit_gb is None else self._bytes / (self._limit_gb * GB)

    def used_up(self, now_s: float) -> EnvironmentUnfit:
        """What to say when no more may be sent this month."""
        again = f"{datetime.fromtimestamp(next_month_s(now_s, self._zone), self._zone):%d %B}"
        return EnvironmentUnfit(
            f"{self._bytes / GB:,.2f} GB of the {self._limit_gb:g} GB of this month (`month_gb`) are used up",
            hint=f"it goes on from {again}; or raise `month_gb`",
        )

    def count(self, total_bytes: int, *, now_s: float) -> None:
        """The swarm has moved `total_bytes` since it was opened."""
        self._turn(now_s)
        self._bytes += max(0, total_bytes - self._counter)
        self._counter = total_bytes
        if self._bytes - self._saved_bytes >= SAVE_BYTES:
            self.save()

    def save(self) -> None:
        """Write it down; a disk that will not is said in the log."""
        try:
            write_atomically(self._path, json.dumps({"month": self._month, "bytes": self._bytes}).encode())
            self._saved_bytes = self._bytes
        except EnvironmentUnfit as error:
            log.warning("this month's traffic was not noted: %s", error)

    def _turn(self, now_s: float) -> None:
        month = f"{datetime.fromtimestamp(now_s, self._zone):%Y-%m}"
        if month > self._month:
            self._month, self._bytes, self._saved_bytes = month, 0, 0

    def _load(self) -> tuple[str, int]:
        try:
            value = json.loads(self._path.read_bytes())
            month, count = str(value["month"]), int(value["bytes"])
            datetime.strptime(month, "%Y-%m")
            return month, max(0, count)
        except FileNotFoundError:
            return "", 0
        except (OSError, ValueError, TypeError, KeyError):
            log.warning("%s is damaged: this month's traffic counts from now on", self._path)
            return "", 0


BLOCK = 4096
FREE_SHARE = 0.1
LOOK_S = 2.0
"""Between two looks at what a full folder can spare for whoever asks how much is left: each walks all of it."""
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
    free: Callable[[int], int] = lambda wanted_bytes: 0
    """Removes what others sent and nothing names, until so many bytes are free; returns how many are."""


class Allowance:
    """How much of a limit a folder takes; from any thread."""

    def __init__(self, home: Path, limit_bytes: int, *, in_use: Callable[[], InUse] = InUse) -> None:
        self._home = home
        self._limit_bytes = limit_bytes
        self._in_use = in_use
        self._lock = threading.Lock()
        self._used_bytes = folder_bytes(home)
        self._next_look_s = 0.0
        """Before that `left_bytes` looks for nothing that can be spared."""

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, length: int) -> None:
        """Room for `length` more bytes; raises LimitReached."""
        length = -(-length // BLOCK) * BLOCK
        with self._lock:
            if self._used_bytes + length > self._limit_bytes:
                self._make_room(length)
            if self._used_bytes + length > self._limit_bytes:
                used = f"{self._used_bytes / MB:,.1f} MB of the {self._limit_bytes / MB:,.1f} MB (`disk_gb`)"
                raise LimitReached(
                    f"{used} that {self._home} may have are in use, and {length / MB:,.1f} MB more needed"
                )
            self._used_bytes += length

    def left_bytes(self, *, wanted: int) -> int:
        """What may still be taken, once what can be spared has made room for `wanted`."""
        with self._lock:
            now_s = time.monotonic()
            if self._used_bytes + wanted > self._limit_bytes and now_s >= self._next_look_s:
                self._make_room(wanted)
                self._next_look_s = now_s + LOOK_S
            return max(0, self._limit_bytes - self._used_bytes)

    def measure(self) -> None:
        """Count what is there, with what others than stores have written."""
        with self._lock:
            self._count()

    def _count(self) -> None:
        wait_removed()
        self._used_bytes = folder_bytes(self._home)

    def _make_room(self, length: int) -> None:
        self._count()
        wanted = self._limit_bytes - max(length, int(FREE_SHARE * self._limit_bytes))
        if self._used_bytes > wanted:
            prune(self._home, self._used_bytes - wanted, self._in_use())
            self._count()


class LimitedDisk(Disk):
    """A disk that keeps an allowance."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._allowance.take(len(data))
        super().write(file, data)

    def free_bytes(self, folder: Path, *, wanted: int) -> int:
        return min(super().free_bytes(folder, wanted=wanted), self._allowance.left_bytes(wanted=wanted))


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
    """Remove what can be spared, the least needed first, until `wanted_bytes` are free; how many are. What others have
    sent for nothing yet comes first: its senders send it again."""
    freed = in_use.free(wanted_bytes)
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
