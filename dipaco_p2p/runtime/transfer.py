"""Blobs between this peer's store and others': fetch, send, serve, and take uploads within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..canonical import is_digest
from ..clock import Clock
from ..errors import BlobMissing, IntegrityError, Refused
from ..protocol.documents import BlobRef
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..swarm.blobs.blobs import send_blob, serve_blobs, serve_uploads
from ..swarm.blobs.fetch import fetch_blob
from .node import CALL_TIMEOUT_S, Node
from .store import Store

log = logging.getLogger(__name__)

UNUSED_UPLOADS_MAX = 16
"""Finished uploads per peer that no contribution has named yet; the oldest gives way."""
UNUSED_UPLOADS_IN_ALL_MAX = 256
UNFINISHED_UPLOADS_MAX = 8
"""Per peer; its oldest gives way, so that nobody's uploads make room for a flood of another's."""
SENDERS_MAX = 256


async def fetch(
    node: Node,
    ref: BlobRef,
    *,
    holders: Sequence[PeerId],
    keep: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> bytes:
    """The blob, from our store or from `holders`; kept in the store on request. Raises BlobMissing."""
    try:
        data = await asyncio.to_thread(node.store.get, ref.digest)
    except IntegrityError as error:  # removed, so that it is fetched again
        log.warning("%s", error)
        data = None
    if data is None:
        others = [(peer, node.watch.addresses(peer)) for peer in holders if peer != node.peer]
        if not others:
            raise BlobMissing(f"nobody alive holds blob {ref.digest[:8]}")
        work = partial(
            fetch_blob,
            node.swarm,
            ref.digest,
            size=ref.size,
            holders=others,
            partial=node.store.partial_path(ref.digest),
            timeout_s=CALL_TIMEOUT_S,
            on_progress=on_progress,
        )
        data = await node.fetching.do(ref.digest, work)
        if keep:
            await asyncio.to_thread(node.store.put, data)
    return data


async def fetch_kept(node: Node, ref: BlobRef, *, holders: Sequence[PeerId]) -> bytes:
    """As `fetch`, from the archives as well, and kept."""
    return await fetch(node, ref, holders=list(dict.fromkeys([*holders, *node.watch.seeds()])), keep=True)


async def send(
    node: Node,
    peer: PeerId,
    data: bytes,
    *,
    digest: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Upload a blob to `peer`, from where an earlier try stopped; its `digest`, if that is known, is not taken again.
    Raises Unreachable or Refused."""
    await send_blob(
        node.swarm,
        peer,
        data,
        timeout_s=CALL_TIMEOUT_S,
        addresses=node.watch.addresses(peer),
        digest=digest,
        on_progress=on_progress,
    )


def serve_store(swarm: Swarm, store: Store) -> None:
    """Let anyone read our blobs."""
    serve_blobs(swarm, store.read_range, store.size)


class Uploads:
    """Takes blobs that others send, each at most `size_max` bytes, and forgets those that nothing came of."""

    def __init__(self, swarm: Swarm, store: Store, *, size_max: int, clock: Clock | None = None) -> None:
        """With a clock, `progress_s` says who is sending."""
        self._store = store
        self._size_max = size_max
        self._clock = clock
        self.progress_s: dict[PeerId, float] = {}
        """When bytes of an unfinished upload last came, by sender."""
        self._unused: dict[PeerId, OrderedDict[str, None]] = {}
        if dropped := store.drop_unnamed():  # an earlier process took them, and its bounds ended with it
            log.info("%d blobs that no document names were dropped", dropped)
        serve_uploads(swarm, self._accept)

    def claim(self, name: str) -> None:
        """A contribution or version names this blob: it stays."""
        for names in self._unused.values():
            names.pop(name, None)

    async def _accept(self, sender: PeerId, name: str, size: int) -> _Sink:
        if not is_digest(name) or not 0 < size <= self._size_max:
            raise Refused(f"an upload of {size} bytes, limit {self._size_max}", reason="oversized")
        self._store.trim_partials(f"{sender}-", but=name, keep=UNFINISHED_UPLOADS_MAX - 1)
        return _Sink(self._store, sender, name, size, on_progress=self._progressed, on_finish=self._finished)

    def _progressed(self, sender: PeerId) -> None:
        if self._clock is not None:
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
            raise Refused(f"offset {offset}, but {self.received} of {self._size} bytes are here", reason="offset")
        self._store.append_partial(self._path, data)
        self._on_progress(self._sender)

    def finish(self) -> None:
        """All bytes are here; raises IntegrityError, and forgets them, if they are not the blob."""
        if self._store.size(self._name) == self._size:
            return
        self._store.finish_partial(self._path, self._name)
        self._on_finish(self._sender, self._name)
