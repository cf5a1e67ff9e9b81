"""Why this volunteer rests, and until when. Any part of the program may have a reason of its own: the user's word, the
hour, the battery. It rests while one is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from dipaco_p2p.clock import Clock
from dipaco_p2p.program.tasks import done_or_later

LOOK_S = 30.0
"""A timer stands still while the machine sleeps, so the clock is looked at again after this long at the latest."""


class Pausing:
    """The reasons to rest that are in force."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[str, float | None] = {}
        self._changed = asyncio.Event()

    @property
    def reasons(self) -> Mapping[str, float | None]:
        """Each with the time of the clock at which it ends by itself; None: not before somebody says so."""
        now_s = self._clock.now_s()
        return {reason: until_s for reason, until_s in self._until_s.items() if until_s is None or until_s > now_s}

    def add(self, reason: str, *, until_s: float | None) -> None:
        """One more reason, or another end of it."""
        self._until_s[reason] = until_s
        self.wake()

    def end(self, reason: str) -> None:
        """It holds no more; nothing to do if it did not."""
        self._until_s.pop(reason, None)
        self.wake()

    def wake(self) -> None:
        """Whoever waits in `changed` looks again."""
        self._changed.set()

    async def changed(self) -> None:
        """Until a reason may have come or gone."""
        ends_s = [until_s for until_s in self.reasons.values() if until_s is not None]
        wait_s = min([LOOK_S, *(until_s - self._clock.now_s() for until_s in ends_s)])
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await done_or_later(waiting, self._clock, wait_s)
        finally:
            waiting.cancel()
        self._changed.clear()


def in_words(reasons: Mapping[str, float | None]) -> str:
    """`battery, user until Tue 14:05`."""
    return ", ".join(
        reason if until_s is None else f"{reason} until {time.strftime('%a %H:%M', time.localtime(until_s))}"
        for reason, until_s in sorted(reasons.items())
    )
