"""When a module's round closes, and how far that makes a path. One round makes one version; the next opens at once.

Theory. A round of a module is about *all* paths through it: volunteers that have trained their path go on with one
that nobody trains, so few of them do the work of many, wave after wave. It waits for every path and for every live
claimant of these (replicas of a path train disjoint parts of its shard), except those whose claim begins with a later
round. What does not come is given up:

- The deadline counts from the last contribution that brought a *path* which was not in yet, so that waves do not run
  into it. It is bounded, whatever anybody sends: there are as many such contributions as paths, and further authors
  of a path change nothing.
- While some volunteer still trains this round elsewhere in the grid, the missing path may be its next: then the
  deadline is as many times longer as there are waves, paths for each volunteer.
- Claims cost nothing, so without a quorum of the claimed *paths* a longer deadline does the same: peers that claim
  and never contribute can slow a round, but not stop it.
- Once all paths are in, only further claimants of them are waited for, and nobody need notice a death and take a path
  over: they have the deadline without the time for that. Else an idle claim beside others cost a whole deadline.
- Beside others, a claimant that has never worked is waited for only in the first round and in one of NEWCOMERS_EVERY
  after it, only for that long since it claimed, and only if it claimed before a path was in (`Timing.is_awaited`).
  Keys are free: with new ones a stranger would make all rounds wait. A newcomer's first work counts a round late, and
  from then on it is waited for. A newcomer too slow for that is in time in a round that waits.
- Work that was refused when the round could close does not make its path come: once, the path has a deadline more.
- Then a grace, in which nearly finished uploads still arrive. While bytes of a claimant's upload keep coming it goes
  on, at most for one more deadline: a slow uplink has done its work already.

How long the deadline is, the leader learns from earlier rounds (`Arrivals`); `deadline_s` of the run file is the most.

A path that nobody can train costs its modules one deadline a round: when all volunteers are done, nothing prolongs it.
A round without any contribution never closes: a module without contributors gets no step. Time is an argument.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

from .. import strict
from ..canonical import canonical_bytes, read_canonical
from ..config import LivenessConfig, RoundsConfig
from ..errors import ConfigError, IntegrityError
from ..strict import bounded
from ..topology import PathId
from .documents import PROBLEM_CHARS_MAX
from .liveness import Claim
from .signing import VALUES_MAX, PeerId

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class IllegalTransition(AssertionError):
    """Our own bug: an event that cannot happen in this state. Never caused by what a peer sends."""


def follow(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after `event`; raises IllegalTransition for a pair that is not in the table."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"`{event}` cannot happen while `{state}`") from None


PATIENCE = 3
"""A round without a quorum closes after this many deadlines."""

NEWCOMERS_EVERY = 4
"""Of so many rounds, on average, one waits for claimants that have never worked."""

UPLOAD_SILENCE_S = 10.0
"""An upload of which no byte came for so long is not waited for in the grace."""

VERSIONS_TOLD = 2
"""Of how many versions a leader tells what they counted: work that came a round late is among it."""

PathClaims = Mapping[PathId, Mapping[PeerId, Claim]]
"""The live claims of every path of the grid, uncovered paths included."""

NOBODY: Mapping[int, int] = MappingProxyType({})
"""How many train each round, of whom only others tell."""

Awaited = Callable[[PeerId, PathId], bool]
"""Whether a round waits for a claimant of a path that others have brought."""


def everybody(peer: PeerId, path: PathId) -> bool:
    """It waits for all of them."""
    return True


def waits_for_newcomers(number: int) -> bool:
    """Whether the round that follows version `number` waits for claimants that have never worked. Drawn, so that nobody
    who trains in every second or third round misses all of them; the same for all modules."""
    return number == 0 or zlib.crc32(str(number).encode()) % NEWCOMERS_EVERY == 0


class RoundState(StrEnum):
    OPEN = "open"
    COLLECTING = "collecting"
    GRACE = "grace"
    CLOSED = "closed"


class RoundEvent(StrEnum):
    CONTRIBUTED = "contributed"
    DEADLINE = "deadline passed"
    COMPLETE = "all paths and claimants are in"
    GRACE_OVER = "grace is over"
    REFUSED = "work was refused"


ROUND_TRANSITIONS = {
    (RoundState.OPEN, RoundEvent.CONTRIBUTED): RoundState.COLLECTING,
    (RoundState.COLLECTING, RoundEvent.CONTRIBUTED): RoundState.COLLECTING,
    (RoundState.COLLECTING, RoundEvent.COMPLETE): RoundState.CLOSED,
    (RoundState.COLLECTING, RoundEvent.DEADLINE): RoundState.GRACE,
    (RoundState.GRACE, RoundEvent.CONTRIBUTED): RoundState.GRACE,
    (RoundState.GRACE, RoundEvent.COMPLETE): RoundState.CLOSED,
    (RoundState.GRACE, RoundEvent.GRACE_OVER): RoundState.CLOSED,
    (RoundState.COLLECTING, RoundEvent.REFUSED): RoundState.COLLECTING,
    (RoundState.GRACE, RoundEvent.REFUSED): RoundState.COLLECTING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A path is in, by the work of one peer."""

    path: PathId
    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One open round of one module: a value; every change makes a new one."""

    number: int
    """The head's version; the round publishes the next."""
    expected: frozenset[PathId] = frozenset()
    """The paths through the module."""
    state: RoundState = RoundState.OPEN
    entries: frozenset[Entry] = frozenset()
    """What is in, of this round's base."""
    last_s: float = 0.0
    """When the round began to collect, or a path last came that was not in yet."""
    grace_from_s: float = 0.0
    was_refused: bool = False
    """Whether it goes on since work was refused."""

    @property
    def paths(self) -> frozenset[PathId]:
        """The paths that have contributed."""
        return frozenset(entry.path for entry in self.entries)

    @property
    def is_closed(self) -> bool:
        return self.state is RoundState.CLOSED

    def contributed(self, path: PathId, peer: PeerId, *, now_s: float, is_late: bool = False) -> Round:
        """An admitted contribution of `path` by `peer` is in.

        A late one, based on an older version, counts in the average but stands for nobody: whoever sent it is now
        training from the head, and a round that closed without waiting would make that late as well, for ever.
        """
        state = follow(ROUND_TRANSITIONS, self.state, RoundEvent.CONTRIBUTED)
        brings_a_path = not is_late and path not in self.paths
        last_s = now_s if brings_a_path or self.state is RoundState.OPEN else self.last_s
        entries = self.entries if is_late else self.entries | {Entry(path=path, peer=peer)}
        return replace(self, state=state, entries=entries, last_s=last_s)

    def tick(
        self,
        claims: PathClaims,
        config: RoundsConfig,
        *,
        now_s: float,
        deadline_s: float | None = None,
        replicas_s: float | None = None,
        uploads_s: Mapping[PeerId, float] | None = None,
        elsewhere: Mapping[int, int] = NOBODY,
        is_awaited: Awaited = everybody,
    ) -> Round:
        """Let time pass; `claims` are those of the whole grid that were read, and `elsewhere` says how many others are
        told of, by their rounds.

        `deadline_s` is the one that was learnt (`Arrivals.deadline_s`), never above the run file's, which None means;
        `replicas_s` the one for claimants whose path others have brought (`Arrivals.replicas_s`), None for the same.
        `uploads_s` says when bytes of an unfinished upload last came, by sender; `is_awaited` whether a claimant is
        waited for beside others of its path.
        """
        deadline_s = config.deadline_s if deadline_s is None else min(deadline_s, config.deadline_s)
        wait_s = self._wait_s(claims, config, elsewhere, deadline_s=deadline_s, replicas_s=replicas_s)
        event = self._event(
            claims,
            config,
            is_awaited=is_awaited,
            now_s=now_s,
            wait_s=wait_s,
            deadline_s=deadline_s,
            uploads_s=uploads_s or {},
        )
        if event is None:
            return self
        state = follow(ROUND_TRANSITIONS, self.state, event)
        return replace(self, state=state, grace_from_s=now_s if state is RoundState.GRACE else self.grace_from_s)

    def but(self, entries: Collection[Entry]) -> Round:
        """The same round, as if these were not in."""
        return replace(self, entries=self.entries - frozenset(entries))

    def without(self, refused: Collection[Entry], *, now_s: float) -> Round | None:
        """The open round without this work: others may train its path, for which it waits a whole deadline more. None
        if the round closes all the same: others' work covers the path, or it has waited once already."""
        left = self.but(refused).entries
        is_missed = self.paths > {entry.path for entry in left}
        if self.was_refused or not is_missed:
            return None
        state = follow(ROUND_TRANSITIONS, self.state, RoundEvent.REFUSED)
        return replace(self, state=state, entries=left, last_s=now_s, was_refused=True)

    def resumed(self, *, now_s: float) -> Round:
        """Nothing could come for a while, since the run was frozen: what is missing has its time anew."""
        return replace(self, last_s=now_s, grace_from_s=now_s)

    def is_complete(self, claims: PathClaims, is_awaited: Awaited = everybody) -> bool:
        """Whether every path is in, and every live claimant that trains this round and is waited for."""
        return self.expected <= self.paths and not any(
            claim.round <= self.number and Entry(path=path, peer=peer) not in self.entries and is_awaited(peer, path)
            for path in self.expected
            for peer, claim in claims.get(path, {}).items()
        )

    def has_quorum(self, claims: PathClaims, config: RoundsConfig) -> bool:
        """Whether enough of the claimed paths are in; at least one contribution always is needed."""
        claimed = sum(bool(claims.get(path)) for path in self.expected)
        # Rounded first: 0.55 of 20 paths is 11.000000000000002 in floating point, and 11 must be enough.
        return len(self.paths) >= max(1, math.ceil(round(config.quorum * claimed, 9)))

    def patience(self, claims: PathClaims, config: RoundsConfig, elsewhere: Mapping[int, int] = NOBODY) -> int:
        """How many deadlines it waits for what is missing; `elsewhere` as in `tick`."""
        others = [claim for path, peers in claims.items() if path not in self.expected for claim in peers.values()]
        rounds = [*(claim.round for claim in others), *(round_ for round_, count in elsewhere.items() if count)]
        is_coming_round = any(round_ <= self.number for round_ in rounds)
        volunteers = len({peer for peers in claims.values() for peer in peers}) + sum(elsewhere.values())
        waves = math.ceil(len(claims) / max(volunteers, 1)) if is_coming_round else 1
        return waves if self.has_quorum(claims, config) else max(PATIENCE, waves)

    def _wait_s(
        self,
        claims: PathClaims,
        config: RoundsConfig,
        elsewhere: Mapping[int, int],
        *,
        deadline_s: float,
        replicas_s: float | None,
    ) -> float:
        """How long after the last path that came it waits for what is missing."""
        if self.expected <= self.paths:
            return deadline_s if replicas_s is None else min(deadline_s, replicas_s)
        return self.patience(claims, config, elsewhere) * deadline_s

    def left_s(
        self,
        claims: PathClaims,
        config: RoundsConfig,
        *,
        now_s: float,
        deadline_s: float,
        replicas_s: float | None = None,
        elsewhere: Mapping[int, int] = NOBODY,
    ) -> float:
        """How long it waits from now on, if nothing more comes; a whole deadline before anything has come."""
        if self.state is RoundState.OPEN:
            return deadline_s
        is_waiting = self.state is RoundState.COLLECTING
        wait_s = self._wait_s(claims, config, elsewhere, deadline_s=deadline_s, replicas_s=replicas_s)
        grace_s = self.last_s + wait_s if is_waiting else self.grace_from_s
        return max(0.0, grace_s + config.grace_s - now_s)

    def _event(
        self,
        claims: PathClaims,
        config: RoundsConfig,
        *,
        is_awaited: Awaited,
        now_s: float,
        wait_s: float,
        deadline_s: float,
        uploads_s: Mapping[PeerId, float],
    ) -> RoundEvent | None:
        if self.state not in (RoundState.COLLECTING, RoundState.GRACE):
            return None
        if self.is_complete(claims, is_awaited):
            return RoundEvent.COMPLETE
        if self.state is RoundState.COLLECTING:
            is_due = now_s - self.last_s >= wait_s
            return RoundEvent.DEADLINE if is_due else None
        is_arriving = now_s < self.grace_from_s + deadline_s and self._is_arriving(claims, uploads_s, now_s)
        is_over = now_s >= self.grace_from_s + config.grace_s and not is_arriving
        return RoundEvent.GRACE_OVER if is_over else None

    def _is_arriving(self, claims: PathClaims, uploads_s: Mapping[PeerId, float], now_s: float) -> bool:
        """Whether somebody who trains this round, and is not in, is sending at this moment."""
        return any(
            claim.round <= self.number
            and Entry(path=path, peer=peer) not in self.entries
            and now_s - uploads_s.get(peer, -math.inf) < UPLOAD_SILENCE_S
            for path in self.expected
            for peer, claim in claims.get(path, {}).items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """What a leader answers to `module.round`: the version that contributions now start from, and what is in."""

    version: int = bounded(low=0, high=VALUES_MAX)
    entries: tuple[Entry, ...] = ()
    counted: tuple[tuple[Entry, ...], ...] = ()
    """What the last versions counted, the newest first, up to VERSIONS_TOLD: who works, and whose claim is idle."""
    sending: tuple[PeerId, ...] = ()
    """Whose uploads to this leader are on their way."""
    deadline_s: float = bounded(0.0, low=0.0)
    """How long the round waits after the last path that came; 0 is not told. A hint for who may be slower."""
    left_s: float = bounded(0.0, low=0.0)
    """How long it still waits, if nothing more comes; 0 is not told. A hint for who trains a path after others."""
    refused: tuple[Entry, ...] = strict.added(())
    """Whose work was refused since the versions of `counted`, after judges had measured it."""

    def to_bytes(self) -> bytes:
        return canonical_bytes(strict.plain(self))

    def has(self, path: PathId) -> bool:
        """Whether `path` is in, whoever trained it."""
        return any(entry.path == path for entry in self.entries)


def read_open_round(data: bytes) -> OpenRound:
    """The inverse of `to_bytes`; raises IntegrityError."""
    try:
        return strict.load(OpenRound, read_canonical(data), where="this open round")
    except ConfigError as error:
        raise IntegrityError(str(error)[:PROBLEM_CHARS_MAX]) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a path is."""

    progress: int = 0
    """Rounds that its modules have behind them, or that it is in: the least of them."""
    is_due: bool = True
    """Whether it can be trained now; otherwise it waits for other paths."""


def standing(versions: Sequence[int], done: Sequence[bool], *, rounds: int) -> Standing:
    """Of a path, from its modules' versions and whether the path is in the open round of each.

    A module that is behind the others, since their rounds closed without this path, is trained until it has caught
    up: only modules that have reached least are waited for.
    """
    reached = [version + is_done for version, is_done in zip(versions, done, strict=True)]
    progress = min(reached)
    is_waiting = any(is_done and round_ == progress for round_, is_done in zip(reached, done, strict=True))
    return Standing(progress=progress, is_due=progress < rounds and not is_waiting)


MULTIPLE = 2.0
"""Of the typical duration: a machine half as fast as the others is waited for."""
NOTICE_TTLS = 1.5
"""Lives of a heartbeat until a silent peer's claim has expired and somebody else has seen it."""
ROUNDS_REMEMBERED = 5
FASTER_MAX = 4.0
"""A volunteer that is faster than that beside the typical one waits a little between two paths; nothing is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When the paths of one module contributed in the last rounds, and how long the next one waits by that.

    The leader measures how long after a round opened a path's contributions from its version came; if the same peer
    brought another path in between, how long after that. This is what a volunteer needs for one path: modules, inner
    steps, push. Of the authors of a path in one round the slowest counts, of each path the median of its last rounds,
    and of the paths the upper median again:

        deadline = MULTIPLE * typical duration + the time in which a death is noticed and its path taken over

    - Never above `deadline_s` of the run file, which also holds until half of the paths were seen: a leader that just
      took over knows nothing, and a swarm of slow machines needs the time.
    - Never below the second term: the path of a peer that died must have time to be taken over, whatever was measured.
    - A late contribution teaches like one in time, so that slow but honest machines are waited for as soon as they are
      half of the paths; where they are fewer, they are told the deadline and do fewer steps (peers/path/training.py).
    - A peer that sends at once shortens no figure of a path that an honest peer trains as well, whatever the number of
      its paths. One that is as late as it can lengthens those of its paths: medians of medians do not follow a
      minority, and a majority reaches the bound above: a round that lacks something waits as the run file says.
    - Rounds that this leader did not see open teach nothing: what waited for it would seem to have taken no time.

    A value; every change makes a new one. Time is an argument.
    """

    paths: int
    """How many go through the module."""
    opened_s: Mapping[int, float] = field(default_factory=dict)
    """When this leader published each of the last versions, which is when its round opened."""
    brought_s: Mapping[tuple[int, PeerId], float] = field(default_factory=dict)
    """When a peer last brought a path into a round."""
    durations_s: Mapping[PathId, Mapping[int, float]] = field(default_factory=dict)
    """Of each path, by version, how long the slowest of its authors took."""
    first_s: Mapping[PathId, float] = field(default_factory=dict)
    """The same of a first round, which no leader sees open, from the authors' claims on. Machines still prepare then,
    so this tells only how long to wait for further claimants."""

    def opened(self, version: int, *, now_s: float) -> Arrivals:
        """This leader has published `version`: trainers may start from it now. Older rounds are forgotten."""
        oldest = version - ROUNDS_REMEMBERED
        durations = {
            path: {number: seconds for number, seconds in found.items() if number >= oldest}
            for path, found in self.durations_s.items()
        }
        return replace(
            self,
            opened_s={number: at_s for number, at_s in self.opened_s.items() if number > oldest} | {version: now_s},
            brought_s={key: at_s for key, at_s in self.brought_s.items() if key[0] > oldest},
            durations_s={path: found for path, found in durations.items() if found},
        )

    def arrived(
        self, path: PathId, peer: PeerId, *, base: int, now_s: float, claimed_s: float | None = None
    ) -> Arrivals:
        """A contribution of `path` by `peer`, from version `base`, was admitted; late ones are told as well.
        `claimed_s` is when its author was first seen to claim the path, if that was seen."""
        if base not in self.opened_s:
            if base > 0 or claimed_s is None or math.isinf(claimed_s):
                return self
            return replace(self, first_s={**self.first_s, path: max(self.first_s.get(path, 0.0), now_s - claimed_s)})
        known, began_s = self.durations_s.get(path, {}), self.brought_s.get((base, peer), self.opened_s[base])
        slowest_s = max(known.get(base, 0.0), now_s - began_s)
        return replace(
            self,
            brought_s={**self.brought_s, (base, peer): now_s},
            durations_s={**self.durations_s, path: {**known, base: slowest_s}},
        )

    def typical_s(self) -> float | None:
        """How long one path takes a volunteer; None until half of the paths were seen."""
        if 2 * len(self.durations_s) < self.paths:
            return None
        return statistics.median_high(statistics.median_high(found.values()) for found in self.durations_s.values())

    def next_s(self, peer: PeerId, rounds: RoundsConfig, *, base: int) -> float | None:
        """When `peer`, which has brought a path from version `base`, may bring its next one: it may be FASTER_MAX times
        as fast as others, who may have idled. None while it is not known how fast these are."""
        brought_s, typical_s = self.brought_s.get((base, peer)), self.typical_s()
        if brought_s is None or typical_s is None:
            return None
        return brought_s + min(typical_s, rounds.deadline_s) / FASTER_MAX

    def replicas_s(self, liveness: LivenessConfig) -> float | None:
        """How long the open round waits for further claimants of its paths once all of these are in; None while that is
        not known. A machine half as fast as the others is in by then, and one that was busy for a moment."""
        first_s = statistics.median_high(self.first_s.values()) if 2 * len(self.first_s) >= self.paths else None
        typical_s = self.typical_s() or first_s
        return None if typical_s is None else max(MULTIPLE * typical_s, liveness.heartbeat_ttl_s)

    def deadline_s(self, rounds: RoundsConfig, liveness: LivenessConfig) -> float:
        """How long the open round waits after the last path that came: `Round.tick` takes it."""
        typical_s = self.typical_s()
        if typical_s is None:
            return rounds.deadline_s
        return within_bounds(MULTIPLE * typical_s + notice_s(liveness), rounds, liveness)


def notice_s(liveness: LivenessConfig) -> float:
    """Seconds in which a death is noticed and the path claimed by another."""
    return NOTICE_TTLS * liveness.heartbeat_ttl_s + liveness.settle_s


def within_bounds(deadline_s: float, rounds: RoundsConfig, liveness: LivenessConfig) -> float:
    """The nearest deadline that a leader may have: what it tells is a hint, and may be a lie."""
    return min(rounds.deadline_s, max(notice_s(liveness), deadline_s))
