"""How long this machine may train in a round: a slower volunteer does fewer steps, so that its push is in time.

The time of a round is what the leaders of the path's modules say that they wait (protocol/pace.py), and the run file's
`deadline_s` where one has not said; less what the push takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from dipaco_p2p.config import LivenessConfig, RoundsConfig
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.protocol.pace import within_bounds
from dipaco_p2p.topology import ModuleId

PUSHES = 3
PUSH_SHARE = 0.1
"""Of the deadline, for a push, before one was seen."""
PUSH_SHARE_MAX = 0.5
"""A push that waited for a new leader says little about the next."""


class Pace:
    """What one volunteer knows of its time."""

    def __init__(self, rounds: RoundsConfig, liveness: LivenessConfig) -> None:
        self._rounds = rounds
        self._liveness = liveness
        self._deadline_s = rounds.deadline_s
        self._pushes_s: deque[float] = deque(maxlen=PUSHES)

    async def ask(self, watch: Watch, modules: Collection[ModuleId]) -> None:
        """Learn from the leaders of `modules` how long they wait."""
        await watch.read_rounds(modules)
        self.deadline_s(watch, modules)

    def deadline_s(self, watch: Watch, modules: Collection[ModuleId]) -> float:
        """How long they wait by what they told last, the run file's for who did not."""
        self.told(watch.rounds[module].deadline_s for module in modules if module in watch.rounds)
        return self._deadline_s

    def told(self, deadlines_s: Iterable[float]) -> None:
        """What the leaders of the modules wait; 0 from one that does not say. The shortest counts, since the path has
        to be in time for all; but not less than any honest leader waits."""
        most_s = self._rounds.deadline_s
        least_s = min((deadline_s or most_s for deadline_s in deadlines_s), default=most_s)
        self._deadline_s = within_bounds(least_s, self._rounds, self._liveness)

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
