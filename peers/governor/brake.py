"""What is kept between inner steps: a share of the processor's time, by waiting, and a GPU that can be given up soon.

Within a step all the processor gives is taken; the mean is what is kept. Time is an argument.
"""

from __future__ import annotations

import math

BURST_S = 5.0
"""Processor time that was left unused so long before a step, or later, may be caught up."""
GPU_PART_S = 0.4
"""Two parts may still follow once a GPU is wanted (core/microbatch.py), and a look may be a second away."""
LONG_STEPS = 3


class CpuShare:
    """When the next step may begin, so that the program takes its share of the processor and no more.

    A timetable like that of a line (bandwidth.py): a second of processor time takes 1 / (share * cores) seconds. All
    that the program does counts, but only steps wait: leading modules or answering others may take more than that.
    """

    def __init__(self, share: float, cores: float) -> None:
        assert share > 0 and cores > 0
        self._rate = share * cores
        self._used_s: float | None = None
        self._free_s = -math.inf
        """When all that was used so far is through."""

    def wait_s(self, used_s: float, now_s: float, *, busy_s: float) -> float:
        """How long from now on to wait, after a step of `busy_s`; `used_s` is the program's processor time so far."""
        if self._used_s is None:  # starting is not counted
            self._used_s, self._free_s = used_s, now_s
            return 0.0
        length_s, self._used_s = used_s - self._used_s, used_s
        self._free_s = max(self._free_s, now_s - busy_s - BURST_S) + length_s / self._rate
        return max(0.0, self._free_s - now_s)


class LongParts:
    """Whether parts of a batch take too long for a GPU to be given up in time: three steps in a row, since now and then
    one is compiled first."""

    def __init__(self) -> None:
        self._long = 0

    def told(self, longest_s: float) -> bool:
        """Of one step, the longest part; whether parts should be shorter from now on."""
        self._long = self._long + 1 if longest_s > GPU_PART_S else 0
        if self._long < LONG_STEPS:
            return False
        self._long = 0
        return True
