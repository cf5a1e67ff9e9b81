"""Credit: what a volunteer's work is worth, as anybody can work it out again from the versions alone.

The unit is a token that entered a published version. A share of a version earns its tokens, up to a full round's, since
more than that weighs nothing more in the average; divided by the levels of the grid, since one round of a path is
contributed once for each of its modules. So a path whose whole round entered all its modules earns its tokens once.
Copies of the same work share its tokens, which is what their shares name (core/outer/copies.py).

An audit takes the same steps again, and earns what the work does: its tokens, divided by the levels in each of its
modules' chains. Which audits a chain names, and which of them earn, is in audits.py and standing.py.

Recent credit is an average per day in which what was earned a half-life ago counts half. Who earns the same every day
comes near that figure; who stops sees it halve with every half-life. That a recent average with a half-life suits
volunteers is known from BOINC; here it is computed as its definition, a sum, so that it depends on no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

DAY_S = 86_400.0
HALF_LIFE_S = 7 * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """What one share earned, or one audit."""

    credit: float
    at_s: float
    """Unix time."""


def share_credit(tokens: int, *, tokens_full: int, levels: int) -> float:
    """What a share with `tokens`, or an audit of its work, earns on a grid of `levels`, of which a full round has
    `tokens_full`."""
    assert tokens >= 0 and tokens_full >= 1 and levels >= 1, (tokens, tokens_full, levels)
    return min(tokens, tokens_full) / levels


def recent_credit(earned: Iterable[Earned], *, now_s: float) -> float:
    """Credit a day. What a clock that is ahead dates into the future counts as earned just now."""
    weights = (one.credit * math.exp2(-max(now_s - one.at_s, 0.0) / HALF_LIFE_S) for one in earned)
    return math.fsum(weights) * math.log(2) * DAY_S / HALF_LIFE_S
