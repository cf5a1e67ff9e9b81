"""Files that survive a crash: written, synced and renamed, so that a crash leaves the old or the new, never a part.

A full disk is one clear error, and what was half written is removed. All changes go through `disk`, which a simulation
replaces by one that loses what was not synced.

Fault points: `reach("write: before rename")` names a point between two effects, where a crash would hurt most. It costs
a comparison in production. In a simulation a listener may raise there what ends the peer, so that every order of
"on disk", "told" and "known" is tried. Names are literals: `simulation.faults` reads them from the sources, and its
tests check that each one is visited.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from ..errors import EnvironmentUnfit, TooManyFiles

LOCK_NAME = "lock"
PIECE_BYTES = 4 * 1024 * 1024
"""Of what nobody reads soon, written before the disk begins with it."""
OPEN_FILES = 65_536
"""What a program asks for: each call of a peer is one. Many systems give 1024 until they are asked."""
OPEN_FILES_ERRORS = {errno.EMFILE, errno.ENFILE}
ELSEWHERE = "choose another folder (--home of a volunteer, --dir of a coordinator)"
_writes = itertools.count()
_removing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="removing")

Listener = Callable[[str], None]

_listener: Listener | None = None


class Disk:
    """What changes files: each call may fail with OSError, and nothing is safe from a power cut before its `sync`."""

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)
        file.flush()

    def send_on(self, file: BinaryIO) -> None:
        """Begin to bring to the disk what was written of a file, and hold no copy in memory of what is there; a hint,
        which some systems do not take."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self, file: BinaryIO) -> None:
        """The bytes of a file are safe."""
        os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def remove(self, path: Path, *, aside: Path) -> None:
        """Take a file out of its folder; nothing to do if it is not there. To free its blocks can take the system long,
        and whoever removes it must not wait: another thread removes what now lies in the folder `aside`."""
        gone = aside / f"{os.getpid()}-{next(_writes)}"
        try:
            path.replace(gone)
        except FileNotFoundError:
            if aside.is_dir():
                return
            make_folder(aside)
            return self.remove(path, aside=aside)
        _removing.submit(gone.unlink, missing_ok=True)

    def free_bytes(self, folder: Path, *, wanted: int) -> int:
        """How much more fits there, once what can be spared has made room for `wanted` bytes, if anything can."""
        return shutil.disk_usage(folder).free

    def sync_folder(self, path: Path) -> None:
        """The names in a folder are safe."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def wait_removed() -> None:
    """Return once the blocks of all that was removed so far are free."""
    _removing.submit(int).result()


class LimitReached(OSError):
    """The disk has room, and the owner of the machine lets us have no more of it."""


disk = Disk()


@contextlib.contextmanager
def folder_lock(folder: Path, *, hint: str) -> Iterator[None]:
    """Make `folder`, and keep every other process out of it while the block runs; raises EnvironmentUnfit.

    The kernel holds the lock, so that it ends with the process, however that ends.
    """
    make_folder(folder)
    try:
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unfit(error, folder / LOCK_NAME) from None
    try:
        _lock(handle, folder, hint)
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, *parts: bytes | memoryview, is_cold: bool = False) -> None:
    """Write, sync, rename, sync the folder; raises EnvironmentUnfit when the machine will not.

    What `is_cold`, nobody reads soon: it goes to the disk while it is written, and takes no room in the system's cache,
    where a version would oust what others on the machine read (docs/performance.md).
    """
    # Two threads may write the same blob at once: each renames a file of its own.
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{next(_writes)}.tmp")
    try:
        reach("write: nothing yet")
        with temporary.open("wb") as file:
            for piece in _pieces(parts) if is_cold else parts:
                disk.write(file, piece)
                if is_cold:
                    disk.send_on(file)
            sync(file)
            if is_cold:
                disk.send_on(file)
        rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unfit(error, path) from None


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        yield from (view[begin : begin + PIECE_BYTES] for begin in range(0, len(view), PIECE_BYTES))


def sync(file: BinaryIO) -> None:
    """The bytes of `file` are safe."""
    reach("write: before sync")
    disk.sync(file)


def rename(temporary: Path, path: Path) -> None:
    """Put a synced file in its place, and make its name safe."""
    reach("write: before rename")
    disk.rename(temporary, path)
    reach("write: before sync of the folder")
    disk.sync_folder(path.parent)
    reach("write: done")


def unfit(error: OSError, path: Path) -> EnvironmentUnfit:
    """What to tell about a file system that refuses, or that was not asked because too many files are open."""
    if error.errno in OPEN_FILES_ERRORS:
        return too_many_files(path)
    if isinstance(error, LimitReached):
        return EnvironmentUnfit(str(error), hint=f"raise `disk_gb`, or {ELSEWHERE}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentUnfit(f"no space left on the disk of {path.parent}", hint=f"free some space, or {ELSEWHERE}")
    return EnvironmentUnfit(f"cannot write {path}: {error.strerror}", hint=ELSEWHERE)


def too_many_files(wanted: Path | str) -> TooManyFiles:
    """What to tell when `wanted` could not be opened beside all others."""
    hint = "raise the hard limit: `LimitNOFILE` of a systemd unit, or `nofile` in /etc/security/limits.conf"
    return TooManyFiles(f"too many open files: {wanted} cannot be opened", hint=hint)


def allow_open_files() -> None:
    """Let this process, and those that it starts, open as many files as the system grants, `OPEN_FILES` at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _lock(handle: int, folder: Path, hint: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EnvironmentUnfit(f"`{folder}` is in use by another process", hint=hint) from None
    except OSError as error:  # some network file systems know no locks
        raise EnvironmentUnfit(f"`{folder}` cannot be locked: {error.strerror}", hint=ELSEWHERE) from None


def make_folder(path: Path) -> None:
    """Make it if it is not there; raises EnvironmentUnfit."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unfit(error, path) from None


def reach(name: str) -> None:
    """Pass the fault point `name`; raises whatever the listener raises, and nothing without one."""
    if _listener is not None:
        _listener(name)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` at every fault point of this process while the block runs."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def output_of(*command: str, timeout_s: float = 10.0) -> str | None:
    """What a command prints; None if it is not here, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def is_clock_synchronised() -> bool | None:
    """Whether the system's clock is in step with a time server; None where systemd does not say."""
    said = output_of("timedatectl", "show", "--property=NTPSynchronized", "--value")
    return {"yes": True, "no": False}.get((said or "").strip())


def installed_version(package: str) -> str | None:
    """None for a package that is not here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def existing(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    return next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))


def why_unwritable(folder: Path) -> str | None:
    """Why nothing can be written where `folder` is, or would be made; None if something can."""
    try:
        with tempfile.NamedTemporaryFile(dir=existing(folder), prefix=".dipaco-"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files in a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it went away meanwhile
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def free_disk(folder: Path) -> int:
    """Bytes that may be written where `folder` is, or would be made."""
    return shutil.disk_usage(existing(folder)).free
