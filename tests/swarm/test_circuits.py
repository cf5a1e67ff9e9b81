"""Through a relay with real daemons: slots, calls, bytes; relays that drop, delay, cut and lie."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from dipaco_p2p.clock import ManualClock, SystemClock, settle
from dipaco_p2p.errors import Refused, Unreachable
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.addresses import is_circuit, read_address
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.calls import DialBackMe
from dipaco_p2p.swarm.frames import Caller
from dipaco_p2p.swarm.hivemind import circuits
from dipaco_p2p.swarm.hivemind.circuits import (
    HOP,
    HopMessage,
    Relay,
    ask_slot,
    place_bytes,
    read_message,
    write_message,
)
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p
from dipaco_p2p.swarm.hivemind.reservations import LOST_S, RENEW_S, Reservations
from dipaco_p2p.swarm.relay_slots import RelayLimits, Slots

pytestmark = pytest.mark.libp2p
MIB = 1024 * 1024


class Net:
    """Swarms of one test; the first is the one that others join through."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.swarms: list[Libp2pSwarm] = []

    async def relay(self, limits: RelayLimits | None = None) -> Libp2pSwarm:
        return await self._open(relay=limits or RelayLimits())

    async def home(self, *relays: Libp2pSwarm) -> Libp2pSwarm:
        """A peer that others reach through these relays; on loopback nothing else keeps them from it."""
        home = await self._open(behind_nat=True)
        await home.join({relays[0].addresses[0]: read_address(relays[0].addresses[0])})
        assert home.reservations is not None
        home.reservations.begin({relay.peer: relay.addresses for relay in relays})
        return home

    async def client(self, relay: Libp2pSwarm) -> Libp2pSwarm:
        client = await self._open(client_mode=True)
        await client.join({relay.addresses[0]: read_address(relay.addresses[0])})
        return client

    async def close(self) -> None:
        for swarm in reversed(self.swarms):
            await swarm.close()

    async def _open(self, **options: Any) -> Libp2pSwarm:
        path = self._folder / f"{len(self.swarms)}.key"
        self.swarms.append(await open_libp2p(path, clock=SystemClock(), **options))
        self.swarms[-1].serve("echo", echo)
        return self.swarms[-1]


async def echo(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
    return Reply({"from": sender}, body)


@pytest.fixture
def net(tmp_path: Path) -> Net:
    return Net(tmp_path)


async def reachable(home: Libp2pSwarm) -> tuple[str, ...]:
    assert home.reservations is not None and await home.reservations.wait_reachable(10)
    return home.addresses


async def test_a_peer_without_an_address_of_its_own_is_called_through_a_relay(net: Net) -> None:
    relay = await net.relay()
    home, client = await net.home(relay), await net.client(relay)
    addresses = await reachable(home)
    assert addresses and all(map(is_circuit, addresses)) and addresses[0].endswith(home.peer)
    body = b"x" * MIB
    reply = await client.call(home.peer, "echo", {}, body, timeout_s=10, addresses=addresses)
    assert (reply.header["from"], reply.body) == (client.peer, body), "authenticated through the relay too"
    for swarm in (home, client):
        found = swarm.statistics()
        assert found.bytes_relayed == found.bytes_sent + found.bytes_received > 2 * MIB
    assert relay.statistics().bytes_relayed == 0
    assert relay.relay.slots.passed_bytes > 2 * MIB and relay.relay.slots.open_circuits == 1


async def test_who_has_no_slot_cannot_be_called_and_dialling_back_goes_to_nobody_through_a_relay(net: Net) -> None:
    relay = await net.relay()
    home, client = await net.home(relay), await net.client(relay)
    [address, *_] = await reachable(home)
    nobody = address.replace(home.peer, Signer(bytes([9]) * 32).peer)
    with pytest.raises(Unreachable):
        await client.call(PeerId(nobody.rpartition("/")[2]), "echo", {}, timeout_s=5, addresses=[nobody])
    await client.call(home.peer, "echo", {}, timeout_s=10, addresses=[address])
    with pytest.raises(Refused) as refused:  # the home sees the client through the relay alone
        await DialBackMe(port=31337).call(client, home.peer, timeout_s=10, addresses=[address])
    assert refused.value.reason == Reason.UNREACHABLE


async def test_a_slot_is_sought_elsewhere_when_its_relay_goes_and_again_there_when_it_comes_back(
    net: Net, tmp_path: Path
) -> None:
    first = await net.relay()
    second = await net._open(relay=RelayLimits())
    await second.join({first.addresses[0]: read_address(first.addresses[0])})
    third = await net._open(relay=RelayLimits())
    home = await net.home(first, second, third)
    await reachable(home)
    assert home.reservations is not None
    held = set(home.reservations._held)
    assert held == {first.peer, second.peer}, "two are kept"
    await second.close()
    await until(lambda: home.reservations is not None and set(home.reservations._held) == {first.peer, third.peer})
    client = await net.client(first)
    assert await client.call(home.peer, "echo", {}, timeout_s=10, addresses=home.addresses)


async def until(holds: Any, within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come to hold in time"
        await asyncio.sleep(0.05)


# -- hostile relays


class Dropping(Relay):
    """Grants slots and takes circuits, and carries nothing."""

    async def pass_on(self, circuit: Any, here: Any, there: Any) -> None:
        await asyncio.sleep(60)


class Cutting(Relay):
    """Ends each circuit after 128 KiB, as the daemon's own does."""

    async def pass_on(self, circuit: Any, here: Any, there: Any) -> None:
        circuit.bytes_left = 128 * 1024
        await super().pass_on(circuit, here, there)


class Slow(Relay):
    """Takes its time with every chunk."""

    async def _pass(self, circuit: Any, reader: StreamReader, writer: StreamWriter, *, way: int) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(circuits.CHUNK_BYTES):
                await asyncio.sleep(0.2)
                writer.write(data)
                await writer.drain()


class Lying(Relay):
    """Says yes to every question for a slot, and remembers none."""

    async def _answer(self, caller: Any, place: str, reader: StreamReader, writer: StreamWriter) -> None:
        question = await read_message(HopMessage, reader)
        granted = HopMessage(type=circuits.STATUS, status=circuits.OK, reservation={"expire": 2**62})
        denied = HopMessage(type=circuits.STATUS, status=circuits.NO_SLOT)
        await write_message(writer, granted if question.type == circuits.RESERVE else denied)


@pytest.mark.parametrize("kind", [Dropping, Lying, Cutting, Slow])
async def test_a_hostile_relay_costs_time_and_the_other_one_carries_on(
    net: Net, kind: type[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = await net.relay()
    monkeypatch.setattr("dipaco_p2p.swarm.hivemind.libp2p.Relay", kind)
    hostile = await net._open(relay=RelayLimits())
    home, client = await net.home(hostile, honest), await net.client(honest)
    await until(lambda: home.reservations is not None and len(home.reservations._held) == 2)
    body, calls = b"x" * (256 * 1024), 0
    deadline_s = time.monotonic() + 60
    while True:  # as callers do: another try after a while
        assert time.monotonic() < deadline_s, "the honest relay was never used"
        with contextlib.suppress(Unreachable):
            calls += 1
            reply = await client.call(home.peer, "echo", {}, body, timeout_s=10, addresses=home.addresses)
            break
    assert reply.body == body and calls <= 4


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff", b"\x80\x80\x01", b"\x02\x08", b"\x00", b"\x05hello", b"\x04\x08\x07\x28\x64"]
)
async def test_nonsense_to_a_relay_is_refused_and_harms_nobody(net: Net, data: bytes) -> None:
    relay = await net.relay()
    client = await net.client(relay)
    reader, writer = await client._daemon.open_stream(relay.peer, HOP)
    writer.write(data)
    writer.write_eof()
    await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert relay.relay.slots.taken == 0
    assert await ask_slot(client._daemon.open_stream, relay.peer) > time.time()


async def test_a_peer_that_asks_for_a_thousand_slots_has_one(net: Net) -> None:
    relay = await net.relay()
    client = await net.client(relay)
    for _ in range(20):
        await asyncio.gather(*(ask_slot(client._daemon.open_stream, relay.peer) for _ in range(50)))
    assert relay.relay.slots.taken == 1


async def test_who_does_not_offer_it_relays_nothing_though_its_daemon_would(net: Net) -> None:
    first = await net._open()
    client = await net.client(first)
    for asked, asker in ((first, client), (client, first)):
        with pytest.raises(Refused, match="has no slot for us"):
            await ask_slot(asker._daemon.open_stream, asked.peer)


# -- without daemons


class Relays:
    """What the keeper of reservations sees and does, on a clock of its own."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.up: dict[str, float] = {}
        """For how long each relay that lives grants a slot."""
        self.asked: list[str] = []
        self.hung_up: list[str] = []
        self.dead: set[str] = set()
        """Connected, as far as the daemon knows, and silent."""
        self.unspeakable: set[str] = set()
        """At addresses that nobody foresaw."""
        self.odd_looks = 0
        """How many looks come upon a way that nobody foresaw."""
        self.kept = Reservations(PeerId("me"), self, clock=self.clock)

    async def ways(self) -> Mapping[PeerId, Sequence[str]]:
        if self.odd_looks:
            self.odd_looks -= 1
            raise ValueError("a way that nobody foresaw")
        return {PeerId(name): ["/ip4/45.0.0.1/tcp/4001"] for name in self.up}

    async def connect(self, peer: PeerId, places: Sequence[str]) -> None:
        if peer in self.unspeakable:
            raise ValueError("no multiaddr")

    async def disconnect(self, peer: PeerId) -> None:
        self.hung_up.append(peer)

    async def open_stream(self, peer: PeerId, protocol: str) -> Any:
        raise AssertionError("replaced")

    async def ask(self, open_stream: Any, relay: PeerId) -> float:
        self.asked.append(relay)
        if relay not in self.up or relay in self.dead:
            raise Unreachable("away")
        if not self.up[relay]:
            raise Refused("no slot", reason=Reason.FULL)
        return self.clock.now_s() + self.up[relay]


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Relays:
    made = Relays()
    monkeypatch.setattr("dipaco_p2p.swarm.hivemind.reservations.ask_slot", made.ask)
    made.kept._relays = {PeerId(name): () for name in "abcd"}
    return made


@pytest.mark.parametrize(("life_s", "renewed_s"), [(20.0, 10.0), (100.0, RENEW_S)])
async def test_slots_are_renewed_in_time_and_two_are_enough(relays: Relays, life_s: float, renewed_s: float) -> None:
    relays.up = dict.fromkeys("abcd", life_s)
    await relays.kept.look()
    await relays.clock.advance(renewed_s - 1.0)
    await relays.kept.look()
    assert relays.asked == ["a", "b"]
    await relays.clock.advance(1.0)
    await relays.kept.look()
    assert relays.asked == ["a", "b"] * 2 and len(relays.kept.addresses) == 2


async def test_a_connection_that_is_dead_and_does_not_know_it_is_closed_and_dialled_anew(relays: Relays) -> None:
    relays.up, relays.kept._relays = {"a": 100.0}, {PeerId("a"): ()}
    await relays.kept.look()
    relays.dead = {"a"}
    for _ in range(int(RENEW_S) + 4):
        await relays.kept.look()
        await relays.clock.advance(1.0)
    assert relays.hung_up == ["a"] and list(relays.kept._held) == []
    relays.dead = set()
    await relays.clock.advance(5.0)
    await relays.kept.look()
    assert list(relays.kept._held) == ["a"] and relays.hung_up == ["a"]


async def test_a_relay_that_restarts_is_asked_at_once_and_meanwhile_the_address_stays_announced(relays: Relays) -> None:
    relays.up, relays.kept._relays = {"a": 100.0}, {PeerId("a"): ()}
    await relays.kept.look()
    before = relays.kept.addresses
    relays.up = {}
    await relays.clock.advance(1.0)
    await relays.kept.look()
    assert relays.asked == ["a", "a"] and list(relays.kept._held) == [] and relays.kept.addresses == before
    await relays.clock.advance(LOST_S)
    await relays.kept.look()
    assert relays.kept.addresses == ()
    relays.up = {"a": 100.0}
    await relays.clock.advance(5.0)
    await relays.kept.look()
    assert relays.kept.addresses == before


@pytest.mark.parametrize(("up", "asked", "rest_s"), [({}, 62, 5.0), ({"a": 0.0}, 10, 60.0)])
async def test_a_relay_that_is_away_is_asked_soon_again_and_one_without_a_slot_later(
    relays: Relays, up: dict[str, float], asked: int, rest_s: float
) -> None:
    relays.up, relays.kept._relays = up, {PeerId("a"): ()}
    for _ in range(300):
        await relays.kept.look()
        await relays.clock.advance(1.0)
    assert asked - 2 <= len(relays.asked) <= asked + 2
    relays.up = {"a": 100.0}
    await relays.clock.advance(rest_s)
    await relays.kept.look()
    assert list(relays.kept._held) == ["a"]


async def test_whatever_goes_wrong_with_one_relay_the_slots_at_others_are_kept(relays: Relays) -> None:
    relays.up, relays.unspeakable = {"b": 100.0}, {PeerId(Signer(bytes([7]) * 32).peer)}
    [odd] = relays.unspeakable
    relays.kept._relays = {PeerId(odd): (f"/ip4/45.0.0.1/tcp/4001/p2p/{odd}",), PeerId("b"): ()}
    await relays.kept.look()
    assert list(relays.kept._held) == ["b"] and relays.asked == ["b"]
    await relays.clock.advance(RENEW_S)
    await relays.kept.look()
    assert relays.asked == ["b", "b"]


async def test_looking_after_slots_goes_on_when_one_look_fails(relays: Relays) -> None:
    relays.up, relays.odd_looks = {"a": 100.0}, 1
    relays.kept.begin({PeerId("a"): ()})
    await relays.clock.advance(2.0)
    assert list(relays.kept._held) == ["a"]
    await relays.kept.close()


async def test_a_slot_that_is_said_to_last_for_ever_is_renewed_all_the_same(relays: Relays) -> None:
    relays.up = {"a": 1e12}
    relays.kept._relays = {PeerId("a"): ()}
    await relays.kept.look()
    await relays.clock.advance(1801.0)
    await relays.kept.look()
    assert relays.asked == ["a", "a"]


def test_a_place_at_a_relay_is_written_as_the_daemon_reads_it() -> None:
    from hivemind.utils.multiaddr import Multiaddr

    place = f"/ip4/45.0.0.1/tcp/4001/p2p/{Signer(bytes(32)).peer}/p2p-circuit"
    assert str(Multiaddr(place_bytes(place))) == place
    assert Slots(SystemClock()).taken == 0


class Ear:
    """What a relay writes to, and what it said."""

    def __init__(self) -> None:
        self.heard, self.transport = StreamReader(), SimpleNamespace(abort=lambda: None)

    def write(self, data: bytes) -> None:
        self.heard.feed_data(data)

    async def drain(self) -> None: ...

    def close(self) -> None: ...


@contextlib.asynccontextmanager
async def silent(relay: Relay, keys: int, streams: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    """So many open streams at one host that say nothing, each as long as its task is not done."""
    readers = [StreamReader() for _ in range(streams)]
    asked = [
        asyncio.create_task(relay.answer(calling(number % keys, "45.0.0.9"), reader, Ear()))  # type: ignore[arg-type]
        for number, reader in enumerate(readers)
    ]
    await settle()
    yield asked
    for reader in readers:
        reader.feed_eof()
    await asyncio.gather(*asked)


def calling(number: int, host: str) -> Any:
    peer = Signer(bytes([number + 1]) * 32).peer
    return SimpleNamespace(addr=f"/ip4/{host}/tcp/4001", peer_id=PeerID.from_base58(peer))


async def nobody(peer: PeerId, protocol: str) -> Any:
    raise AssertionError("no circuit is asked for")


@pytest.mark.parametrize("keys", [1, 200])
async def test_streams_that_say_nothing_take_a_share_and_keep_no_member_out(keys: int) -> None:
    relay = Relay(Slots(ManualClock()), nobody)
    async with silent(relay, keys, 600):
        question, answer = Ear(), Ear()
        await write_message(question, HopMessage(type=circuits.RESERVE))  # type: ignore[arg-type]
        question.heard.feed_eof()
        await relay.answer(calling(250, "198.51.100.7"), question.heard, answer)  # type: ignore[arg-type]
        assert (await read_message(HopMessage, answer.heard)).status == circuits.OK


async def test_a_peer_that_never_hangs_up_has_its_share_of_streams_and_no_more() -> None:
    relay = Relay(Slots(ManualClock()), nobody)
    async with silent(relay, 1, 600) as asked:
        waiting, denied = circuits.HANDSHAKES_PER_PEER_MAX, circuits.HANDSHAKES_PER_PEER_MAX
        assert sum(not task.done() for task in asked) == waiting + denied, "each is an open file of the relay"


@pytest.mark.parametrize("is_banned", [False, True])
async def test_a_circuit_that_carries_nothing_ends_all_the_same(is_banned: bool) -> None:
    clock = ManualClock()
    slots = Slots(clock, RelayLimits(circuit_s=10.0 * circuits.LOOK_S))
    target = Signer(bytes([2]) * 32).peer
    slots.note([target], ())
    slots.reserve(Caller(target))
    ends: Any = [(StreamReader(), Ear()) for _ in range(2)]
    circuit = slots.open(Caller(Signer(bytes([1]) * 32).peer), target)
    passing = asyncio.create_task(Relay(slots, nobody).pass_on(circuit, *ends))
    await clock.advance(9.0 * circuits.LOOK_S)
    assert not passing.done()
    if is_banned:
        slots.note([], [target])
        await clock.advance(0.5 * circuits.LOOK_S)
        assert not passing.done(), "it is looked at now and then"
    await clock.advance(circuits.LOOK_S)
    assert passing.done()


async def test_one_host_with_many_circuits_leaves_half_of_the_line_to_another() -> None:
    """Attack: keys at one address open the 128 circuits that it may have, and send what they can: all of the line but
    a hundredth was theirs."""
    clock = ManualClock()
    slots = Slots(clock, RelayLimits(mbit=8.0))
    target = Signer(bytes([250]) * 32).peer
    slots.note([target], ())
    slots.reserve(Caller(target))
    relay, passing, ears = Relay(slots, nobody), list[asyncio.Task[None]](), list[Ear]()
    for number in range(1, 22):
        source = Caller(Signer(bytes([number]) * 32).peer, "203.0.113.7" if number < 21 else "198.51.100.7")
        here, there, ear = StreamReader(), StreamReader(), Ear()
        here.feed_data(bytes(2 * MIB))
        ends: Any = [(here, Ear()), (there, ear)]
        passing.append(asyncio.create_task(relay.pass_on(slots.open(source, target), *ends)))
        ears.append(ear)
    for _ in range(200):
        await clock.advance(0.01)
    passed = [len(ear.heard._buffer) for ear in ears]  # type: ignore[attr-defined]
    assert 2 * MIB < sum(passed) < 3 * MIB and passed[-1] > sum(passed) / 3, passed
    for task in passing:
        task.cancel()
    await asyncio.gather(*passing, return_exceptions=True)
