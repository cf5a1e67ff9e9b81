"""A swarm inside one process, for tests and simulations, with seeded faults.

Delay, loss, duplication and late messages; partitions and cuts of one direction; peers that are slow, frozen or dead.
All time comes from the clock that it is given and all chance from one `random.Random(seed)`, so a run repeats itself
exactly. Requests and replies pass through the same frames, limits and dispatcher as on the real network.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..clock import Clock
from ..errors import ConfigError, IntegrityError, Refused, Unreachable
from ..protocol import neighbours
from ..protocol.reasons import Reason
from ..protocol.records import TTL_MAX_S, Record
from ..protocol.signing import PeerId, Signer, public_key_of, short
from . import frames
from .api import Handler, Reply, SwarmStatistics
from .blobs.bandwidth import Line
from .frames import Dispatcher, Frame
from .record_cache import RecordCache

T = TypeVar("T")

REPLICAS = 5
HOLDERS_MAX = 20
"""Of a larger network only the nodes that are closest to a key are asked for its records, as in Kademlia."""
HELD_BACK = 10.0
"""A message that comes late takes up to this many times the longest delay."""
ADDRESS_PREFIX = "/memory/p2p/"
TASKS_KEPT = 32
"""So many may lie about that are done, before they are looked for."""


class MemoryNetwork:
    """The wires between `MemorySwarm`s; `delay_s` is the range of one way, the others the chance of each way.

    `loss`: it never arrives; `duplication`: a request arrives twice; `reordering`: it is overtaken by later ones.
    """

    def __init__(
        self,
        seed: int,
        clock: Clock,
        delay_s: tuple[float, float] = (0.0, 0.0),
        loss: float = 0.0,
        duplication: float = 0.0,
        reordering: float = 0.0,
        *,
        ttl_max_s: float = TTL_MAX_S,
    ) -> None:
        self.clock, self.delay_s, self.loss, self.duplication = clock, delay_s, loss, duplication
        self.reordering = reordering
        self.ttl_max_s = ttl_max_s
        self.random = random.Random(seed)
        self.hosts: dict[PeerId, str] = {}
        """Where the calls of a peer come from, as limits see it."""
        self._nodes: dict[PeerId, MemorySwarm] = {}
        self._group_of: dict[PeerId, int] = {}
        self._cuts: set[tuple[PeerId, PeerId]] = set()
        self._lag_s: dict[PeerId, float] = {}
        self._overloaded: set[PeerId] = set()

    def join(self, signer: Signer, *, clock: Clock | None = None, line: Line | None = None) -> MemorySwarm:
        """A new node for `signer`; one that was killed or closed may join again, with nothing remembered.

        `clock` is the node's own, by which its records expire. What others make it do runs in the context of this call.
        """
        assert signer.peer not in self._nodes, f"{signer.peer} is in the network already"
        node = MemorySwarm(self, signer, clock or self.clock, line or Line())
        self._nodes[signer.peer] = node
        return node

    def partition(self, groups: Iterable[Collection[PeerId]]) -> None:
        """Let peers talk only within their group; those in no group form one of their own."""
        self._group_of = {peer: number for number, group in enumerate(groups, start=1) for peer in group}

    def cut(self, sender: PeerId, receiver: PeerId) -> None:
        """From now on nothing that `sender` says reaches `receiver`; the other direction stays."""
        self._cuts.add((sender, receiver))

    def heal(self) -> None:
        """End the partition and all cuts."""
        self._group_of = {}
        self._cuts = set()

    def slow(self, peer: PeerId, lag_s: float) -> None:
        """From now on everything from and to `peer` takes so much longer; 0 ends it."""
        self._lag_s[peer] = lag_s

    def overload(self, peer: PeerId, *, is_over: bool = False) -> None:
        """From now on `peer` answers every call with `busy`, as one with too many calls at once does, and says and
        asks what it did before; until it `is_over`."""
        (self._overloaded.discard if is_over else self._overloaded.add)(peer)

    def is_overloaded(self, peer: PeerId) -> bool:
        return peer in self._overloaded

    def freeze(self, peer: PeerId) -> None:
        """As SIGSTOP would: what comes waits, what was under way stays there, and nothing is refused."""
        self._nodes[peer].running.clear()

    def thaw(self, peer: PeerId) -> None:
        """As SIGCONT would; nothing to do for one that died meanwhile."""
        if peer in self._nodes:
            self._nodes[peer].running.set()

    def kill(self, peer: PeerId) -> None:
        """End `peer` as SIGKILL would: its handlers stop, and calls to and from it become Unreachable."""
        node = self._nodes.pop(peer, None)
        if node is not None:
            node.stop()

    @property
    def nodes(self) -> list[MemorySwarm]:
        """All that live, in order of joining."""
        return list(self._nodes.values())

    def find(self, caller: MemorySwarm, peer: PeerId) -> MemorySwarm | None:
        """The node of `peer` if a message of `caller` can reach it now."""
        node = self._nodes.get(peer)
        return node if node is not None and self.linked(caller, node) else None

    def lives(self, peer: PeerId) -> bool:
        """Whether `peer` is in the network at all, on whichever side."""
        return peer in self._nodes

    def linked(self, one: MemorySwarm, other: MemorySwarm) -> bool:
        """Whether a message of `one` reaches `other` now."""
        same_side = self._group_of.get(one.peer) == self._group_of.get(other.peer)
        return same_side and one.alive and other.alive and (one.peer, other.peer) not in self._cuts

    def reachable(self, caller: MemorySwarm, key: str) -> list[MemorySwarm]:
        """The other nodes that keep `key` and that `caller` can reach, in order of joining; frozen ones keep silent."""
        is_split = bool(self._group_of or self._cuts)
        nodes = [
            node
            for node in self._nodes.values()
            if node is not caller and node.running.is_set() and (not is_split or self.linked(caller, node))
        ]
        if len(nodes) > HOLDERS_MAX:
            place = neighbours.place(key)
            nodes = sorted(nodes, key=lambda node: node.place ^ place)[:HOLDERS_MAX]
        return nodes

    def chance(self, probability: float) -> bool:
        """Draw once; no draw is spent on a fault that is switched off."""
        return probability > 0.0 and self.random.random() < probability

    async def travel(self, *ends: PeerId) -> None:
        """One way over the wire, between these peers."""
        wait_s = sum(self._lag_s.get(peer, 0.0) for peer in ends) if self._lag_s else 0.0
        if self.delay_s[1] > 0.0:
            wait_s += self.random.uniform(*self.delay_s)
        if self.chance(self.reordering):
            wait_s += self.random.uniform(0.0, HELD_BACK * self.delay_s[1])
        if wait_s > 0.0:
            await self.clock.sleep(wait_s)


class MemorySwarm:
    """One node of a `MemoryNetwork`; keeps the `Swarm` protocol."""

    def __init__(self, network: MemoryNetwork, signer: Signer, clock: Clock, line: Line) -> None:
        self._network, self._signer = network, signer
        self.peer = signer.peer
        self.line = line
        self.alive = True
        self.running = asyncio.Event()
        """Not set while the node is frozen."""
        self.running.set()
        self._ended: asyncio.Future[None] | None = None
        self.place = neighbours.place(signer.peer)
        """Where it is among the keys of a large network."""
        self._counts: Counter[str] = Counter()
        self._dispatcher = Dispatcher(self._counts)
        self.records = RecordCache(clock=clock, ttl_max_s=network.ttl_max_s, counts=self._counts)
        self.changes: Counter[str] = Counter()
        """How often something may have come under a key."""
        self._has_seen: dict[str, dict[MemorySwarm, int]] = {}
        """Under each key up to which change of another node we have all that it has."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """Those that were not done yet, and some that are by now."""
        self._tasks_max = TASKS_KEPT
        self._context = contextvars.copy_context()

    @property
    def signer(self) -> Signer:
        return self._signer

    @property
    def addresses(self) -> tuple[str, ...]:
        return (ADDRESS_PREFIX + self.peer,)

    def host(self, peer: PeerId) -> str:
        return self._dispatcher.host(peer)

    @property
    def offers_relay(self) -> bool:
        return False  # everybody can be dialled

    def note_peers(
        self,
        *,
        members: Collection[PeerId],
        known: Collection[PeerId],
        banned: Collection[PeerId],
        relays: Mapping[PeerId, Sequence[str]],
    ) -> Collection[PeerId]:
        self._dispatcher.known = known
        return ()

    async def put(self, key: str, body: dict[str, Any], *, ttl_s: float) -> bool:
        record = self.records.sign(self._signer, key, body, ttl_s=ttl_s)
        self.changes[key] += 1
        self._counts["records_put"] += 1
        await self._travel()
        if not self.alive or self._network.chance(self._network.loss):
            return False
        return self.store_bytes(key, self.peer, record.to_bytes())

    def store_bytes(self, key: str, owner: PeerId, data: bytes) -> bool:
        """Offer `data` as it is to some nodes, as anybody may; whether one of them kept it."""
        others = self._network.reachable(self, key)
        chosen = self._network.random.sample(others, min(REPLICAS, len(others)))
        return any([node._admit(key, [(owner, data)]) for node in [self, *chosen]])

    def _admit(self, key: str, owner_and_data: Sequence[tuple[PeerId, bytes]]) -> int:
        before = self.records.version(key)
        count = self.records.admit(key, owner_and_data)
        if self.records.version(key) is not before:
            self.changes[key] += 1
        return count

    async def get(self, key: str) -> dict[PeerId, Record]:
        await self._travel()
        if self.alive and not self._network.chance(self._network.loss):
            has_seen = self._has_seen.setdefault(key, {})
            for node in self._network.reachable(self, key):
                changes = node.changes.get(key, 0)
                if has_seen.get(node, 0) == changes:
                    continue
                if not self._network.linked(node, self):  # the question arrives, the answer does not
                    continue
                fresh = self.records.lacking(key, node.records)
                admitted = self._admit(key, fresh) if fresh else 0
                if admitted == len(fresh):  # what is refused now may be fine later: clocks differ
                    has_seen[node] = changes
        return self.records.read(key)

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
        await self._travel(peer)
        node = self._network.find(self, peer)
        if node is None or not self._network.linked(node, self):
            raise Unreachable(f"no answer from {address}")
        return peer

    async def close(self) -> None:
        if self.alive:
            self._network.kill(self.peer)
        current = asyncio.current_task()
        await asyncio.gather(*(task for task in self._tasks if task is not current), return_exceptions=True)

    def statistics(self) -> SwarmStatistics:
        return SwarmStatistics(**self._counts)

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the node is dead: whoever waits for its answer notices."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
            if not self.alive:
                self._ended.set_result(None)
        return self._ended

    def stop(self) -> None:
        """End all that this node is doing, on either side of a call."""
        self.alive = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
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
        request, size_bytes = _carried(request)
        self._counts["bytes_sent"] += size_bytes
        node = await self._reach(peer)
        if self._network.chance(self._network.duplication):
            node._spawn(node._answer_again(self.peer, request, size_bytes))
        work = node._spawn(node._answer(self.peer, request, size_bytes))
        either: set[asyncio.Future[Any]] = {work, node.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() or work.cancelled():
            raise Unreachable(f"{short(peer)} went away during the call")
        await self._return(node)
        reply, size_bytes = work.result()
        self._counts["bytes_received"] += size_bytes
        return reply

    async def _reach(self, peer: PeerId) -> MemorySwarm:
        """The way there: a dead peer is noticed at once, a loss or a partition never."""
        await self._travel(peer)
        lost = self._network.chance(self._network.loss)
        self._require_lives(peer)
        node = self._network.find(self, peer)
        if lost or node is None:
            await asyncio.Event().wait()
        assert node is not None
        return node

    async def _return(self, node: MemorySwarm) -> None:
        """The way back, on which what is lost is waited for in vain, too."""
        await self._travel(node.peer)
        lost = self._network.chance(self._network.loss)
        self._require_lives(node.peer)
        if lost or not self._network.linked(node, self):
            await asyncio.Event().wait()

    def _require_lives(self, peer: PeerId) -> None:
        if not self.alive or not self._network.lives(peer):
            raise Unreachable(f"no answer from {short(peer)}: nobody is there")

    async def _travel(self, *others: PeerId) -> None:
        if not self.running.is_set():
            await self.running.wait()
        await self._network.travel(self.peer, *others)

    async def _answer(self, caller: PeerId, request: Frame, size_bytes: int) -> tuple[Frame, int]:
        """The reply as it arrives at the other side, and its length."""
        if not self.running.is_set():
            await self.running.wait()
        try:
            if self._network.is_overloaded(self.peer):
                raise Refused("more calls at once than one peer may have now", reason=Reason.BUSY)
            entering = self._dispatcher.caller(caller, self._network.hosts.get(caller, ""))
            with self._dispatcher.entered(entering):
                async with self._dispatcher.turn(entering, request.header, len(request.body)):
                    self._counts["bytes_received"] += size_bytes
                    reply, size_bytes = _carried(await self._dispatcher.answer(caller, request))
                    self._counts["bytes_sent"] += size_bytes
        except Refused as refused:  # too many calls at once
            return _carried(self._dispatcher.refuse(refused))
        if not self.running.is_set():
            await self.running.wait()
        return reply, size_bytes

    async def _answer_again(self, caller: PeerId, request: Frame, size_bytes: int) -> None:
        await self._network.travel(caller, self.peer)
        await self._answer(caller, request, size_bytes)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks[task] = None
        if len(self._tasks) > self._tasks_max:
            self._tasks = {each: None for each in self._tasks if not each.done()}
            self._tasks_max = max(TASKS_KEPT, 2 * len(self._tasks))
        return task


def _carried(frame: Frame) -> tuple[Frame, int]:
    """The frame as it arrives, and its length: a copy, so that nobody shares a header with the other side."""
    head = frames.encode_head(frame)
    copy = Frame(kind=frame.kind, header=json.loads(head[frames.PREFIX_BYTES :]), body=bytes(frame.body))
    return copy, len(head) + len(frame.body)
