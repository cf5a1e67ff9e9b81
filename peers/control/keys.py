"""The identity of a volunteer as a file: looked at, taken to another machine, brought back.

It is the one thing in a home that cannot be made again: receipts and credit are its.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.protocol.signing import KEY_BYTES, PeerId
from dipaco_p2p.swarm import identity

SCHEMA = "dipaco.identity/1"
KEY_NAME = "identity.key"
RUNNING_HINT = "stop the volunteer first: `dipaco-peer stop`"
ONCE_HINT = "an identity must not be in two places at once: end the volunteer here before you start it elsewhere"


def peer_of(home: Path) -> PeerId:
    """Raises ConfigError without an identity, EnvironmentUnfit if others may read it, IntegrityError if it is none."""
    path = home / KEY_NAME
    if not path.exists():
        raise ConfigError(
            f"no identity in `{home}`", hint="it is made at the first join; or name its folder with --home"
        )
    return identity.load_or_create(path).peer


def plain(home: Path) -> dict[str, Any]:
    """For `--json`: nothing of it is secret."""
    path = home / KEY_NAME
    peer = peer_of(home)
    return {"schema": SCHEMA, "peer": peer, "file": str(path.absolute()), "written_s": path.stat().st_mtime}


def export_to(home: Path, target: Path, *, is_forced: bool) -> PeerId:
    """Copy the key file, for its owner only to read; raises ConfigError where there is something already."""
    peer = peer_of(home)
    _write(target, (home / KEY_NAME).read_bytes(), is_forced=is_forced)
    return peer


def import_from(source: Path, home: Path, *, is_forced: bool) -> PeerId:
    """Make the key in `source` the identity of `home`; the one that was there is kept beside it.

    Raises as `peer_of` for what is no key of one user alone, ConfigError where there is an identity already,
    EnvironmentUnfit while a volunteer runs there.
    """
    if not source.exists():
        raise ConfigError(f"there is no file `{source}`", hint="`dipaco-peer identity export` writes one")
    peer = identity.load_or_create(source).peer
    data = source.read_bytes()
    with folder_lock(home, hint=RUNNING_HINT):
        target = home / KEY_NAME
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
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if is_forced:
                temporary.replace(target)
            else:
                os.link(temporary, target)  # unlike a rename, this fails if there is something
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigError(f"`{target}` is there already", hint="choose another, or replace it with --force") from None
    except OSError as error:
        message = f"cannot write the key file {target}: {error.strerror}"
        raise EnvironmentUnfit(message, hint="choose a folder that you may write to") from None
