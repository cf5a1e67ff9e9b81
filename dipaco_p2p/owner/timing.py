"""How long the paths of one module take, as its leader and its mirrors see it, and how long a round waits by that.

A mirror learns as its leader does: contributions are handed on to it as they come, and versions as they are made. So
one that takes the module over does not begin with the longest deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..node.node import Member
from ..protocol.documents import Contribution
from ..protocol.rounds import Arrivals, Round, waits_for_newcomers
from ..protocol.signing import PeerId
from ..topology import ModuleId, PathId


class Timing:
    """Of one module at this peer."""

    def __init__(self, node: Member, module: ModuleId, *, is_proven: Callable[[PeerId], bool]) -> None:
        """`is_proven` says whether a peer has ever worked."""
        self._node = node
        self._module = module
        self._is_proven = is_proven
        self.arrivals = Arrivals(paths=len(node.run.topology.paths_through(module)))
        self._came_s: dict[tuple[int, PathId], float] = {}
        """When each path first came from a version, of those that may still have an open round: as this peer saw it, or
        heard of it; at the latest when it took the round over."""
        self._began_s = node.clock.now_s()

    def arrived(self, document: Contribution) -> None:
        """It was admitted just now, by this peer or by the leader, which has handed it on."""
        path, author, base = document.path, document.author, document.base_version
        claimed_s, now_s = self._node.watch.sightings.claimed_s(author, path), self._node.clock.now_s()
        self.arrivals = self.arrivals.arrived(path, author, base=base, now_s=now_s, claimed_s=claimed_s)
        self._came_s.setdefault((base, path), now_s)

    def opened(self, version: int) -> None:
        """Trainers may begin with `version` from now on."""
        self.arrivals = self.arrivals.opened(version, now_s=self._node.clock.now_s())
        self._came_s = {(base, path): at_s for (base, path), at_s in self._came_s.items() if base >= version}

    def taken_over(self, round_: Round) -> Round:
        """The round that this peer goes on with as a new leader. If all paths are in, further claimants have had their
        time since the last one came, as this peer saw it or heard it from the leader before; a path that is missing has
        a whole deadline once more."""
        number, now_s = round_.number, self._node.clock.now_s()
        for path in round_.paths:
            if (heard_s := self._node.watch.paths.came_s(self._module, path, number=number)) is not None:
                self._came_s.setdefault((number, path), heard_s)
        came_s = [self._came_s.get((number, path)) for path in round_.expected & round_.paths]
        known_s = [at_s for at_s in came_s if at_s is not None]
        for path in round_.paths:
            self._came_s.setdefault((number, path), now_s)
        return replace(round_, last_s=max(known_s)) if len(known_s) == len(round_.expected) else round_

    def deadline_s(self) -> float:
        """How long a round waits for a path that is missing."""
        return self.arrivals.deadline_s(self._node.run.config.rounds, self._node.run.config.liveness)

    def replicas_s(self) -> float | None:
        """How long it waits for further claimants of paths that are in; None for as long as for a path."""
        return self.arrivals.replicas_s(self._node.run.config.liveness)

    def is_awaited(self, peer: PeerId, path: PathId, *, number: int) -> bool:
        """Whether the round that follows version `number` waits for a claimant of `path` beside others. Anybody may
        claim, so a peer that has never worked has less time: of its own, not from the last path on, and one life of a
        heartbeat where nobody knows yet what a path takes. One that came when a path was in already begins with the
        next round: new keys would make the round wait as long as they come."""
        if self._is_proven(peer):
            return True
        if not waits_for_newcomers(number):
            return False
        replicas_s, claimed_s = self.replicas_s(), self._node.watch.sightings.claimed_s(peer, path)
        wait_s = self._node.run.config.liveness.heartbeat_ttl_s if replicas_s is None else replicas_s
        since_s = max(self.arrivals.opened_s.get(number, self._began_s), -math.inf if claimed_s is None else claimed_s)
        has_time = self._node.clock.now_s() < since_s + wait_s
        return has_time and (claimed_s is None or claimed_s <= self._first_s(number))

    def _first_s(self, number: int) -> float:
        """When the first path came from a version; infinite before."""
        return min((at_s for (base, _), at_s in self._came_s.items() if base == number), default=math.inf)
