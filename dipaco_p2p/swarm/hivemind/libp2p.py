"""The real swarm: libp2p streams and a Kademlia DHT.

hivemind's `P2P` and `DHTNode` run in the program's own event loop, not in the process that `hivemind.DHT` forks, so
that nothing outlives the program but for a second (the daemon ends when its parent does). TCP only; no UPnP. A peer
behind a NAT keeps slots at relays (reservations.py), and who offers it is one (circuits.py). Every wait has a limit of
our own. Traps in hivemind 1.1.12 that are designed around (those of its DHT: dht.py): one seed with a wrong clock
aborts a join (`_join_through`), a request that fails or is given up leaks its connection to the daemon (`_Daemon`), and
an answer to a call that was just given up ends the reading of all others (`_Pending`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2P, PeerID, p2p_daemon
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
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
from ..dialback import DialBack, greets
from ..frames import Caller, Dispatcher
from ..record_cache import RecordCache
from ..relay_slots import RelayLimits, Slots
from .circuits import HOP, Relay, place_bytes
from .daemon import cannot_join, daemons_apart, long_backlog, places_to_listen, sweep_stale_sockets, wait_port_free
from .dht import MESSAGE_BYTES_MAX, RPC_TIMEOUT_S, create_node, hash_key, install
from .guard import RecordGuard
from .reservations import Reservations

PROTOCOL = "/dipaco-p2p/call/1"
DIAL_TIMEOUT_S = 10.0
DHT_TIMEOUT_S = 10.0
STARTUP_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 3.0
PEERS_REMEMBERED = 256
_HINT = "check that it is running and that the address is current"
_log = logging.getLogger(__name__)

# Undo what importing hivemind has just done to the logging and to the sharing of tensors of this process: its choice
# would start a helper process, and leave segments in /dev/shm, as soon as any library shares a tensor (datasets does).
set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.ERROR)
p2p_daemon.loglevel = "ERROR"  # What the daemon is told to log.
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
    install()
    host, port = read_place(listen)
    for place in announce:
        read_place(place)
    signer = identity.load_or_create(identity_path)
    dialled = {address: read_address(address) for address in initial_peers if not address.endswith(signer.peer)}
    sweep_stale_sockets()
    if not client_mode:
        await wait_port_free(host, port)
    p2p = await _start_daemon(identity_path, listen, client_mode, behind_nat=behind_nat)
    try:
        swarm = Libp2pSwarm(p2p, signer, clock=clock, ttl_max_s=ttl_max_s, frame_timeout_s=frame_timeout_s)
        swarm.line = line or swarm.line
        await swarm.start(client_mode=client_mode, behind_nat=behind_nat)
        swarm.announce(announce)
        if relay is not None:
            swarm.offer_relay(relay)
        if dialled:
            await swarm.join(dialled)
    except BaseException:
        await _stop_daemon(p2p)
        raise
    return swarm


class Libp2pSwarm:
    """One peer of the real network; keeps the `Swarm` protocol. Made by `open_libp2p`."""

    def __init__(self, p2p: P2P, signer: Signer, *, clock: Clock, ttl_max_s: float, frame_timeout_s: float) -> None:
        self.peer, self.signer = signer.peer, signer
        self.line = Line()
        self.relay = Relay(Slots(clock, RelayLimits(slots=0)), self._open_stream)
        """What others are dialled through; with slots for nobody unless we offer it."""
        self.reservations: Reservations | None = None
        """Of a peer behind a NAT: its slots at relays."""
        self._addresses: tuple[str, ...] = ()
        self._is_relayed: dict[PeerId, bool] = {}
        """Of peers with whom we had a call, whether the last one went through a relay."""
        self._clock = clock
        self._p2p = p2p
        self._daemon = _Daemon(p2p)
        self._counts: Counter[str] = Counter()
        self._dispatcher = Dispatcher(self._counts)
        self._server = streams.StreamServer(self._dispatcher, self._counts, timeout_s=frame_timeout_s)
        self._records = RecordCache(clock=clock, ttl_max_s=ttl_max_s, counts=self._counts)
        self._guard = RecordGuard(clock=clock, ttl_max_s=ttl_max_s, hash_key=hash_key, counts=self._counts)
        self._client_mode = False
        self._node: DHTNode | None = None
        DialBackMe.serve(self, DialBack(clock, places=self.places, greets=greets).answer)

    @property
    def addresses(self) -> tuple[str, ...]:
        """As `Swarm.addresses`; behind a NAT those at the relays where we have a slot now."""
        return self._addresses if self.reservations is None else self.reservations.addresses

    @property
    def offers_relay(self) -> bool:
        return self.relay.slots.limits.slots > 0

    def note_peers(
        self, *, members: Collection[PeerId], banned: Collection[PeerId], relays: Mapping[PeerId, Sequence[str]]
    ) -> Collection[PeerId]:
        if self.reservations is not None:
            self.reservations.note(relays)
        return self.relay.slots.note(members, banned)

    async def start(self, *, client_mode: bool, behind_nat: bool) -> None:
        """Bring up our node of the DHT and answer calls."""
        self._client_mode = client_mode or behind_nat
        if not self._client_mode:
            self._addresses = tuple(str(address) for address in await self._p2p.get_visible_maddrs())
        self._node = await create_node(self._p2p, self._guard, client_mode=self._client_mode, on_found=self._on_found)
        _quieten(self._p2p)
        with long_backlog():
            await self._p2p.add_binary_stream_handler(PROTOCOL, self._on_stream)
            await self._p2p.add_binary_stream_handler(HOP, self._on_hop)  # in place of the daemon's
        if behind_nat and not client_mode:
            self.reservations = Reservations(self.peer, self._daemon, ways=self.ways, clock=self._clock)

    def announce(self, places: Sequence[str]) -> None:
        """Tell of these places before all others, if we listen at all."""
        if self._addresses:
            own = [f"{place}/p2p/{self.peer}" for place in places]
            self._addresses = tuple(dict.fromkeys([*own, *self._addresses]))

    def offer_relay(self, limits: RelayLimits) -> None:
        """Be a relay from now on."""
        self.relay = Relay(Slots(self._clock, limits), self._open_stream)

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
        try:
            async with asyncio.timeout(DHT_TIMEOUT_S):
                stored = await self._node.store(
                    key, record.to_bytes(), record.expires_s, subkey=self.peer, exclude_self=self._client_mode
                )
        except TimeoutError:
            return False
        return bool(stored)

    async def get(self, key: str) -> dict[PeerId, Record]:
        if self._node is None:
            return dict(self._records.live(key))
        self._guard.know(key)
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DHT_TIMEOUT_S):
                found = await self._node.get(key, latest=True)
        if found is not None and isinstance(found.value, dict):
            pairs = ((owner, entry.value) for owner, entry in found.value.items())
            self._records.admit(key, ((owner, data) for owner, data in pairs if isinstance(data, bytes)))
        return dict(self._records.live(key))

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
                await self._daemon.connect(target.peer, [target.place])
        except (TimeoutError, OSError, P2PDaemonError, IncompleteReadError):
            raise Unreachable(f"no answer from {address}", hint=_HINT) from None
        return target.peer

    async def places(self, peer: PeerId) -> list[str]:
        """Where our connections with `peer` lead to, as the transport sees it: multiaddrs without the peer."""
        return (await self.ways()).get(peer, [])

    async def ways(self) -> dict[PeerId, list[str]]:
        """Where the connections with each peer lead to, as in `places`."""
        return await self._daemon.ways()

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
        await self._server.close()
        await self.relay.close()
        if self.reservations is not None:
            await self.reservations.close()
        with contextlib.suppress(TimeoutError, OSError, P2PDaemonError, IncompleteReadError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await node.shutdown()
        await _stop_daemon(self._p2p)

    def statistics(self) -> SwarmStatistics:
        slots, relayed = self.relay.slots, sum(self._is_relayed.values())
        return SwarmStatistics(
            **self._counts,
            peers_direct=len(self._is_relayed) - relayed,
            peers_relayed=relayed,
            relay_slots=slots.taken,
            relay_circuits=slots.open_circuits,
            relay_bytes=slots.counts.bytes,
        )

    async def _exchange(
        self, peer: PeerId, request: frames.Frame, addresses: Sequence[str], *, dial_s: float
    ) -> frames.Frame:
        if peer == self.peer:  # libp2p does not dial itself.
            return await self._server.answer_self(self.peer, request)
        reader, writer, place = await self._dial(peer, addresses, dial_s=dial_s)
        is_relayed = self._note_way(peer, place)
        try:
            self._counts["bytes_sent"] += (sent := frames.size_bytes(request))
            self._counts["bytes_relayed"] += sent * is_relayed
            reply = await streams.exchange(reader, writer, request)
            self._counts["bytes_received"] += (received := frames.size_bytes(reply))
            self._counts["bytes_relayed"] += received * is_relayed
            return reply
        finally:
            writer.close()

    async def _dial(self, peer: PeerId, addresses: Sequence[str], *, dial_s: float) -> _Stream:
        """A stream to `peer`: by what the daemon knows of it, else by the `addresses` that it announced. Of a peer
        behind a NAT the daemon may know where it cannot be reached, and try that for long: its relays come first."""
        places = places_of(peer, addresses)
        if any(map(is_circuit, places)):
            with contextlib.suppress(P2PDaemonError):  # a connection that there is remains as good as a new one
                await self._daemon.connect(peer, places)
        try:
            async with asyncio.timeout(dial_s if places else None):
                return await self._daemon.open_way(peer)
        except (TimeoutError, P2PDaemonError):
            if not places:
                raise
        await self._daemon.connect(peer, places)
        return await self._daemon.open_way(peer)

    async def _join_through(self, address: Address) -> None:
        assert self._node is not None
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            await self._daemon.connect(address.peer, [address.place])
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

    async def _open_stream(self, peer: PeerId, protocol: str) -> tuple[StreamReader, StreamWriter]:
        return await self._daemon.open_stream(peer, protocol)

    async def _on_hop(self, info: Any, reader: StreamReader, writer: StreamWriter) -> None:
        await self.relay.answer(info, reader, writer)

    async def _on_stream(self, info: Any, reader: StreamReader, writer: StreamWriter) -> None:
        place = str(info.addr)
        caller = Caller(PeerId(info.peer_id.to_base58()), host_of(place))
        await self._server.answer(caller, reader, writer, is_relayed=self._note_way(caller.peer, place))

    def _note_way(self, peer: PeerId, place: str) -> bool:
        """Whether a connection that leads there goes through a relay."""
        self._is_relayed.pop(peer, None)  # the one that was heard of last comes to the end
        self._is_relayed[peer] = is_circuit(place)
        while len(self._is_relayed) > PEERS_REMEMBERED:
            del self._is_relayed[next(iter(self._is_relayed))]
        return self._is_relayed[peer]


_Stream = tuple[StreamReader, StreamWriter, str]
"""Both ends, and where the connection that it goes over leads to."""


class _Daemon:
    """Requests to the daemon that close their connection to it also when they fail or are given up."""

    def __init__(self, p2p: P2P) -> None:
        self._connector = p2p._client.control.daemon_connector

    async def connect(self, peer: PeerId, places: Sequence[str]) -> None:
        """Dial `peer` at `places`; raises P2PDaemonError."""
        raw = p2pd_pb2.ConnectRequest(
            peer=PeerID.from_base58(peer).to_bytes(),
            addrs=list(map(place_bytes, places)),
            timeout=int(DIAL_TIMEOUT_S),
        )
        _, writer, _ = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=raw))
        writer.close()

    async def ways(self) -> dict[PeerId, list[str]]:
        """Where the connections with each peer lead to; raises P2PDaemonError."""
        _, writer, response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        writer.close()
        found: dict[PeerId, list[str]] = {}
        for each in response.peers:
            places = [str(Multiaddr(place)) for place in each.addrs]
            found.setdefault(PeerId(PeerID(each.id).to_base58()), []).extend(places)
        return found

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections with `peer`; raises P2PDaemonError."""
        raw = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer).to_bytes())
        _, writer, _ = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=raw))
        writer.close()

    async def open_stream(self, peer: PeerId, protocol: str = PROTOCOL) -> tuple[StreamReader, StreamWriter]:
        """A stream to `peer`; raises P2PDaemonError."""
        reader, writer, _ = await self.open_way(peer, protocol)
        return reader, writer

    async def open_way(self, peer: PeerId, protocol: str = PROTOCOL) -> _Stream:
        """The same, and where it leads."""
        raw = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol], timeout=int(DIAL_TIMEOUT_S)
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=raw)
        reader, writer, response = await self._ask(request)
        leads_to = response.streamInfo.addr
        return reader, writer, str(Multiaddr(leads_to)) if leads_to else ""

    async def _ask(self, request: Any) -> tuple[StreamReader, StreamWriter, Any]:
        reader, writer = await self._connector.open_connection()
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            raise_if_failed(response)
        except BaseException:
            writer.close()
            raise
        return reader, writer, response


class _P2P(P2P):  # type: ignore[misc]
    """Starts the daemon without its service for strangers of 4 GiB a circuit, which hivemind does not switch off. What
    stays, whatever `use_relay` says, serves 128 KiB; our own handler takes its place."""

    @staticmethod
    def _make_process_args(*words: Any, **options: Any) -> list[str]:
        arguments: list[str] = P2P._make_process_args(*words, relayService=False, **options)
        return arguments


async def _start_daemon(identity_path: Path, listen: str, client_mode: bool, *, behind_nat: bool) -> P2P:
    try:
        with daemons_apart():
            return await _P2P.create(
                identity_path=str(identity_path),
                check_if_identity_free=False,  # It reads RSA keys only.
                host_maddrs=places_to_listen(listen),
                no_listen=client_mode,
                dht_mode="client" if client_mode or behind_nat else "server",
                nat_port_map=False,
                auto_nat=behind_nat,  # It is what switches hole punching on.
                force_reachability="private" if behind_nat else None,
                use_relay=False,
                use_auto_relay=False,
                startup_timeout=STARTUP_TIMEOUT_S,
                persistent_conn_max_msg_size=MESSAGE_BYTES_MAX,
            )
    except P2PDaemonError as error:
        raise EnvironmentUnfit(f"the libp2p daemon did not start: {error}") from None


class _Pending(dict[Any, Any]):
    """Calls that wait for the daemon. One that was given up is not there any more, although it is removed later:
    to give it its result would raise, and end the task that reads all results."""

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()


def _quieten(p2p: P2P) -> None:
    """The daemon tries our socket by connecting and hanging up, for which hivemind's handler prints a traceback."""
    control = p2p._client.control
    control._pending_calls = _Pending(control._pending_calls)
    handler = control._handler

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (IncompleteReadError, ConnectionError, P2PDaemonError):
            writer.close()

    control._handler = handle


async def _stop_daemon(p2p: P2P) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await p2p.shutdown()
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()
