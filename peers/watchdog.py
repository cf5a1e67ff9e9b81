"""Whether this volunteer gets on with its round. "Alive" and "taking part" are two things.

A machine whose graphics card or disk hangs still sends heartbeats, and may lead modules well; but while it also renews
its claim, nobody else takes its path. So a claim is renewed only while there is progress: an inner step, a part of an
upload that arrived, the end of a phase. Without any for several times what its rounds take, the claim is given up; the
heartbeat goes on. When the machine gets on again, its work is offered once, and it claims anew. A slow uplink is
progress, however slow.
"""

from __future__ import annotations

import statistics
from collections import deque

from dipaco_p2p.clock import Clock

ROUNDS_SILENT_MAX = 3
"""Times of a round without progress until the claim is given up."""
ROUNDS_REMEMBERED = 5


class Watchdog:
    """Watches one volunteer's rounds; it may be told of progress from any thread."""

    def __init__(self, clock: Clock, *, deadline_s: float) -> None:
        """`deadline_s` is the longest that a round should take, and stands for one until one was seen."""
        self._clock = clock
        self._deadline_s = deadline_s
        self._rounds_s: deque[float] = deque(maxlen=ROUNDS_REMEMBERED)
        self._began_s: float | None = None
        self._last_s = 0.0

    def begin(self) -> None:
        """A round begins."""
        self._began_s = self._last_s = self._clock.now_s()

    def progress(self) -> None:
        """Something got on."""
        self._last_s = self._clock.now_s()

    def end(self) -> None:
        """The round is over, well or not: what comes is waiting, which is no fault of ours."""
        if self._began_s is not None:
            self._rounds_s.append(self._clock.now_s() - self._began_s)
        self._began_s = None

    @property
    def is_working(self) -> bool:
        """Whether a round is going on: training or pushing."""
        return self._began_s is not None

    @property
    def limit_s(self) -> float:
        """Seconds without progress that are too long. A round that is quicker than a deadline is given one all the
        same: the first steps on a shard, or a disk that is busy, may take longer than everything after them."""
        usual_s = statistics.median(self._rounds_s) if self._rounds_s else self._deadline_s
        return max(ROUNDS_SILENT_MAX * usual_s, self._deadline_s)

    @property
    def is_stalled(self) -> bool:
        """Whether a round is going on, and nothing in it."""
        return self.is_working and self._clock.now_s() - self._last_s > self.limit_s
