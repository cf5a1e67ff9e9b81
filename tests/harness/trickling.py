"""A peer that gives what it has so slowly that nobody has it in time, and never fails a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import CALL_TIMEOUT_S
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.swarm.blobs.bandwidth import CUT_BYTES_MIN
from dipaco_p2p.swarm.calls import Range, ReadBlob
from dipaco_p2p.swarm.memory import MemorySwarm


def trickle(swarm: MemorySwarm, data: bytes, *, on_asked: Callable[[str], None] = lambda name: None) -> BlobRef:
    """Give of `data`, whatever is asked for, as little as a call may bring, just before the call ends; `on_asked` hears
    which blob is asked for."""

    async def handle(peer: str, request: ReadBlob) -> Range:
        on_asked(request.digest)
        await asyncio.sleep(CALL_TIMEOUT_S - 1)
        length = min(request.length, CUT_BYTES_MIN)
        return Range(size=len(data), body=data[request.offset : request.offset + length])

    swarm._dispatcher._handlers.pop(ReadBlob.METHOD, None)
    ReadBlob.serve(swarm, handle)
    return BlobRef.of(data)


def trickle_from(swarm: MemorySwarm, *stores: Store, over_bytes: int) -> None:
    """Give what is in `stores`: what is larger than `over_bytes` like that, and the rest at once."""

    async def handle(peer: str, request: ReadBlob) -> Range:
        found = [(store, size) for store in stores if (size := store.size(request.digest)) is not None]
        if not found:
            raise Refused("it is not here", reason=Reason.MISSING)
        [(store, size), *_], length = found, request.length
        if size > over_bytes:
            await asyncio.sleep(CALL_TIMEOUT_S - 1)
            length = min(length, CUT_BYTES_MIN)
        return Range(size=size, body=store.read_range(request.digest, request.offset, length) or b"")

    swarm._dispatcher._handlers.pop(ReadBlob.METHOD, None)
    ReadBlob.serve(swarm, handle)
