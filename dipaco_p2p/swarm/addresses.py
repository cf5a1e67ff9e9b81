"""Multiaddrs of peers, as far as this project uses them: TCP with the peer's id at the end, or through a relay.

    /ip4/203.0.113.7/tcp/31337/p2p/PEER
    /ip4/203.0.113.7/tcp/31337/p2p/RELAY/p2p-circuit/p2p/PEER

People type direct ones, and tickets hold only these. Peers announce both kinds.
"""

from __future__ import annotations

import ipaddress
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, IntegrityError
from ..protocol.signing import PeerId, public_key_of

ADDRESS_CHARS_MAX = 400
ADDRESSES_MAX = 16
CIRCUIT = "/p2p-circuit"
IPV6_BITS = 48
GIVEN_MAX = 4
"""Addresses of one peer in a ticket: machines have some that lead nowhere."""
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\.?")
_HINT = "an address looks like /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a peer listens: `place` is the multiaddr without the peer."""

    peer: PeerId
    place: str


def read_address(text: str) -> Address:
    """The address that `text` says; raises ConfigError."""
    place, _, peer = text.rpartition("/p2p/")
    try:
        read_place(place)
        public_key_of(PeerId(peer))
    except (ConfigError, IntegrityError):
        raise ConfigError(f"not the address of a peer: {text[:ADDRESS_CHARS_MAX]}", hint=_HINT) from None
    return Address(peer=PeerId(peer), place=place)


def peer_at(address: str) -> PeerId:
    """Who should be at `address`, which nobody has checked."""
    return PeerId(address.rpartition("/p2p/")[2])


def is_address(text: object) -> bool:
    """Whether `read_address` would take it."""
    try:
        read_address(str(text))
    except ConfigError:
        return False
    return True


def read_place(text: str) -> tuple[str, int]:
    """Host and port of a multiaddr without a peer, /ip4/HOST/tcp/PORT; raises ConfigError."""
    parts = text.split("/")
    if len(text) <= ADDRESS_CHARS_MAX and len(parts) == 5:
        empty, kind, host, transport, port = parts
        is_port = port.isascii() and port.isdigit() and int(port) < 2**16
        if not empty and transport == "tcp" and is_port and _is_host(kind, host):
            return host, int(port)
    message = f"not a TCP address: {text[:ADDRESS_CHARS_MAX]}"
    raise ConfigError(message, hint="a place to listen on looks like /ip4/0.0.0.0/tcp/31337")


def is_circuit(place: str) -> bool:
    """Whether an address or a place leads through a relay."""
    return f"{CIRCUIT}/" in place or place.endswith(CIRCUIT)


def circuit_through(relay: Address, peer: PeerId) -> str:
    """The address of `peer` at this relay."""
    return f"{relay.place}/p2p/{relay.peer}{CIRCUIT}/p2p/{peer}"


def places_of(peer: PeerId, addresses: Sequence[str]) -> list[str]:
    """Where `peer` says it can be dialled, directly or through relays; others wrote this, so what is malformed or
    another's is left out."""
    places = []
    for text in addresses[:ADDRESSES_MAX]:
        place, _, named = text.rpartition("/p2p/")
        relay = place.removesuffix(CIRCUIT)
        if named == peer and is_address(text if relay == place else relay):
            places.append(place)
    return places


def best_address(addresses: Sequence[str]) -> str:
    """The address to give to others: one that leaves this machine, if there is any."""
    return next((address for address in addresses if not _is_loopback(address)), addresses[0])


def worth_giving(addresses: Sequence[str]) -> list[str]:
    """Those to put into a ticket: direct ones that leave this machine; if none does, the first direct one."""
    direct = [address for address in addresses if not is_circuit(address)]
    outside = [address for address in direct if not _is_loopback(address)]
    return outside[:GIVEN_MAX] or direct[:1]


def worth_trying(addresses: Sequence[str], chance: random.Random, *, most: int) -> tuple[str, ...]:
    """So many of them, at random: one that leads furthest, and others, those of the peer's own machine last."""
    first = min(addresses, key=lambda address: (_nearness(address), chance.random()))
    others = [address for address in addresses if address != first]
    return (first, *sorted(others, key=lambda address: (_is_loopback(address), chance.random())))[:most]


def ip_of(place: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Where a place or an address leads to first, of a relayed one to the relay; None for a name."""
    kind, _, host = place.removeprefix("/").partition("/")
    try:
        address = ipaddress.ip_address(host.partition("/")[0].partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address if kind in ("ip4", "ip6") else None


def host_of(place: str) -> str:
    """What of a caller's multiaddr costs somebody something: its IPv4 address, or the /48 network of its IPv6 address,
    of which one home or one tunnel may have all; of a relayed connection that of the relay. Empty for this machine and
    for a name."""
    address = ip_of(place)
    if address is None or address.is_loopback:
        return ""
    return str(address if address.version == 4 else ipaddress.ip_network((address, IPV6_BITS), strict=False))


def _nearness(address: str) -> int:
    """From where a peer can be reached there: from anywhere, by all that we can see, 0; from its network 1; from its
    machine 2."""
    host = ip_of(address)
    if host is None:
        return 0
    return 2 if host.is_loopback else int(host.is_private or host.is_link_local)


def _is_loopback(address: str) -> bool:
    return (host := ip_of(address)) is not None and host.is_loopback


def _is_host(kind: str, host: str) -> bool:
    if kind in ("dns", "dns4", "dns6"):
        return _NAME.fullmatch(host) is not None
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return False
    return kind == f"ip{version}" and "%" not in host  # no multiaddr holds the zone that Python takes
