"""Knocking: all addresses of an entry are tried, and whichever shows the right run first opens it.

One bad seed does not matter, whatever is wrong with it: dead, slow, of another run, with another clock, or nonsense.
The first is dialled at once, each further one a moment later or as soon as all before it have failed (the idea of
RFC 8305, "Happy Eyeballs"). Peers that were met in an earlier session are asked only after the seeds had their
chance. The failures, with their reasons, are told only when all have failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..clock import Clock
from ..errors import DipacoError, EnvironmentUnfit, IntegrityError, Refused, Unreachable, WrongRun
from ..protocol.signing import PeerId
from ..swarm.addresses import peer_at
from ..swarm.api import Swarm
from .entry import Entry
from .run import Run
from .stages import fetch_stages

CONNECT_TIMEOUT_S = 15.0
STAGGER_S = 0.25
FRIENDS_AFTER_S = 3.0
"""How long the seeds have for themselves, while one of them has not failed."""
TELLING = (WrongRun, IntegrityError, EnvironmentUnfit, Refused, Unreachable)
"""Of several failures the one of the first kind here decides how the program ends: an answer tells more than none."""

Enter = Callable[[str], Awaitable[None]]
"""Joins the DHT through the peer at an address; raises EnvironmentUnfit when its clock is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The first that opened."""

    address: str
    host: PeerId
    stages: list[Run]
    """Of the run, the newest last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One address, and which run must be behind it."""

    address: str
    run: str | None
    coordinator: PeerId | None
    after_s: float
    """How long it leaves those before it to themselves."""


def doors(entry: Entry, *, friends: Sequence[str] = (), known_run: str | None = None) -> list[Door]:
    """In which order to knock; `friends` were met in `known_run` through this entry, and are asked for it alone."""
    seeds = dict.fromkeys(entry.addresses)
    found = [Door(address=a, run=entry.run, coordinator=entry.coordinator, after_s=STAGGER_S) for a in seeds]
    run = entry.run or known_run
    for number, address in enumerate(a for a in dict.fromkeys(friends) if a not in seeds):
        wait_s = STAGGER_S if number else FRIENDS_AFTER_S
        found.append(Door(address=address, run=run, coordinator=entry.coordinator, after_s=wait_s))
    return found


async def knock(swarm: Swarm, found: Sequence[Door], clock: Clock, *, enter: Enter) -> Opened:
    """The first of the doors that opens. Raises the most telling failure, which names every address, if none does."""

    async def attempt(door: Door) -> Opened:
        host = await swarm.connect(door.address, timeout_s=CONNECT_TIMEOUT_S)
        stages = await fetch_stages(swarm, host, expected=door.run, author=door.coordinator, addresses=[door.address])
        await enter(door.address)
        return Opened(address=door.address, host=host, stages=stages)

    running: dict[asyncio.Task[Opened], Door] = {}
    failures: dict[str, DipacoError] = {}
    waiting = [door for door in found if peer_at(door.address) != swarm.peer]
    try:
        while waiting or running:
            if waiting:
                door = waiting.pop(0)
                running[asyncio.ensure_future(attempt(door))] = door
            opened = await _first(running, failures, clock, wait_s=waiting[0].after_s if waiting else None)
            if opened is not None:
                return opened
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    raise _summary(failures)


async def _first(
    running: dict[asyncio.Task[Opened], Door],
    failures: dict[str, DipacoError],
    clock: Clock,
    *,
    wait_s: float | None,
) -> Opened | None:
    """The first that opens within `wait_s`; None when that is over, or all that were tried have failed."""
    timer = None if wait_s is None else asyncio.ensure_future(clock.sleep(wait_s))
    try:
        while running and (timer is None or not timer.done()):
            await asyncio.wait({*running, *([timer] if timer else [])}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                door = running.pop(task)
                try:
                    return task.result()
                except DipacoError as error:
                    failures[door.address] = error
    finally:
        if timer is not None:
            timer.cancel()
    return None


def _summary(failures: dict[str, DipacoError]) -> DipacoError:
    """One error for all: the only one as it is, of several the most telling kind with a note for each."""
    if not failures:
        return Unreachable("nobody to ask but ourselves", hint="join through another peer than this one")
    if len(failures) == 1:
        return next(iter(failures.values()))
    ranked = sorted(failures.values(), key=_rank)
    hint = ranked[0].hint or "check that one of them is running"
    summary = type(ranked[0])(f"none of {len(failures)} addresses opens the run", hint=hint)
    for address, error in failures.items():
        summary.add_note(f"{address}: {error}")
    return summary


def _rank(error: DipacoError) -> int:
    return next((rank for rank, kind in enumerate(TELLING) if isinstance(error, kind)), len(TELLING))
