"""Dialling back tells a peer whether it can be reached, and cannot be aimed at anybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from dipaco_p2p.clock import ManualClock, SystemClock
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.calls import DialBackMe, DialedBack
from dipaco_p2p.swarm.dialback import (
    DIAL_BACK_AT_ONCE,
    DIAL_BACK_EVERY_S,
    DIAL_BACK_PER_HOST,
    DIAL_BACK_REMEMBERED,
    GREETING,
    DialBack,
    Reach,
    ask_reach,
    greets,
)
from dipaco_p2p.swarm.memory import MemoryNetwork

PORT = 31337


def peer(number: int) -> PeerId:
    return Signer(bytes([number % 256, number // 256]) + bytes(30)).peer


class Wires:
    """Where connections come from, and who was dialled."""

    def __init__(self, *, reached: bool = True) -> None:
        self.clock = ManualClock(1000.0)
        self.dialled: list[tuple[str, int]] = []
        self.of: dict[PeerId, list[str]] = {}
        self.hold: asyncio.Event | None = None
        self._reached = reached
        self.served = DialBack(self.clock, places=self._places, greets=self._greets)

    async def ask(self, who: PeerId, port: object = PORT) -> str:
        try:
            reply = await DialBackMe.door(self.served.answer)(who, {"port": port, "host": "192.0.2.1"}, b"")
        except Refused as refused:
            return refused.reason
        except IntegrityError:  # the dispatcher refuses it with this reason
            return "malformed"
        return str(reply.header["reached"])

    async def _places(self, who: PeerId) -> Sequence[str]:
        return self.of.get(who, ["/ip4/198.51.100.9/tcp/50123"])

    async def _greets(self, host: str, port: int) -> bool:
        self.dialled.append((host, port))
        if self.hold is not None:
            await self.hold.wait()
        return self._reached


@pytest.mark.parametrize("reached", [True, False])
def test_the_answer_says_whether_the_askers_own_host_greets(reached: bool) -> None:
    wires = Wires(reached=reached)
    assert asyncio.run(wires.ask(peer(1))) == str(reached)
    assert wires.dialled == [("198.51.100.9", PORT)], "the request named another host, which is none of its business"


@pytest.mark.parametrize("port", [0, 22, 1023, 65536, -1, "31337", None, True, 31337.0])
def test_only_ports_of_users_are_dialled(port: object) -> None:
    wires = Wires()
    assert (asyncio.run(wires.ask(peer(1), port)), wires.dialled) == ("malformed", [])


async def test_one_peer_is_dialled_once_a_while() -> None:
    wires = Wires()
    assert [await wires.ask(peer(1)), await wires.ask(peer(1))] == ["True", "busy"]
    await wires.clock.advance(DIAL_BACK_EVERY_S)
    assert await wires.ask(peer(1)) == "True"


async def test_many_names_at_one_host_are_not_served_more_than_a_home() -> None:
    wires = Wires()
    said = [await wires.ask(peer(number)) for number in range(20)]
    assert said.count("True") == DIAL_BACK_PER_HOST == len(wires.dialled)
    wires.of[peer(99)] = ["/ip4/198.51.100.10/tcp/1024"]
    assert await wires.ask(peer(99)) == "True"


async def test_all_addresses_of_one_ipv6_network_count_as_one_host() -> None:
    """Attack: three of them whose ports swallow what comes keep all that is dialled at once busy, for ever."""
    wires = Wires()
    for number in range(10):
        wires.of[peer(number)] = [f"/ip6/2001:db8:7:{number}::{number + 1}/tcp/50123"]
    assert [await wires.ask(peer(number)) for number in range(10)].count("busy") == 10 - DIAL_BACK_PER_HOST
    assert len(wires.dialled) == DIAL_BACK_PER_HOST


async def test_few_are_dialled_at_once_and_the_rest_is_told() -> None:
    wires = Wires()
    wires.hold = asyncio.Event()
    for number in range(10):
        wires.of[peer(number)] = [f"/ip4/198.51.100.{number}/tcp/1024"]
    tasks = [asyncio.create_task(wires.ask(peer(number))) for number in range(10)]
    done, _ = await asyncio.wait(tasks, timeout=1)
    assert {task.result() for task in done} == {"busy"}
    assert len(done) == 10 - DIAL_BACK_AT_ONCE and len(wires.dialled) == DIAL_BACK_AT_ONCE
    wires.hold.set()
    await asyncio.gather(*tasks)


async def test_what_is_remembered_of_askers_is_bounded() -> None:
    wires = Wires()
    for number in range(2 * DIAL_BACK_REMEMBERED):
        await wires.ask(peer(number))
    assert len(wires.served._served_s) == DIAL_BACK_REMEMBERED


@pytest.mark.parametrize("place", ["", "/p2p-circuit", "/ip4/198.51.100.9/udp/4001/quic-v1"])
def test_without_a_direct_connection_nobody_is_dialled(place: str) -> None:
    wires = Wires()
    wires.of[peer(1)] = [place] if place else []
    assert (asyncio.run(wires.ask(peer(1))), wires.dialled) == ("unreachable", [])


async def test_only_a_listener_that_speaks_libp2p_is_one() -> None:
    said: list[bytes] = [
        GREETING,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x13/multistream/2.0.0\n",
        b"",
        GREETING[:5],
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said[0])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = []
    while said:
        found.append(await greets("127.0.0.1", port))
        said.pop(0)
    server.close()
    assert found == [True, False, False, False, False]
    assert not await greets("127.0.0.1", port), "nobody listens there any more"


def test_of_several_witnesses_one_who_reaches_us_is_enough_and_silence_says_nothing() -> None:
    async def scenario(*reached: bool | None) -> tuple[Reach, str]:
        network = MemoryNetwork(0, SystemClock())
        me = network.join(Signer(bytes([200]) * 32))
        witnesses = []
        for number, one in enumerate(reached):
            swarm = network.join(Signer(bytes([number + 1]) * 32))
            if one is not None:
                wires = Wires(reached=one)
                DialBackMe.serve(swarm, wires.served.answer)
            witnesses.append((swarm.peer, ()))
        return await ask_reach(_Listening(me), witnesses)  # type: ignore[arg-type]

    # Where the router is, whose port is forwarded: nobody else could dial the address of the machine itself.
    assert asyncio.run(scenario(False, True, None)) == (Reach.YES, f"/ip4/198.51.100.9/tcp/{PORT}")
    assert asyncio.run(scenario(False, None)) == (Reach.NO, "")
    assert asyncio.run(scenario(None)) == (Reach.UNKNOWN, "")
    assert asyncio.run(scenario()) == (Reach.UNKNOWN, "")


@pytest.mark.parametrize("host", ["", "203.0.113.9/tcp/1/p2p/x", "9" * 300, "fe80::1%eth0", "\x1b[2J"])
def test_a_witness_that_names_no_host_is_not_believed(host: str) -> None:
    """Attack: a seed of the ticket says where it has dialled the newcomer. That went into every heartbeat, and with a
    long word no heartbeat could be said any more: the volunteer was never seen."""

    async def lie(sender: PeerId, request: DialBackMe) -> DialedBack:
        return DialedBack(reached=True, host=host)

    async def scenario() -> tuple[Reach, str]:
        network = MemoryNetwork(0, SystemClock())
        me, liar = (network.join(Signer(bytes([number]) * 32)) for number in (200, 1))
        DialBackMe.serve(liar, lie)
        return await ask_reach(_Listening(me), [(liar.peer, ())])  # type: ignore[arg-type]

    assert asyncio.run(scenario()) == (Reach.UNKNOWN, "")


class _Listening:
    """A memory swarm that says it listens on TCP."""

    def __init__(self, swarm: object) -> None:
        self.call = swarm.call  # type: ignore[attr-defined]
        self.addresses = (f"/ip4/127.0.0.1/tcp/{PORT}/p2p/{swarm.peer}",)  # type: ignore[attr-defined]


@pytest.mark.libp2p
async def test_a_real_daemon_greets_and_tells_where_a_connection_comes_from(tmp_path: Path) -> None:
    from dipaco_p2p.swarm.addresses import read_address
    from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p

    swarms = [
        await open_libp2p(tmp_path / f"{name}.key", ttl_max_s=60, clock=SystemClock(), client_mode=name == "client")
        for name in ("seed", "listener", "client")
    ]
    seed, listener, client = swarms
    try:
        for swarm in (listener, client):
            await swarm.join({seed.addresses[0]: read_address(seed.addresses[0])})
        assert await ask_reach(listener, [(seed.peer, ())]) == (Reach.YES, "")
        assert await ask_reach(client, [(seed.peer, ())]) == (Reach.NO, "")
        ahead_s, took_s = await client.clock_ahead_s(seed.peer)
        assert abs(ahead_s) < 3 and took_s >= 0
    finally:
        for swarm in swarms:
            await swarm.close()
