from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dipaco_p2p.errors import EnvironmentUnfit, IntegrityError
from dipaco_p2p.swarm import identity


def test_an_identity_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "peer.key"
    before = os.umask(0)
    try:
        signer = identity.load_or_create(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert identity.load_or_create(path).peer == signer.peer
    assert os.listdir(path.parent) == ["peer.key"]


def test_an_identity_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    signer = identity.write(path, bytes([1]) * 32)
    with pytest.raises(FileExistsError):
        identity.write(path, bytes([2]) * 32)
    assert identity.load_or_create(path).peer == signer.peer and os.listdir(tmp_path) == ["peer.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "peer.key"
    identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(EnvironmentUnfit) as unfit:
        identity.load_or_create(path)
    assert unfit.value.hint == f"chmod 600 {path}"


def test_malformed_key_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    identity.load_or_create(path)
    good = path.read_bytes()
    for bad in (b"", good[:-1], good + b"\0", b"\x08\x00" + good[2:], good[:-1] + bytes([good[-1] ^ 1])):
        path.write_bytes(bad)
        with pytest.raises(IntegrityError):
            identity.load_or_create(path)


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnfit, match="cannot write the key file"):
        identity.write(tmp_path / "file" / "peer.key", bytes(32))
