"""Who has granted itself a module whose leader lives: what the coordinator's seed node alone can tell.

Any member of a group may sign the next term while the seed node is away, once nobody's head lives. Who reads such a
grant later cannot know how it came about. The seed node has seen the leader's head a moment before, hears its heartbeat
afterwards, and has heard the member all along: so there was no partition, in which both may have been right.
"""

from __future__ import annotations

from dataclasses import dataclass

from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import Grant, Sealed
from dipaco_p2p.protocol.grants import Mandate
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId

FRESH_HEARTBEATS = 1 / 2
"""How long ago the leader's head was seen at most, in lives of a heartbeat: three looks at the swarm."""
HEARD_HEARTBEATS = 2.0
"""For how long the member was heard before, at least: who comes back from the other side of a partition was not."""


@dataclass(frozen=True, slots=True)
class Coup:
    """`by` has signed `grant`, and so deposed the `leader` of a module, as seen at `at_s`."""

    grant: Sealed[Grant]
    by: PeerId
    leader: PeerId
    at_s: float


class Coups:
    """Those that this seed node has seen, by module."""

    def __init__(self, node: Member) -> None:
        self._node = node
        self._led: dict[ModuleId, tuple[Sealed[Grant], float]] = {}
        """The grant under which each module was led when we last looked, and when that was."""
        self._coups: dict[ModuleId, Coup] = {}
        self._heard_s: dict[PeerId, float] = {}
        """Since when live peers have been heard without a gap."""

    def look(self, module: ModuleId) -> None:
        """Note who leads `module`, and whether somebody has deposed a leader that lived at the last look."""
        newest, now_s = self._node.mandates.newest(module), self._node.clock.now_s()
        self._heard_s = {peer: self._heard_s.get(peer, now_s) for peer in self._node.watch.heartbeats}
        if not newest:
            return
        if (coup := self._coups.get(module)) is not None and coup.grant not in newest:
            del self._coups[module]
        if (seen := self._seen(module, newest)) is not None:
            self._coups[module] = seen
        elif module not in self._coups and self._is_led(module, newest[-1]):
            self._led[module] = newest[-1], now_s

    def of(self, module: ModuleId, *, is_certain: bool = True) -> Coup | None:
        """The one by which `module` is led, unless the leader that it deposed is gone, or the coordinator has granted
        the module since. It `is_certain` once that leader was heard again: its last heartbeat may outlive it."""
        coup, watch = self._coups.get(module), self._node.watch
        if coup is None or coup.grant not in self._node.mandates.newest(module):
            return None
        beaten_s = self._node.clock.now_s() if coup.leader == self._node.peer else watch.beaten_s(coup.leader)
        return coup if beaten_s is not None and (beaten_s > coup.at_s or not is_certain) else None

    def _seen(self, module: ModuleId, newest: Mandate) -> Coup | None:
        """One that we have not seen before."""
        node, now_s, ttl_s = self._node, self._node.clock.now_s(), self._node.run.config.liveness.heartbeat_ttl_s
        led, at_s = self._led.get(module, (None, 0.0))
        if led is None or led == newest[-1] or now_s - at_s > FRESH_HEARTBEATS * ttl_s or module in self._coups:
            return None
        first = newest[min(newest.index(led) + 1, len(newest) - 1)] if led in newest else newest[-1]
        by, leader = first.document.author, led.document.leader
        if by in (leader, node.run.manifest.author) or now_s - self._heard_s.get(by, now_s) < HEARD_HEARTBEATS * ttl_s:
            return None
        return Coup(first, by, leader, now_s)

    def _is_led(self, module: ModuleId, grant: Sealed[Grant]) -> bool:
        leader = grant.document.leader
        head = self._node.watch.heads[module].get(leader)
        return head is not None and head.grant == grant.signature and leader in self._node.watch.heartbeats
