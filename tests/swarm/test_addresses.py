from __future__ import annotations

import pytest

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.addresses import places_of, read_address, read_place

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
