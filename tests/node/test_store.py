"""The store: bytes by digest that are checked, whole files or none, and one clear error when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import EnvironmentUnfit, IntegrityError, TooManyFiles
from dipaco_p2p.node.store import PARTIALS_MAX, Store
from dipaco_p2p.program import files as files_module
from dipaco_p2p.program.files import Disk, folder_lock, write_atomically
from dipaco_p2p.protocol.documents import BlobRef


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fill_disk(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_blob_is_found_by_its_digest_in_whole_and_in_part(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ref = store.put(b"0123456789")
    assert ref.digest == digest(b"0123456789") and ref.size == 10
    again = Store(tmp_path)
    assert again.get(ref.digest) == b"0123456789"
    assert again.size(ref.digest) == 10
    assert again.read_range(ref.digest, 3, 4) == b"3456"


def test_what_is_here_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    ref = store.put(b"0123456789")
    fill_disk(monkeypatch)
    store.keep(ref, b"0123456789")
    with pytest.raises(EnvironmentUnfit):
        store.keep(BlobRef.of(b"new"), b"new")


def test_a_finished_transfer_becomes_the_blob_and_another_one_is_forgotten(tmp_path: Path) -> None:
    store, data = Store(tmp_path), b"0123456789"
    for name in (digest(data), digest(b"another")):
        path = store.partial_path(name)
        store.append_partial(path, data)
        with contextlib.nullcontext() if name == digest(data) else pytest.raises(IntegrityError, match="is not blob"):
            store.finish_partial(path, name)
        assert not path.exists()
    assert store.get(digest(data)) == data and store.size(digest(b"another")) is None
    with pytest.raises(IntegrityError, match="is gone"):
        store.finish_partial(path, name)
    assert store.failure is None, "a flood of others' transfers must not end the program"


def test_a_transfer_that_the_disk_does_not_sync_is_no_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = Store(tmp_path), b"0123456789"
    path = store.partial_path(digest(data))
    store.append_partial(path, data)
    with monkeypatch.context() as patch:
        fill_disk(patch, errno.EIO)
        with pytest.raises(EnvironmentUnfit):
            store.finish_partial(path, digest(data))
    assert store.failure is not None and store.size(digest(data)) is None
    store.finish_partial(path, digest(data))
    assert store.get(digest(data)) == data


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_not_taken_for_a_disk_that_refuses(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*what: object) -> None:
        raise OSError(number, os.strerror(number))

    store = Store(tmp_path)
    path = store.partial_path("a")
    writes = (lambda: store.put(b"new"), lambda: store.append_partial(path, b"new"))
    with monkeypatch.context() as patch:
        patch.setattr(files_module.disk, "write", refuse)
        for write in writes:
            with pytest.raises(TooManyFiles, match="too many open files") as caught:
                write()
            assert "LimitNOFILE" in caught.value.hint and "folder" not in caught.value.hint
    assert store.failure is None, "a stranger can bring it about, and it passes: the program must not end"
    for write in writes:
        write()


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    store, name = Store(tmp_path), digest(b"elsewhere")
    assert [store.get(name), store.size(name), store.read_range(name, 0, 1), store.read_document("x")] == [None] * 4
    store.drop(name)
    store.drop_document("x")


def test_bit_rot_is_found_and_the_blob_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ref = store.put(b"as it was written")
    [path] = (tmp_path / "blobs").rglob(ref.digest)
    path.write_bytes(b"as it was wr1tten")
    with pytest.raises(IntegrityError, match=ref.digest[:8]):
        store.get(ref.digest)
    assert store.get(ref.digest) is None
    store.put(b"as it was written")
    assert store.get(ref.digest) == b"as it was written"


def test_a_reader_beside_the_owner_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ref, damaged = store.put(b"whole"), store.put(b"as it was written")
    store.write_document("head", b"{}")
    next((tmp_path / "blobs").rglob(damaged.digest)).write_bytes(b"as it was wr1tten")
    (tmp_path / "documents" / "head.json.1-2.tmp").write_bytes(b"the owner is in the middle of it")
    before = files(tmp_path)
    reader = Store(tmp_path, is_read_only=True)
    assert reader.get(ref.digest) == b"whole" and reader.read_document("head") == b"{}"
    with pytest.raises(IntegrityError, match=damaged.digest[:8]):
        reader.get(damaged.digest)
    reader.drop(ref.digest)
    reader.drop_document("head")
    for write in (lambda: reader.put(b"more"), lambda: reader.write_document("head", b"[]")):
        with pytest.raises(AssertionError):
            write()
    assert files(tmp_path) == before
    assert Store(tmp_path / "none", is_read_only=True).documents("") == [] and not (tmp_path / "none").exists()


def test_a_full_disk_is_one_clear_error_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write_document("head", b"old")
    before = files(tmp_path)
    fill_disk(monkeypatch)
    with pytest.raises(EnvironmentUnfit, match="no space left") as caught:
        store.put(b"too much")
    assert caught.value.hint
    with pytest.raises(EnvironmentUnfit, match="no space left"):
        store.write_document("head", b"new")
    assert files(tmp_path) == before
    assert store.read_document("head") == b"old"


def test_a_disk_that_refuses_for_another_reason_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, errno.EROFS)
    with pytest.raises(EnvironmentUnfit, match="[Rr]ead-only"):
        Store(tmp_path).put(b"data")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentUnfit):
        Store(tmp_path / "file")


def test_a_locked_folder_is_refused_until_the_lock_ends(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "home"
    with folder_lock(folder, hint="another --home"):
        with pytest.raises(EnvironmentUnfit, match=f"`{folder}` is in use by another process") as caught:
            with folder_lock(folder, hint="another --home"):
                raise AssertionError("two at once")
        assert caught.value.hint == "another --home"
        with folder_lock(tmp_path / "new" / "other", hint=""):
            pass
    with pytest.raises(BlockingIOError), folder_lock(folder, hint=""):
        raise BlockingIOError("what the block raises is not taken for the lock")


def test_a_crash_before_the_rename_leaves_the_old_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Crash(BaseException):
        pass

    def crash(self: Path, target: Path) -> Path:
        raise Crash

    path = tmp_path / "documents" / "head.json"
    store = Store(tmp_path)
    store.write_document("head", b"old")
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Path, "replace", crash)
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert files(tmp_path) != ["documents/head.json"], "the crash left its temporary file"
    Store(tmp_path)
    assert files(tmp_path) == ["documents/head.json"]


def test_documents_are_listed_by_prefix_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("version-L1.M0-00000002", "version-L1.M0-00000001", "version-L1.M1-00000001"):
        store.write_document(name, b"{}")
    assert store.documents("version-L1.M0-") == ["version-L1.M0-00000001", "version-L1.M0-00000002"]
    store.drop_document("version-L1.M0-00000001")
    assert store.documents("version-L1.M0-") == ["version-L1.M0-00000002"]


def test_a_dropped_blob_is_gone_at_once_and_its_bytes_soon(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ref, again = store.put(b"0123456789"), store.put(b"again")
    store.drop(ref.digest)
    store.drop(again.digest)
    assert store.size(ref.digest) is None and store.put(b"again") == again, "the new one is not what is removed"
    files_module._removing.submit(lambda: None).result(10.0)  # it takes one after the other
    assert files(tmp_path) == [f"blobs/{again.digest[:2]}/{again.digest}"]


def test_what_a_crash_left_half_removed_goes_with_the_next_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ref = store.put(b"0123456789")
    (tmp_path / "removed").mkdir()
    (tmp_path / "blobs" / ref.digest[:2] / ref.digest).rename(tmp_path / "removed" / "1-1")
    Store(tmp_path, is_read_only=True)
    assert files(tmp_path) == ["removed/1-1"], "a reader changes nothing"
    assert Store(tmp_path).size(ref.digest) is None and files(tmp_path) == []


def test_a_document_goes_under_another_name_and_a_reader_renames_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_document("open-a", b"{}")
    Store(tmp_path, is_read_only=True).rename_document("open-a", "kept-a")
    assert store.read_document("kept-a") is None
    store.rename_document("open-a", "kept-a")
    store.rename_document("open-b", "kept-a")
    assert (store.read_document("open-a"), store.read_document("kept-a")) == (None, b"{}")


def test_unfinished_transfers_make_room_from_the_oldest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(PARTIALS_MAX):
        path = store.partial_path(f"{number:03d}")
        path.write_bytes(b"x")
        os.utime(path, (number, number))
    store.partial_path("one more").write_bytes(b"x")
    names = {path.name for path in (tmp_path / "partial").iterdir()}
    assert len(names) == PARTIALS_MAX
    assert "000" not in names and {"001", "one more"} <= names


def test_two_threads_may_keep_the_same_blob_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, both_have_written = Store(tmp_path), threading.Barrier(2)
    sync = os.fsync

    def meet(handle: int) -> None:
        sync(handle)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_written.wait(timeout=10.0)

    monkeypatch.setattr(os, "fsync", meet)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(store.put, [b"the same bytes"] * 2)
    assert first == second and store.get(first.digest) == b"the same bytes"
    assert store.failure is None and not list(tmp_path.rglob("*.tmp"))


class Recorded(Disk):
    """A disk that tells what was done, and what of a blob it would have to keep in memory."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.steps.append(f"write {bytes(data).decode()}")
        super().write(file, data)

    def send_on(self, file: BinaryIO) -> None:
        self.steps.append("send on")
        super().send_on(file)

    def sync(self, file: BinaryIO) -> None:
        self.steps.append("sync")
        super().sync(file)


@pytest.mark.parametrize("is_cold", [False, True])
def test_what_nobody_reads_soon_goes_to_the_disk_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cold: bool
) -> None:
    recorded = Recorded()
    monkeypatch.setattr(files_module, "disk", recorded)
    monkeypatch.setattr(files_module, "PIECE_BYTES", 4)
    store, ref = Store(tmp_path), BlobRef.of(b"0123456789")
    store.keep(ref, b"012345", memoryview(b"6789"), is_cold=is_cold)
    assert store.get(ref.digest) == b"0123456789"
    if is_cold:
        pieces = [step for piece in ("0123", "45", "6789") for step in (f"write {piece}", "send on")]
        assert recorded.steps == [*pieces, "sync", "send on"]
    else:
        assert recorded.steps == ["write 012345", "write 6789", "sync"]
