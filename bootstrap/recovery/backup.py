"""A copy of a coordinator's folder as one tar file, made while the coordinator is at work.

The copy is a state that a crash could have left. What a document names is on disk before the document, and an archive
drops nothing: so documents are copied before blobs, and those that name others before those they name. Histories only
tell of what is on disk, and go first.

    histories -> version -> open -> contribution -> mandate, sharding and the rest -> manifest -> decrees -> blobs

A stage whose manifest is not there yet is left out: it is prepared again, as after a crash. A chain ends at its first
gap. The last member, `backup.json`, has the digest of every other one. The key is inside: whoever has the file *is* the
coordinator, so only its owner may read it.

`restore` checks every byte, replaces nothing, and makes the folder appear as a whole. The run may have gone on since,
so the folder is marked (folder.py): its coordinator signs nothing before it has learnt what it signed after the backup.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import shutil
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.program.files import unfit
from dipaco_p2p.protocol.manifest import STAGES
from dipaco_p2p.swarm.identity import KEY_NAME, load_or_create, private_file
from dipaco_p2p.use.folder import MANIFEST, manifest_path
from leaderboard import words
from leaderboard.places import IN_RUN_FOLDER

from ..folder import DECREES, Marker, read_stage, text_paths, write_marker

SCHEMA = "dipaco.backup/1"
CONTENTS = "backup.json"
WORDS = f"{IN_RUN_FOLDER}/{words.FILE}"
ROOT_FILES = (KEY_NAME, "tokenizer.json", "sequences.safetensors", "address.json", "met.json", WORDS)
FIRST = ("version-", "open-", "contribution-")
"""In this order, before all other documents."""
APPENDED = (".jsonl",)
VERSION = re.compile(r"version-(.+)-(\d{8})\.json")
RUN_HINT = "give the folder that `start --dir` was given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a backup came to."""

    path: Path
    run: str
    files: int
    bytes: int


def back_up(root: Path, to: Path, *, now_s: float) -> Written:
    """Copy the run in `root` to the new file `to`, or to one in the folder `to`.

    Raises ConfigError for a folder without a run and for a file that is there, EnvironmentUnfit for a disk that will
    not, IntegrityError for damaged files.
    """
    stages = [name for name in STAGES if manifest_path(root, name).exists()]
    if not (root / KEY_NAME).exists() or not stages:
        raise ConfigError(f"`{root}` holds no run that was prepared here", hint=RUN_HINT)
    run = read_stage(root, stages[0])
    assert run is not None
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    path = to / f"{run.manifest.config.name}-{stamp}.tar" if to.is_dir() else to
    if path.exists():
        raise ConfigError(f"`{path}` already exists", hint="name another file: a backup replaces nothing")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        written = _write(root, stages, temporary, made_s=now_s, run=run.id)
        os.link(temporary, path)  # fails if somebody else has made one of this name meanwhile
    except FileExistsError:
        raise ConfigError(f"`{path}` already exists", hint="name another file") from None
    except OSError as error:
        raise unfit(error, path) from None
    finally:
        temporary.unlink(missing_ok=True)
    return Written(path=path, run=run.name, files=written, bytes=path.stat().st_size)


def _write(root: Path, stages: list[str], path: Path, *, made_s: float, run: str) -> int:
    with private_file(path) as raw, tarfile.open(fileobj=raw, mode="w") as tar:
        digests: dict[str, str] = {}
        for name in _names(root, stages):
            data = _read(root / name)
            if data is not None:
                digests[name] = _checked_digest(name, data)
                _add(tar, name, data, made_s=made_s)
        contents = {"schema": SCHEMA, "made_s": made_s, "run": run, "stages": stages, "files": digests}
        _add(tar, CONTENTS, json.dumps(contents, sort_keys=True).encode(), made_s=made_s)
    return len(digests)


def _names(root: Path, stages: list[str]) -> Iterator[str]:
    """Everything that belongs to the run, in the order that the header explains. A generator: a folder is listed when
    what stands before it was read."""
    for stage in stages:
        plain = (path for path in (root / stage).iterdir() if path.suffix in {".json", ".jsonl"})
        yield from sorted(path.relative_to(root).as_posix() for path in plain)
        documents = root / stage / "documents"
        yield from (f"{stage}/documents/{name}" for name in _documents(documents))
        yield f"{stage}/documents/{MANIFEST}.json"
    yield from (f"{DECREES}/documents/{path.name}" for path in sorted((root / DECREES / "documents").glob("*.json")))
    for stage in stages:
        blobs = (path for path in (root / stage / "blobs").glob("??/*") if not path.suffix)
        yield from sorted(path.relative_to(root).as_posix() for path in blobs)
    yield from ROOT_FILES
    yield from (path.name for path in text_paths(root))


def _documents(folder: Path) -> Iterator[str]:
    for prefix in FIRST:
        names = sorted(path.name for path in folder.glob(f"{prefix}*.json"))
        yield from _chains(names) if prefix == "version-" else names
    others = sorted(path.name for path in folder.glob("*.json"))
    yield from (name for name in others if name != f"{MANIFEST}.json" and not name.startswith(FIRST))


def _chains(names: list[str]) -> Iterator[str]:
    """The versions of each module up to the first that is not listed: it came while the folder was read."""
    matches = [found for name in names if (found := VERSION.fullmatch(name))]
    for _, chain in itertools.groupby(matches, key=lambda found: found[1]):
        yield from (found[0] for number, found in enumerate(chain, start=1) if int(found[2]) == number)


def _read(path: Path) -> bytes | None:
    """None for what was dropped meanwhile; of a file that grows, its whole lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data[: data.rfind(b"\n") + 1] if path.suffix in APPENDED else data


def _checked_digest(name: str, data: bytes) -> str:
    found, digest = hashlib.sha256(data).hexdigest(), name.rpartition("/")[2]
    if "/blobs/" in name and found != digest:
        message = f"{name} was damaged on disk"
        raise IntegrityError(message, hint="`dipaco-bootstrap verify` says what else is; an older backup may have it")
    return found


def _add(tar: tarfile.TarFile, name: str, data: bytes, *, made_s: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o600, int(made_s)
    tar.addfile(info, io.BytesIO(data))


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
        raise ConfigError(f"`{backup}` is not a file", hint="give a file that `dipaco-bootstrap backup` wrote")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"`{root}` is not empty", hint="restore into a new or an empty folder")
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
                    digests[name] = _write_member(folder / name, _pieces(tar, member))
    except (tarfile.TarError, EOFError) as error:
        raise IntegrityError(f"`{backup}` is not a complete backup: {error}", hint=DAMAGED_HINT) from None
    found = _read_contents(contents, backup)
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


def _write_member(path: Path, pieces: Iterator[bytes]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256()
    with private_file(path) as file:
        for piece in pieces:
            found.update(piece)
            file.write(piece)
    return found.hexdigest()


def _read_contents(data: bytes, backup: Path) -> dict[str, Any]:
    try:
        found = json.loads(data)
        is_sound = found["schema"] == SCHEMA and isinstance(found["files"], dict) and isinstance(found["run"], str)
        found["made_s"], found["stages"] = float(found["made_s"]), list(found["stages"])
    except (ValueError, TypeError, KeyError):
        is_sound = False
    if not is_sound:
        raise IntegrityError(f"`{backup}` is not a complete backup: its list of contents is missing", hint=DAMAGED_HINT)
    return dict(found)


def _check_key(folder: Path, found: dict[str, Any]) -> None:
    """The key must be that of the run's coordinator, else nobody would believe what it signs."""
    run = read_stage(folder, str(found["stages"][0])) if found["stages"] else None
    if run is None or not (folder / KEY_NAME).exists():
        raise IntegrityError("a backup without a run or without its key", hint=DAMAGED_HINT)
    try:
        peer = load_or_create(folder / KEY_NAME).peer
    except EnvironmentUnfit as error:
        raise IntegrityError(f"the key of the backup cannot be used: {error}", hint=DAMAGED_HINT) from None
    if peer != run.manifest.author:
        raise IntegrityError("the key of the backup is not that of the run's coordinator", hint=DAMAGED_HINT)
