"""What a peer keeps on disk: blobs by digest, uploads in progress, and small documents by name.

`Uploads` takes blobs that others send: each within a bound, and dropped when nothing comes of it.

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
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ..canonical import digest, is_digest
from ..clock import Clock
from ..errors import EnvironmentUnfit, IntegrityError, Refused, TooManyFiles
from ..program import files
from ..program.files import make_folder, rename, sync, unfit, write_atomically
from ..protocol.documents import BlobRef
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..swarm.blobs.blobs import serve_uploads
from ..swarm.frames import THIN_BYTES_S

log = logging.getLogger(__name__)

PARTIALS_MAX = 64
"""Unfinished downloads, and as many unfinished uploads: neither takes the place of the other."""
UNUSED_UPLOADS_MAX = 16
"""Finished uploads per peer that no contribution has named yet; the oldest gives way."""
UNUSED_UPLOADS_IN_ALL_MAX = 256
UNFINISHED_UPLOADS_MAX = 8
"""Per peer; its oldest gives way, so that one peer's flood never takes the place of another's upload."""
IDLE_BYTES_S, UPLOAD_SPARE_S = 1024, 30.0
"""An unfinished upload is idle when less than this has come of it, for so long: an eighth of what a line of 0.25 Mbit/s
carries if it sends to four peers at once. A call may take 20 s."""
SLOW_BYTES_S = THIN_BYTES_S / 8
"""It is slow when less than this has come of it: an author sends to the leaders of all modules of its path at once, of
four say, while others read as much of it. 64 uploads that fast take 2 Mbit/s of our line, less than nearly all have."""
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
        """Keep it under another name, in place of what had that; nothing to do if it is not here."""
        if not self._is_read_only:
            with contextlib.suppress(FileNotFoundError):
                rename(_document_path(self.folder, name), _document_path(self.folder, new))

    def drop_document(self, name: str) -> None:
        self._remove(_document_path(self.folder, name))

    def _partials(self) -> list[Path]:
        return sorted((self.folder / "partial").iterdir(), key=_age)

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
            raise self._failed(error) from None

    def _failed(self, error: EnvironmentUnfit) -> EnvironmentUnfit:
        if not isinstance(error, TooManyFiles):
            self.failure = error
        return error

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


def _sender(upload: Path) -> PeerId:
    return PeerId(upload.name.partition("-")[0])


class Uploads:
    """Takes blobs that others send, each at most `size_max` bytes, and forgets those that nothing came of."""

    def __init__(self, swarm: Swarm, store: Store, clock: Clock, *, size_max: int) -> None:
        """`size_max` 0: takes none, and leaves the store as it is."""
        self._swarm, self._store, self._clock = swarm, store, clock
        self._size_max = size_max
        self.progress_s: dict[PeerId, float] = {}
        """When bytes of an unfinished upload last came, by sender."""
        self._arriving: dict[str, _Arriving] = {}
        """What is known of each unfinished upload, by its file's name."""
        self.is_proven: Callable[[PeerId], bool] = lambda peer: False
        """Whether a sender has worked: in a full folder the uploads of those that have not give way first."""
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
        sink = _Sink(self._store, sender, name, size, on_progress=self._came, on_finish=self._finished)
        if not sink.received:
            self._make_room(sender)
        return sink

    def _make_room(self, sender: PeerId) -> None:
        """For one more unfinished upload of `sender`. Beyond the bounds its own oldest gives way, or else an idle one,
        or of senders that have not worked one of the address that has most, or a slow one, or one of whoever has most;
        raises Refused ("busy") if there is no such one.

        Keys cost nothing, and an address little. So an upload that goes on, the last of its address, gives way to no
        stranger's unless it is slow, and a crowd at one address keeps no other from us.
        """
        others = self._store.unfinished_uploads()
        for gone in set(list(self._arriving)).difference(other.name for other in others):
            self._arriving.pop(gone, None)
        held = Counter(map(_sender, others))
        if held[sender] >= UNFINISHED_UPLOADS_MAX:
            next(other for other in others if _sender(other) == sender).unlink(missing_ok=True)
        elif len(others) >= PARTIALS_MAX:
            self._oust_one(others, held, sender)

    def _oust_one(self, others: list[Path], held: Counter[PeerId], newcomer: PeerId) -> None:
        now_s, host, is_strange = self._clock.now_s(), self._swarm.host(newcomer), not self.is_proven(newcomer)
        found = {other: self._arriving.get(other.name, _Arriving()) for other in others}
        strange = {other for other in others if not self.is_proven(_sender(other))}
        at = Counter(found[other].host for other in strange)

        def rank(other: Path) -> tuple[bool, bool, int, bool, int]:
            one, own = found[other], held[_sender(other)]
            if other not in strange:
                return one.idle_s <= now_s, False, 0, False, own
            return one.idle_s <= now_s, True, at[one.host], one.slow_s <= now_s, own

        def rank_in_place_of(other: Path) -> tuple[bool, bool, int, bool, int]:
            is_more = other not in strange or found[other].host != host
            return False, is_strange, (at[host] + is_more) * is_strange, False, held[newcomer] + 1

        worse = [other for other in others if rank(other) > rank_in_place_of(other)]
        if not worse:
            raise Refused(f"{len(others)} uploads are arriving, and more do not fit", reason=Reason.BUSY)
        max(worse, key=rank).unlink(missing_ok=True)  # the oldest of equals

    def _came(self, sender: PeerId, name: str, count: int) -> None:
        self._progressed(sender)
        one = self._arriving.setdefault(self._store.upload_path(sender, name).name, _Arriving())
        one.host = self._swarm.host(sender)
        least = min(SLOW_BYTES_S, self._swarm.line.down.bytes_per_s / (2 * PARTIALS_MAX))
        one.came(count, self._clock.now_s(), slow_bytes_s=least)

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


@dataclass(slots=True)
class _Arriving:
    """What is known of one unfinished upload; of one that an earlier process took, nothing."""

    host: str = ""
    """Where it comes from."""
    idle_s: float = 0.0
    """When it will be idle if nothing more comes, and when slow."""
    slow_s: float = 0.0

    def came(self, count: int, now_s: float, *, slow_bytes_s: float) -> None:
        """So many bytes of it."""
        self.idle_s = min(max(now_s, self.idle_s) + count / IDLE_BYTES_S, now_s + UPLOAD_SPARE_S)
        self.slow_s = min(max(now_s, self.slow_s) + count / slow_bytes_s, now_s + UPLOAD_SPARE_S)


class _Sink:
    """One upload on its way into the store; what has arrived survives a broken connection."""

    def __init__(
        self,
        store: Store,
        sender: PeerId,
        name: str,
        size: int,
        *,
        on_progress: Callable[[PeerId, str, int], None],
        on_finish: Callable[[PeerId, str], None],
    ) -> None:
        self._store, self._sender, self._name, self._size = store, sender, name, size
        self._path = store.upload_path(sender, name)
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
        self._on_progress(self._sender, self._name, len(data))

    def finish(self) -> None:
        """All bytes are here; raises IntegrityError, and forgets them, if they are not the blob."""
        if self._store.size(self._name) == self._size:
            return
        self._store.finish_partial(self._path, self._name)
        self._on_finish(self._sender, self._name)
