"""The observer's process on the owner's side: when it saw a new heartbeat of the volunteer, and whether one was late.

python -m benchmarks.line.observer FOLDER ADDRESS
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.processes import Handler, Values, serve
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import SwarmError
from dipaco_p2p.protocol.records import peers_key
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from peers.joining.arrival import TTL_MAX_S

LOOK_S = 0.25


class Gaps:
    """Seconds between two heartbeats that were seen, and looks at which there was none that lives."""

    def __init__(self, now_s: float) -> None:
        self._counter = -1
        self._seen_s = now_s
        self.greatest_s = 0.0
        self.missed = 0
        """Looks at which the last heartbeat had expired."""

    def look(self, counter: int | None, now_s: float) -> None:
        """The counter of the newest heartbeat that lives at this moment, if there is one."""
        self.greatest_s = max(self.greatest_s, now_s - self._seen_s)
        if counter is None:
            self.missed += 1
        elif counter != self._counter:
            self._counter, self._seen_s = counter, now_s


class Observer:
    """Looks at one peer's heartbeats, from one request for its gaps to the next."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._clock = SystemClock()
        self._gaps = Gaps(self._clock.now_s())
        self._looking: asyncio.Task[None] | None = None

    async def handle(self, values: Values) -> Values:
        """Begin to look, or tell of the time since it began, or since it told last."""
        if values["do"] == "look":
            self.end()
            self._gaps = Gaps(self._clock.now_s())
            self._looking = asyncio.create_task(self._look(peers_key(values["run"]), PeerId(values["peer"])))
            return {}
        gaps, self._gaps = self._gaps, Gaps(self._clock.now_s())
        return {"greatest_s": gaps.greatest_s, "missed": gaps.missed}

    def end(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self, key: str, peer: PeerId) -> None:
        while True:
            with contextlib.suppress(SwarmError):
                record = (await self._swarm.get(key)).get(peer)
                self._gaps.look(None if record is None else record.counter, self._clock.now_s())
            await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def opened(folder: Path, address: str) -> AsyncIterator[Handler]:
    """It has a part in the DHT while the block runs, and stores nothing."""
    home = folder / "observer"
    home.mkdir(parents=True, exist_ok=True)
    swarm = await open_libp2p(
        home / "identity.key", initial_peers=[address], client_mode=True, ttl_max_s=TTL_MAX_S, clock=SystemClock()
    )
    observer = Observer(swarm)
    try:
        yield observer.handle
    finally:
        observer.end()
        await swarm.close()


if __name__ == "__main__":
    place, ticket = sys.argv[1:]
    serve(lambda: opened(Path(place), ticket))
