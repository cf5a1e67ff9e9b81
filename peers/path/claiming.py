"""A volunteer's claim: which path it trains, said to all, and given up when it is needed more elsewhere.

The rules are in protocol/claims.py, and for a swarm that is too large to be read whole in protocol/summaries.py; here
they meet the swarm.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterable, Mapping

from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.claims import (
    CLAIM_TRANSITIONS,
    ClaimEvent,
    ClaimState,
    choose_path,
    drawn,
    places_drawn,
    ranking,
    replicas,
    should_rotate,
    should_yield,
)
from dipaco_p2p.protocol.rounds import PathClaims, Standing, follow
from dipaco_p2p.protocol.summaries import PATHS_TOLD_MAX, Need, draw_path, path_needs, share_moving
from dipaco_p2p.topology import PathId

from .kept import InnerStates

DRAWS_MAX = 4
"""Paths that a try looks at: where more train than was told, another one is drawn."""
ASKED_MAX = 4
"""Paths without anybody whose leaders are asked, in a look of one that might move there."""


def first_round(progress: int, *, others: int) -> int:
    """The round from which on a new claimant of a path is waited for, with `others` other claimants there already:
    joining them in the middle of a round would only hold them up. Before the first round ends all are newcomers."""
    return progress + 1 if progress and others else progress


class Claiming:
    """One volunteer's claim, from choosing a path to releasing it."""

    def __init__(self, node: Member, states: InnerStates, *, is_ready: Callable[[PathId], bool]) -> None:
        """`is_ready` says whether this machine could train a path now; others are chosen only if none is."""
        self._node = node
        self._states = states
        self._is_ready = is_ready
        self._state = ClaimState.IDLE
        self._releasing = asyncio.Lock()
        self._path: PathId | None = None
        self._before: PathId | None = None
        """What was claimed last, to tell a move."""
        self._target: PathId | None = None
        """Where we are needed more, as the claims there say."""
        self._round = 0
        self._chance = random.Random(zlib.crc32(node.peer.encode()))

    @property
    def round(self) -> int:
        """The round from which on this claim holds: who was in an earlier one did its part."""
        return self._round

    async def claim(self) -> PathId | None:
        """Choose, say so, wait, look who else did; until a path is ours to keep. None when all are finished."""
        attempt = 0
        while True:
            await self._look()
            if not self.unfinished():
                return None
            path = await self._try(attempt)
            if not self.must_yield(path):
                break
            attempt += 1
            await self.release(ClaimEvent.YIELDED)
        self._stay(path)
        return path

    async def again(self) -> None:
        """Claim the path that we still train once more, after all others, if the claim was given up."""
        async with self._releasing:
            if self._state is ClaimState.IDLE and self._path is not None:
                await self._say(self._path)
                self._stay(self._path)

    async def release(self, event: ClaimEvent) -> None:
        """Say that nobody here trains the path any more; nothing to do without a claim."""
        async with self._releasing:  # a watchdog and the trainer may both think of it
            if self._state is not ClaimState.IDLE:
                # Said first: who is stopped while saying it still has the claim, and releases it on leaving.
                await self._node.presence.release()
                self._follow(event)
                self._node.history.add("released", path=str(self._path), why=str(event))
                self._node.presence.note(path=None)

    def note_round(self, round_number: int) -> None:
        """The round that we train now or next: no earlier one needs to wait for us."""
        self._round = round_number
        self._node.presence.note_round(round_number)

    async def should_move(self, path: PathId, mine: Standing) -> ClaimEvent | None:
        """Why a claimant of `path`, for which it stands as in `mine`, should go to another one now."""
        watch = self._node.watch
        if not self._node.presence.has_claim:
            return ClaimEvent.EXPIRED
        if not watch.is_whole:
            return await self._should_move_far(path, mine)
        if self.must_yield(path):
            return ClaimEvent.YIELDED
        claims = self._choices()
        uncovered = [other for other, peers in claims.items() if not peers and other != path]
        if uncovered:
            # After the claims: who has given one up has brought its path in before.
            await watch.read_rounds(module for other in uncovered for module in other.modules())
            if should_rotate(path, mine, claims, self._standings(claims)):
                return ClaimEvent.ROTATED
        return None

    def must_yield(self, path: PathId) -> bool:
        """Whether another path needs us more than `path`, which others claim as well. Where the others are only told
        of, a few go at a time: all see the same gap."""
        claims, told, me = self._choices(), self._told(), self._node.peer
        if not should_yield(me, path, claims, told):
            return False
        counts = {other: len(peers) for other, peers in claims.items()} | told
        rank = list(ranking(path, claims[path])).index(me)
        return self._node.watch.is_whole or self._chance.random() < share_moving(rank, counts)

    def unfinished(self) -> Mapping[PathId, int]:
        """How many claim each path that still has rounds to train, of those of which anything is known."""
        watch, last = self._node.watch, self._node.run.rounds
        counts = watch.paths.counts()
        if watch.is_whole:
            return {path: count for path, count in counts.items() if watch.round(path) < last}
        standings = self._standings(counts)
        return {path: n for path, n in counts.items() if path not in standings or standings[path].progress < last}

    def replica(self, path: PathId) -> tuple[int, int]:
        """Our place among those that train `path`, and how many they are."""
        order = replicas(path, self._choices(), self._told())
        return (order.index(self._node.peer), len(order)) if self._node.peer in order else (0, 1)

    def is_drawn(self, path: PathId, round_number: int) -> bool:
        """Whether we train `path` in this round, of more claimants perhaps than its modules' versions count."""
        claims, me = self._node.watch.claims[path], self._node.peer
        places = places_drawn(self._node.run.config.places_min)
        return me in drawn(path, {*claims, me}, round_number=round_number, places=places)

    # -- choosing

    async def _look(self) -> None:
        """Learn which paths there are to choose from."""
        watch = self._node.watch
        await watch.refresh()
        if watch.is_whole:
            await watch.read_rounds()
            return
        topology = self._node.run.topology
        levels = [level for level, width in enumerate(topology.widths) if topology.path_count <= width * PATHS_TOLD_MAX]
        await watch.read_level(self._chance.choice(levels))  # another each time: one leader's word is not enough
        if not self.unfinished():
            await watch.survey()

    async def _try(self, attempt: int) -> PathId:
        watch = self._node.watch
        seed = zlib.crc32(f"{self._node.peer}|{self._round}|{attempt}".encode())
        if watch.is_whole:
            claims = self._choices()
            path = choose_path(claims, self._standings(claims), seed=seed, held=self._states.held())
        else:
            path = await self._draw(seed)
        self._path = watch.concerns.own = path
        standing = watch.how_far(path)
        progress = standing.progress if standing is not None else watch.round(path)
        self._round = first_round(progress, others=len(watch.claims[path].keys() - {self._node.peer}))
        await self._say(path)
        await self._node.clock.sleep(self._node.run.config.liveness.settle_s)
        await watch.read_claims(None if watch.is_whole else [path])
        return path

    async def _say(self, path: PathId) -> None:
        self._follow(ClaimEvent.CHOSE)
        await self._node.presence.claim(path, since_s=self._node.clock.now_s(), round_number=self._round)

    def _stay(self, path: PathId) -> None:
        self._follow(ClaimEvent.STAYED)
        self._node.presence.note(path=path)
        before = str(self._before) if self._before not in (None, path) else ""
        self._before = path
        self._node.history.add("claimed", path=str(path), round=self._round, before=before)

    async def _draw(self, seed: int) -> PathId:
        """A path by need and chance, whose claims were read: what was told of it may be out of date, or a lie."""
        watch, target, self._target = self._node.watch, self._target, None
        unfinished = self.unfinished()
        path = target if target in unfinished else None
        for draw in range(DRAWS_MAX if path is None else 0):
            needs = self._needs()
            if not needs:  # what was drawn before was the last, as its modules' heads say
                break
            path = draw_path(needs, seed=seed + draw, held=frozenset(self._states.held()))
            before = needs[path].claimants
            await asyncio.gather(watch.read_claims([path]), *map(watch.read_heads, path.modules()))
            if len(watch.claims[path].keys() - {self._node.peer}) <= before:
                break
        assert path is not None
        return path

    def _needs(self) -> dict[PathId, Need]:
        """Of the unfinished paths that we can train; without any, of all unfinished."""
        unfinished = self.unfinished()
        ready = {path: count for path, count in unfinished.items() if self._is_ready(path)} or unfinished
        return path_needs(ready, self._standings(ready))

    async def _should_move_far(self, path: PathId, mine: Standing) -> ClaimEvent | None:
        """As `should_move`, where most paths are only told of: before we go to one its claims are read."""
        watch, me = self._node.watch, self._node.peer
        module = self._chance.choice(self._node.run.topology.modules())  # so that in turn all are heard of
        one_more = watch.concerns.one_more(self._chance, crowd=len(watch.claims[path]))
        await asyncio.gather(watch.read_heads(module), watch.read_claims(one_more))
        order = list(ranking(path, watch.claims[path]))
        rank = order.index(me) if me in order else 0
        if self.must_yield(path):
            needs = {other: need for other, need in self._needs().items() if need.claimants < rank}
            if await self._aim(needs, fewer_than=rank):
                return ClaimEvent.YIELDED
        free = {other: need for other, need in self._needs().items() if not need.claimants and other != path}
        limit = mine.progress if mine.is_due else mine.progress + 1
        least = [(need.progress, other) for other, need in free.items() if need.progress < limit]
        behind = sorted((progress, self._chance.random(), other) for progress, other in least)
        candidates = [other for _, _, other in behind[:ASKED_MAX]]
        if candidates:
            modules = {module for other in candidates for module in other.modules()}
            await asyncio.gather(watch.read_claims(candidates), *map(watch.read_heads, modules))
            await watch.read_rounds(modules)
            claims: PathClaims = {other: watch.claims[other] for other in (*candidates, path)}
            standings = {other: found for other in candidates if (found := watch.standing(other)) is not None}
            for other in sorted(standings, key=lambda each: standings[each].progress):
                if should_rotate(path, mine, {other: claims[other], path: claims[path]}, standings):
                    self._target = other
                    return ClaimEvent.ROTATED
        return None

    async def _aim(self, needs: Mapping[PathId, Need], *, fewer_than: int) -> bool:
        """Whether one of the paths is as needy as is told; we go there then."""
        for _ in range(min(DRAWS_MAX, len(needs))):
            path = draw_path(needs, seed=self._chance.getrandbits(32))
            await self._node.watch.read_claims([path])
            if len(self._node.watch.claims[path]) < fewer_than:
                self._target = path
                return True
            needs = {other: need for other, need in needs.items() if other != path}
        return False

    def _choices(self) -> PathClaims:
        """The claims that we have read, of the unfinished paths that we can train; without any, of all unfinished."""
        watch, unfinished = self._node.watch, self.unfinished()
        read = {path: watch.claims[path] for path in unfinished if watch.paths.is_read(path)}
        found = {path: claims for path, claims in read.items() if self._is_ready(path)} or read
        if not watch.is_whole and (own := watch.concerns.own) is not None:
            return found | {own: watch.claims[own]}
        return found

    def _told(self) -> dict[PathId, int]:
        """How many claim the other paths, of which we have not read the claims."""
        told = self._node.watch.paths.told()
        unfinished = self.unfinished() if told else {}
        return {path: count for path, count in told.items() if path in unfinished and self._is_ready(path)}

    def _standings(self, paths: Iterable[PathId]) -> dict[PathId, Standing]:
        found = {path: self._node.watch.how_far(path) for path in paths}
        return {path: standing for path, standing in found.items() if standing is not None}

    def _follow(self, event: ClaimEvent) -> None:
        self._state = follow(CLAIM_TRANSITIONS, self._state, event)
