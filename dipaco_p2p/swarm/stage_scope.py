"""One network, several stages: each stage of a run has the methods of its own calls, so that they never meet.

A peer that went on to the next stage still answers those who are in the last one. One that takes no part for a while
closes the scope: it answers nobody, as if it had left, and serves again when it comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import Refused
from ..protocol.reasons import Reason
from ..protocol.records import Record
from ..protocol.signing import PeerId, Signer
from .api import Handler, Reply, Swarm, SwarmStatistics
from .blobs.bandwidth import Line

SCOPE_CHARS = 16
ABSENT = "this peer takes no part at the moment"
"""It passes: the caller tries again, or asks another peer."""


class ScopedSwarm:
    """A `Swarm` whose methods carry the id of a stage; records, whose keys carry it anyway, are passed through."""

    def __init__(self, swarm: Swarm, stage: str) -> None:
        self._swarm = swarm
        self._prefix = f"{stage[:SCOPE_CHARS]}/"
        self._handlers: dict[str, Handler] = {}
        self._served: set[str] = set()
        """Of what the swarm beneath was told to answer through us."""
        self._answering: dict[asyncio.Task[Any], None] = {}
        """In order, so that a run that is simulated ends them in the same one whenever it is played."""
        self._idle = asyncio.Event()

    @property
    def peer(self) -> PeerId:
        return self._swarm.peer

    @property
    def signer(self) -> Signer:
        return self._swarm.signer

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._swarm.addresses

    @property
    def line(self) -> Line:
        return self._swarm.line

    def host(self, peer: PeerId) -> str:
        return self._swarm.host(peer)

    @property
    def offers_relay(self) -> bool:
        return self._swarm.offers_relay

    def note_peers(
        self,
        *,
        members: Collection[PeerId],
        known: Collection[PeerId],
        banned: Collection[PeerId],
        relays: Mapping[PeerId, Sequence[str]],
    ) -> Collection[PeerId]:
        return self._swarm.note_peers(members=members, known=known, banned=banned, relays=relays)

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
        assert method not in self._handlers, f"`{method}` is served already"
        self._handlers[method] = handler
        if method not in self._served:
            self._served.add(method)
            self._swarm.serve(self._prefix + method, partial(self._answer, method))

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        return await self._swarm.connect(address, timeout_s=timeout_s)

    async def close(self) -> None:
        """Answer nobody in this stage from now on, until handlers are served again; what is being answered ends in a
        refusal. The swarm beneath is closed by whoever opened it."""
        self._handlers = {}
        for task in self._answering:
            task.cancel()
        while self._answering:
            self._idle.clear()
            await self._idle.wait()

    def statistics(self) -> SwarmStatistics:
        return self._swarm.statistics()

    async def _answer(self, method: str, sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        handler, task = self._handlers.get(method), asyncio.current_task()
        if handler is None:
            raise Refused(ABSENT, reason=Reason.BUSY)
        assert task is not None
        self._answering[task] = None
        try:
            return await handler(sender, header, body)
        except asyncio.CancelledError:
            if self._handlers or task.uncancel():  # the call itself was given up, not our part in the stage
                raise
            raise Refused(ABSENT, reason=Reason.BUSY) from None
        finally:
            self._answering.pop(task, None)
            self._idle.set()
