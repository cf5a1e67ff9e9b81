"""Asking seeds, each one alone: does it answer, what does it show, what time is it there, how fast is the line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable

from dipaco_p2p.errors import DipacoError, Unreachable
from dipaco_p2p.node.entry import Entry
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.swarm.addresses import read_address, read_place
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.calls import ReadBlob
from dipaco_p2p.swarm.dialback import Reach, ask_reach, greets
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm

from .facts import SeedFacts, SpeedFacts

CONNECT_TIMEOUT_S = 10.0
RANGE_BYTES = 256 * 1024
RANGES_MAX = 16
SPEED_S = 4.0
"""Per direction; and no more than `RANGES_MAX` ranges."""
CALL_S = 10.0


async def probe_seeds(swarm: Libp2pSwarm, entry: Entry) -> list[SeedFacts]:
    """All seeds of the entry, at the same time."""
    return list(await asyncio.gather(*(_probe_seed(swarm, entry, address) for address in entry.addresses)))


async def _probe_seed(swarm: Libp2pSwarm, entry: Entry, address: str) -> SeedFacts:
    run, latency_s, ahead_s, peer = None, None, None, read_address(address).peer
    try:
        # Apart from the swarm, which would not dial a second address of a peer that it knows.
        if not await greets(*read_place(read_address(address).place)):
            raise Unreachable("no libp2p answers there", hint="check that it is running, and that its port is open")
        await swarm.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        with contextlib.suppress(Unreachable):
            ahead_s, latency_s = await swarm.clock_ahead_s(peer)
        stages = await fetch_stages(swarm, peer, expected=entry.run, author=entry.coordinator, addresses=[address])
        run = stages[-1]
    except DipacoError as error:
        return SeedFacts(address=address, problem=error, latency_s=latency_s, ahead_s=ahead_s)
    return SeedFacts(address=address, latency_s=latency_s, ahead_s=ahead_s, run=run)


async def probe_reach(swarm: Swarm, seeds: list[SeedFacts]) -> Reach:
    """What the seeds that answer say when they dial us back."""
    answering = {read_address(seed.address).peer: [seed.address] for seed in seeds if seed.problem is None}
    return await ask_reach(swarm, list(answering.items())[:3])


async def probe_speed(swarm: Swarm, seed: SeedFacts, run: Run) -> SpeedFacts:
    """What one seed sends and takes within some seconds: a blob of the run down, zeros that it forgets up."""
    peer, scoped = read_address(seed.address).peer, ScopedSwarm(swarm, run.id)
    blobs = [*(ref.blob for ref in run.manifest.genesis), *(ref.blob for ref in run.manifest.shards)]
    blob = max(blobs, key=lambda ref: ref.size)

    async def down(number: int) -> int:
        offset = number * RANGE_BYTES % max(blob.size - RANGE_BYTES, 1)
        header = {"digest": blob.digest, "offset": offset, "length": RANGE_BYTES}
        return len((await scoped.call(peer, ReadBlob.METHOD, header, timeout_s=CALL_S, addresses=[seed.address])).body)

    async def up(number: int) -> int:
        # Asking for the size of a blob needs no body, and one that is there is read and forgotten.
        header = {"digest": blob.digest, "offset": 0, "length": 0}
        await scoped.call(
            peer, ReadBlob.METHOD, header, os.urandom(RANGE_BYTES), timeout_s=CALL_S, addresses=[seed.address]
        )
        return RANGE_BYTES

    return SpeedFacts(down=await _rate(down), up=await _rate(up))


async def _rate(move: Callable[[int], Awaitable[int]]) -> float | None:
    """Bytes per second of one move after the other, until the time or the ranges are over; None if none succeeds."""
    start_s, moved = time.monotonic(), 0
    with contextlib.suppress(DipacoError):
        for number in range(RANGES_MAX):
            moved += await move(number)
            if time.monotonic() - start_s > SPEED_S:
                break
    return moved / max(time.monotonic() - start_s, 1e-6) if moved else None
