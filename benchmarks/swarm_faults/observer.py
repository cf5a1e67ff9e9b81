"""A client of the swarm that only looks: whose heartbeat it sees, and since when it does not any more.

It is to the swarm what a survivor is, and its view is no older than `LOOK_S` plus one read of the DHT; a survivor looks
every sixth of an expiry. What it saw goes into a history of its own: `sees` and `misses` with the peer, and `records`
with how many live records there are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from dipaco_p2p.errors import SwarmError
from dipaco_p2p.node.node import open_observer
from dipaco_p2p.node.reading import open_connection
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.program.history import History
from dipaco_p2p.swarm.addresses import read_address
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm

OBSERVER = "observer"
"""Its name among the histories."""
LOOK_S = 0.25


@asynccontextmanager
async def observe(address: str, folder: Path) -> AsyncIterator[None]:
    """Look at the newest stage of the run at `address` while the block runs. Raises as joining does."""
    folder.mkdir(parents=True, exist_ok=True)
    async with open_connection(address) as connection:
        swarm, clock = connection.swarm, connection.clock
        assert isinstance(swarm, Libp2pSwarm)
        run = (await fetch_stages(swarm, connection.host, expected=None))[-1]
        watch = open_observer(run, ScopedSwarm(swarm, run.id), clock).watch

        async def find_again() -> None:
            await swarm.join({address: read_address(address)})

        looking = asyncio.create_task(_look(watch, History(folder / "history.jsonl", clock), find_again))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


async def _look(watch: Watch, history: History, find_again: Callable[[], Awaitable[None]]) -> None:
    """`find_again` is for when nobody is seen: a client that has lost its last neighbour hears of no other."""
    seen, counts = set[str](), (0, 0, 0)
    while True:
        with contextlib.suppress(SwarmError):
            await watch.refresh()
            if not watch.heartbeats:
                await find_again()
        now = {str(peer) for peer in watch.heartbeats}
        for ev, peers in (("sees", now - seen), ("misses", seen - now)):
            for peer in sorted(peers):
                history.add(ev, peer=peer)
        seen, before = now, counts
        counts = (len(now), sum(map(len, watch.claims.values())), sum(map(len, watch.heads.values())))
        if counts != before:
            history.add("records", heartbeats=counts[0], claims=counts[1], heads=counts[2])
        await asyncio.sleep(LOOK_S)
