"""Who comes and goes: sessions as volunteers elsewhere have them, a day's rhythm, a flash crowd, and a region that is
lost.

Source: ../shared/reference/field.md, section 7, which names its own: of the peers of IPFS in a week a tenth are always
on and a fifth come once, half of the sessions are shorter than two hours and 80 % than eight, which is a lognormal with
sigma 1.65. How far a day's rhythm goes is an assumption.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

ALWAYS_ON = 0.10
ONCE = 0.20
MEDIAN_S = 2 * 3600.0
ONCE_MEDIAN_S = 20 * 60.0
SIGMA = 1.65
DAY_S = 24 * 3600.0
RHYTHM = 0.25
"""By so much of their mean do the volunteers of a day's fullest hour outnumber it."""
CRASHES = 0.5
"""Of the sessions that end; the others end by Ctrl-C."""
REGION = 0.10
REGION_S = 180.0
FLASH_S = 600.0
RETURN_S = 120.0
"""How fast the number that is there follows the number that wants to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """One swarm's; without, everybody comes at the beginning and stays."""

    is_quiet: bool = False
    flash_at_s: float = math.inf
    """From when on the swarm doubles."""
    region_at_s: float = math.inf
    """When a tenth is lost."""

    def wanted(self, volunteers: int, now_s: float) -> float:
        """How many want to be there."""
        share = (
            1.0 if self.flash_at_s == math.inf else 0.5 + 0.5 * min(1.0, max(0.0, now_s - self.flash_at_s) / FLASH_S)
        )
        rhythm = 0.0 if self.is_quiet else RHYTHM * math.sin(2 * math.pi * now_s / DAY_S)
        return volunteers * share * (1 + rhythm)

    def session_s(self, chance: random.Random) -> float:
        """How long somebody who comes now stays."""
        kind = chance.random()
        if self.is_quiet or kind < ALWAYS_ON:
            return math.inf
        median_s = ONCE_MEDIAN_S if kind < ALWAYS_ON + ONCE else MEDIAN_S
        return median_s * math.exp(SIGMA * chance.gauss(0.0, 1.0))
