"""A peer that gives what it has so slowly that nobody has it in time, and never fails a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dipaco_p2p.node.node import CALL_TIMEOUT_S
from dipaco_p2p.protocol.documents import BlobRef
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
