"""Where other peers' words may make us dial: anywhere, but seldom, unless we met the peer there.

Addresses in heartbeats are their author's word, and keys are free: a stranger could name one machine, of the swarm or
not, in the names of many keys, and every honest peer would dial it again and again. Rules:

1. where a peer was met, because it called from there or was reached there, it is dialled as often as need be; so is
   whoever is behind a relay that was met where it is dialled;
2. all other dials are counted by target: by host (of IPv6 its /64 network), by network, and all names of the DNS as one
   host.

Addresses that a person typed, or that a ticket names, are not counted, and stay places where that peer was met: a name,
too, which a connection does not show.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, deque
from collections.abc import Sequence

from ..clock import Clock
from ..protocol.signing import PeerId
from .addresses import ip_of, is_circuit

SPAN_S = 60.0
DIALS_PER_HOST_MAX = 20
"""In SPAN_S: a relay that restarts is dialled twelve times."""
DIALS_PER_NETWORK_MAX = 60
DIALS_MAX = 300
MET_MAX = 256


class Dialling:
    """Remembers ways to peers, and counts dials."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._met: dict[PeerId, str] = {}
        """Where the last call with each peer went or came from."""
        self._given: dict[PeerId, str] = {}
        """Where somebody said that it answers who is no stranger."""
        self._dialled: deque[tuple[float, str, str]] = deque()
        """When, and to which host and network, the last at the end."""

    @property
    def met(self) -> int:
        """Peers with whom we had a call."""
        return len(self._met)

    @property
    def relayed(self) -> int:
        """Those of them whose last one went through a relay."""
        return sum(map(is_circuit, self._met.values()))

    def has_met(self, peer: PeerId) -> bool:
        """Whether we had a call with `peer`."""
        return peer in self._met

    def meet(self, peer: PeerId, place: str) -> bool:
        """The transport has a connection with `peer` that leads there; whether through a relay."""
        self._met.pop(peer, None)  # the one that was heard of last comes to the end
        self._met[peer] = place
        while len(self._met) > MET_MAX:
            del self._met[next(iter(self._met))]
        return is_circuit(place)

    def give(self, peer: PeerId, place: str) -> None:
        """A person or a ticket says that `peer` answers there, and it did."""
        self._given[peer] = place
        self.meet(peer, place)

    def allowed(self, peer: PeerId, places: Sequence[str]) -> list[str]:
        """Those of `places`, where `peer` says it is, that may be dialled now; they are counted."""
        now_s = self._clock.now_s()
        while self._dialled and not 0.0 <= now_s - self._dialled[0][0] < SPAN_S:
            self._dialled.popleft()
        hosts = Counter(host for _, host, _ in self._dialled)
        networks = Counter(network for _, _, network in self._dialled)
        found = []
        for place in places:
            host, network = _target(place)
            if not self._was_met_at(host, peer, place):
                is_full = hosts[host] >= DIALS_PER_HOST_MAX or networks[network] >= DIALS_PER_NETWORK_MAX
                if is_full or len(self._dialled) >= DIALS_MAX:
                    continue
                hosts[host] += 1
                networks[network] += 1
                self._dialled.append((now_s, host, network))
            found.append(place)
        return found

    def _was_met_at(self, host: str, peer: PeerId, place: str) -> bool:
        direct, is_relayed, _ = place.partition("/p2p-circuit")
        relay = PeerId(direct.rpartition("/p2p/")[2]) if is_relayed else peer
        known = (places[one] for places in (self._met, self._given) for one in (peer, relay) if one in places)
        return any(_target(one)[0] == host for one in known)


def _target(place: str) -> tuple[str, str]:
    """The host and the network that a place leads to."""
    address = ip_of(place)
    if address is None:
        return "names", "names"
    bits = (32, 24) if address.version == 4 else (64, 48)
    host_net, network = (ipaddress.ip_network((address, length), strict=False) for length in bits)
    return str(host_net), str(network)
