"""The real swarm: libp2p streams and a Kademlia DHT.

hivemind's `P2P` and `DHTNode` run in the program's own event loop, not in the process that `hivemind.DHT` forks, so
that nothing outlives the program but for a second (the daemon ends when its parent does). TCP only; no UPnP. A peer
behind a NAT keeps slots at relays (reservations.py), and who offers it is one (circuits.py). Every wait has a limit of
our own. Traps in hivemind 1.1.12 that are designed around (those of its DHT: dht.py): one seed with a wrong clock
aborts a join (`_join_through`), a request that fails or is given up leaks its connection to the daemon, a call that its
caller gives up is kept for good, and an answer to a call that was just given up ends the reading of all others (all
three: p2pd.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID, p2p_daemon
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.proto import dht_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time
from torch.multiprocessing import set_sharing_strategy

from ...clock import Clock
from ...errors import EnvironmentUnfit, Unreachable
from ...protocol.records import TTL_MAX_S, Record
from ...protocol.signing import PeerId, Signer, short
from .. import frames, identity, streams
from ..addresses import Address, host_of, is_circuit, places_of, read_address, read_place
from ..api import FRAME_TIMEOUT_S, Handler, Reply, SwarmStatistics
from ..blobs.bandwidth import Line
from ..calls import DialBackMe
from ..connections import Connections
from ..dialback import DialBack, greets
from ..dialling import Dialling
from ..frames import Dispatcher
from ..record_cache import RecordCache
from ..relay_slots import RelayLimits, Slots
from . import dht, p2pd
from .circuits import HOP, Relay
from .daemon import cannot_join, long_backlog, sweep_stale_sockets, wait_port_free
from .dht import RPC_TIMEOUT_S, create_node, hash_key
from .guard import RecordGuard
from .p2pd import CLOSE_TIMEOUT_S, DIAL_TIMEOUT_S, PROTOCOL, P2pd, Stream
from .reservations import Reservations

DHT_TIMEOUT_S = 10.0
_HINT = "check that it is running and that the address is current"
_log = logging.getLogger(__name__)

# Undo what importing hivemind has just done to the logging and to the sharing of tensors of this process: its choice
# would start a helper process, and leave segments in /dev/shm, as soon as any library shares a tensor (datasets does).
set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.ERROR)
p2p_daemon.loglevel = "ERROR"  # What the daemon is told to log.
logging.getLogger("hivemind.dht.protocol").setLevel(logging.CRITICAL)  # A key that is left out is an "error" there.
logging.getLogger("hivemind.p2p.p2p_daemon").setLevel(logging.CRITICAL)  # Every failed dial is an "error" there.
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole process.


async def open_libp2p(
    identity_path: Path,
    *,
    initial_peers: Sequence[str] = (),
    listen: str = "/ip4/127.0.0.1/tcp/0",
    announce: Sequence[str] = (),
    client_mode: bool = False,
    ttl_max_s: float = TTL_MAX_S,
    clock: Clock,
    frame_timeout_s: float = FRAME_TIMEOUT_S,
    line: Line | None = None,
    behind_nat: bool = False,
    relay: RelayLimits | None = None,
) -> Libp2pSwarm:
    """Start a daemon and join the DHT of `initial_peers`; with none, begin a new one.

    One answering peer is enough. `announce` are places at which others dial us besides: a router's own address, say,
    where it forwards a port. A peer in `client_mode` does not listen and stores nothing for others. One that is
    `behind_nat` stores nothing either, and is dialled through relays, if it finds any, and through holes that both ends
    punch. With `relay` others are dialled through this peer. `line` limits what blobs take of this machine's line.
    Raises ConfigError (a malformed address), Unreachable (none of the peers answers), EnvironmentUnfit (a taken
    port, a wrong clock, an unsafe key file), IntegrityError (a malformed key file).
    """
    dht.install()
    p2pd.install()
    host, port = read_place(listen)
    for place in announce:
        read_place(place)
    signer = identity.load_or_create(identity_path)
    dialled = {address: read_address(address) for address in initial_peers if not address.endswith(signer.peer)}
    sweep_stale_sockets()
    if not client_mode:
        await wait_port_free(host, port)
    host = await p2pd.start(identity_path, listen, client_mode, behind_nat=behind_nat)
    try:
        swarm = Libp2pSwarm(host, signer, clock=clock, ttl_max_s=ttl_max_s, frame_timeout_s=frame_timeout_s)
        swarm.line = line or swarm.line
        await swarm.start(client_mode=client_mode, behind_nat=behind_nat)
        swarm.announce(announce)
        if relay is not None:
            swarm.offer_relay(relay)
        if dialled:
            await swarm.join(dialled)
    except BaseException:
        await p2pd.stop(host)
        raise
    return swarm


class Libp2pSwarm:
    """One peer of the real network; keeps the `Swarm` protocol. Made by `open_libp2p`."""

    def __init__(self, p2p: P2P, signer: Signer, *, clock: Clock, ttl_max_s: float, frame_timeout_s: float) -> None:
        self.peer, self.signer = signer.peer, signer
        self.line = Line()
        self._dialling = Dialling(clock)
        self._daemon = P2pd(p2p, self._dialling)
        self.relay = Relay(Slots(clock, RelayLimits(slots=0)), self._daemon.open_stream)
        """What others are dialled through; with slots for nobody unless we offer it."""
        self.reservations: Reservations | None = None
        """Of a peer behind a NAT: its slots at relays."""
        self._addresses: tuple[str, ...] = ()
        self._connections = Connections(clock)
        self._clock = clock
        self._p2p = p2p
        self._counts: Counter[str] = Counter()
        self._dispatcher = Dispatcher(self._counts)
        self._server = streams.StreamServer(self._dispatcher, self._counts, timeout_s=frame_timeout_s)
        self._records = RecordCache(clock=clock, ttl_max_s=ttl_max_s, counts=self._counts)
        self._guard = RecordGuard(clock=clock, ttl_max_s=ttl_max_s, hash_key=hash_key, counts=self._counts)
        self._client_mode = False
        self._node: DHTNode | None = None
        self._searching: set[asyncio.Task[None]] = set()
        """For further nodes that are to keep records of ours."""
        DialBackMe.serve(self, DialBack(clock, places=self.places, greets=greets).answer)

    @property
    def addresses(self) -> tuple[str, ...]:
        """As `Swarm.addresses`; behind a NAT those at the relays where we have a slot now."""
        return self._addresses if self.reservations is None else self.reservations.addresses

    def host(self, peer: PeerId) -> str:
        return self._dispatcher.host(peer)

    @property
    def offers_relay(self) -> bool:
        return self.relay.slots.limits.slots > 0

    def note_peers(
        self,
        *,
        members: Collection[PeerId],
        known: Collection[PeerId],
        banned: Collection[PeerId],
        relays: Mapping[PeerId, Sequence[str]],
    ) -> Collection[PeerId]:
        self._dispatcher.known = known
        if self.reservations is not None:
            self.reservations.note(relays)
        return self.relay.slots.note(members, banned)

    async def start(self, *, client_mode: bool, behind_nat: bool) -> None:
        """Bring up our node of the DHT and answer calls."""
        self._client_mode = client_mode or behind_nat
        if not self._client_mode:
            self._addresses = tuple(str(address) for address in await self._p2p.get_visible_maddrs())
        self._node = await create_node(self._p2p, self._guard, client_mode=self._client_mode, on_found=self._on_found)
        p2pd.quieten(self._p2p)
        with long_backlog():
            await self._p2p.add_binary_stream_handler(PROTOCOL, self._on_stream)
            await self._p2p.add_binary_stream_handler(HOP, self._on_hop)  # in place of the daemon's
        if behind_nat and not client_mode:
            self.reservations = Reservations(self.peer, self._daemon, clock=self._clock)

    def announce(self, places: Sequence[str]) -> None:
        """Tell of these places before all others, if we listen at all."""
        if self._addresses:
            own = [f"{place}/p2p/{self.peer}" for place in places]
            self._addresses = tuple(dict.fromkeys([*own, *self._addresses]))

    def offer_relay(self, limits: RelayLimits) -> None:
        """Be a relay from now on."""
        self.relay = Relay(Slots(self._clock, limits), self._daemon.open_stream)

    async def join(self, dialled: dict[str, Address]) -> None:
        """Join through whichever of `dialled` answer; raises as `open_libp2p`."""
        problems = await asyncio.gather(*map(self._join_through, dialled.values()), return_exceptions=True)
        if all(problems):
            unreachable = Unreachable(f"no answer from {', '.join(dialled)}", hint=_HINT)
            raise next((problem for problem in problems if isinstance(problem, EnvironmentUnfit)), unreachable)
        assert self._node is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DHT_TIMEOUT_S):
                await self._node.find_nearest_nodes([self._node.node_id])

    async def put(self, key: str, body: dict[str, Any], *, ttl_s: float) -> bool:
        if self._node is None:
            return False
        self._guard.know(key)
        record = self._records.sign(self.signer, key, body, ttl_s=ttl_s)
        self._counts["records_put"] += 1
        return await self._bring(key, record)

    async def _bring(self, key: str, record: Record) -> bool:
        """Bring a record to the nodes of our table that are nearest to its key, and to those that a search finds;
        whether one stored it. Nobody waits for the search if one has: whoever answers it may name nodes that nobody
        runs, beside the key, and as many as there are places."""
        assert self._node is not None
        node, key_id, value = self._node, DHTID.generate(source=key), MSGPackSerializer.dumps(record.to_bytes())
        near = dict(node.protocol.routing_table.get_nearest_neighbors(key_id, dht.REPLICAS))
        stored: list[bool] = []

        async def store_at(peers: Iterable[PeerID]) -> None:
            words = [key_id], [value], [record.expires_s], [record.peer]
            answers = await asyncio.gather(*(node.protocol.call_store(peer, *words) for peer in peers))
            stored.extend(map(bool, answers))

        async def search() -> None:
            try:
                async with asyncio.timeout(DHT_TIMEOUT_S):
                    found = await node.find_nearest_nodes([key_id], k_nearest=dht.REPLICAS, exclude_self=True)
                    await store_at(peer for node_id, peer in found[key_id].items() if node_id not in near)
            except Exception as error:  # whatever hostile answers can raise: the record is at the nodes of our table
                _log.debug("the search for nodes near %s: %r", key, error)

        if not self._client_mode:
            stored.append(node.protocol.storage.store(key_id, value, record.expires_s, subkey=record.peer))
        searching = asyncio.create_task(search())
        self._searching.add(searching)
        searching.add_done_callback(self._searching.discard)
        await store_at(near.values())
        if not any(stored):
            await asyncio.wait({searching})
        return any(stored)

    async def get(self, key: str) -> dict[PeerId, Record]:
        if self._node is None:
            return dict(self._records.live(key))
        self._guard.know(key)
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DHT_TIMEOUT_S):
                found = await self._node.get(key, latest=True, beam_size=dht.NEAREST)
        if found is not None and isinstance(found.value, dict):
            pairs = ((owner, entry.value) for owner, entry in found.value.items())
            self._records.admit(key, ((owner, data) for owner, data in pairs if isinstance(data, bytes)))
        return self._records.read(key)

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
        request = frames.request(method, header, body)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(peer, request, addresses, dial_s=timeout_s / 2)
        except (TimeoutError, IncompleteReadError, OSError, ValueError, P2PDaemonError) as error:
            self._counts["calls_failed"] += 1
            _log.debug("call of %s to %s: %r", method, peer, error)
            raise Unreachable(f"no answer from {short(peer)}: {streams.why_broken(error, timeout_s)}") from None
        return Reply(*frames.read_reply(reply))

    def serve(self, method: str, handler: Handler) -> None:
        self._dispatcher.serve(method, handler)

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        target = read_address(address)
        try:
            async with asyncio.timeout(timeout_s):
                await self._daemon.connect_given(target)
        except (TimeoutError, OSError, P2PDaemonError, IncompleteReadError):
            raise Unreachable(f"no answer from {address}", hint=_HINT) from None
        return target.peer

    async def places(self, peer: PeerId) -> list[str]:
        """Where our connections with `peer` lead to, as the transport sees it: multiaddrs without the peer."""
        return (await self._daemon.ways()).get(peer, [])

    async def clock_ahead_s(self, peer: PeerId) -> tuple[float, float]:
        """How far the clock of `peer` is ahead of ours, and the time that its answer took. Raises Unreachable."""
        assert self._node is not None
        protocol, asked_s = self._node.protocol, get_dht_time()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False)
                answer = await protocol.get_stub(PeerID.from_base58(peer)).rpc_ping(request, timeout=RPC_TIMEOUT_S)
        except Exception as error:  # whatever a hostile answer can raise, it is no time
            raise Unreachable(f"{short(peer)} does not say what time it is: {type(error).__name__}") from None
        now_s = get_dht_time()
        return answer.dht_time - (asked_s + now_s) / 2, now_s - asked_s

    async def close(self) -> None:
        if self._node is None:
            return
        node, self._node = self._node, None
        for searching in self._searching:
            searching.cancel()
        await asyncio.gather(*self._searching, return_exceptions=True)
        await self._server.close()
        await self.relay.close()
        if self.reservations is not None:
            await self.reservations.close()
        with contextlib.suppress(TimeoutError, OSError, P2PDaemonError, IncompleteReadError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await node.shutdown()
        await p2pd.stop(self._p2p)

    def statistics(self) -> SwarmStatistics:
        slots, dialling = self.relay.slots, self._dialling
        return SwarmStatistics(
            **self._counts,
            peers_direct=dialling.met - dialling.relayed,
            peers_relayed=dialling.relayed,
            relay_slots=slots.taken,
            relay_circuits=slots.open_circuits,
            relay_bytes=slots.passed_bytes,
        )

    async def _exchange(
        self, peer: PeerId, request: frames.Frame, addresses: Sequence[str], *, dial_s: float
    ) -> frames.Frame:
        if peer == self.peer:  # libp2p does not dial itself.
            return await self._server.answer_self(self.peer, request)
        reader, writer, place = await self._dial(peer, addresses, dial_s=dial_s)
        is_relayed = self._dialling.meet(peer, place)
        try:
            self._counts["bytes_sent"] += (sent := frames.size_bytes(request))
            self._counts["bytes_relayed"] += sent * is_relayed
            with self._connections.calling(peer, place):
                reply = await streams.exchange(reader, writer, request)
                self._connections.hear(peer, place)
            self._counts["bytes_received"] += (received := frames.size_bytes(reply))
            self._counts["bytes_relayed"] += received * is_relayed
            return reply
        finally:
            writer.close()

    async def _dial(self, peer: PeerId, addresses: Sequence[str], *, dial_s: float) -> Stream:
        """A stream to `peer`: by what the daemon knows of it, else by the `addresses` that it announced. Of a peer
        behind a NAT the daemon may know where it cannot be reached, and try that for long: its relays come first."""
        await self._hang_up_if_dead(peer)
        places = places_of(peer, addresses)
        if places and not self._dialling.has_met(peer) and peer not in await self._daemon.ways():
            await self._daemon.connect(peer, places)  # else the daemon dials all that it was told before, uncounted
            return await self._daemon.open_way(peer)
        if any(map(is_circuit, places)) and peer not in await self._daemon.ways():
            with contextlib.suppress(P2PDaemonError):
                await self._daemon.connect(peer, places)
        try:
            async with asyncio.timeout(dial_s if places else None):
                return await self._daemon.open_way(peer)
        except (TimeoutError, P2PDaemonError):
            if not places:
                raise
        await self._daemon.connect(peer, places)
        return await self._daemon.open_way(peer)

    async def _hang_up_if_dead(self, peer: PeerId) -> None:
        if self._connections.seem_dead(peer):
            _log.info("hanging up on %s: a connection seems dead", short(peer))
            with contextlib.suppress(OSError, IncompleteReadError, P2PDaemonError):
                await self._daemon.disconnect(peer)

    async def _join_through(self, address: Address) -> None:
        assert self._node is not None
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            await self._daemon.connect_given(address)
            try:
                pong = await self._node.protocol.call_ping(PeerID.from_base58(address.peer), validate=True, strict=True)
            except ValidationError as error:
                raise cannot_join(address.place, str(error)) from None
        if pong is None:
            raise Unreachable(f"{short(address.peer)} has no part in a DHT")

    def _on_found(self, key_hash: bytes, entries: list[tuple[object, bytes]]) -> None:
        key = self._guard.name_of(key_hash)
        if key is not None:
            self._records.admit(key, entries)

    async def _on_hop(self, info: Any, reader: StreamReader, writer: StreamWriter) -> None:
        await self.relay.answer(info, reader, writer)

    async def _on_stream(self, info: Any, reader: StreamReader, writer: StreamWriter) -> None:
        place = str(info.addr)
        caller = self._dispatcher.caller(PeerId(info.peer_id.to_base58()), host_of(place))
        self._connections.hear(caller.peer, place)
        await self._hang_up_if_dead(caller.peer)
        await self._server.answer(caller, reader, writer, is_relayed=self._dialling.meet(caller.peer, place))
