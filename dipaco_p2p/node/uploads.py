"""Blobs that others upload: each within a bound, and dropped when nothing comes of it."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..canonical import is_digest
from ..clock import Clock
from ..errors import Refused
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..swarm.blobs.blobs import serve_uploads
from ..swarm.frames import THIN_BYTES_S
from .store import PARTIALS_MAX, Store, blob_path

log = logging.getLogger(__name__)

UNUSED_UPLOADS_MAX = 16
"""Finished uploads per peer that no contribution has named yet; the oldest gives way."""
UNUSED_UPLOADS_IN_ALL_MAX = 256
UNNAMED_UPLOADS = PARTIALS_MAX // 2
"""All uploads that nothing names, whole ones and unfinished ones together, take as many times the bytes of the largest
one at most, and those of strangers at one address half of that. An author's is named right after it has come, so an
owner rarely has so many; and whom it says `busy` to comes again."""
UNFINISHED_UPLOADS_MAX = 8
"""Per peer; its oldest gives way, so that one peer's flood never takes the place of another's upload."""
IDLE_BYTES_S, UPLOAD_SPARE_S = 1024, 30.0
"""An unfinished upload is idle when less than this has come of it, for so long: an eighth of what a line of 0.25 Mbit/s
carries if it sends to four peers at once. A call may take 20 s."""
SLOW_BYTES_S = THIN_BYTES_S / 8
"""It is slow when less than this has come of it: an author sends to the leaders of all modules of its path at once, of
four say, while others read as much of it. 64 uploads that fast take 2 Mbit/s of our line, less than nearly all have."""
SENDERS_MAX = 256


class Uploads:
    """Takes blobs that others send, each at most `size_max` bytes, and forgets those that nothing came of."""

    def __init__(self, swarm: Swarm, store: Store, clock: Clock, *, size_max: int) -> None:
        """`size_max` 0: takes none, and leaves the store as it is."""
        self._swarm, self._store, self._clock = swarm, store, clock
        self._size_max = size_max
        self._bytes_max = UNNAMED_UPLOADS * size_max
        self.progress_s: dict[PeerId, float] = {}
        """When bytes of an unfinished upload last came, by sender."""
        self._lock = threading.Lock()
        """Bytes are written, and uploads come to their end, in threads; held while what is below changes."""
        self._arriving: dict[str, _Upload] = {}
        """What is known of each unfinished upload, by its file's name."""
        self._unused: dict[PeerId, OrderedDict[str, _Upload]] = {}
        """Of each whole one that nothing names, by sender and digest."""
        self.is_proven: Callable[[PeerId], bool] = lambda peer: False
        """Whether a sender has worked: in a full folder the uploads of those that have not give way first."""
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
        with self._lock:
            for names in self._unused.values():
                names.pop(name, None)

    def free(self, wanted_bytes: int) -> int:
        """Remove uploads that nothing names, what gives way first first, until so much is free; how much is. From any
        thread."""
        freed = 0
        with self._lock:
            uploads = [*self._whole(), *self._unfinished()]
            for one in sorted(uploads, key=self._ranks(uploads, _bytes), reverse=True):
                if freed >= wanted_bytes:
                    break
                if length := _disk_bytes(one.path):  # else its first bytes may be what needs the room
                    one.path.unlink(missing_ok=True)  # not aside: the room is needed at once
                    freed += length
                    self._drop(one)
        return freed

    def unnamed_bytes(self) -> int:
        """How much `free` could make room for."""
        with self._lock:
            return sum(_disk_bytes(one.path) for one in (*self._whole(), *self._unfinished()))

    async def _accept(self, sender: PeerId, name: str, size: int) -> _Sink:
        if not is_digest(name) or not 0 < size <= self._size_max:
            raise Refused(f"an upload of {size} bytes, limit {self._size_max}", reason=Reason.OVERSIZED)
        new = _Upload(self._store.upload_path(sender, name), sender, name, size, host=self._swarm.host(sender))
        with self._lock:
            known = self._arriving.get(new.path.name)
            sink = _Sink(self._store, known or new, size, on_progress=self._came, on_finish=self._finished)
            if sink.received < size and (known is None or known.size < size or not sink.received):
                self._make_room(new)
                new.idle_s = self._clock.now_s() + UPLOAD_SPARE_S if known is None else known.idle_s
                self._arriving[new.path.name] = sink.upload = new
                new.path.touch()  # it has its place from now on, not only once its bytes are here
        return sink

    def _make_room(self, new: _Upload) -> None:
        """For one more upload. Beyond the bounds its sender's oldest unfinished one gives way, or else an idle one, or
        of senders that have not worked one of the address that has most, or a slow one, or one of whoever has most;
        raises Refused ("busy") if there is no such one. Places are counted for unfinished ones, and bytes for all:
        those that an upload is to have, so that what has begun can come to its end.

        Keys cost nothing, and an address little. So an upload that goes on, the last of its address, gives way to no
        stranger's unless it is slow, and a crowd at one address keeps no other from us.
        """
        places = [one for one in self._unfinished() if one.path != new.path]
        own = [one for one in places if one.sender == new.sender]
        gone: list[_Upload] = []
        if len(own) >= UNFINISHED_UPLOADS_MAX:
            gone.append(own[0])
        elif len(places) >= PARTIALS_MAX:
            gone.append(self._worst(places, new, lambda one: 1))
        uploads = [one for one in (*self._whole(), *places) if one not in gone]
        if not self.is_proven(new.sender):
            near = [one for one in uploads if one.host == new.host and not self.is_proven(one.sender)]
            while sum(map(_bytes, near)) + new.size > self._bytes_max // 2:
                gone.append(self._worst(near, new, _bytes))
                near.remove(gone[-1])
                uploads.remove(gone[-1])
        while sum(map(_bytes, uploads)) + new.size > self._bytes_max:
            gone.append(self._worst(uploads, new, _bytes))
            uploads.remove(gone[-1])
        for one in gone:
            self._drop(one)

    def _worst(self, uploads: list[_Upload], new: _Upload, weight: Callable[[_Upload], int]) -> _Upload:
        """Of `uploads` the one that gives way to `new`, the oldest of equals, or else the oldest whole one of the same
        sender; raises Refused ("busy")."""
        rank, rank_in_place_of = self._ranks(uploads, weight), self._ranks(uploads, weight, new)
        worse = [one for one in uploads if rank(one) > rank_in_place_of(one)]
        own = [one for one in uploads if one.sender == new.sender and self._is_whole(one)]
        if not worse and own:
            return own[0]
        if not worse:
            raise Refused(f"{len(uploads)} uploads are here for nothing yet, and more do not fit", reason=Reason.BUSY)
        return max(worse, key=rank)

    def _ranks(
        self, uploads: Sequence[_Upload], weight: Callable[[_Upload], int], new: _Upload | None = None
    ) -> Callable[[_Upload], tuple[bool, bool, int, bool, int]]:
        """How each of `uploads` ranks, the first to give way highest; or `new`, in the place of each of them."""
        now_s = self._clock.now_s()
        strange = {one for one in (*uploads, *filter(None, [new])) if not self.is_proven(one.sender)}
        held, at = Counter[PeerId](), Counter[str]()
        for one in uploads:
            held[one.sender] += weight(one)
            at[one.host] += weight(one) * (one in strange)

        def rank(one: _Upload) -> tuple[bool, bool, int, bool, int]:
            own, is_idle = held[one.sender], one.idle_s <= now_s
            if one not in strange:
                return is_idle, False, 0, False, own
            return is_idle, True, at[one.host], one.slow_s <= now_s, own

        def rank_in_place_of(one: _Upload) -> tuple[bool, bool, int, bool, int]:
            assert new is not None
            is_strange, freed = new in strange, weight(one) * (one in strange and one.host == new.host)
            near = (at[new.host] + weight(new) - freed) * is_strange
            return False, is_strange, near, False, held[new.sender] + weight(new)

        return rank if new is None else rank_in_place_of

    def _unfinished(self) -> list[_Upload]:
        """What was written to last comes last. Of those that an earlier process took nothing but the file is known."""
        paths = self._store.unfinished_uploads()
        for gone in self._arriving.keys() - {path.name for path in paths}:
            del self._arriving[gone]
        return [self._arriving.get(path.name) or _found(path) for path in paths]

    def _whole(self) -> list[_Upload]:
        held = [one for names in self._unused.values() for one in names.values()]
        return [one for one in held if one.path.exists()]

    def _is_whole(self, one: _Upload) -> bool:
        return one.sender in self._unused and self._unused[one.sender].get(one.name) is one

    def _drop(self, one: _Upload) -> None:
        if self._is_whole(one):
            del self._unused[one.sender][one.name]
            self._store.drop(one.name)
        else:
            one.path.unlink(missing_ok=True)

    def _came(self, one: _Upload, count: int) -> None:
        least = min(SLOW_BYTES_S, self._swarm.line.down.bytes_per_s / (2 * PARTIALS_MAX))
        with self._lock:
            self._progressed(one.sender)
            self._arriving.setdefault(one.path.name, one)
            one.host = self._swarm.host(one.sender)
            one.came(count, self._clock.now_s(), slow_bytes_s=least)

    def _progressed(self, sender: PeerId) -> None:
        self.progress_s.pop(sender, None)
        self.progress_s[sender] = self._clock.now_s()
        while len(self.progress_s) > SENDERS_MAX:  # the one that was silent longest
            del self.progress_s[next(iter(self.progress_s))]

    def _finished(self, one: _Upload) -> None:
        with self._lock:
            self.progress_s.pop(one.sender, None)
            self._arriving.pop(one.path.name, None)
            one.finished(blob_path(self._store.folder, one.name), self._clock.now_s())
            names = self._unused.setdefault(one.sender, OrderedDict())
            names[one.name] = one
            if len(names) > UNUSED_UPLOADS_MAX:
                self._forget_oldest(names)
            self._unused = {peer: held for peer, held in self._unused.items() if held}
            if sum(map(len, self._unused.values())) > UNUSED_UPLOADS_IN_ALL_MAX:
                self._forget_oldest(max(self._unused.values(), key=len))

    def _forget_oldest(self, names: OrderedDict[str, _Upload]) -> None:
        oldest, _ = names.popitem(last=False)
        self._store.drop(oldest)


@dataclass(slots=True, eq=False)
class _Upload:
    """What is known of one upload that nothing names yet."""

    path: Path
    sender: PeerId
    name: str
    """The digest of what it is to be."""
    size: int
    """Its bytes, with those that are still to come."""
    host: str = ""
    """Where it comes from."""
    idle_s: float = 0.0
    """When it will be idle if nothing more comes, and when slow; a whole one, if nothing names it."""
    slow_s: float = 0.0

    def came(self, count: int, now_s: float, *, slow_bytes_s: float) -> None:
        """So many bytes of it."""
        self.idle_s = min(max(now_s, self.idle_s) + count / IDLE_BYTES_S, now_s + UPLOAD_SPARE_S)
        self.slow_s = min(max(now_s, self.slow_s) + count / slow_bytes_s, now_s + UPLOAD_SPARE_S)

    def finished(self, path: Path, now_s: float) -> None:
        """All of it is there."""
        self.path, self.idle_s, self.slow_s = path, now_s + UPLOAD_SPARE_S, now_s + UPLOAD_SPARE_S


def _bytes(one: _Upload) -> int:
    return one.size


def _disk_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # another thread has finished or dropped it
        return 0


def _found(path: Path) -> _Upload:
    sender, _, name = path.name.partition("-")
    try:
        return _Upload(path, PeerId(sender), name, path.stat().st_size)
    except FileNotFoundError:  # another thread has finished or dropped it
        return _Upload(path, PeerId(sender), name, 0)


class _Sink:
    """One upload on its way into the store; what has arrived survives a broken connection."""

    def __init__(
        self,
        store: Store,
        upload: _Upload,
        size: int,
        *,
        on_progress: Callable[[_Upload, int], None],
        on_finish: Callable[[_Upload], None],
    ) -> None:
        self.upload = upload
        self._store, self._name, self._path, self._size = store, upload.name, upload.path, size
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
        self._on_progress(self.upload, len(data))

    def finish(self) -> None:
        """All bytes are here; raises IntegrityError, and forgets them, if they are not the blob."""
        if self._store.size(self._name) == self._size:
            return
        self._store.finish_partial(self._path, self._name)
        self._on_finish(self.upload)
