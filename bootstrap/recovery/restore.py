"""A folder out of a backup: every byte checked, nothing replaced, and nothing there until all of it is.

The run may have gone on since. So the folder is marked (marker.py), and its coordinator signs nothing before it has
learnt from the swarm what it signed after the backup.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.program.files import unfit
from dipaco_p2p.swarm.identity import load_or_create

from ..folder import MANIFEST, read_stage
from .backup import CONTENTS, KEY, SCHEMA
from .marker import Marker, write_marker

MEMBER = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){0,3}")
"""No name leads out of the folder."""
PIECE_BYTES = 1 << 20
DAMAGED_HINT = "take an older backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came out of a backup."""

    folder: Path
    run: str
    files: int
    made_s: float


def restore(backup: Path, root: Path) -> Restored:
    """Make `root` of the file `backup`. Raises ConfigError for a folder that holds something and a file that is not
    there, IntegrityError for one that is not whole, EnvironmentUnfit for a disk that will not."""
    if not backup.is_file():
        raise ConfigError(f"`{backup}` is no file", hint="give a file that `dipaco-bootstrap backup` wrote")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"`{root}` holds something already", hint="restore into a folder that is new or empty")
    temporary = root.with_name(f".{root.name}.restoring-{os.getpid()}")
    try:
        temporary.mkdir(parents=True, mode=0o700)
        found = _unpack(backup, temporary)
        if root.exists():
            root.rmdir()
        temporary.rename(root)
    except OSError as error:
        raise unfit(error, root) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Restored(folder=root, run=found["run"], files=len(found["files"]), made_s=found["made_s"])


def _unpack(backup: Path, folder: Path) -> dict[str, Any]:
    digests: dict[str, str] = {}
    contents = b""
    try:
        with tarfile.open(backup, mode="r:") as tar:
            for name, member in _members(tar):
                if name == CONTENTS:
                    contents = b"".join(_pieces(tar, member))
                else:
                    digests[name] = _write(folder / name, _pieces(tar, member))
    except (tarfile.TarError, EOFError) as error:
        raise IntegrityError(f"`{backup}` is no whole backup: {error}", hint=DAMAGED_HINT) from None
    found = _contents(contents, backup)
    if found["files"] != digests:
        odd = sorted(name for name in {*found["files"], *digests} if found["files"].get(name) != digests.get(name))
        raise IntegrityError(f"`{backup}` is damaged: {odd[0]} is not what was written", hint=DAMAGED_HINT)
    _check_key(folder, found)
    write_marker(folder, Marker(made_s=found["made_s"]))
    return found


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    for member in tar:
        if not member.isreg() or not MEMBER.fullmatch(member.name):
            raise IntegrityError(f"a backup with the member {ascii(member.name)[:80]}", hint="do not trust this file")
        yield member.name, member


def _pieces(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = tar.extractfile(member)
    assert file is not None
    while piece := file.read(PIECE_BYTES):
        yield piece


def _write(path: Path, pieces: Iterator[bytes]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    found = hashlib.sha256()
    with os.fdopen(handle, "wb") as file:
        for piece in pieces:
            found.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return found.hexdigest()


def _contents(data: bytes, backup: Path) -> dict[str, Any]:
    try:
        found = json.loads(data)
        is_sound = found["schema"] == SCHEMA and isinstance(found["files"], dict) and isinstance(found["run"], str)
        found["made_s"], found["stages"] = float(found["made_s"]), list(found["stages"])
    except (ValueError, TypeError, KeyError):
        is_sound = False
    if not is_sound:
        raise IntegrityError(f"`{backup}` is no whole backup: its list of contents is missing", hint=DAMAGED_HINT)
    return dict(found)


def _check_key(folder: Path, found: dict[str, Any]) -> None:
    """The key must be that of the run's coordinator, else nobody would believe what it signs."""
    run = read_stage(folder / str(found["stages"][0]) / "documents" / f"{MANIFEST}.json") if found["stages"] else None
    if run is None or not (folder / KEY).exists():
        raise IntegrityError("a backup without a run or without its key", hint=DAMAGED_HINT)
    try:
        peer = load_or_create(folder / KEY).peer
    except EnvironmentUnfit as error:
        raise IntegrityError(f"the key of the backup cannot be used: {error}", hint=DAMAGED_HINT) from None
    if peer != run.manifest.author:
        raise IntegrityError("the key of the backup is not that of the run's coordinator", hint=DAMAGED_HINT)
