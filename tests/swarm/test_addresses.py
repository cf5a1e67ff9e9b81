from __future__ import annotations

import random

import pytest

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.addresses import places_of, read_address, read_place, worth_trying

PEER, OTHER = Signer(bytes([1]) * 32).peer, Signer(bytes([2]) * 32).peer


@pytest.mark.parametrize("place", ["/ip4/127.0.0.1/tcp/31337", "/ip6/::1/tcp/1", "/dns/seed.example.org/tcp/65535"])
def test_an_address_is_a_place_and_a_peer(place: str) -> None:
    address = read_address(f"{place}/p2p/{PEER}")
    assert (address.place, address.peer) == (place, PEER)


@pytest.mark.parametrize(
    "place",
    [
        "",
        "127.0.0.1:31337",
        "/ip4/127.0.0.1/udp/1",
        "/ip4/127.0.0.1/udp/1/quic",
        "/ip4/256.0.0.1/tcp/1",
        "/ip6/127.0.0.1/tcp/1",
        "/ip4/127.0.0.1/tcp/65536",
        "/ip4/127.0.0.1/tcp/-1",
        "/ip6/fe80::1%eth0/tcp/1",  # Python takes a zone, and no multiaddr holds one
        "/ip6/fe80::1%a b/tcp/1",
        "/dns/a b/tcp/1",
        "/dns/-a/tcp/1",
        "/unix/tmp/socket",
        "/ip4/127.0.0.1/tcp/1/",
    ],
)
def test_malformed_places_are_refused(place: str) -> None:
    with pytest.raises(ConfigError):
        read_place(place)
    with pytest.raises(ConfigError, match="not the address of a peer"):
        read_address(f"{place}/p2p/{PEER}")


def test_of_announced_addresses_only_the_peers_own_good_ones_are_dialled() -> None:
    good = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    announced = ["junk", f"/ip4/127.0.0.1/tcp/2/p2p/{OTHER}", good, "x" * 10_000]
    assert places_of(PEER, announced) == ["/ip4/127.0.0.1/tcp/1"]
    assert len(places_of(PEER, [good] * 1000)) <= 16


@pytest.mark.parametrize("end", ["/p2p-circuit/p2p/{other}/p2p/{me}", "/p2p-circuit/p2p/junk/p2p/{me}"])
def test_a_circuit_leads_from_one_relay_to_the_peer_and_no_further(end: str) -> None:
    relay = f"/ip4/45.0.0.1/tcp/1/p2p/{OTHER}"
    assert places_of(PEER, [relay + end.format(me=PEER, other=OTHER)]) == []
    assert places_of(PEER, [f"{relay}/p2p-circuit/p2p/{PEER}"]) == [f"{relay}/p2p-circuit"]


def test_every_address_that_is_taken_can_be_written_for_the_daemon() -> None:
    circuits = pytest.importorskip("dipaco_p2p.swarm.hivemind.circuits")
    hosts = ["ip4/1.2.3.4", "ip6/::", "ip6/::ffff:1.2.3.4", "ip6/1:2:3:4:5:6:7:8", "ip6/fe80::1%x", "ip6/::%\u00e9"]
    hosts += [f"dns/{name}" for name in ("a.", "xn--a", "ab--c", "1.2", "a" * 253)]
    for end in ("", f"/p2p/{OTHER}/p2p-circuit"):
        announced = [f"/{host}/tcp/{port}{end}/p2p/{PEER}" for host in hosts for port in ("0", "0065535")]
        found = places_of(PEER, announced[:16]) + places_of(PEER, announced[16:])
        assert len([circuits.place_bytes(place) for place in found]) == 18


def test_of_what_a_stranger_says_one_place_that_leads_far_is_tried_and_in_time_each_that_leaves_its_machine() -> None:
    places = ["/ip4/127.0.0.1/tcp/1", "/ip4/172.17.0.1/tcp/1", "/ip6/fd00::1/tcp/1", "/ip4/45.0.0.1/tcp/1"]
    places += ["/ip4/192.168.1.2/tcp/1", "/ip6/2a01::1/tcp/1"]
    chance = random.Random(0)
    tried = [worth_trying(places, chance, most=2) for _ in range(200)]
    assert all(set(each) & {"/ip4/45.0.0.1/tcp/1", "/ip6/2a01::1/tcp/1"} for each in tried)
    assert {place for each in tried for place in each} == set(places[1:])
    assert worth_trying(places[:1], chance, most=2) == ("/ip4/127.0.0.1/tcp/1",)
