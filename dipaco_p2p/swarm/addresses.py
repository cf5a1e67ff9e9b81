"""Multiaddrs of peers, as far as this project uses them: TCP with the peer's id at the end, or through a relay.

    /ip4/203.0.113.7/tcp/31337/p2p/PEER
    /ip4/203.0.113.7/tcp/31337/p2p/RELAY/p2p-circuit/p2p/PEER

People type direct ones, and tickets hold only these. Peers announce both kinds.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, IntegrityError
from ..protocol.signing import PeerId, public_key_of

ADDRESS_CHARS_MAX = 400
ADDRESSES_MAX = 16
CIRCUIT = "/p2p-circuit"
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
        relay, is_relayed, _ = text.partition(f"{CIRCUIT}/p2p/")
        try:
            if is_relayed:
                read_address(relay)
            else:
                read_address(text)
        except ConfigError:
            continue
        place, _, named = text.rpartition("/p2p/")
        if named == peer:
            places.append(place)
    return places


def best_address(addresses: Sequence[str]) -> str:
    """The address to give to others: one that leaves this machine, if there is any."""
    return next((address for address in addresses if not _is_loopback(address)), addresses[0])


def worth_giving(addresses: Sequence[str], *, most: int = GIVEN_MAX) -> list[str]:
    """Those to put into a ticket: direct ones that leave this machine; if none does, the first direct one."""
    direct = [address for address in addresses if not is_circuit(address)]
    outside = [address for address in direct if not _is_loopback(address)]
    return outside[:most] or direct[:1]


def host_of(place: str) -> str:
    """What of a caller's multiaddr costs somebody something: its IPv4 address, or the /64 network of its IPv6 address,
    of which everybody has all; of a relayed connection that of the relay. Empty for this machine, and where there is
    none."""
    parts = place.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return ""
    try:
        address = ipaddress.ip_address(parts[2].partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ""
    return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))


def _is_loopback(address: str) -> bool:
    return "/ip4/127." in address or address.startswith("/ip6/::1/")


def _is_host(kind: str, host: str) -> bool:
    if kind in ("dns", "dns4", "dns6"):
        return _NAME.fullmatch(host) is not None
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return False
    return kind == f"ip{version}"
