"""What of the swarm concerns one peer, and how often it reads that.

A small swarm concerns everybody as a whole: a peer reads all of it at each look while it may choose a path, and of what
others train every third time while it is busy. In a larger one these concern a volunteer: the claims of its path; the
heads of that path's modules, of those that it owns or keeps something of, and of those whose place is in its bucket;
and a leader the claims of all paths through its modules. Whoever takes no part reads all heads, and no claims; but in
the bucket of all the claims of one path at each look: it may be there because it lost sight of everybody.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping

from ..clock import Clock
from ..protocol.neighbours import is_whole, place
from ..topology import ModuleId, PathId
from .neighbourhood import SELDOM, Neighbourhood, Rhythm
from .run import Run


class Concerns:
    """Kept up to date by whoever claims a path, and by who leads."""

    def __init__(self, run: Run, clock: Clock, neighbourhood: Neighbourhood) -> None:
        self._topology = run.topology
        self._clock = clock
        self._ttl_s = run.config.liveness.heartbeat_ttl_s
        self._modules = frozenset(run.topology.modules())
        self._places = {module: place(str(module)) for module in self._modules}
        self._neighbourhood = neighbourhood
        self._rhythm = Rhythm()
        self.own: PathId | None = None
        """The path that this peer trains, or is about to."""
        self.led: Callable[[], Collection[ModuleId]] = tuple
        """The modules that this peer leads."""
        self.held: Callable[[], Collection[ModuleId]] | None = None
        """The modules that this peer owns or keeps something of; None for one that takes no part."""
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether this peer chooses no path now, since it trains or the run is frozen."""
        self.peers = 0
        """How many are seen to live."""
        self._looks_far = True
        """Whether this look is also at what is not ours."""
        self.watched = self._modules
        """The modules whose heads are read: at every look, unless they are not ours and we are busy."""
        self._read_s = dict.fromkeys(self._modules, -math.inf)
        self._turn = 0
        """Of the paths that whoever takes no part reads in turn."""

    @property
    def is_whole(self) -> bool:
        """Whether the swarm is so small that we read every key."""
        sizes = {"modules": len(self._modules), "paths": self._topology.path_count, "peers": self.peers}
        return is_whole(depth=self._neighbourhood.depth, **sizes)

    def look(self) -> tuple[set[ModuleId], set[ModuleId]]:
        """One more look: the modules whose heads to read, and those that we had not watched before."""
        self._rhythm.begin()
        self._looks_far = not self.is_busy() or self._rhythm.is_due("far")
        if self._looks_far:
            self._rhythm.read("far", SELDOM)
        before = self.watched
        if self.held is None or self.is_whole:
            self.watched = self._modules
        else:
            near = {module for module, at in self._places.items() if self._neighbourhood.is_in_our_bucket(at)}
            self.watched = frozenset({*self.mine, *near})
        levels = {module.level for module in self.led()}
        more = {module for module in self._modules if module.level in levels}
        if self.is_whole or not more or not self._rhythm.is_due("levels"):
            more = set()
        else:
            self._rhythm.read("levels", SELDOM)  # who leads reckons how many train elsewhere
        heads = self.watched if self._looks_far else self.watched & self.mine
        return {*heads, *more}, set(self.watched - before)

    @property
    def mine(self) -> set[ModuleId]:
        """Those of our path, and those that we lead, own, or keep something of."""
        path = self.own.modules() if self.own is not None else ()
        return {*path, *self.led(), *(self.held() if self.held is not None else ())}

    @property
    def sought(self) -> set[ModuleId]:
        """Those whose leader is looked for if it is not seen. In the bucket of all these are all that are watched:
        whoever leads one of them is there too, or there are several buckets."""
        return self.mine if self._neighbourhood.depth else set(self.watched)

    def paths(self) -> list[PathId]:
        """The paths whose claims to read at this look."""
        if self.is_whole and self._looks_far:
            return list(self._topology.paths())
        wanted = {path for module in self.led() for path in self._topology.paths_through(module)}
        wanted |= {self.own} if self.own is not None else set()
        if not self._neighbourhood.depth and self.held is None:
            self._turn = (self._turn + 1) % self._topology.path_count
            wanted.add(self._topology.path(self._turn))
        return sorted(path for path in wanted if self._rhythm.is_due(str(path)))

    def read_claims(self, path: PathId, records: int) -> None:
        """So many claims were found: of many it is seldom that one more matters."""
        self._rhythm.read(str(path), records)

    def one_more(self, chance: random.Random, *, crowd: int) -> list[PathId]:
        """A path whose claims a volunteer that waits reads besides: where a leader lies, somebody sees it soon. Seldom
        where a path has a `crowd` of claimants, since the swarm has many such readers then."""
        if not self._rhythm.is_due("one more"):
            return []
        self._rhythm.read("one more", crowd)
        return [self._topology.path(chance.randrange(self._topology.path_count))]

    def read_head(self, module: ModuleId) -> None:
        self._read_s[module] = self._clock.now_s()

    def outdated(self, heads: Mapping[ModuleId, object]) -> list[ModuleId]:
        """Modules whose heads were read for a choice, longer ago than any of them lives."""
        now_s = self._clock.now_s()
        return [
            module
            for module in self._modules - self.watched
            if heads[module] and now_s - self._read_s[module] > self._ttl_s
        ]
