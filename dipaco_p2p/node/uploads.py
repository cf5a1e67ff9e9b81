"""Blobs that others send us: each within a bound, and forgotten when nothing comes of it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from ..canonical import is_digest
from ..clock import Clock
from ..errors import Refused
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..swarm.blobs.blobs import serve_uploads
from .store import Store

log = logging.getLogger(__name__)

UNUSED_UPLOADS_MAX = 16
"""Finished uploads per peer that no contribution has named yet; the oldest gives way."""
UNUSED_UPLOADS_IN_ALL_MAX = 256
UNFINISHED_UPLOADS_MAX = 8
"""Per peer; its oldest gives way, so that nobody's uploads make room for a flood of another's."""
SENDERS_MAX = 256


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
