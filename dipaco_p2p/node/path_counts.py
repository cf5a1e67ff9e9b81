"""How many claim each path, and how far it is: as this peer has read, and else as the leaders of its modules tell.

The rules are in protocol/summaries.py. What was read here counts for the lifetime of a record; then what is told does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping

from ..clock import Clock
from ..protocol.liveness import Head
from ..protocol.rounds import PathClaims, Standing, standing
from ..protocol.summaries import PathSummary, merged, read_summaries, write_summaries
from ..topology import ModuleId, PathId
from .run import Run


class PathCounts:
    """By path. `claims` are those that were read; in a swarm that `is_whole` they are all there are."""

    def __init__(self, run: Run, clock: Clock, claims: PathClaims, *, is_whole: Callable[[], bool]) -> None:
        self._run = run
        self._clock = clock
        self._claims = claims
        self._is_whole = is_whole
        self._ttl_s = run.config.liveness.heartbeat_ttl_s
        self._told: dict[ModuleId, tuple[float, int, Mapping[PathId, PathSummary]]] = {}
        """Of each module when its leader said it, which version it had, and what it told."""
        self._read_s: dict[PathId, float] = {}
        self._reached: dict[tuple[ModuleId, PathId], tuple[int, float]] = {}
        """How far each path is at each of its modules, and since when the module's leader has told that."""

    def note_head(self, module: ModuleId, head: Head | None, *, until_s: float) -> None:
        """The head of the module's leader, just read, and when it expires; None while nobody leads it."""
        if head is None:
            self._told.pop(module, None)
        else:
            told = read_summaries(head.paths, self._run.topology.paths_through(module))
            self._told[module] = until_s - self._ttl_s, head.version, told
            for path, summary in told.items():
                if summary.round > self._reached.get((module, path), (-1, 0.0))[0]:
                    self._reached[module, path] = summary.round, self._clock.now_s()

    def came_s(self, module: ModuleId, path: PathId, *, number: int) -> float | None:
        """When the leader of `module` was first heard to have `path` in the round that follows version `number`; None
        if that was not heard."""
        reached, at_s = self._reached.get((module, path), (-1, 0.0))
        return at_s if reached == number + 1 else None

    def note_claims(self, path: PathId) -> None:
        """The claims of a path were read."""
        self._read_s[path] = self._clock.now_s()

    def counts(self) -> dict[PathId, int]:
        """How many train each path of which anything is known."""
        if self._is_whole():
            return {path: len(claims) for path, claims in self._claims.items()}
        read = {path: len(claims) for path, claims in self._claims.items() if self.is_read(path)}
        return {path: told.claimants for path, told in self._all().items()} | read

    def told(self) -> dict[PathId, int]:
        """The same, of those paths whose claims were not read."""
        return {} if self._is_whole() else {path: n for path, n in self.counts().items() if not self.is_read(path)}

    def is_read(self, path: PathId) -> bool:
        """Whether the claims of `path` were read within the lifetime of a record."""
        return self._is_whole() or self._clock.now_s() - self._read_s.get(path, -math.inf) <= self._ttl_s

    def covered(self) -> int:
        """How many paths have anybody, as far as is known."""
        return sum(map(bool, self.counts().values()))

    def training(self) -> int:
        """How many train in all, as far as is known: nobody trains two paths."""
        read = {peer for claims in self._claims.values() for peer in claims}
        return len(read) + sum(self.told().values())

    def elsewhere(self) -> Counter[int]:
        """How many train paths whose claims were not read, by their rounds, as far as leaders tell. Not an entry for
        each: who tells of thousands on each path would have every leader of its level count them, tick for tick."""
        found, count = {} if self._is_whole() else self._all(), Counter[int]()
        for path, told in found.items():
            if not self.is_read(path):
                count[told.round] += told.claimants
        return count

    def standing(self, path: PathId) -> Standing | None:
        """How far it is by what is told of those of its modules of which anything is; None of none."""
        known = [self._told[module] for module in path.modules() if module in self._told]
        known = [one for one in known if path in one[2]]
        if not known:
            return None
        versions = [version for _, version, _ in known]
        done = [told[path].round > version for _, version, told in known]
        return standing(versions, done, rounds=self._run.rounds)

    def tell(self, module: ModuleId, is_in: Container[PathId], *, version: int) -> str:
        """What to tell of the paths through a module that we lead, of which those of `is_in` are in the open round."""
        now_s = self._clock.now_s()
        return write_summaries(
            [
                PathSummary(
                    claimants=len(self._claims[path]),
                    round=version + (path in is_in),
                    age_s=min(now_s - self._read_s.get(path, -math.inf), 9 * self._ttl_s),
                )
                for path in self._run.topology.paths_through(module)
            ]
        )

    def _all(self) -> dict[PathId, PathSummary]:
        """Of every path that is told of, by whoever tells of the greatest need."""
        found: dict[PathId, PathSummary] = {}
        now_s = self._clock.now_s()
        for said_s, _, told in self._told.values():
            for path, summary in told.items():
                if max(0.0, now_s - said_s) + summary.age_s <= 2 * self._ttl_s:
                    found[path] = merged(found.get(path), summary)
        return found
