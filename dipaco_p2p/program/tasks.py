"""Loops that must not die unnoticed, waits that end, and work that several ask for and that is done once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..clock import Clock
from ..errors import DipacoError, Unreachable

log = logging.getLogger(__name__)

T = TypeVar("T")

RESTART_S = 1.0
SOON_S = 0.05
"""What happened is looked at so much later, together with what else happens in the same moment."""
CHECK_S = 1.0


async def keep_going(work: Callable[[], Awaitable[None]], clock: Clock) -> None:
    """Run `work` to its end; whenever it fails, log why and start it again a second later. Cancellation passes."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s failed and is started again", getattr(work, "__qualname__", work))
            await clock.sleep(RESTART_S)


async def done_or_later(task: asyncio.Future[Any], clock: Clock, duration_s: float) -> None:
    """Wait until `task` is done, `duration_s` at most; it goes on, and what it raises stays with it."""
    await first_or_later([task], clock, duration_s)


async def first_or_later(tasks: Iterable[asyncio.Future[Any]], clock: Clock, duration_s: float) -> None:
    """As `done_or_later`, until the first of `tasks` is done."""
    sleeping = asyncio.ensure_future(clock.sleep(duration_s))
    try:
        await asyncio.wait({*tasks, sleeping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeping.cancel()
        await asyncio.gather(sleeping, return_exceptions=True)


async def in_time(work: Awaitable[T], clock: Clock, limit_s: float, *, what: str) -> T:
    """What `work` gives; raises Unreachable, which names it, if that takes longer than `limit_s`, and stops it."""
    working = asyncio.ensure_future(work)
    try:
        await done_or_later(working, clock, max(limit_s, 0.0))
        if not working.done():
            raise Unreachable(f"{what} did not come in {limit_s:.0f} s")
        return working.result()
    finally:
        working.cancel()


async def as_long_as(check: Callable[[], None], work: Callable[[], Awaitable[T]], clock: Clock) -> T:
    """What `work` gives; `check` is called right before it and each second meanwhile: what it raises stops the work."""

    async def checked() -> T:
        check()
        return await work()

    working = asyncio.ensure_future(checked())
    try:
        while not working.done():
            await done_or_later(working, clock, CHECK_S)
            if not working.done():
                check()
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)  # whoever goes on finds it at an end


async def changed_or_later(condition: asyncio.Condition, clock: Clock, duration_s: float) -> None:
    """Wait until `condition` is notified, `duration_s` at most."""

    async def changed() -> None:
        async with condition:
            await condition.wait()

    waiting = asyncio.ensure_future(changed())
    try:
        await done_or_later(waiting, clock, duration_s)
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def repeat(
    *steps: Callable[[], Awaitable[None]],
    clock: Clock,
    every_s: float,
    is_wanted: Callable[[], bool],
    sooner: asyncio.Event | None = None,
) -> None:
    """Take `steps` in turn again and again while `is_wanted`: after `every_s`, or soon after `sooner` is set."""
    while is_wanted():
        if sooner is not None:
            sooner.clear()  # before the steps, so that what comes while they wait is looked at again
        for step in steps:
            await step()
        if sooner is None:
            await clock.sleep(every_s)
        else:
            waiting = asyncio.ensure_future(sooner.wait())
            try:
                await done_or_later(waiting, clock, every_s)
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            if sooner.is_set():
                await clock.sleep(SOON_S)


@dataclass(slots=True)
class _Running(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SingleFlight(Generic[T]):
    """What is being done, by name. It ends when nobody waits for it any more."""

    def __init__(self) -> None:
        self._running: dict[str, _Running[T]] = {}

    def is_doing(self, beginning: str) -> bool:
        """Whether something is being done whose name begins so."""
        return any(name.startswith(beginning) for name in self._running)

    async def do(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, or of the same work that another caller has begun. Raises only what our own work
        raises, since another's may have failed for reasons of its own."""
        while True:
            is_ours = name not in self._running
            if is_ours:
                self._running[name] = _Running(asyncio.ensure_future(work()))
            try:
                return await self._result(name, self._running[name])
            except DipacoError:
                if is_ours:
                    raise

    async def _result(self, name: str, running: _Running[T]) -> T:
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if self._running.get(name) is running and (running.task.done() or not running.waiting):
                del self._running[name]
                running.task.cancel()
