"""A volunteer's claim: which path it trains, said to all, and given up when it is needed more elsewhere.

The rules are in protocol/claims.py; here they meet the swarm.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.claims import (
    CLAIM_TRANSITIONS,
    ClaimEvent,
    ClaimState,
    choose_path,
    replicas,
    should_rotate,
    should_yield,
)
from dipaco_p2p.protocol.rounds import PathClaims, Standing, follow
from dipaco_p2p.topology import PathId

from .kept import InnerStates


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
        self._round = 0

    @property
    def round(self) -> int:
        """The round from which on this claim holds: who was in an earlier one did its part."""
        return self._round

    async def claim(self) -> PathId | None:
        """Choose, say so, wait, look who else did; until a path is ours to keep. None when all are finished."""
        attempt = 0
        while True:
            await self._node.watch.refresh()
            await self._node.watch.read_rounds()
            if not self.unfinished():
                return None
            path = await self._try(attempt)
            if not should_yield(self._node.peer, path, self._choices()):
                break
            attempt += 1
            await self.release(ClaimEvent.YIELDED)
        self._follow(ClaimEvent.STAYED)
        self._node.presence.note(path=path)
        before = str(self._before) if self._before not in (None, path) else ""
        self._before = path
        self._node.history.add("claimed", path=str(path), round=self._round, before=before)
        return path

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
        if not self._node.presence.has_claim:
            return ClaimEvent.EXPIRED
        claims = self._choices()
        if should_yield(self._node.peer, path, claims):
            return ClaimEvent.YIELDED
        uncovered = [other for other, peers in claims.items() if not peers and other != path]
        if uncovered:
            # After the claims: who has given one up has brought its path in before.
            await self._node.watch.read_rounds(module for other in uncovered for module in other.modules())
            if should_rotate(path, mine, claims, self._standings()):
                return ClaimEvent.ROTATED
        return None

    def must_yield(self, path: PathId) -> bool:
        """Whether another path needs us more than `path`, which others claim as well."""
        return should_yield(self._node.peer, path, self._choices())

    def unfinished(self) -> PathClaims:
        """The claims of the paths that still have rounds to train."""
        watch, last = self._node.watch, self._node.run.config.rounds.rounds
        return {path: claims for path, claims in watch.claims.items() if watch.round(path) < last}

    def replica(self, path: PathId) -> tuple[int, int]:
        """Our place among those that train `path`, and how many they are."""
        order = replicas(path, self._choices())
        return (order.index(self._node.peer), len(order)) if self._node.peer in order else (0, 1)

    async def _try(self, attempt: int) -> PathId:
        watch, claims, standings = self._node.watch, self._choices(), self._standings()
        seed = zlib.crc32(f"{self._node.peer}|{self._round}|{attempt}".encode())
        path = self._path = choose_path(claims, standings, seed=seed, held=self._states.held())
        progress = standings[path].progress if path in standings else watch.round(path)
        self._round = first_round(progress, others=len(claims[path].keys() - {self._node.peer}))
        self._follow(ClaimEvent.CHOSE)
        await self._node.presence.claim(path, since_s=self._node.clock.now_s(), round_number=self._round)
        await self._node.clock.sleep(self._node.run.config.liveness.settle_s)
        await watch.read_claims()
        return path

    def _choices(self) -> PathClaims:
        """The unfinished paths that we can train; without any, all unfinished ones."""
        unfinished = self.unfinished()
        return {path: claims for path, claims in unfinished.items() if self._is_ready(path)} or unfinished

    def _standings(self) -> dict[PathId, Standing]:
        found = {path: self._node.watch.standing(path) for path in self._node.watch.claims}
        return {path: standing for path, standing in found.items() if standing is not None}

    def _follow(self, event: ClaimEvent) -> None:
        self._state = follow(CLAIM_TRANSITIONS, self._state, event)
