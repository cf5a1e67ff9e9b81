"""What a peer keeps on disk: blobs by digest, uploads in progress, and small documents by name.

blobs/ab/<digest>          immutable; the name is the SHA-256 of the bytes, checked on every whole read
partial/<peer>-<digest>    an upload or a download that is not complete
documents/<name>.json      small, replaced atomically
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from ..canonical import digest
from ..errors import EnvironmentUnfit, IntegrityError
from ..program import files
from ..program.files import make_folder, rename, sync, unfit, write_atomically
from ..protocol.documents import BlobRef

PARTIALS_MAX = 64
_PATHS_REMEMBERED = 4096
"""Making a path takes as long as looking whether its file is there."""
DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


class Store:
    """A folder of blobs and documents; one process at a time, which `folder_lock` sees to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failure: EnvironmentUnfit | None = None
        """The last write that the disk refused. Whoever wrote may have had it on another's behalf, and answered only
        that a request failed: the program looks here, and ends."""
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
        """The blob, or None; raises IntegrityError and forgets the file when the disk changed its bytes."""
        path = self._blob_path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if digest(data) != name:
            files.disk.remove(path)
            raise IntegrityError(f"blob {name[:8]} was damaged on disk", hint="it will be fetched again")
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
        files.disk.remove(self._blob_path(name))

    def drop_unnamed(self) -> int:
        """Remove every blob whose digest stands in no document, and return how many these were.

        A process that died between a blob and the document that was to name it leaves such blobs, and so does one that
        took uploads of which nothing came. Documents are not understood here: any digest in their bytes counts, so that
        a new kind of document needs no change. Only for a store that nobody writes to yet.
        """
        named: set[bytes] = set()
        for path in (self.folder / "documents").glob("*.json"):
            named.update(DIGEST.findall(path.read_bytes()))
        unnamed = [path for path in (self.folder / "blobs").glob("*/*") if path.name.encode() not in named]
        for path in unnamed:
            files.disk.remove(path)
        return len(unnamed)

    def partial_path(self, name: str) -> Path:
        """Where an unfinished transfer of this name may keep its bytes; the oldest makes room beyond a bound."""
        folder = self.folder / "partial"
        others = sorted(folder.iterdir(), key=_age)
        for path in others[: max(0, len(others) - PARTIALS_MAX + 1)]:
            path.unlink(missing_ok=True)
        return folder / name

    def append_partial(self, path: Path, data: bytes) -> None:
        """Some more bytes of an unfinished transfer; raises EnvironmentUnfit when the disk is full."""
        try:
            with path.open("ab") as file:
                files.disk.write(file, data)
        except OSError as error:
            self.failure = unfit(error, path)
            raise self.failure from None

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
            files.disk.remove(path)
        except FileNotFoundError:  # others' transfers may take its place at any time
            raise IntegrityError(f"the transfer of blob {name[:8]} is gone", hint="it begins anew") from None
        except OSError as error:
            self.failure = unfit(error, path)
            raise self.failure from None
        raise IntegrityError(f"the transfer is not blob {name[:8]}")

    def trim_partials(self, prefix: str, *, but: str, keep: int) -> None:
        """Of the unfinished transfers whose names begin with `prefix`, leave `prefix` + `but` and the newest `keep`."""
        others = [path for path in (self.folder / "partial").glob(f"{prefix}*") if path.name != prefix + but]
        for path in sorted(others, key=_age)[: max(0, len(others) - keep)]:
            path.unlink(missing_ok=True)

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

    def drop_document(self, name: str) -> None:
        files.disk.remove(_document_path(self.folder, name))

    def _blob_path(self, name: str) -> Path:
        return _blob_path(self.folder, name)

    def _write(self, path: Path, *parts: bytes | memoryview, is_cold: bool = False) -> None:
        try:
            if not path.parent.is_dir():
                make_folder(path.parent)
            write_atomically(path, *parts, is_cold=is_cold)
        except EnvironmentUnfit as error:
            self.failure = error
            raise

    def _sweep(self) -> None:
        for path in self.folder.rglob("*.tmp"):
            path.unlink(missing_ok=True)


@functools.lru_cache(maxsize=_PATHS_REMEMBERED)
def _blob_path(folder: Path, name: str) -> Path:
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
