"""Plays a schedule on a swarm: every action at its second, or as soon as the one before it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from .evidence import Done
from .schedule import Action
from .swarm import POLL_S, LocalSwarm


async def play(
    swarm: LocalSwarm,
    actions: Sequence[Action],
    *,
    duration_s: float,
    on_done: Callable[[Done], None] = lambda done: None,
    on_tick: Callable[[], None] = lambda: None,
) -> None:
    """Do all `actions`, and come back after `duration_s`; raises DipacoError when an unharmed member ends."""
    began_s, waiting = time.monotonic(), list(actions)
    while (elapsed_s := time.monotonic() - began_s) < duration_s or waiting:
        while waiting and waiting[0].at_s <= elapsed_s:
            action = waiting.pop(0)
            on_done(await swarm.act(action.verb, action.name))
        swarm.require_up()
        on_tick()
        await asyncio.sleep(POLL_S)
