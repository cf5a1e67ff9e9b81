"""What a volunteer is doing right now, and why it rests; the display, the heartbeat and `status` read it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dipaco_p2p.clock import Clock
from dipaco_p2p.program.tasks import done_or_later
from dipaco_p2p.program.text import duration, size
from dipaco_p2p.strict import plain
from dipaco_p2p.topology import ModuleId, PathId

NOT_TOLD = frozenset({"run", "peer", "limited", "unwritten", "is_complete", "is_last_stage"})
"""Of a status, in its figures: who shows them says it otherwise, or nobody asks."""


@dataclass(slots=True, kw_only=True)
class Status:
    """Changed by the volunteer, one plain assignment at a time, so any thread may read it."""

    run: str = ""
    peer: str = ""
    doing: str = "starting"
    waits_for: str = ""
    """Whom or what it waits for; empty while it works."""
    path: PathId | None = None
    round: int = 0
    rounds: int = 0
    """Of the stage."""
    rounds_after: int = 0
    """Of the stages that follow."""
    step: int = 0
    """Inner steps of this round."""
    steps: int = 0
    is_cut: bool = False
    """Whether the inner steps end early, for the push to be in time."""
    limited: str = ""
    """What was done last to stay within the owner's limits."""
    unwritten: str = ""
    """Where curves are not written any more, and why."""
    loss: float | None = None
    tokens_per_s: float = 0.0
    last_receipt: str = ""
    receipts: int = 0
    """Of this identity, in all stages of the run and over restarts, as its histories have them."""
    leads: list[ModuleId] = field(default_factory=list)
    keep_bytes: int = 0
    """Room that is given to keep old versions for others."""
    kept_bytes: int = 0
    kept_ranges: int = 0
    """Ranges of versions that are whole here."""
    keeping_proofs: int = 0
    """Challenges of the coordinator that were answered since the start."""
    peers_alive: int = 0
    """Peers whose heartbeat is heard."""
    peers_training: int = 0
    """Those of them that take part: that claim a path, and get on with it."""
    paths_covered: int = 0
    paths: int = 0
    is_complete: bool = False
    """Whether the stage has ended, by itself."""
    is_last_stage: bool = True
    """Whether the run ends with it."""
    eta_s: float | None = None
    """Seconds until the whole run ends, if rounds take as long as the last ones did; None before two were begun."""

    def figures(self) -> dict[str, Any]:
        """As plain JSON values: the same keys always, null for what is not known."""
        told = {key: value for key, value in plain(self).items() if key not in NOT_TOLD}
        return told | {
            "waits_for": self.waits_for or None,
            "last_receipt": self.last_receipt or None,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
        }


def in_rows(figures: Mapping[str, Any]) -> dict[str, str]:
    """The `figures` of a status for people, by what they are called, in the order in which somebody asks for them."""
    cut = ", cut short" if figures["is_cut"] else ""
    covered = f"{figures['paths_covered']} of {figures['paths']} paths have a volunteer"
    kept = {"keeps": _kept(figures)} if figures.get("keep_bytes") else {}
    return {
        "doing": figures["doing"] + (f" for {figures['waits_for']}" if figures["waits_for"] else ""),
        "path": figures["path"] or "none",
        "leads": ", ".join(figures["leads"]) or "no module",
        "round": f"{figures['round']} of {figures['rounds']}, step {figures['step']} of {figures['steps']}{cut}",
        "loss": "-" if figures["loss"] is None else f"{figures['loss']:.3f} nats per token",
        "speed": f"{figures['tokens_per_s']:,.0f} tokens/s",
        "receipts": str(figures["receipts"]),
        "last receipt": figures["last_receipt"] or "-",
        **kept,
        "swarm": f"{figures['peers_alive']} peers alive, {figures['peers_training']} training; {covered}",
        "time left": _time_left(figures),
    }


def _kept(figures: Mapping[str, Any]) -> str:
    """For others; whoever offers nothing has no such line."""
    room = f"{size(figures['kept_bytes'])} of {size(figures['keep_bytes'])}"
    return f"{room} for others, {figures['kept_ranges']} ranges; proved {figures['keeping_proofs']} times"


def _time_left(figures: Mapping[str, Any]) -> str:
    """Of the whole run, and on what it rests; a volunteer of an earlier version told that of the stage."""
    is_guess = figures["eta_s"] is not None and figures.get("rounds_after")
    return duration(figures["eta_s"]) + (f" if {OTHER_PACE}" if is_guess else "")


OTHER_PACE = "the grid's rounds take as long as those of the warm-up"


LOOK_S = 30.0
"""A timer stands still while the machine sleeps, so the clock is looked at again after this long at the latest."""


class Pauses:
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


SAID = {"user": "your `pause`"}
"""Reasons whose name in a report is too short for people."""


def in_words(reasons: Mapping[str, float | None]) -> str:
    """``battery, your `pause` until Tue 14:05``."""
    return ", ".join(
        SAID.get(reason, reason)
        + ("" if until_s is None else time.strftime(" until %a %H:%M", time.localtime(until_s)))
        for reason, until_s in sorted(reasons.items())
    )
