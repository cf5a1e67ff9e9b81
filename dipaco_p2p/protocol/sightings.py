"""Which claims weigh, as one peer sees them: a claim costs nothing to write, so it counts only with work behind it.

Theory. A claim is its author's word, and keys are free. If every claim weighed, a few keys that claim and never train
would make rounds wait, volunteers yield, and paths look covered. So a peer judges the claims of others by what it has
seen itself and by what the leaders say of the work that came in:

- *A new claim has its chance.* It weighs at once, so that nobody else takes the path, and goes on weighing while work
  comes. The chance is over when the path has gone on for `CHANCE_ROUNDS` rounds without this claimant, or when it
  could be trained for `CHANCE_DEADLINES` deadlines and nobody trained it (`FIRST_CHANCE_DEADLINES`, if the claimant
  never worked; then a single round is enough that began and ended without it, unless so many claim the path that not
  all of them train each round).
- *Newcomers share their chance.* Keys are free, so a chance for each would be one without an end. Once a claimant that
  never worked has used up its chance, no other weighs on that path before it has worked, for REST_ROUNDS rounds; and
  while newcomers rest like this on half of the paths, at least on two, none weighs on the others either.
- *An idle claim weighs nothing*: nobody yields to it or waits for it, and its path is free. It weighs again as soon
  as its author's work is in a round. Whoever moves on without having worked takes the used chance along.
- *Refused work does not count as work.* If a leader says that it refused a claimant's work, and no module of the path
  counts any, or if the leaders of most of its modules say so, the claim is idle at once. A single leader that lies
  takes no claim away: other modules count the work.
- *One path at a time.* Of several claims by one peer only the newest weighs.
- *A claim is as old as others have seen it*, and at most one life of a record older: nobody comes first by writing an
  early time. Claims that were there before this peer looked have the age that they say: among them it has no rank.

Time in which nobody could have worked (a frozen run, leaders that do not answer) is nobody's fault, and not counted. A
claimant whose upload a leader sees arrive has done its work: it has SENDING_DEADLINES of the run file's deadlines.
Leaders could deny somebody's work only together: a peer has worked if the leader of any module of its path says so.
Each peer keeps its own `Sightings`; no two need the same, since two peers on one path only waste some effort.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..topology import ModuleId, PathId
from .liveness import Claim
from .rounds import Entry, OpenRound, Standing
from .signing import PeerId

CHANCE_ROUNDS = 3
"""A slow machine's work may come a round late, and leaders tell who was counted in the last VERSIONS_TOLD versions."""
CHANCE_DEADLINES = 2.0
"""A round waits one; the second is for whoever took the path just before its round closed."""
FIRST_CHANCE_DEADLINES = 0.5
"""A round waits one: so another volunteer can still bring the path in time."""
SENDING_DEADLINES = 6.0
"""A slow line takes several; without a bound a peer that sends a byte now and then would hold a path."""
REST_ROUNDS = 8
"""How long newcomers of a path have no chance after one of them has wasted it."""
REST_PATHS_MIN = 2
"""A single volunteer that dies before its first work ends no other newcomer's chance elsewhere."""
GONE_MAX = 1024
"""Claimants without a live claim that are remembered: they may come back."""


@dataclass(slots=True)
class _Sight:
    """What is known of one claimant."""

    claim: Claim
    """The newest of its claims: only this one may weigh."""
    seen_s: float
    """When it was first seen to claim this path; -inf if it did so before we looked."""
    chance_s: float
    """When its chance began: with its first claim, with its last work, or when it moved on from a path that it had
    worked on."""
    has_worked: bool = False
    """On the path that it claims."""
    worked: dict[ModuleId, int] = field(default_factory=dict)
    """The newest version of each module that its work went into, as the module's leader says."""
    is_earlier: bool = False
    """Whether it worked in the stage before."""
    progress: int | None = None
    """Of its path, when that was last told."""
    missed: int = 0
    """Rounds that its paths went on without its work, since its chance began."""
    is_idle: bool = False

    @property
    def is_newcomer(self) -> bool:
        """Whether it has never worked."""
        return not (self.worked or self.is_earlier)

    def weighs(self, path: PathId) -> bool:
        """Whether its claim of `path` does: it has not moved on since, and is not idle."""
        return self.claim.path == path and not self.is_idle


@dataclass(slots=True)
class _Path:
    """What is known of one path."""

    untrained_s: float = math.inf
    """Since when it can be trained, as far as we were told, and nobody trained it; infinite while it cannot be."""
    due_progress: int = -1
    """The progress at which it could be trained last."""
    due_since_s: float = math.inf
    """Since when it could be trained at that, whoever trained it meanwhile: work that some of its modules have, or that
    is refused later, is no reason to wait longer for those who never worked."""
    excused_s: float = math.inf
    """Since when nobody could say whether it can be trained; infinite while somebody does."""
    worked: dict[ModuleId, int] = field(default_factory=dict)
    """The newest version of each module that anybody's work on this path went into."""
    ask_s: float = -math.inf
    """When to ask the leaders again."""
    live: int = 0
    """Claims by others."""
    weigh: int = 0
    """Claims that weigh."""
    progress: int = 0
    """How far it is, as far as we were told."""
    rests_until: int = 0
    """Before it is so far, nobody who never worked weighs here."""

    @property
    def due_s(self) -> float:
        """Since when newcomers could have trained it; infinite while nobody can."""
        return self.due_since_s if self.untrained_s < math.inf else math.inf


class Sightings:
    """Judges all claims but those of `me`, whose own claim always weighs. Time is an argument."""

    def __init__(
        self, me: PeerId, *, ttl_s: float, deadline_max_s: float, places: int, earlier: Container[PeerId] = ()
    ) -> None:
        """`ttl_s` is the life of a record, `deadline_max_s` the run file's deadline; a version has `places` for work on
        each path, and the stage before counts work of those who are in `earlier`."""
        self._me = me
        self._crowd = max(1, places // 2)
        self._earlier = earlier
        self._ttl_s = ttl_s
        self._sending_max_s = SENDING_DEADLINES * deadline_max_s
        self._peers: dict[PeerId, _Sight] = {}
        """The one that was seen last comes last."""
        self._paths: dict[PathId, _Path] = {}
        self._all_rest = False
        """Whether newcomers weigh on no path: on so many they have wasted their chance."""

    def weighing(self, path: PathId, claims: Mapping[PeerId, Claim], *, now_s: float) -> dict[PeerId, Claim]:
        """Those of the live `claims` of `path`, just read, that weigh, with the age that they count with."""
        seen_s = now_s if path in self._paths else -math.inf
        self._paths.setdefault(path, _Path()).live = len(claims.keys() - {self._me})
        found = {}
        for peer, claim in claims.items():
            if peer == self._me:
                found[peer] = claim
                continue
            sight = self._see(peer, claim, seen_s=seen_s, now_s=now_s)
            if sight.weighs(path):
                found[peer] = replace(claim, since_s=max(claim.since_s, sight.seen_s - self._ttl_s))
        self._paths[path].weigh = len(found)
        self._forget()
        return found

    def still_weighing(self, path: PathId, claims: Mapping[PeerId, Claim]) -> dict[PeerId, Claim]:
        """Those of `claims` that weigh now, of those that did when the claims of `path` were last read."""
        idle = {peer for peer in claims.keys() & self._peers.keys() if not self._peers[peer].weighs(path)}
        return {peer: claim for peer, claim in claims.items() if peer not in idle}

    def to_ask(self, *, now_s: float) -> list[PathId]:
        """The claimed paths of which the leaders should be asked now who works on them. None is named again within
        the life of a record, answer or not."""
        claimed = {sight.claim.path for sight in self._peers.values()}
        paths = [path for path, known in self._paths.items() if path in claimed and now_s >= known.ask_s]
        for path in paths:
            self._paths[path].ask_s = now_s + self._ttl_s
        return paths

    def told(
        self,
        rounds: Mapping[ModuleId, OpenRound],
        standings: Mapping[PathId, Standing],
        *,
        deadlines_s: Mapping[PathId, float],
        now_s: float,
    ) -> None:
        """Leaders have told their open `rounds`, and so how far the paths in `standings` are."""
        refused = _refused(rounds)
        works, ended_s = _works(rounds, refused), dict[PathId, float]()
        for path, how_far in standings.items():
            for peer, versions in works[path].items():
                self._credit(peer, path, versions, now_s=now_s)
            known = self._paths.setdefault(path, _Path())
            known.progress = how_far.progress
            is_new = any([_is_new(known.worked, versions) for versions in works[path].values()])
            if how_far.is_due and known.due_progress != how_far.progress:
                has_gone_on = 0 <= known.due_progress < how_far.progress and math.isinf(known.excused_s)
                if has_gone_on and known.weigh <= self._crowd:
                    ended_s[path] = known.due_since_s
                known.due_progress, known.due_since_s = how_far.progress, now_s
            elif known.excused_s < now_s:
                known.due_since_s += now_s - known.excused_s
            known.excused_s = math.inf
            if not how_far.is_due:
                known.untrained_s = math.inf
            elif is_new or math.isinf(known.untrained_s):
                known.untrained_s = now_s
            first_s, chance_s = FIRST_CHANCE_DEADLINES * deadlines_s[path], CHANCE_DEADLINES * deadlines_s[path]
            ends_s = known.due_s + first_s, known.untrained_s + chance_s
            known.ask_s = min((at_s for at_s in ends_s if now_s < at_s < math.inf), default=now_s + deadlines_s[path])
        for peer, sight in self._peers.items():  # after all credit: it may have moved on from a path that it worked on
            path = sight.claim.path
            if path in standings:
                is_sending = any(peer in rounds[module].sending for module in path.modules())
                self._judge(sight, standings[path], deadlines_s[path], is_sending=is_sending, now_s=now_s)
                sight.is_idle |= Entry(path=path, peer=peer) in refused
                # We may have heard that a round began when it was half over, and of a claim in the same look.
                since_s = sight.seen_s + self._ttl_s / 3
                sight.is_idle |= sight.is_newcomer and path in ended_s and since_s <= ended_s[path]
        resting = sum(known.progress < known.rests_until for known in self._paths.values())
        self._all_rest = resting >= max(REST_PATHS_MIN, len(self._paths) / 2)
        for sight in self._peers.values():
            sight.is_idle |= sight.is_newcomer and self._rests(sight.claim.path)

    def claimed_s(self, peer: PeerId, path: PathId) -> float | None:
        """Since when `peer` claims `path`, give or take the time between two looks, if that is its newest claim that
        was ever seen, alive or not; None otherwise. -inf if it was there before we looked."""
        sight = self._peers.get(peer)
        return sight.seen_s - self._ttl_s / 3 if sight is not None and sight.claim.path == path else None

    def claimed(self, peer: PeerId) -> PathId | None:
        """The path of its newest claim that was ever seen."""
        sight = self._peers.get(peer)
        return None if sight is None else sight.claim.path

    def hurry(self, paths: Iterable[PathId]) -> None:
        """A leader says that something has become of its round: the next look at the claims of `paths` asks it."""
        for path in self._paths.keys() & set(paths):
            self._paths[path].ask_s = -math.inf

    def moved(self, paths: Collection[PathId]) -> None:
        """A module of these paths has a new version, so the chance of newcomers there may begin now."""
        newcomers = (sight for sight in self._peers.values() if sight.is_newcomer and not sight.is_idle)
        self.hurry({sight.claim.path for sight in newcomers}.intersection(paths))

    def excuse(self, path: PathId, *, now_s: float, ask_s: float) -> None:
        """Nobody can work on `path` now, or we cannot know; the leaders should be asked again at `ask_s`. Those who
        never worked have what was left of their chance: a module that changes hands gives them no new one."""
        known = self._paths.setdefault(path, _Path())
        known.untrained_s, known.excused_s = math.inf, min(now_s, known.excused_s)
        known.ask_s = ask_s

    def _see(self, peer: PeerId, claim: Claim, *, seen_s: float, now_s: float) -> _Sight:
        sight = self._peers.pop(peer, None)
        if sight is None:
            is_earlier = peer in self._earlier
            is_idle = not is_earlier and self._rests(claim.path)
            sight = _Sight(claim=claim, seen_s=seen_s, chance_s=now_s, is_idle=is_idle, is_earlier=is_earlier)
        elif sight.claim.path == claim.path:
            sight.claim = claim
        elif sight.claim.since_s < claim.since_s:  # it has moved on; its old claim may live on for a while
            if sight.has_worked:
                sight.chance_s, sight.missed = now_s, 0
            sight.claim, sight.seen_s, sight.progress, sight.has_worked = claim, now_s, None, False
        self._peers[peer] = sight
        return sight

    def _credit(self, peer: PeerId, path: PathId, versions: Mapping[ModuleId, int], *, now_s: float) -> None:
        sight = self._peers.get(peer)
        if sight is None or not _is_new(sight.worked, versions):
            return
        if sight.claim.path == path:
            sight.chance_s, sight.missed, sight.progress = now_s, 0, None
            sight.has_worked, sight.is_idle = True, False
        else:  # on the path that it had before: the chance of its new claim begins with that claim
            sight.chance_s = max(sight.chance_s, sight.seen_s)

    def _judge(self, sight: _Sight, how_far: Standing, deadline_s: float, *, is_sending: bool, now_s: float) -> None:
        """Whether the chance of a claimant is over, now that its path is so far."""
        if sight.progress is not None:
            sight.missed += max(0, how_far.progress - sight.progress)
        sight.progress = how_far.progress
        known = self._paths[sight.claim.path]
        waits_s, deadlines = known.due_s, FIRST_CHANCE_DEADLINES
        if not sight.is_newcomer:
            waits_s, deadlines = known.untrained_s, CHANCE_DEADLINES
        is_over = now_s - max(waits_s, sight.chance_s) >= deadlines * deadline_s or sight.missed >= CHANCE_ROUNDS
        if is_over and not (is_sending and now_s - sight.chance_s < self._sending_max_s):
            if sight.is_newcomer and not sight.is_idle:
                known.rests_until = how_far.progress + REST_ROUNDS
            sight.is_idle = True

    def _rests(self, path: PathId) -> bool:
        """Whether earlier newcomers have used up the chance of those that come to `path` now."""
        known = self._paths.get(path)
        return self._all_rest or (known is not None and known.progress < known.rests_until)

    def _forget(self) -> None:
        """Those that were seen longest ago. All live ones stay, or a crowd would get its chance again and again."""
        live = sum(known.live for known in self._paths.values())
        for peer in list(self._peers)[: max(0, len(self._peers) - GONE_MAX - live)]:
            del self._peers[peer]


def _refused(rounds: Mapping[ModuleId, OpenRound]) -> set[Entry]:
    """Whose work on a path the leaders of most of its modules say that they refused; or some, while none counts it."""
    told: dict[Entry, set[ModuleId]] = defaultdict(set)
    for module, open_ in rounds.items():
        for entry in open_.refused:
            told[entry].add(module)
    counted = {entry for open_ in rounds.values() for entry in (open_.counted[0] if open_.counted else ())}
    return {
        entry
        for entry, by in told.items()
        if entry not in counted or 2 * len(by.intersection(entry.path.modules())) > len(entry.path.modules())
    }


def _works(
    rounds: Mapping[ModuleId, OpenRound], refused: Collection[Entry]
) -> Mapping[PathId, dict[PeerId, dict[ModuleId, int]]]:
    """By path and peer: of each module, the newest version that its work went into. What is in an open round does not
    stand for who was refused last: it may be refused as well."""
    found: dict[PathId, dict[PeerId, dict[ModuleId, int]]] = defaultdict(lambda: defaultdict(dict))
    for module, open_ in rounds.items():
        entries = tuple(entry for entry in open_.entries if entry not in refused)
        newest_first = zip(range(open_.version + 1, 0, -1), (entries, *open_.counted), strict=False)
        for version, those in newest_first:
            for entry in those:
                if module in entry.path.modules():
                    found[entry.path][entry.peer].setdefault(module, version)
    return found


def _is_new(known: dict[ModuleId, int], versions: Mapping[ModuleId, int]) -> bool:
    """Whether `versions` say of work that `known` does not; it does afterwards."""
    newer = {module: version for module, version in versions.items() if version > known.get(module, 0)}
    known.update(newer)
    return bool(newer)
