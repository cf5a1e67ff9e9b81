"""Whom a relay serves, and how much: slots for peers that want to be dialled, circuits for those who dial them.

A relay passes on what it cannot read: both ends of a circuit encrypt and authenticate as on any connection. How it is
asked is libp2p's circuit relay v2 (hivemind/circuits.py). Rules, so that it stays cheap:

1. a circuit leads to a peer with a slot, never to an address that somebody names;
2. members of the run, whose heartbeats we see, keep a slot as long as they renew it. Others are guests for GUEST_S,
   which is how newcomers begin, and may come again after GUEST_REST_S; banned peers have none;
3. each host has a few slots, and half of the circuits at most, the less the fewer are free: identities cost nothing,
   and hosts little;
4. a circuit ends after so many bytes and so much time, and all of them share one limit of the line, host by host.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..clock import Clock
from ..errors import Refused
from ..protocol.reasons import Reason
from .blobs.bandwidth import Way

if TYPE_CHECKING:  # who reads the limits in a run file needs no cryptography for it (benchmarks/gpu)
    from ..protocol.signing import PeerId
    from .frames import Caller

SLOT_S = 300.0
GUEST_S = 60.0
GUEST_REST_S = 600.0
GUESTS_PER_HOST = 4
GUESTS_REMEMBERED = 1024
MEMBER_S = 120.0
"""How long after its last heartbeat somebody counts as a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """What a relay gives."""

    slots: int = 128
    slots_per_host: int = 16
    """Homes behind one provider's NAT share an address."""
    circuits: int = 256
    circuits_per_peer: int = 32
    """That one peer dials."""
    circuit_bytes: int = 4 * 1024**3
    circuit_s: float = 7200.0
    mbit: float | None = None
    """Of this machine's line, for all circuits together, each way; None is all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A peer that can be dialled through this relay."""

    host: str
    place: str
    """Where its connection comes from."""
    until_s: float
    is_guest: bool


@dataclass(slots=True, eq=False)
class Circuit:
    """One connection through the relay."""

    source: Caller
    target: PeerId
    until_s: float
    bytes_left: int


@dataclass(slots=True)
class Slots:
    """Who has a slot, and which circuits are open."""

    clock: Clock
    limits: RelayLimits = field(default_factory=RelayLimits)
    passed_bytes: int = 0
    """Both ways together, since this relay was opened."""
    _slots: dict[PeerId, Slot] = field(default_factory=dict)
    _circuits: set[Circuit] = field(default_factory=set)
    _guests_s: OrderedDict[PeerId, float] = field(default_factory=OrderedDict)
    """When each guest came, the one that came last at the end."""
    _members_s: dict[PeerId, float] = field(default_factory=dict)
    """When each member was last seen."""
    _banned: Collection[PeerId] = ()

    def note(self, members: Collection[PeerId], banned: Collection[PeerId]) -> Collection[PeerId]:
        """Who is seen to take part now, and who may not. Returns who has a slot."""
        now_s = self.clock.now_s()
        self._members_s = {peer: at_s for peer, at_s in self._members_s.items() if now_s - at_s < MEMBER_S}
        self._members_s |= dict.fromkeys(members, now_s)
        self._banned = banned
        return self._live().keys()

    def line(self) -> Way:
        """What all circuits share."""
        return Way(self.limits.mbit, self.clock)

    @property
    def taken(self) -> int:
        """Slots that are held now."""
        return len(self._live())

    @property
    def open_circuits(self) -> int:
        return len(self._circuits)

    def reserve(self, caller: Caller, place: str = "") -> float:
        """Give `caller` a slot, or renew its own; when it ends. Raises Refused."""
        slots, now_s = self._live(), self.clock.now_s()
        until_s = self._until_s(caller.peer, now_s)
        others = [slot for peer, slot in slots.items() if peer != caller.peer]
        at_host = [slot for slot in others if caller.host and slot.host == caller.host]
        is_guest = until_s < now_s + SLOT_S
        if len(others) >= self.limits.slots or len(at_host) >= self.limits.slots_per_host:
            raise Refused("no slot is free", reason=Reason.FULL)
        guests = sum(slot.is_guest for slot in others)
        if is_guest and (guests >= self.limits.slots // 4 or sum(s.is_guest for s in at_host) >= GUESTS_PER_HOST):
            raise Refused("no slot is free for a newcomer", reason=Reason.BUSY)
        self._slots[caller.peer] = Slot(host=caller.host, place=place, until_s=until_s, is_guest=is_guest)
        return until_s

    def left_behind(self, peer: PeerId, place: str) -> list[Circuit]:
        """The circuits of a peer that has a slot and asks from another `place` now: it has changed networks, and what
        went over its old connection gets nowhere, though nobody has hung up."""
        slot = self._live().get(peer)
        if slot is None or slot.place == place:
            return []
        return [circuit for circuit in self._circuits if peer in (circuit.target, circuit.source.peer)]

    def open(self, source: Caller, target: PeerId) -> Circuit:
        """A circuit from `source` to `target`, to be closed by `close`. Raises Refused."""
        slots, now_s = self._live(), self.clock.now_s()
        if target not in slots or target in self._banned:
            raise Refused("that peer has no slot here", reason=Reason.UNREACHABLE)
        if source.peer in self._banned:
            raise Refused("banned", reason=Reason.BANNED)
        held = Counter(circuit.source.peer for circuit in self._circuits)
        at_host = sum(bool(source.host) and circuit.source.host == source.host for circuit in self._circuits)
        free = self.limits.circuits - len(self._circuits)
        most_at_host = max(1, 2 * free * free // self.limits.circuits)  # half for one alone, as in frames.py
        if free <= 0 or held[source.peer] >= self.limits.circuits_per_peer or at_host >= most_at_host:
            raise Refused("no circuit is free", reason=Reason.BUSY)
        until_s = now_s + self.limits.circuit_s
        circuit = Circuit(source, target, until_s, self.limits.circuit_bytes)
        self._circuits.add(circuit)
        return circuit

    def carry(self, circuit: Circuit, length: int) -> bool:
        """Count what goes through `circuit`; False if its time is over: after its bytes or its hours, or with the slot
        of a guest that did not become a member, or by a ban."""
        circuit.bytes_left -= length
        self.passed_bytes += length
        now_s = self.clock.now_s()
        is_banned = circuit.source.peer in self._banned or circuit.target in self._banned
        is_over = circuit.bytes_left <= 0 or now_s >= circuit.until_s
        slot = self._slots.get(circuit.target)
        return not (is_banned or is_over) and slot is not None and slot.until_s > now_s

    def close(self, circuit: Circuit) -> None:
        self._circuits.discard(circuit)

    def _until_s(self, peer: PeerId, now_s: float) -> float:
        if peer in self._banned:
            raise Refused("banned", reason=Reason.BANNED)
        if now_s - self._members_s.get(peer, -math.inf) < MEMBER_S:
            self._guests_s.pop(peer, None)
            return now_s + SLOT_S
        came_s = self._guests_s.get(peer, -math.inf)
        if now_s - came_s >= GUEST_REST_S:
            came_s = self._guests_s[peer] = now_s
            self._guests_s.move_to_end(peer)
            while len(self._guests_s) > GUESTS_REMEMBERED:
                self._guests_s.popitem(last=False)
        if now_s - came_s >= GUEST_S:
            raise Refused("this relay serves members of its run", reason=Reason.UNKNOWN_PEER)
        return came_s + GUEST_S

    def _live(self) -> dict[PeerId, Slot]:
        now_s = self.clock.now_s()
        self._slots = {peer: slot for peer, slot in self._slots.items() if slot.until_s > now_s}
        return self._slots
