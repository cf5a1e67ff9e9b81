"""Which peers' connections are dead, though nobody has closed them.

A router that restarts forgets the connections through it. Neither end hears of that, and the transport notices after
40 s; until then it uses the dead connection, since it prefers the one with the most streams, and there they pile up.
Two signs come sooner:

1. a call has waited for SILENT_S, nothing came over its connection meanwhile, and the peer is heard over one that is
   newer than the last word over that: it has dialled us again, as no peer does that is connected;
2. MISSED_MAX calls, one after the other or at once, got no answer in SILENT_S or more, and nothing else came from the
   peer since the first of them.

A direct connection that follows one through a relay is no such sign: a hole was punched, and both are good. We hang up
on a peer whose connections seem dead; then it dials us, or we dial it again. A peer that was only slow loses a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..clock import Clock
from ..protocol.signing import PeerId
from .addresses import is_circuit

SILENT_S = 3.0
MISSED_MAX = 2
PEERS_MAX = 256
PLACES_MAX = 8
"""Of one peer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One of ours that has no answer yet."""

    place: str
    since_s: float


@dataclass(slots=True)
class _Peer:
    """What came from a peer, by the place that the connection leads to."""

    first_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    """The place that was heard from last is at the end."""
    calls: set[_Call] = field(default_factory=set)
    missed: int = 0
    """Our calls without an answer since it was heard."""

    def is_replaced(self, call: _Call) -> bool:
        """Whether nothing came over the connection of `call` since that began, and something over a newer one: newer
        than the last word over the other."""
        word_s = self.last_s.get(call.place)
        if word_s is not None and word_s >= call.since_s:
            return False
        return any(
            self.first_s[place] > (call.since_s if word_s is None else word_s)
            and last_s > call.since_s
            and (is_circuit(place) or not is_circuit(call.place))
            for place, last_s in self.last_s.items()
            if place != call.place
        )


class Connections:
    """Watches our calls with each peer, and what comes from it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._peers: dict[PeerId, _Peer] = {}

    def hear(self, peer: PeerId, place: str) -> None:
        """A call or an answer of `peer` came over the connection that leads to `place`."""
        known, now_s = self._known(peer), self._clock.now_s()
        known.missed = 0
        known.first_s.setdefault(place, now_s)
        known.last_s.pop(place, None)
        known.last_s[place] = now_s
        if len(known.last_s) > PLACES_MAX:
            oldest = next(iter(known.last_s))
            del known.first_s[oldest], known.last_s[oldest]

    @contextlib.contextmanager
    def calling(self, peer: PeerId, place: str) -> Iterator[None]:
        """Within, we wait for an answer of `peer` over the connection that leads to `place`."""
        known, call = self._known(peer), _Call(place, self._clock.now_s())
        known.calls.add(call)
        try:
            yield
        finally:
            known.calls.discard(call)
            is_silent = all(last_s < call.since_s for last_s in known.last_s.values())
            known.missed += is_silent and self._is_late(call)

    def seem_dead(self, peer: PeerId) -> bool:
        """Whether those with `peer` are to be closed; what was known of them is forgotten then."""
        if (known := self._peers.get(peer)) is None:
            return False
        is_replaced = any(self._is_late(call) and known.is_replaced(call) for call in known.calls)
        is_dead = is_replaced or known.missed >= MISSED_MAX
        if is_dead:
            del self._peers[peer]
        return is_dead

    def _is_late(self, call: _Call) -> bool:
        return call.since_s <= self._clock.now_s() - SILENT_S

    def _known(self, peer: PeerId) -> _Peer:
        """Also brings it to the end, behind those that are heard of less often."""
        known = self._peers[peer] = self._peers.pop(peer, _Peer())
        while len(self._peers) > PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        return known
