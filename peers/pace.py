"""How long this machine may train in a round: a slower volunteer does fewer steps, so that its push is in time."""

from __future__ import annotations

from collections import deque

PUSHES = 3
PUSH_SHARE = 0.1
"""Of the deadline, for a push, before one was seen."""
PUSH_SHARE_MAX = 0.5
"""A push that waited for a new leader says little about the next."""


class Pace:
    """The time of a round is the run's deadline, less what the push takes."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._pushes_s: deque[float] = deque(maxlen=PUSHES)

    def pushed(self, duration_s: float) -> None:
        """Note how long a push took."""
        self._pushes_s.append(duration_s)

    def training_s(self, *, spent_s: float = 0.0) -> float:
        """Seconds for the inner steps, when `spent_s` of the round's time went by in getting ready."""
        push_s = max(self._pushes_s, default=PUSH_SHARE * self._deadline_s)
        return self._deadline_s - min(push_s, PUSH_SHARE_MAX * self._deadline_s) - spent_s

    @staticmethod
    def has_time(steps: int, *, elapsed_s: float, training_s: float) -> bool:
        """Whether one more step fits, if it takes as long as each of the `steps` that took `elapsed_s`."""
        return elapsed_s + elapsed_s / steps <= training_s
