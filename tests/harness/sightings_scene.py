"""What one peer sees of the claims and the work of others, as their leaders tell it; time is set by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.rounds import Entry, OpenRound
from dipaco_p2p.protocol.rounds import standing as standing_of
from dipaco_p2p.protocol.sightings import Sightings
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

TTL_S = 10.0
DEADLINE_S = 20.0
HERE, THERE = PathId((0, 0)), PathId((0, 1))
ME, HONEST, IDLE, NEW = PeerId("me"), PeerId("honest"), PeerId("idle"), PeerId("new")
Works = Mapping[PathId, Collection[PeerId]]

PLACES = 8
EARLIER = PeerId("earlier")
"""It worked in the stage before."""


class Scene:
    """What one peer sees of a grid of two paths that share their first module, or of others; all leaders are at one
    version."""

    def __init__(self, paths: Collection[PathId] = (HERE, THERE), *, there: Collection[PeerId] = ()) -> None:
        """Those who are `there` claim the first path before this peer looks."""
        self.sightings = Sightings(ME, ttl_s=TTL_S, deadline_max_s=DEADLINE_S, places=PLACES, earlier=[EARLIER])
        self.now_s = 1000.0
        self.version = 0
        self.open: Works = {}
        self.only: ModuleId | None = None
        """The module whose leader alone has what is in the open round."""
        self.counted: list[Works] = []
        self.sending: tuple[PeerId, ...] = ()
        self.live: dict[PathId, dict[PeerId, Claim]] = {path: {} for path in paths}
        for peer in there:
            self.claim(peer)
        self.look()

    def claim(self, peer: PeerId, path: PathId = HERE, *, since_s: float | None = None) -> None:
        for found in self.live.values():
            found.pop(peer, None)
        self.live[path][peer] = Claim(path=path, since_s=self.now_s if since_s is None else since_s)

    def look(self) -> dict[PathId, dict[PeerId, Claim]]:
        return {path: self.sightings.weighing(path, found, now_s=self.now_s) for path, found in self.live.items()}

    def weighing(self, path: PathId = HERE) -> set[PeerId]:
        return set(self.look()[path])

    def works(self, works: Works) -> None:
        self.open = works

    def publish(self) -> None:
        self.counted = [self.open, *self.counted][:2]
        self.open, self.version = {}, self.version + 1

    def tell(self, after_s: float = 0.0) -> None:
        """The leaders tell their rounds, so much later."""
        self.look()
        self.now_s += after_s
        rounds, standings = {}, {}
        for path in self.live:
            for module in path.modules():
                rounds[module] = OpenRound(
                    version=self.version,
                    entries=_entries(self.open, module) if self.only in (None, module) else (),
                    counted=tuple(_entries(works, module) for works in self.counted),
                    sending=self.sending,
                )
            done = [rounds[module].has(path) for module in path.modules()]
            standings[path] = standing_of([self.version] * len(done), done, rounds=100)
        deadlines_s = dict.fromkeys(standings, DEADLINE_S)
        self.sightings.told(rounds, standings, deadlines_s=deadlines_s, now_s=self.now_s)


def _entries(works: Works, module: ModuleId) -> tuple[Entry, ...]:
    return tuple(
        Entry(path=path, peer=peer) for path, peers in works.items() if module in path.modules() for peer in peers
    )
