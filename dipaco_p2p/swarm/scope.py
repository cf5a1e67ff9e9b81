"""One network, several stages: each stage of a run has the methods of its own calls, so that they never meet.

A peer that went on to the next stage still answers those who are in the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..protocol.records import Record
from ..protocol.signing import PeerId, Signer
from .api import Handler, Reply, Swarm, SwarmStatistics

SCOPE_CHARS = 16


class ScopedSwarm:
    """A `Swarm` whose methods carry the id of a stage; records, whose keys carry it anyway, are passed through."""

    def __init__(self, swarm: Swarm, stage: str) -> None:
        self._swarm = swarm
        self._prefix = f"{stage[:SCOPE_CHARS]}/"

    @property
    def peer(self) -> PeerId:
        return self._swarm.peer

    @property
    def signer(self) -> Signer:
        return self._swarm.signer

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._swarm.addresses

    async def put(self, key: str, body: dict[str, Any], *, ttl_s: float) -> bool:
        return await self._swarm.put(key, body, ttl_s=ttl_s)

    async def get(self, key: str) -> dict[PeerId, Record]:
        return await self._swarm.get(key)

    async def call(
        self,
        peer: PeerId,
        method: str,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        timeout_s: float,
        addresses: Sequence[str] = (),
    ) -> Reply:
        return await self._swarm.call(
            peer, self._prefix + method, header, body, timeout_s=timeout_s, addresses=addresses
        )

    def serve(self, method: str, handler: Handler) -> None:
        self._swarm.serve(self._prefix + method, handler)

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        return await self._swarm.connect(address, timeout_s=timeout_s)

    async def close(self) -> None:
        """Nothing: who opened the swarm beneath closes it."""

    def statistics(self) -> SwarmStatistics:
        return self._swarm.statistics()
