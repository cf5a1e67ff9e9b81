"""What a peer keeps on disk: blobs by digest, uploads in progress, and small documents by name.

`Uploads` takes blobs that others send: each within a bound, and dropped when nothing comes of it.

blobs/ab/<digest>          immutable; the name is the SHA-256 of the bytes, checked on every whole read
partial/<peer>-<digest>    an upload or a download that is not complete
removed/                   what is on its way out
documents/<name>.json      small, replaced atomically
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path

from ..canonical import digest, is_digest
from ..clock import Clock
from ..errors import EnvironmentUnfit, IntegrityError, Refused
from ..program import files
from ..program.files import make_folder, rename, sync, unfit, write_atomically
from ..protocol.documents import BlobRef
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..swarm.blobs.blobs import serve_uploads

log = logging.getLogger(__name__)

PARTIALS_MAX = 64
UNUSED_UPLOADS_MAX = 16
"""Finished uploads per peer that no contribution has named yet; the oldest gives way."""
UNUSED_UPLOADS_IN_ALL_MAX = 256
UNFINISHED_UPLOADS_MAX = 8
"""Per peer; its oldest gives way, so that one peer's flood never takes the place of another's upload."""
SENDERS_MAX = 256
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
        that a request failed: the program looks here, and ends."""
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
            self._remove(path)
        except FileNotFoundError:  # others' transfers may take its place at any time
            raise IntegrityError(f"the transfer of blob {name[:8]} is gone", hint="it starts again") from None
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

    def written_ns(self, name: str) -> int:
        """When a document was written; 0 for one that is not there."""
        try:
            return _document_path(self.folder, name).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def rename_document(self, name: str, new: str) -> None:
        """Keep it under another name, in place of what had that; nothing to do if it is not here."""
        if not self._is_read_only:
            with contextlib.suppress(FileNotFoundError):
                rename(_document_path(self.folder, name), _document_path(self.folder, new))

    def drop_document(self, name: str) -> None:
        self._remove(_document_path(self.folder, name))

    def _blob_path(self, name: str) -> Path:
        return _blob_path(self.folder, name)

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
            self.failure = error
            raise

    def _sweep(self) -> None:
        for path in (*self.folder.rglob("*.tmp"), *self.folder.glob("removed/*")):
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


class Uploads:
    """Takes blobs that others send, each at most `size_max` bytes, and forgets those that nothing came of."""

    def __init__(self, swarm: Swarm, store: Store, clock: Clock, *, size_max: int) -> None:
        """`size_max` 0: takes none, and leaves the store as it is."""
        self._store = store
        self._size_max = size_max
        self._clock = clock
        self.progress_s: dict[PeerId, float] = {}
        """When bytes of an unfinished upload last came, by sender."""
        self._unused: dict[PeerId, OrderedDict[str, None]] = {}
        if not size_max:
            return
        if dropped := store.drop_unnamed():  # an earlier process took them, and its bounds ended with it
            log.info("%d blobs that no document names were dropped", dropped)
        serve_uploads(swarm, self._accept)

    def arriving(self, silence_s: float) -> list[PeerId]:
        """Of whom bytes of an unfinished upload came within the last `silence_s` seconds."""
        since_s = self._clock.now_s() - silence_s
        return sorted(sender for sender, at_s in self.progress_s.items() if at_s > since_s)

    def claim(self, name: str) -> None:
        """A contribution or version names this blob: it stays."""
        for names in self._unused.values():
            names.pop(name, None)

    async def _accept(self, sender: PeerId, name: str, size: int) -> _Sink:
        if not is_digest(name) or not 0 < size <= self._size_max:
            raise Refused(f"an upload of {size} bytes, limit {self._size_max}", reason=Reason.OVERSIZED)
        self._store.trim_partials(f"{sender}-", but=name, keep=UNFINISHED_UPLOADS_MAX - 1)
        return _Sink(self._store, sender, name, size, on_progress=self._progressed, on_finish=self._finished)

    def _progressed(self, sender: PeerId) -> None:
        self.progress_s.pop(sender, None)
        self.progress_s[sender] = self._clock.now_s()
        while len(self.progress_s) > SENDERS_MAX:  # the one that was silent longest
            del self.progress_s[next(iter(self.progress_s))]

    def _finished(self, sender: PeerId, name: str) -> None:
        self.progress_s.pop(sender, None)
        names = self._unused.setdefault(sender, OrderedDict())
        names[name] = None
        if len(names) > UNUSED_UPLOADS_MAX:
            self._forget_oldest(names)
        self._unused = {peer: held for peer, held in self._unused.items() if held}
        if sum(map(len, self._unused.values())) > UNUSED_UPLOADS_IN_ALL_MAX:
            self._forget_oldest(max(self._unused.values(), key=len))

    def _forget_oldest(self, names: OrderedDict[str, None]) -> None:
        oldest, _ = names.popitem(last=False)
        self._store.drop(oldest)


class _Sink:
    """One upload on its way into the store; what has arrived survives a broken connection."""

    def __init__(
        self,
        store: Store,
        sender: PeerId,
        name: str,
        size: int,
        *,
        on_progress: Callable[[PeerId], None],
        on_finish: Callable[[PeerId, str], None],
    ) -> None:
        self._store, self._sender, self._name, self._size = store, sender, name, size
        self._path: Path = store.partial_path(f"{sender}-{name}")
        self._on_progress = on_progress
        self._on_finish = on_finish

    @property
    def received(self) -> int:
        """Bytes that are here already."""
        if self._store.size(self._name) == self._size:
            return self._size
        return self._path.stat().st_size if self._path.exists() else 0

    def write(self, offset: int, data: bytes) -> None:
        if offset != self.received or offset + len(data) > self._size:
            raise Refused(f"offset {offset}, but {self.received} of {self._size} bytes are here", reason=Reason.OFFSET)
        self._store.append_partial(self._path, data)
        self._on_progress(self._sender)

    def finish(self) -> None:
        """All bytes are here; raises IntegrityError, and forgets them, if they are not the blob."""
        if self._store.size(self._name) == self._size:
            return
        self._store.finish_partial(self._path, self._name)
        self._on_finish(self._sender, self._name)
