"""An audit of one work, at its module's leader: one peer after the other is asked to repeat it, until enough agree.

It takes an auditor about as long as the author, and whoever repeats a work says no more meanwhile than that it is at
it. A liar says so for ever. So an auditor is waited for alone for most of the time that a work may wait, and then the
next one is asked as well; whoever says something first, counts. What is said after the work counted, a later version
tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ..canonical import digest
from ..clock import Clock
from ..errors import Refused
from ..program.tasks import first_or_later
from ..protocol import gate
from ..protocol.documents import Sealed
from ..protocol.gate import Appraisal
from ..protocol.signing import PeerId

RETRY_S = 1.0
AGAIN = 0.1
"""Of the works that an auditor could repeat, the share that another one repeats as well."""
ALONE_SHARE = 0.75
"""For so much of the time that a work may wait nobody else is asked, while an auditor says that it is at it. That time
is about twice as long as a path takes: an auditor that trains meanwhile needs most of it."""
AT_ONCE = 2
"""Auditors of one work: of three that share a line of 0.1 Mbit/s one may get next to nothing (node.py)."""
LONG_VERSIONS = 3
"""Once so many versions were made since the work was handed in, two rounds have gone by: that is long as well."""
ASKED_VERSIONS = 4
"""After so many nobody else is asked: the author has the states of its work no more."""
LATE_VERSIONS = 5
"""Those who are at it may go on for so many."""

Ask = Callable[[PeerId], Awaitable[Sealed[Appraisal] | None]]
"""What one peer says, once it has repeated the work; None if it will not. Raises Refused if it repeats another one."""


@dataclass(slots=True)
class Audit:
    """Of a work: while it goes on, and until a version says what came of it."""

    task: asyncio.Task[None]
    said: Mapping[PeerId, Sealed[Appraisal]]
    late: int = 0
    """Versions that were made since its work was handed in."""
    is_told: bool = False
    """Whether the version that is being made tells of it."""

    @property
    def is_in_time(self) -> bool:
        """Whether something may still come of it."""
        return not self.task.done() and self.late < LATE_VERSIONS

    @property
    def may_ask(self) -> bool:
        """Whether its author still has what one more auditor needs."""
        return self.late < ASKED_VERSIONS

    @property
    def found(self) -> list[Sealed[Appraisal]]:
        """What came of it after its work counted; nothing while auditors do not agree, or others are asked."""
        found = [sealed for sealed in self.said.values() if sealed.document.repeated is not None]
        is_open = gate.is_open if self.may_ask and not self.task.done() else gate.is_undecided
        return found if self.late and not is_open([sealed.document for sealed in found]) else []


async def have_repeated(
    said: dict[PeerId, Sealed[Appraisal]],
    ask: Ask,
    *,
    candidates: Callable[[], Sequence[PeerId]],
    late: Callable[[], int],
    least: int,
    alone_s: float,
    until_s: float,
    clock: Clock,
) -> None:
    """Until enough agree, `least` at the least, or nobody is left to be asked. `candidates` come in order, each is
    waited for `alone_s`, and nobody else is asked after `until_s`; whoever repeats another work is asked again later.
    `late` says how many versions were made since the work was handed in."""
    asked, taken = set[PeerId](), set[PeerId]()
    asking: dict[asyncio.Task[Sealed[Appraisal] | None], tuple[PeerId, float]] = {}
    try:
        while sum(one.document.repeated is not None for one in said.values()) < least or is_open(said):
            now_s = clock.now_s()
            is_long = all(now_s >= since_s + alone_s for _, since_s in asking.values())
            is_long |= late() >= LONG_VERSIONS
            is_due = is_long and len(asking) < AT_ONCE and now_s < until_s and late() < ASKED_VERSIONS
            left = [judge for judge in candidates() if judge not in asked] if is_due else []
            judge = next((one for one in left if one not in taken), None)
            if judge is not None:
                asked.add(judge)
                asking[asyncio.ensure_future(ask(judge))] = judge, now_s
            elif left:
                taken.clear()
            elif not asking:
                return
            await first_or_later(asking, clock, RETRY_S)
            for task in [task for task in asking if task.done()]:
                judge, _ = asking.pop(task)
                try:
                    if (found := task.result()) is not None:
                        said[judge] = found
                except Refused:
                    asked.remove(judge)
                    taken.add(judge)
    finally:
        for task in asking:
            task.cancel()


def is_open(said: Mapping[PeerId, Sealed[Appraisal]]) -> bool:
    """Whether one more auditor should be asked."""
    return gate.is_open([sealed.document for sealed in said.values()])


def is_drawn(lot: str, chance: float) -> bool:
    """Whether a lot that nobody could foresee comes out so."""
    number = digest(lot.encode())
    return int(number, 16) < chance * (1 << 4 * len(number))
