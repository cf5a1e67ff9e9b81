"""How long the paths of one module take, as its leader and its mirrors see it, and how long a round waits by that.

A mirror learns as its leader does: contributions are handed on to it as they come, and versions as they are made. So
one that takes the module over does not begin with the longest deadline.
"""

from __future__ import annotations

from ..node.node import Member
from ..protocol.documents import Contribution
from ..protocol.rounds import Arrivals
from ..topology import ModuleId


class Timing:
    """Of one module at this peer."""

    def __init__(self, node: Member, module: ModuleId) -> None:
        self._node = node
        self.arrivals = Arrivals(paths=len(node.run.topology.paths_through(module)))

    def arrived(self, document: Contribution) -> None:
        """It was admitted just now, by this peer or by the leader, which has handed it on."""
        now_s = self._node.clock.now_s()
        self.arrivals = self.arrivals.arrived(document.path, document.author, base=document.base_version, now_s=now_s)

    def opened(self, version: int) -> None:
        """Trainers may begin with `version` from now on."""
        self.arrivals = self.arrivals.opened(version, now_s=self._node.clock.now_s())

    def deadline_s(self) -> float:
        """How long a round waits for a path that is missing."""
        return self.arrivals.deadline_s(self._node.run.config.rounds, self._node.run.config.liveness)

    def replicas_s(self) -> float | None:
        """How long it waits for further claimants of paths that are in; None for as long as for a path."""
        return self.arrivals.replicas_s(self._node.run.config.liveness)
