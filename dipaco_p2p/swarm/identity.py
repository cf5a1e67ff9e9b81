"""The key file of a peer: one Ed25519 key, in libp2p's own format, readable by its owner only.

Format: protobuf PrivateKey, field 1 (type) = 1 (Ed25519), field 2 (data) = private key, then public key, 32 bytes each
(libp2p specification, "Peer Ids and Keys"). Ed25519 rather than RSA: the peer id then holds the public key itself, so
every signature can be checked with nothing but the id of the signer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import EnvironmentUnfit, IntegrityError
from ..protocol.signing import KEY_BYTES, Signer

KEY_NAME = "identity.key"
"""In the folder of every program."""
_PREFIX = b"\x08\x01\x12\x40"
_FILE_BYTES = len(_PREFIX) + 2 * KEY_BYTES
_DAMAGED_HINT = "move it away: a new identity is made when there is none"


def load_or_create(path: Path) -> Signer:
    """The identity in `path`, made on first use.

    Raises EnvironmentUnfit if others may read the file or it cannot be written, IntegrityError if it is malformed.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        # Somebody else may create it at this very moment: then theirs is the identity.
        with contextlib.suppress(FileExistsError):
            write(path, secrets.token_bytes(KEY_BYTES))
        return _load(path)


def write(path: Path, private_key_bytes: bytes) -> Signer:
    """Write a new key file, whole or not at all; raises FileExistsError rather than replace an identity."""
    signer = Signer(private_key_bytes)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
        with private_file(temporary) as file:
            file.write(_PREFIX + private_key_bytes + signer.public_key)
        try:
            os.link(temporary, path)  # Unlike a rename, this fails if the file has appeared meanwhile.
        finally:
            temporary.unlink()
        _sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            raise
        hint = "choose a folder that you may write to"
        raise EnvironmentUnfit(f"cannot write the key file {path}: {error.strerror}", hint=hint) from None
    return signer


def _load(path: Path) -> Signer:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            message = f"the key file {path} can be read or written by others (mode {mode:03o})"
            raise EnvironmentUnfit(message, hint=f"chmod 600 {path}")
        data = file.read(_FILE_BYTES + 1)
    if len(data) != _FILE_BYTES or not data.startswith(_PREFIX):
        raise IntegrityError(f"{path} is not an Ed25519 key file of libp2p", hint=_DAMAGED_HINT)
    private_key, public_key = data[len(_PREFIX) : -KEY_BYTES], data[-KEY_BYTES:]
    signer = Signer(private_key)
    if signer.public_key != public_key:
        raise IntegrityError(f"the two halves of the key in {path} do not belong together", hint=_DAMAGED_HINT)
    return signer


@contextlib.contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """A new file for its owner only, synced when the block ends; raises FileExistsError rather than replace one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
