"""Both swarms behind one face, so that the contract is written once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.blobs.bandwidth import Line

TTL_MAX_S = 60.0
DEADLINE_S = 15.0


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Poll until `holds`, with a deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while not await holds():
        assert time.monotonic() < end_s, "it did not come to hold in time"
        await asyncio.sleep(0.05)


class MemoryHarness:
    def __init__(self, folder: Path) -> None:
        from dipaco_p2p.swarm.memory import MemoryNetwork

        self._network = MemoryNetwork(1, SystemClock(), ttl_max_s=TTL_MAX_S)
        self._swarms: list[Any] = []

    async def join(self, *, line: Line | None = None) -> Swarm:
        self._swarms.append(self._network.join(Signer(bytes([len(self._swarms) + 1]) * 32), line=line))
        return self._swarms[-1]

    async def plant(self, swarm: Any, key: str, owner: PeerId, data: bytes, expires_s: float) -> bool:
        return swarm.store_bytes(key, owner, data)

    async def close(self) -> None:
        for swarm in self._swarms:
            await swarm.close()


class Libp2pHarness:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.swarms: list[Any] = []

    async def join(self, **options: Any) -> Swarm:
        from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p

        path = self._folder / f"{len(self.swarms)}.key"
        peers = self.swarms[0].addresses if self.swarms else ()
        options = {"initial_peers": peers, "ttl_max_s": TTL_MAX_S, "frame_timeout_s": 1.0} | options
        self.swarms.append(await open_libp2p(path, clock=SystemClock(), **options))
        return self.swarms[-1]

    async def plant(self, swarm: Any, key: str, owner: PeerId, data: bytes, expires_s: float) -> bool:
        """Store as a modified client would: without its own checks."""
        protocol = swarm._node.protocol
        protocol.record_validator, before = None, protocol.record_validator
        try:
            return bool(await swarm._node.store(key, data, expires_s, subkey=owner, exclude_self=True))
        finally:
            protocol.record_validator = before

    async def close(self) -> None:
        for swarm in self.swarms:
            await swarm.close()


HARNESSES = {"memory": MemoryHarness, "libp2p": Libp2pHarness}
