"""A swarm inside one process, for tests and simulations: seeded delay, loss, duplication, partition and death.

All time comes from the clock that it is given and all chance from one `random.Random(seed)`, so a run repeats itself
exactly. Requests and replies pass through the same frames, limits and dispatcher as on the real network.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from ..clock import Clock
from ..errors import ConfigError, IntegrityError, Unreachable
from ..protocol.records import Record
from ..protocol.signing import PeerId, Signer, public_key_of, short
from . import frames
from .api import Handler, Reply, SwarmStatistics
from .dispatch import Dispatcher, busy
from .frames import Frame
from .shelf import Shelf

T = TypeVar("T")

REPLICAS = 5
ADDRESS_PREFIX = "/memory/p2p/"


class MemoryNetwork:
    """The wires between `MemorySwarm`s; `delay_s` is the range of one way, `loss` the chance of each way."""

    def __init__(
        self,
        seed: int,
        clock: Clock,
        delay_s: tuple[float, float] = (0.0, 0.0),
        loss: float = 0.0,
        duplication: float = 0.0,
        *,
        ttl_max_s: float = 3600.0,
    ) -> None:
        self.clock, self.delay_s, self.loss, self.duplication = clock, delay_s, loss, duplication
        self.ttl_max_s = ttl_max_s
        self.random = random.Random(seed)
        self._nodes: dict[PeerId, MemorySwarm] = {}
        self._group_of: dict[PeerId, int] = {}

    def join(self, signer: Signer) -> MemorySwarm:
        """A new node for `signer`; one that was killed or closed may join again, with nothing remembered."""
        assert signer.peer not in self._nodes, f"{signer.peer} is in the network already"
        node = MemorySwarm(self, signer)
        self._nodes[signer.peer] = node
        return node

    def partition(self, groups: Iterable[Collection[PeerId]]) -> None:
        """Let peers talk only within their group; those in no group form one of their own."""
        self._group_of = {peer: number for number, group in enumerate(groups, start=1) for peer in group}

    def heal(self) -> None:
        """End the partition."""
        self._group_of = {}

    def kill(self, peer: PeerId) -> None:
        """End `peer` as SIGKILL would: its handlers stop, and calls to and from it become Unreachable."""
        node = self._nodes.pop(peer, None)
        if node is not None:
            node.stop()

    def find(self, caller: MemorySwarm, peer: PeerId) -> MemorySwarm | None:
        """The node of `peer` if a message of `caller` can reach it now."""
        node = self._nodes.get(peer)
        return node if node is not None and self.linked(caller, node) else None

    def lives(self, peer: PeerId) -> bool:
        """Whether `peer` is in the network at all, on whichever side."""
        return peer in self._nodes

    def linked(self, one: MemorySwarm, other: MemorySwarm) -> bool:
        """Whether both live and are on the same side of a partition."""
        same_side = self._group_of.get(one.peer) == self._group_of.get(other.peer)
        return same_side and one.alive and other.alive

    def reachable(self, caller: MemorySwarm) -> list[MemorySwarm]:
        """All other nodes that `caller` can talk to, in order of joining."""
        return [node for node in self._nodes.values() if node is not caller and self.linked(caller, node)]

    def chance(self, probability: float) -> bool:
        """Draw once; no draw is spent on a fault that is switched off."""
        return probability > 0.0 and self.random.random() < probability

    async def travel(self) -> None:
        """One way over the wire."""
        if self.delay_s[1] > 0.0:
            await self.clock.sleep(self.random.uniform(*self.delay_s))


class MemorySwarm:
    """One node of a `MemoryNetwork`; keeps the `Swarm` protocol."""

    def __init__(self, network: MemoryNetwork, signer: Signer) -> None:
        self._network, self._signer = network, signer
        self.alive = True
        self._counts: Counter[str] = Counter()
        self._dispatcher = Dispatcher(self._counts)
        self.shelf = Shelf(clock=network.clock, ttl_max_s=network.ttl_max_s, counts=self._counts)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def peer(self) -> PeerId:
        return self._signer.peer

    @property
    def signer(self) -> Signer:
        return self._signer

    @property
    def addresses(self) -> tuple[str, ...]:
        return (ADDRESS_PREFIX + self.peer,)

    async def put(self, key: str, body: dict[str, Any], *, ttl_s: float) -> bool:
        record = self.shelf.sign(self._signer, key, body, ttl_s=ttl_s)
        self._counts["records_put"] += 1
        await self._network.travel()
        if not self.alive or self._network.chance(self._network.loss):
            return False
        return self.store_bytes(key, self.peer, record.to_bytes())

    def store_bytes(self, key: str, owner: PeerId, data: bytes) -> bool:
        """Offer `data` as it is to some nodes, as anybody may; whether one of them kept it."""
        others = self._network.reachable(self)
        chosen = self._network.random.sample(others, min(REPLICAS, len(others)))
        return any([node.shelf.admit(key, [(owner, data)]) for node in [self, *chosen]])

    async def get(self, key: str) -> dict[PeerId, Record]:
        await self._network.travel()
        if self.alive and not self._network.chance(self._network.loss):
            known = self.shelf.live(key)
            for node in self._network.reachable(self):
                fresh = [record for peer, record in node.shelf.live(key).items() if known.get(peer) != record]
                self.shelf.admit(key, [(record.peer, record.to_bytes()) for record in fresh])
                known = self.shelf.live(key) if fresh else known
        return self.shelf.live(key)

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
        self._counts["calls_made"] += 1
        try:
            exchange = self._exchange(peer, frames.request(method, header, body))
            return Reply(*frames.read_reply(await self._within(timeout_s, exchange, peer)))
        except Unreachable:
            self._counts["calls_failed"] += 1
            raise

    def serve(self, method: str, handler: Handler) -> None:
        self._dispatcher.serve(method, handler)

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        peer = PeerId(address.removeprefix(ADDRESS_PREFIX))
        try:
            public_key_of(peer)
        except IntegrityError:
            raise ConfigError(f"not an address of the memory network: {address[:200]}") from None
        await self._network.travel()
        if self._network.find(self, peer) is None:
            raise Unreachable(f"no answer from {address}")
        return peer

    async def close(self) -> None:
        if self.alive:
            self._network.kill(self.peer)
        await asyncio.gather(*self._tasks - {asyncio.current_task()}, return_exceptions=True)

    def statistics(self) -> SwarmStatistics:
        return SwarmStatistics(**self._counts)

    def stop(self) -> None:
        """End all that this node is doing, on either side of a call."""
        self.alive = False
        for task in self._tasks:
            task.cancel()

    async def _within(self, timeout_s: float, exchange: Coroutine[Any, Any, Frame], peer: PeerId) -> Frame:
        work, timer = self._spawn(exchange), asyncio.ensure_future(self._network.clock.sleep(timeout_s))
        try:
            await asyncio.wait({work, timer}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not work.cancelled():
                return work.result()
            raise Unreachable(f"no answer from {short(peer)} in {timeout_s:g} s")
        finally:
            work.cancel()
            timer.cancel()

    async def _exchange(self, peer: PeerId, request: Frame) -> Frame:
        """The way there, the work at the other side, the way back; what is lost on the way is waited for in vain."""
        request = self._carry(request, "bytes_sent")
        await self._pass(peer)
        node = self._network.find(self, peer)
        assert node is not None
        if self._network.chance(self._network.duplication):
            node._spawn(node._answer_again(self.peer, request))
        work = node._spawn(node._answer(self.peer, request))
        await asyncio.wait({work})
        if work.cancelled():
            raise Unreachable(f"{short(peer)} went away during the call")
        await self._pass(peer)
        return self._carry(work.result(), "bytes_received")

    async def _pass(self, peer: PeerId) -> None:
        """One way between us and `peer`: a dead peer is noticed at once, a loss or a partition never."""
        await self._network.travel()
        lost = self._network.chance(self._network.loss)
        if not self.alive or not self._network.lives(peer):
            raise Unreachable(f"no answer from {short(peer)}: nobody is there")
        if lost or self._network.find(self, peer) is None:
            await asyncio.Event().wait()

    async def _answer(self, caller: PeerId, request: Frame) -> Frame:
        if not self._dispatcher.enter(caller):
            return self._dispatcher.refuse(busy())
        try:
            self._counts["bytes_received"] += frames.size_bytes(request)
            reply = await self._dispatcher.answer(caller, request)
            self._counts["bytes_sent"] += frames.size_bytes(reply)
            return reply
        finally:
            self._dispatcher.leave(caller)

    async def _answer_again(self, caller: PeerId, request: Frame) -> None:
        await self._network.travel()
        await self._answer(caller, request)

    def _carry(self, frame: Frame, direction: str) -> Frame:
        """The frame as it arrives: a copy, so that nobody shares a header with the other side."""
        head = frames.encode_head(frame)
        self._counts[direction] += len(head) + len(frame.body)
        header = frames.decode_header(head[frames.PREFIX_BYTES :])
        return Frame(kind=frame.kind, header=header, body=bytes(frame.body))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
