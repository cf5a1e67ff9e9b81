"""What a peer keeps on disk: blobs by digest, uploads in progress, and small documents by name.

blobs/ab/<digest>          immutable; the name is the SHA-256 of the bytes, checked on every whole read
partial/<digest>.<size>    a download that is not complete
partial/<peer>-<digest>    an upload that is not complete
removed/                   what is on its way out
documents/<name>.json      small, replaced atomically
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from ..canonical import digest
from ..errors import EnvironmentUnfit, IntegrityError, TooManyFiles
from ..program import files
from ..program.files import make_folder, rename, sync, unfit, write_atomically
from ..protocol.documents import BlobRef
from ..protocol.signing import PeerId

PARTIALS_MAX = 64
"""Unfinished downloads, and as many unfinished uploads (uploads.py): neither takes the place of the other."""
_PATHS_REMEMBERED = 4096
"""Making a path takes as long as looking whether its file is there."""
DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


class Store:
    """A folder of blobs and documents; one process at a time, which `folder_lock` sees to, and readers beside it.

    What is there was renamed into place whole, blobs before the documents that name them: so a reader needs no lock. It
    changes nothing, and what its owner would drop as damaged stays.
    """

    def __init__(self, folder: Path, *, is_read_only: bool = False) -> None:
        self.folder = folder
        self._is_read_only = is_read_only
        self.failure: EnvironmentUnfit | None = None
        """The last write that the disk refused. Whoever wrote may have had it on another's behalf, and answered only
        that a request failed: the program looks here, and ends. Too many open files are no such refusal: a stranger
        can bring them about, and they pass."""
        if is_read_only:
            return
        for name in ("blobs", "partial", "documents"):
            make_folder(folder / name)
        self._sweep()

    def put(self, data: bytes) -> BlobRef:
        """Keep `data`; raises EnvironmentUnfit when the disk is full."""
        ref = BlobRef.of(data)
        self.keep(ref, data)
        return ref

    def keep(self, ref: BlobRef, *parts: bytes | memoryview, is_cold: bool = False) -> None:
        """Keep what has the name `ref`, which the caller knows; raises EnvironmentUnfit when the disk is full."""
        path = self._blob_path(ref.digest)
        if not path.exists():
            self._write(path, *parts, is_cold=is_cold)

    def get(self, name: str) -> bytes | None:
        """The blob, or None; raises IntegrityError and forgets the file, if it is ours, when the disk changed its
        bytes."""
        path = self._blob_path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if digest(data) != name:
            self._remove(path)
            hint = "its owner fetches it again" if self._is_read_only else "it will be fetched again"
            raise IntegrityError(f"blob {name[:8]} was damaged on disk", hint=hint)
        return data

    def size(self, name: str) -> int | None:
        """The blob's size in bytes, or None if it is not here."""
        try:
            return self._blob_path(name).stat().st_size
        except FileNotFoundError:
            return None

    def read_range(self, name: str, offset: int, length: int) -> bytes | None:
        """A part of a blob; not checked here, since the reader checks the whole."""
        try:
            with self._blob_path(name).open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            return None

    def drop(self, name: str) -> None:
        self._remove(self._blob_path(name))

    def drop_unnamed(self, *, but: Collection[str] = ()) -> int:
        """Remove every blob whose digest stands in no document, `but` these, and return how many these were.

        A process that died between a blob and the document that was to name it leaves such blobs, and so does one that
        took uploads of which nothing came. Documents are not understood here: any digest in their bytes counts, so that
        a new kind of document needs no change. Only for a store that nobody writes to yet.
        """
        named: set[bytes] = set()
        for path in (self.folder / "documents").glob("*.json"):
            named.update(DIGEST.findall(path.read_bytes()))
        named.update(name.encode() for name in but)
        unnamed = [path for path in (self.folder / "blobs").glob("*/*") if path.name.encode() not in named]
        for path in unnamed:
            self._remove(path)
        return len(unnamed)

    def partial_path(self, name: str) -> Path:
        """Where an unfinished download of this name may keep its bytes; the oldest makes room beyond a bound."""
        path = self.folder / "partial" / name
        others = [other for other in self._partials() if "-" not in other.name and other != path]
        for other in others[: max(0, len(others) - PARTIALS_MAX + 1)]:
            other.unlink(missing_ok=True)
        return path

    def upload_path(self, sender: PeerId, name: str) -> Path:
        """Where an unfinished upload keeps its bytes; `Uploads` sees to their number."""
        return self.folder / "partial" / f"{sender}-{name}"

    def unfinished_uploads(self) -> list[Path]:
        """Those of all senders; what was written to last comes last."""
        return [path for path in self._partials() if "-" in path.name]

    def append_partial(self, path: Path, data: bytes) -> None:
        """Some more bytes of an unfinished transfer; raises EnvironmentUnfit when the disk is full."""
        try:
            with path.open("ab") as file:
                files.disk.write(file, data)
        except OSError as error:
            raise self._failed(unfit(error, path)) from None

    def finish_partial(self, path: Path, name: str) -> None:
        """Keep what was transferred as the blob `name`: synced and renamed, not written again. Raises IntegrityError,
        and forgets the bytes, if they are another; EnvironmentUnfit when the disk fails."""
        blob = self._blob_path(name)
        make_folder(blob.parent)
        try:
            with path.open("rb+") as file:
                is_right = hashlib.file_digest(file, "sha256").hexdigest() == name
                if is_right:
                    sync(file)
            if is_right:
                rename(path, blob)
                return
            self._remove(path)
        except FileNotFoundError:  # others' transfers may take its place at any time
            raise IntegrityError(f"the transfer of blob {name[:8]} is gone", hint="it starts again") from None
        except OSError as error:
            raise self._failed(unfit(error, path)) from None
        raise IntegrityError(f"the transfer is not blob {name[:8]}")

    def write_document(self, name: str, data: bytes) -> None:
        """Keep it in place of what had this name; raises EnvironmentUnfit when the disk is full."""
        self._write(_document_path(self.folder, name), data)

    def read_document(self, name: str) -> bytes | None:
        try:
            return _document_path(self.folder, name).read_bytes()
        except FileNotFoundError:
            return None

    def documents(self, prefix: str) -> list[str]:
        """The names of documents that start with `prefix`, sorted."""
        return sorted(path.stem for path in (self.folder / "documents").glob(f"{prefix}*.json"))

    def written_ns(self, name: str) -> int:
        """When a document was written; 0 for one that is not there."""
        try:
            return _document_path(self.folder, name).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def rename_document(self, name: str, new: str) -> None:
        """Keep it under another name, in place of what had that; nothing to do if it is not here. After a crash it may
        have its old name once more."""
        if not self._is_read_only:
            with contextlib.suppress(FileNotFoundError):
                files.disk.rename(_document_path(self.folder, name), _document_path(self.folder, new))

    def drop_document(self, name: str) -> None:
        self._remove(_document_path(self.folder, name))

    def _partials(self) -> list[Path]:
        return sorted((self.folder / "partial").iterdir(), key=_age)

    def _blob_path(self, name: str) -> Path:
        return blob_path(self.folder, name)

    def _remove(self, path: Path) -> None:
        if not self._is_read_only:
            files.disk.remove(path, aside=self.folder / "removed")

    def _write(self, path: Path, *parts: bytes | memoryview, is_cold: bool = False) -> None:
        assert not self._is_read_only, "a reader changes nothing"
        try:
            if not path.parent.is_dir():
                make_folder(path.parent)
            write_atomically(path, *parts, is_cold=is_cold)
        except EnvironmentUnfit as error:
            raise self._failed(error) from None

    def _failed(self, error: EnvironmentUnfit) -> EnvironmentUnfit:
        if not isinstance(error, TooManyFiles):
            self.failure = error
        return error

    def _sweep(self) -> None:
        for path in (*self.folder.rglob("*.tmp"), *self.folder.glob("removed/*")):
            path.unlink(missing_ok=True)


@functools.lru_cache(maxsize=_PATHS_REMEMBERED)
def blob_path(folder: Path, name: str) -> Path:
    return folder / "blobs" / name[:2] / name


@functools.lru_cache(maxsize=_PATHS_REMEMBERED)
def _document_path(folder: Path, name: str) -> Path:
    return folder / "documents" / f"{name}.json"


def _age(path: Path) -> float:
    """When a file was last written; one that another upload has finished meanwhile counts as old."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
