"""Circuits through relays, by libp2p's circuit relay v2: asking a relay for a slot, and being a relay.

The daemon that hivemind ships can relay, but cannot be told for whom nor not to, counts nothing, and asks for a slot
only after three minutes unless it knows four relays. It opens and takes streams of any protocol, though, and so both
ends that concern us are here; the daemons at the ends of a circuit do the rest: they dial, encrypt, and try to punch a
hole. What a relay grants has no limit on the wire (libp2p keeps all but a few protocols off a limited one); ours are
those of relay_slots.py.

Source: libp2p specs, relay/circuit-v2.md: RESERVE and CONNECT on a stream of HOP, CONNECT on one of STOP, each answered
by STATUS; messages are protobuf, after their length as a varint.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.proto import serialize_length_prefixed
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from ...errors import Refused, Unreachable
from ...protocol.reasons import Reason
from ...protocol.signing import PeerId, short
from ..addresses import CIRCUIT, host_of, is_circuit
from ..frames import Caller, Share, Turns
from ..relay_slots import Circuit, Slots
from ..streams import wait_hang_up

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
P2P_CODE = b"\xa5\x03"
"""What goes before a peer's id in a multiaddr: 421 as a varint."""
MESSAGE_BYTES_MAX = 4096
HANDSHAKE_S = 5.0
CHUNK_BYTES = 64 * 1024
UNSENT_S = 10.0
"""What is left of a closed circuit is sent for so long."""
LOOK_S = 15.0
"""How often a circuit is looked at through which nothing goes."""
HANDSHAKES_MAX = 256
"""Streams whose question has not come yet,"""
HANDSHAKES_PER_PEER_MAX = 64
"""and of one peer."""
DATA_BYTES_MIN = 16 * 1024 * 1024
"""A relay that ends a circuit after less than that carries no module."""
RESERVE, CONNECT, STATUS = 0, 1, 2
STOP_CONNECT = 0
OK, FULL, DENIED, FAILED, NO_SLOT = 100, 201, 202, 203, 204
_CODES = {str(Reason.FULL): FULL, str(Reason.BUSY): FULL, str(Reason.UNREACHABLE): NO_SLOT}
_log = logging.getLogger(__name__)

OpenStream = Callable[[PeerId, str], Awaitable[tuple[StreamReader, StreamWriter]]]
"""Opens a stream of a protocol to a connected peer; raises P2PDaemonError."""


def _messages() -> tuple[type[Any], type[Any]]:
    """HopMessage and StopMessage. Their type is said even when it is 0: the daemon's version requires the field."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="dipaco/circuit.proto", package="dipaco.circuit", syntax="proto2")
    layout = {
        "Peer": [("id", 1, kinds.TYPE_BYTES, "")],
        "Reservation": [("expire", 1, kinds.TYPE_UINT64, "")],
        "Limit": [("duration", 1, kinds.TYPE_UINT32, ""), ("data", 2, kinds.TYPE_UINT64, "")],
        "HopMessage": [
            ("type", 1, kinds.TYPE_UINT32, ""),
            ("peer", 2, kinds.TYPE_MESSAGE, "Peer"),
            ("reservation", 3, kinds.TYPE_MESSAGE, "Reservation"),
            ("limit", 4, kinds.TYPE_MESSAGE, "Limit"),
            ("status", 5, kinds.TYPE_UINT32, ""),
        ],
        "StopMessage": [
            ("type", 1, kinds.TYPE_UINT32, ""),
            ("peer", 2, kinds.TYPE_MESSAGE, "Peer"),
            ("limit", 3, kinds.TYPE_MESSAGE, "Limit"),
            ("status", 4, kinds.TYPE_UINT32, ""),
        ],
    }
    for name, fields in layout.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of in fields:
            type_name = f".dipaco.circuit.{of}" if of else None
            message.field.add(name=field, number=number, type=kind, type_name=type_name, label=kinds.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    hop, stop = (pool.FindMessageTypeByName(f"dipaco.circuit.{name}") for name in ("HopMessage", "StopMessage"))
    return message_factory.GetMessageClass(hop), message_factory.GetMessageClass(stop)


HopMessage, StopMessage = _messages()


def place_bytes(place: str) -> bytes:
    """A place as the daemon reads it. hivemind writes a peer's id in a form that the daemon does not take."""
    direct, is_relayed, _ = place.partition(CIRCUIT)
    if not is_relayed:
        return bytes(Multiaddr(place).to_bytes())
    where, _, relay = direct.rpartition("/p2p/")
    peer = PeerID.from_base58(relay).to_bytes()
    assert len(peer) < 128, "its length is a varint of one byte"
    return b"".join((Multiaddr(where).to_bytes(), P2P_CODE, bytes([len(peer)]), peer, Multiaddr(CIRCUIT).to_bytes()))


async def read_message(kind: type[Any], reader: StreamReader) -> Any:
    """The next message; raises DecodeError for other bytes."""
    length = 0
    for shift in (0, 7):  # two bytes hold more than the most that is taken
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 127) << shift
        if byte < 128:
            break
    if byte >= 128 or length > MESSAGE_BYTES_MAX:
        raise DecodeError("too long a message")
    message = kind.FromString(await reader.readexactly(length))
    if not message.HasField("type"):  # it would read as 0, which asks for a slot
        raise DecodeError("a message without its type")
    return message


async def write_message(writer: StreamWriter, message: Any) -> None:
    """A message after its length, in one piece."""
    with io.BytesIO() as buffer:
        serialize_length_prefixed(message, buffer)
        writer.write(buffer.getvalue())
    await writer.drain()


def _close(writer: StreamWriter) -> None:
    """Close it; what is unsent of a circuit may still go, but not wait for ever for one who reads nothing."""
    writer.close()
    asyncio.get_running_loop().call_later(UNSENT_S, writer.transport.abort)


async def ask_slot(open_stream: OpenStream, relay: PeerId) -> float:
    """Ask `relay`, to which we are connected, for a slot or a renewal; the Unix time at which it ends.

    Raises Unreachable (no relay, or silent), Refused (it has none for us, or one that carries too little)."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await open_stream(relay, HOP)
            try:
                await write_message(writer, HopMessage(type=RESERVE))
                answer = await read_message(HopMessage, reader)
            finally:
                writer.close()
    except (TimeoutError, OSError, IncompleteReadError, DecodeError, P2PDaemonError) as error:
        raise Unreachable(f"{short(relay)} gives no slot: {type(error).__name__}") from None
    if answer.type != STATUS or answer.status != OK:
        raise Refused(f"{short(relay)} has no slot for us ({answer.status})", reason=Reason.BUSY)
    if answer.HasField("limit") and 0 < answer.limit.data < DATA_BYTES_MIN:
        raise Refused(f"{short(relay)} relays {answer.limit.data} bytes at most", reason=Reason.FULL)
    return float(answer.reservation.expire)


class Relay:
    """Answers HOP."""

    def __init__(self, slots: Slots, open_stream: OpenStream) -> None:
        self.slots = slots
        self._open_stream = open_stream
        self._ways = slots.line(), slots.line()
        """From those who dial, and to them."""
        self._turns = tuple(Turns(2, per_peer=1) for _ in self._ways)
        """On these: a chunk of one host, then one of another, however many circuits each has."""
        self._ways_of: dict[Circuit, asyncio.Task[None]] = {}
        """One direction of each circuit: when it ends, so does the other."""
        self._asking = Share(HANDSHAKES_MAX, per_peer=HANDSHAKES_PER_PEER_MAX)
        self._answered = Share(HANDSHAKES_MAX, per_peer=HANDSHAKES_PER_PEER_MAX)
        """Open files of ours, too, until their peers hang up. More are closed at once."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def answer(self, info: Any, reader: StreamReader, writer: StreamWriter) -> None:
        """One question, and the whole life of the circuit that it asks for."""
        task = asyncio.create_task(self._serve(info, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task})

    async def close(self) -> None:
        """End all circuits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, info: Any, reader: StreamReader, writer: StreamWriter) -> None:
        place = str(info.addr)
        caller = Caller(PeerId(info.peer_id.to_base58()), host_of(place))
        try:
            is_heard = self._asking.take(caller)
            if is_heard and (circuit := await self._answer(caller, place, reader, writer)) is not None:
                return await self._join(circuit, reader, writer)
            with contextlib.suppress(Refused), self._answered.place(caller):
                if not is_heard:
                    await write_message(writer, HopMessage(type=STATUS, status=DENIED))
                await wait_hang_up(reader)
        except (TimeoutError, OSError, IncompleteReadError, DecodeError, P2PDaemonError) as error:
            _log.debug("relaying for %s: %r", short(caller.peer), error)
        finally:
            _close(writer)

    async def _answer(self, caller: Caller, place: str, reader: StreamReader, writer: StreamWriter) -> Circuit | None:
        """The circuit that is asked for; None if all has been said."""
        try:
            if is_circuit(place):  # relays are not chained
                await write_message(writer, HopMessage(type=STATUS, status=DENIED))
                return None
            async with asyncio.timeout(HANDSHAKE_S):
                question = await read_message(HopMessage, reader)
            try:
                if question.type != RESERVE:
                    return self.slots.open(caller, PeerId(PeerID(question.peer.id).to_base58()))
                for left in self.slots.left_behind(caller.peer, place):
                    if left in self._ways_of:
                        self._ways_of[left].cancel()
                reservation = {"expire": int(self.slots.reserve(caller, place))}
                await write_message(writer, HopMessage(type=STATUS, status=OK, reservation=reservation))
            except Refused as refused:
                await write_message(writer, HopMessage(type=STATUS, status=_CODES.get(refused.reason, DENIED)))
            return None
        finally:
            self._asking.give_back(caller)

    async def _join(self, circuit: Circuit, reader: StreamReader, writer: StreamWriter) -> None:
        """Bring the circuit to its target, then pass on what comes until it ends."""
        try:
            await self._bring(circuit, reader, writer)
            await wait_hang_up(reader)
        finally:
            self.slots.close(circuit)

    async def _bring(self, circuit: Circuit, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                there_reader, there_writer = await self._open_stream(circuit.target, STOP)
        except (TimeoutError, P2PDaemonError, OSError):
            await write_message(writer, HopMessage(type=STATUS, status=FAILED))
            return
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                peer = {"id": PeerID.from_base58(circuit.source.peer).to_bytes()}
                await write_message(there_writer, StopMessage(type=STOP_CONNECT, peer=peer))
                answer = await read_message(StopMessage, there_reader)
            await write_message(writer, HopMessage(type=STATUS, status=OK if answer.status == OK else FAILED))
            if answer.status == OK:
                await self.pass_on(circuit, (reader, writer), (there_reader, there_writer))
        finally:
            _close(there_writer)

    async def pass_on(
        self, circuit: Circuit, here: tuple[StreamReader, StreamWriter], there: tuple[StreamReader, StreamWriter]
    ) -> None:
        """Both ways, until one end hangs up or the circuit has had its share."""
        ways = [
            asyncio.create_task(self._pass(circuit, here[0], there[1], way=0)),
            asyncio.create_task(self._pass(circuit, there[0], here[1], way=1)),
            asyncio.create_task(self._look_after(circuit)),
        ]
        self._ways_of[circuit] = ways[0]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._ways_of[circuit]
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _look_after(self, circuit: Circuit) -> None:
        """Until its time is over, though nothing goes through it."""
        while self.slots.carry(circuit, 0):
            await self.slots.clock.sleep(LOOK_S)

    async def _pass(self, circuit: Circuit, reader: StreamReader, writer: StreamWriter, *, way: int) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if not self.slots.carry(circuit, len(data)):
                    return
                async with self._turns[way].turn(circuit.source):
                    await self._ways[way].take(len(data))
                writer.write(data)
                await writer.drain()
