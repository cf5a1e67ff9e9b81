"""Work that several ask for at once, and that is done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..errors import DipacoError

T = TypeVar("T")


@dataclass(slots=True)
class _Running(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class Shared(Generic[T]):
    """What is being done, by name. It ends with the last who waits for it."""

    def __init__(self) -> None:
        self._running: dict[str, _Running[T]] = {}

    async def do(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` gives, or the same work of another who has begun it; raises what our own raises, for another's
        may have failed for reasons of its own."""
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
