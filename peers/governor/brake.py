"""Shares that are kept by waiting between inner steps: of the processor's time, and of a GPU's power.

A step is never interrupted, so within one the machine gives all it has; the mean is what is kept. Time is an argument.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

BURST_S = 5.0
"""Processor time that was left unused so long before a step, or later, may be caught up."""
DUTY_MIN = 0.02
SAMPLES = 10
GAIN = 0.5
"""A correction goes half of the way: the samples that it is made of lag behind."""


class CpuShare:
    """When the next step may begin, so that the program takes its share of the processor and no more.

    A timetable like that of a line (swarm/line.py): a second of processor time takes 1 / (share * cores) seconds. All
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


class PowerShare:
    """How long to wait after steps so that the mean power stays at a limit, learnt from samples of it.

    Power rises with the share of time in which the GPU computes. The share is corrected by what the mean of the last
    samples was too high or too low, and ends where the mean is the limit, or at 1.
    """

    def __init__(self, limit_w: float) -> None:
        self._limit_w = limit_w
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.duty = 1.0
        """Share of the time in which steps are taken."""

    @property
    def is_too_low(self) -> bool:
        """Whether the limit cannot be kept: the GPU takes more though hardly anything is computed."""
        return self.duty <= DUTY_MIN and bool(self._samples) and statistics.mean(self._samples) > self._limit_w

    def told(self, watts: float) -> None:
        """A sample of the GPU's power; they come at equal times."""
        self._samples.append(watts)
        if len(self._samples) == SAMPLES:
            ratio = self._limit_w / max(statistics.mean(self._samples), 1e-9)
            self.duty = min(1.0, max(DUTY_MIN, self.duty * ratio**GAIN))
            for _ in range(SAMPLES // 2):  # what follows is judged with as many new samples
                self._samples.popleft()

    def wait_s(self, busy_s: float) -> float:
        """How long to wait after computing for `busy_s`."""
        return busy_s * (1 / self.duty - 1)
