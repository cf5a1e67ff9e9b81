"""Where strangers may make us dial: seldom to one host or network, and freely only where they were met."""

from __future__ import annotations

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.dialling import (
    DIALS_MAX,
    DIALS_PER_HOST_MAX,
    DIALS_PER_NETWORK_MAX,
    MET_MAX,
    SPAN_S,
    Dialling,
)

PEERS = [Signer(number.to_bytes(32, "big")).peer for number in range(1, 400)]
HOME, RELAY = PEERS[-2:]


def dialled(dialling: Dialling, places: list[str]) -> int:
    """How many connections are opened for keys of one stranger that each name some of these."""
    return sum(len(dialling.allowed(peer, [place])) for peer, place in zip(PEERS * 10, places, strict=False))


async def test_a_crowd_of_keys_that_name_one_machine_has_it_dialled_a_few_times_a_minute() -> None:
    clock = ManualClock()
    dialling = Dialling(clock)
    named = [f"/ip4/192.168.1.1/tcp/{port}" for port in range(1, 400)]
    named += [f"/ip4/192.168.1.1/tcp/1/p2p/{peer}/p2p-circuit" for peer in PEERS]
    named += [f"/ip6/::ffff:192.168.1.1/tcp/{port}" for port in range(1, 400)]
    assert dialled(dialling, named) == DIALS_PER_HOST_MAX
    await clock.advance(SPAN_S - 1.0)
    assert dialled(dialling, named) == 0
    await clock.advance(1.0)
    assert dialled(dialling, named) == DIALS_PER_HOST_MAX


async def test_a_network_all_names_and_all_together_have_a_limit_too() -> None:
    near = [f"/ip4/192.168.1.{host}/tcp/1" for host in range(256)]
    assert dialled(Dialling(ManualClock()), near) == DIALS_PER_NETWORK_MAX
    one = [f"/ip6/2001:db8:1:1::{host:x}/tcp/1" for host in range(256)]
    assert dialled(Dialling(ManualClock()), one) == DIALS_PER_HOST_MAX, "of a /64 network everybody has all addresses"
    names = [f"/dns/a{number}.example.org/tcp/1" for number in range(256)]
    assert dialled(Dialling(ManualClock()), names) == DIALS_PER_HOST_MAX, "they may all lead to one machine"
    far = [f"/ip4/45.{net}.{host}.1/tcp/1" for net in range(10) for host in range(256)]
    assert dialled(Dialling(ManualClock()), far) == DIALS_MAX


async def test_where_a_peer_was_met_it_is_dialled_as_often_as_need_be_and_nowhere_else() -> None:
    dialling = Dialling(ManualClock())
    assert not dialling.meet(HOME, "/ip4/45.0.0.1/tcp/50000")
    for _ in range(1000):
        assert dialling.allowed(HOME, ["/ip4/45.0.0.1/tcp/4001"])
    assert dialled(dialling, ["/ip4/45.0.0.1/tcp/4001"] * 100) == DIALS_PER_HOST_MAX, "others that name it have a share"
    elsewhere = [dialling.allowed(HOME, ["/ip4/46.0.0.1/tcp/4001"]) for _ in range(1000)]
    assert sum(map(len, elsewhere)) == DIALS_PER_HOST_MAX


async def test_a_name_that_a_ticket_gave_stays_a_place_where_its_peer_was_met() -> None:
    """A connection shows the number that the name stood for, and that may be another one tomorrow."""
    dialling, place = Dialling(ManualClock()), "/dns4/seed.example.org/tcp/4001"
    dialling.give(HOME, place)
    dialling.meet(HOME, "/ip4/45.0.0.1/tcp/4001")
    assert all(dialling.allowed(HOME, [place]) for _ in range(1000))


async def test_homes_behind_a_relay_that_was_met_are_dialled_through_it() -> None:
    dialling, place = Dialling(ManualClock()), f"/ip4/45.0.0.1/tcp/4001/p2p/{RELAY}/p2p-circuit"
    dialling.meet(RELAY, "/ip4/45.0.0.1/tcp/4001")
    assert dialled(dialling, [place] * 390) == 390
    assert dialling.meet(HOME, place) and dialling.relayed == 1 and dialling.met == 2


def test_of_many_peers_those_met_last_are_remembered() -> None:
    dialling = Dialling(ManualClock())
    for number, peer in enumerate(PEERS):
        dialling.meet(peer, f"/ip4/45.0.0.{number % 256}/tcp/1")
    assert dialling.met == MET_MAX and dialling.has_met(PEERS[-1]) and not dialling.has_met(PeerId(PEERS[0]))
