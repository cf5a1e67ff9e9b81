"""Blobs between this peer's store and others': fetch, send and serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import BlobMissing, IntegrityError
from ..protocol.documents import BlobRef
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..swarm.blobs.blobs import send_blob, serve_blobs
from ..swarm.blobs.fetch import fetch_blob
from .node import CALL_TIMEOUT_S, Reader
from .store import Store

log = logging.getLogger(__name__)


async def fetch(
    node: Reader,
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


async def fetch_kept(node: Reader, ref: BlobRef, *, holders: Sequence[PeerId]) -> bytes:
    """As `fetch`, from the archives as well, and kept."""
    return await fetch(node, ref, holders=list(dict.fromkeys([*holders, *node.watch.seeds()])), keep=True)


async def send(
    node: Reader,
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
