"""Requests to p2pd, the libp2p daemon that hivemind ships, and how it starts and ends."""

from __future__ import annotations

import asyncio
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings import control as hivemind_control
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from ...errors import EnvironmentUnfit
from ...protocol.signing import PeerId
from ..addresses import Address
from ..dialling import Dialling
from .circuits import place_bytes, write_message
from .daemon import daemons_apart, places_to_listen
from .dht import MESSAGE_BYTES_MAX

PROTOCOL = "/dipaco-p2p/call/1"
DIAL_TIMEOUT_S = 10.0
STARTUP_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 3.0

Stream = tuple[StreamReader, StreamWriter, str]
"""Both ends, and where the connection that it goes over leads to."""


def install() -> None:
    """Make hivemind, in this whole process, write what it tells the daemon in one piece: it writes the length byte by
    byte, and each is a system call here and wakes the daemon. Calling it again does nothing."""
    hivemind_control.write_pbmsg = write_message


class P2pd:
    """Requests to the daemon that close their connection to it also when they fail or are given up."""

    def __init__(self, p2p: P2P, dialling: Dialling) -> None:
        self._connector = p2p._client.control.daemon_connector
        self._dialling = dialling

    async def connect(self, peer: PeerId, places: Sequence[str]) -> None:
        """Dial `peer` where it says it is, unless that is dialled too often; raises P2PDaemonError."""
        if not (allowed := self._dialling.allowed(peer, places)):
            raise P2PDaemonError("its addresses were dialled too often")
        await self._dial(peer, allowed)

    async def connect_given(self, address: Address) -> None:
        """Dial an address that a person or a ticket gave; raises P2PDaemonError."""
        await self._dial(address.peer, [address.place])
        self._dialling.give(address.peer, address.place)

    async def _dial(self, peer: PeerId, places: Sequence[str]) -> None:
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

    async def open_way(self, peer: PeerId, protocol: str = PROTOCOL) -> Stream:
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
            await write_message(writer, request)
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


async def start(identity_path: Path, listen: str, client_mode: bool, *, behind_nat: bool) -> P2P:
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


class _Handling(dict[Any, asyncio.Task[None]]):
    """Calls of others that are being answered. hivemind keeps those that their callers give up for good, and to ask and
    give up costs a caller a few hundred bytes."""

    def __setitem__(self, call: object, task: asyncio.Task[None]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))  # also if it was given up before it began


def quieten(p2p: P2P) -> None:
    """The daemon tries our socket by connecting and hanging up, for which hivemind's handler prints a traceback."""
    control = p2p._client.control
    control._pending_calls = _Pending(control._pending_calls)
    control._handler_tasks = _Handling(control._handler_tasks)
    handler = control._handler

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (IncompleteReadError, ConnectionError, P2PDaemonError):
            writer.close()

    control._handler = handle


async def stop(p2p: P2P) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await p2p.shutdown()
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()
