"""Every file and folder that a volunteer uses on its machine, to be looked at, backed up and deleted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p.program.control.place import POINTER_NAME, SOCKET_NAME, find_socket

from .logs import LOG_NAME

SCHEMA = "dipaco.paths/1"
NAMES = {
    "identity": "identity.key",
    "lock": "lock",
    "peers met": "acquaintances.json",
    "own address": "address.json",
    "where the control socket is": POINTER_NAME,
    "runs": "runs",
}
"""In the home."""
RUN_NAMES = {
    "log": LOG_NAME,
    "history": "history.jsonl",
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


def plain(home: Path) -> dict[str, Any]:
    """For `--json`."""
    entries = [
        {"what": each.what, "path": str(each.path), "is_there": each.is_there, "bytes": each.bytes}
        for each in places(home)
    ]
    return {"schema": SCHEMA, "home": str(home.absolute()), "places": entries}


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
