"""How much of this machine's line blobs may take, each way: `--up-mbit` and `--down-mbit`.

A token bucket per direction, as a timetable: bytes go when those before them are through (the virtual scheduling
algorithm of ITU-T I.371). What was left unused in the last half second may be caught up. Ranges are at most half a
second's worth, so that under a low limit they go out evenly. Only blobs are counted: what else peers say to each other
is small, and must not wait.
"""

from __future__ import annotations

import asyncio
import math

from ...clock import Clock, SystemClock
from ...errors import ConfigError

MBIT_BYTES = 125_000
MBIT_MIN = 0.1
"""Below it the ranges of sixteen readers at once take longer than one of them waits for its own."""
BURST_S = 0.5
RANGE_S = 0.5
CUT_BYTES_MIN = 4096
"""No limit cuts a range to less, so a peer that sends or asks for less is not believed."""


class Bucket:
    """When bytes may go over a line of `bytes_per_s`, one after the other. Time is an argument."""

    def __init__(self, bytes_per_s: float) -> None:
        assert bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self._free_s = -math.inf
        """When all that was taken so far is through."""
        self._seen_s = -math.inf

    def take(self, length: int, now_s: float) -> float:
        """Take room for `length` bytes; how many seconds from now they may go."""
        self._see(now_s)
        start_s = max(self._free_s, now_s - BURST_S)
        self._free_s = start_s + length / self.bytes_per_s
        return max(0.0, start_s - now_s)

    def give_back(self, length: int) -> None:
        """Of what was taken, `length` bytes were not needed."""
        self._free_s -= length / self.bytes_per_s

    def _see(self, now_s: float) -> None:
        if now_s < self._seen_s:  # the machine's clock was set back: what is still to go takes no longer for that
            self._free_s -= self._seen_s - now_s
        self._seen_s = now_s


class Way:
    """One direction of the line, with a limit or without."""

    def __init__(self, mbit: float | None, clock: Clock) -> None:
        self._bucket = None if mbit is None else Bucket(mbit * MBIT_BYTES)
        self._clock = clock

    @property
    def bytes_per_s(self) -> float:
        """The limit; infinite without one."""
        return math.inf if self._bucket is None else self._bucket.bytes_per_s

    async def take(self, length: int) -> None:
        """Wait until `length` bytes may go; a caller that gives up waiting leaves its place to others."""
        if self._bucket is None or not length:
            return
        wait_s = self._bucket.take(length, self._clock.now_s())
        if wait_s > 0.0:
            try:
                await self._clock.sleep(wait_s)
            except asyncio.CancelledError:
                self._bucket.give_back(length)
                raise

    def give_back(self, length: int) -> None:
        """`length` bytes of what was taken were not needed."""
        if self._bucket is not None:
            self._bucket.give_back(length)

    def range_bytes(self, length: int) -> int:
        """How many of `length` bytes are to go at once, at most."""
        return length if self._bucket is None else min(length, int(self._bucket.bytes_per_s * RANGE_S))


class Line:
    """What blobs may take of the line, in Mbit/s up and down; None is all of it."""

    def __init__(
        self, *, up_mbit: float | None = None, down_mbit: float | None = None, clock: Clock | None = None
    ) -> None:
        """Raises ConfigError for what no line can be limited to."""
        clock = clock or SystemClock()
        self.up = Way(_checked(up_mbit, "up"), clock)
        """What we upload, and the ranges that others read from us."""
        self.down = Way(_checked(down_mbit, "down"), clock)
        """What we fetch, and the uploads that we take."""


def _checked(mbit: float | None, way: str) -> float | None:
    if mbit is None or MBIT_MIN <= mbit < math.inf:
        return mbit
    hint = "leave it out, and there is no limit"
    raise ConfigError(f"a limit of {mbit:g} Mbit/s {way}, but it must be at least {MBIT_MIN}", hint=hint)
