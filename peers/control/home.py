"""What a volunteer leaves in its home: its log, its files and folders, and its identity."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.program.control.place import POINTER_NAME, SOCKET_NAME, find_socket
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.program.history import HISTORY_NAME
from dipaco_p2p.protocol.signing import KEY_BYTES, PeerId
from dipaco_p2p.swarm import identity
from dipaco_p2p.words import printable

LOG_NAME = "peer.log"
BLOCK_BYTES = 65_536
TAIL_BYTES_MAX = 8 * 1024 * 1024
"""Further back nothing is looked for, however many lines are wanted."""


def newest_log(home: Path) -> Path:
    """The log of the stage that something happened in last; raises ConfigError without a log. The history says when
    that was: while the grid is trained, the log of the warm-up goes on, too."""
    found = sorted(
        home.glob(f"runs/*/{LOG_NAME}"), key=lambda path: (_written_s(path.with_name(HISTORY_NAME)), _written_s(path))
    )
    if not found:
        raise ConfigError(
            f"no volunteer has left a log in `{home}`",
            hint="start it with `dipaco-peer join`, or name its folder with --home",
        )
    return found[-1]


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` whole lines, and the place in the file after them."""
    with path.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        data = b""
        while start and data.count(b"\n") <= count and end - start < TAIL_BYTES_MAX:
            step = min(BLOCK_BYTES, start)
            start = file.seek(start - step)
            data = file.read(step) + data
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.decode(errors="replace").splitlines()
    return (lines[-count:] if count else []), start + len(whole)


def clean(line: str) -> str:
    """A line as it may go to a terminal."""
    return printable(line.replace("\t", "    "))


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


PATHS_SCHEMA = "dipaco.paths/1"
NAMES = {
    "identity": identity.KEY_NAME,
    "lock": "lock",
    "run joined last": "last_run.json",
    "peers met": "acquaintances.json",
    "invitations": "invitations.json",
    "own address": "address.json",
    "where the control socket is": POINTER_NAME,
    "what Weights & Biases keeps": "wandb",
    "runs": "runs",
}
"""In the home."""
RUN_NAMES = {
    "log": LOG_NAME,
    "history": HISTORY_NAME,
    "receipts": "receipts.jsonl",
    "unsent contributions": "outbox",
    "documents": "documents",
    "blobs": "blobs",
    "unfinished transfers": "partial",
}
"""In the folder of each run's stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One file or folder."""

    what: str
    path: Path
    is_there: bool
    bytes: int
    """With all that is in it."""


def places(home: Path) -> list[Place]:
    """All, also those that are not there yet."""
    home = home.absolute()
    found = [("home", home), *((what, home / name) for what, name in NAMES.items())]
    found.append(("control socket", find_socket(home) or home / SOCKET_NAME))
    for run in sorted((home / "runs").glob("*/")):
        found += [(f"run {run.name}", run), *((f"run {run.name}: {what}", run / n) for what, n in RUN_NAMES.items())]
    found.append(("sockets of the libp2p daemon", Path(tempfile.gettempdir()) / "hivemind-p2pd-*.sock"))
    return [_place(what, path) for what, path in found]


def plain_places(home: Path) -> dict[str, Any]:
    """For `--json`."""
    entries = [asdict(each) | {"path": str(each.path)} for each in places(home)]
    return {"schema": PATHS_SCHEMA, "home": str(home.absolute()), "places": entries}


def _place(what: str, path: Path) -> Place:
    if "*" in path.name:
        return Place(what=what, path=path, is_there=any(path.parent.glob(path.name)), bytes=0)
    return Place(what=what, path=path, is_there=path.exists(), bytes=sum(_sizes(path)))


def _sizes(path: Path) -> Iterator[int]:
    for each in [path, *(path.rglob("*") if path.is_dir() else ())]:
        try:
            if each.is_file() and not each.is_symlink():
                yield each.stat().st_size
        except OSError:  # it went away meanwhile
            continue


IDENTITY_SCHEMA = "dipaco.identity/1"
RUNNING_HINT = "stop the volunteer first: `dipaco-peer stop`"
ONCE_HINT = "use an identity in one place only: stop the volunteer here before you start it elsewhere"


def peer_of(home: Path) -> PeerId:
    """Raises ConfigError without an identity, EnvironmentUnfit if others may read it, IntegrityError if damaged."""
    path = home / identity.KEY_NAME
    if not path.exists():
        raise ConfigError(
            f"no identity in `{home}`", hint="the first `dipaco-peer join` makes one; or name its folder with --home"
        )
    return identity.load_or_create(path).peer


def plain_identity(home: Path) -> dict[str, Any]:
    """For `--json`: nothing of it is secret."""
    path = home / identity.KEY_NAME
    peer = peer_of(home)
    return {"schema": IDENTITY_SCHEMA, "peer": peer, "file": str(path.absolute()), "written_s": path.stat().st_mtime}


def export_to(home: Path, target: Path, *, is_forced: bool) -> PeerId:
    """Copy the key file, for its owner only to read; raises ConfigError where there is something already."""
    peer = peer_of(home)
    _write(target, (home / identity.KEY_NAME).read_bytes(), is_forced=is_forced)
    return peer


def import_from(source: Path, home: Path, *, is_forced: bool) -> PeerId:
    """Make the key in `source` the identity of `home`; the one that was there is kept beside it.

    Raises as `peer_of` for a bad key or one that others may read, ConfigError where there is an identity already,
    EnvironmentUnfit while a volunteer runs there.
    """
    if not source.exists():
        raise ConfigError(f"there is no file `{source}`", hint="`dipaco-peer identity export` writes one")
    peer = identity.load_or_create(source).peer
    data = source.read_bytes()
    with folder_lock(home, hint=RUNNING_HINT):
        target = home / identity.KEY_NAME
        if target.exists() and is_forced:
            target.rename(_kept_name(target))
        _write(target, data, is_forced=False)
    return peer


def secrets_of(path: Path) -> list[bytes]:
    """What of a key file nobody must ever see; nothing without one."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return [data, data[-2 * KEY_BYTES :], data[-2 * KEY_BYTES : -KEY_BYTES]]


def _kept_name(target: Path) -> Path:
    """A name that is free, for the identity that gives way."""
    number = 1
    while (path := target.with_name(f"identity-before-{number}.key")).exists():
        number += 1
    return path


def _write(target: Path, data: bytes, *, is_forced: bool) -> None:
    """Whole or not at all; never readable by others, never over something else unless that was asked for."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            with identity.private_file(temporary) as file:
                file.write(data)
            if is_forced:
                temporary.replace(target)
            else:
                os.link(temporary, target)  # unlike a rename, this fails if there is something
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigError(f"`{target}` already exists", hint="choose another, or replace it with --force") from None
    except OSError as error:
        message = f"cannot write the key file {target}: {error.strerror}"
        raise EnvironmentUnfit(message, hint="choose a folder that you may write to") from None
