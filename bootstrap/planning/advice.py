"""Which codecs suit a run, and whether its paths should train on while they send.

Decided by three things: how long a volunteer's line is busy in a round, how long the round's inner steps take, and how
many rounds the run has. What a choice costs is what it cost where it was measured (docs/performance.md): after `ROUNDS`
rounds of 30 steps, over float32, each with the outer step that suited it best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dipaco_p2p.config import RunConfig

BUSY = 0.2
"""Of a round on the line: with so little a smaller codec saves less than it may cost."""
ROUNDS = 60
OVERLAP_FROM = 0.3
"""Of a round on the line: overlap then makes so many more rounds that they are worth more than it costs."""
OVERLAP_COSTS, OVERLAP_OUTER = 8.0, "lr = 0.5 and momentum = 0.7"
"""Of perplexity, in percent, the worse of two seeds, with the outer step that suits it best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Codecs that were measured together."""

    uplink: str
    downlink: str
    costs: float
    """Of perplexity, in percent; the worse of two seeds."""
    rounds_min: int = 0
    """In fewer rounds it costs more, or nobody has tried it."""
    outer: str = ""
    """What it wants in `[outer]`, if not the default."""


CHOICES = (
    Choice(uplink="int4", downlink="int4", costs=0.4),
    Choice(uplink="int2", downlink="int4", costs=0.5, rounds_min=6, outer="momentum = 0.8"),
    Choice(uplink="ternary640", downlink="int4", costs=1.7, rounds_min=ROUNDS, outer="lr = 0.9 and momentum = 0.7"),
)
"""From the most exact to the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to set in the run file, and why."""

    uplink: str
    downlink: str
    overlap: bool
    busy: float
    """The share of a round in which the line is busy with these codecs, if nothing overlaps."""
    why: tuple[str, ...]

    @property
    def words(self) -> str:
        """In a line: what to set."""
        return f"uplink {self.uplink}, downlink {self.downlink}, overlap {'on' if self.overlap else 'off'}"


def advise(config: RunConfig, line_s: Callable[[str, str], float], *, steps_s: float) -> Advice:
    """`line_s` says how long a round's line is busy with these codecs, up and down; `steps_s` is how long its inner
    steps take."""
    rounds, exact = config.rounds.rounds, CHOICES[0]
    times = {choice: line_s(choice.uplink, choice.downlink) for choice in CHOICES}
    busy = {choice: times[choice] / (times[choice] + steps_s) for choice in CHOICES}
    fitting = [choice for choice in CHOICES if rounds >= choice.rounds_min]
    chosen = next((choice for choice in fitting if busy[choice] <= BUSY), fitting[-1])
    why = [f"with {exact.uplink} the line is busy for {busy[exact]:.0%} of a round"]
    if chosen != exact:
        outer = f", with {chosen.outer} in [outer]" if chosen.outer else ""
        cost = f"it cost {chosen.costs:g} % of perplexity in {ROUNDS} rounds of 30 steps{outer}"
        why.append(f"with {chosen.uplink} for {busy[chosen]:.0%}; {cost}")
    if busy[chosen] > BUSY and len(fitting) < len(CHOICES):
        smaller = CHOICES[len(fitting)]
        why.append(f"{smaller.uplink} is for runs of {smaller.rounds_min} rounds and more")
    if busy[chosen] > BUSY:
        steps = math.ceil(config.inner.steps * times[exact] * (1 / BUSY - 1) / steps_s)
        why.append(f"with rounds of {steps:,} steps {exact.uplink} would do")
    overlap = busy[chosen] > OVERLAP_FROM and rounds >= ROUNDS
    if overlap:
        cost = f"it cost {OVERLAP_COSTS:g} % of perplexity in {ROUNDS} rounds, with {OVERLAP_OUTER} in [outer]"
        why.append(f"overlap hides the line behind the steps; {cost}")
    return Advice(uplink=chosen.uplink, downlink=chosen.downlink, overlap=overlap, busy=busy[chosen], why=tuple(why))
