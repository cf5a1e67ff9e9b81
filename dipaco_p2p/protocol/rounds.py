"""When a module's round closes. One round makes one version; the next opens at once.

Theory. A round waits for every path through the module that somebody claims. If some do not come, a quorum of the
claimed paths and a deadline, counted from the first contribution, let it go on without them, after a grace in which
nearly finished uploads still arrive. Claims cost nothing, so without a quorum a longer deadline does the same: peers
that claim paths and never contribute can slow a round, but not stop it. A path that loses its claimant is no longer
waited for. A round without any contribution never closes: a module without contributors gets no step. Time is an
argument.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace
from enum import StrEnum

from ..config import RoundsConfig
from ..topology import PathId
from .machine import follow

PATIENCE = 3
"""A round without a quorum closes after this many deadlines."""


class RoundState(StrEnum):
    OPEN = "open"
    COLLECTING = "collecting"
    GRACE = "grace"
    CLOSED = "closed"


class RoundEvent(StrEnum):
    CONTRIBUTED = "contributed"
    DEADLINE = "deadline passed"
    COMPLETE = "all claimed paths are in"
    GRACE_OVER = "grace is over"


ROUND_TRANSITIONS = {
    (RoundState.OPEN, RoundEvent.CONTRIBUTED): RoundState.COLLECTING,
    (RoundState.COLLECTING, RoundEvent.CONTRIBUTED): RoundState.COLLECTING,
    (RoundState.COLLECTING, RoundEvent.COMPLETE): RoundState.CLOSED,
    (RoundState.COLLECTING, RoundEvent.DEADLINE): RoundState.GRACE,
    (RoundState.GRACE, RoundEvent.CONTRIBUTED): RoundState.GRACE,
    (RoundState.GRACE, RoundEvent.COMPLETE): RoundState.CLOSED,
    (RoundState.GRACE, RoundEvent.GRACE_OVER): RoundState.CLOSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One open round of one module: a value; every change makes a new one."""

    number: int
    """The head's version; the round publishes the next."""
    state: RoundState = RoundState.OPEN
    paths: frozenset[PathId] = frozenset()
    """Paths that have contributed."""
    first_s: float = 0.0
    """When the first contribution came."""
    grace_from_s: float = 0.0

    def contributed(self, path: PathId, *, now_s: float, is_late: bool = False) -> Round:
        """An admitted contribution of `path` is in.

        A late one, based on an older version, counts in the average but does not stand for its path: whoever sent it
        is now training from the head, and a round that closed without waiting would make that late as well, for ever.
        """
        first_s = now_s if self.state is RoundState.OPEN else self.first_s
        state = follow(ROUND_TRANSITIONS, self.state, RoundEvent.CONTRIBUTED)
        return replace(self, state=state, paths=self.paths if is_late else self.paths | {path}, first_s=first_s)

    def tick(self, claimed: Set[PathId], config: RoundsConfig, *, now_s: float) -> Round:
        """Let time pass; `claimed` are the paths through the module that somebody trains now."""
        event = self._event(claimed, config, now_s)
        if event is None:
            return self
        state = follow(ROUND_TRANSITIONS, self.state, event)
        return replace(self, state=state, grace_from_s=now_s if state is RoundState.GRACE else self.grace_from_s)

    @property
    def is_closed(self) -> bool:
        return self.state is RoundState.CLOSED

    def _event(self, claimed: Set[PathId], config: RoundsConfig, now_s: float) -> RoundEvent | None:
        if self.state not in (RoundState.COLLECTING, RoundState.GRACE):
            return None
        if claimed <= self.paths:
            return RoundEvent.COMPLETE
        if self.state is RoundState.GRACE:
            return RoundEvent.GRACE_OVER if now_s >= self.grace_from_s + config.grace_s else None
        waited_s = now_s - self.first_s
        patience_s = config.deadline_s if self.has_quorum(claimed, config) else PATIENCE * config.deadline_s
        return RoundEvent.DEADLINE if waited_s >= patience_s else None

    def has_quorum(self, claimed: Set[PathId], config: RoundsConfig) -> bool:
        """Whether enough of the claimed paths are in; at least one contribution always is needed."""
        # Rounded first: 0.55 of 20 paths is 11.000000000000002 in floating point, and 11 must be enough.
        return len(self.paths) >= max(1, math.ceil(round(config.quorum * len(claimed), 9)))
