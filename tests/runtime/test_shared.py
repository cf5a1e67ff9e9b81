"""Work that several ask for at once: done once, for as long as anybody waits, and nobody fails of another's reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from virtual_time import play

from dipaco_p2p.errors import BlobMissing
from dipaco_p2p.program.tasks import SingleFlight


class Works:
    """Each waits until it may end; how many have begun, and ended by cancellation."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    def of(self, *, fails: bool = False) -> Callable[[], Coroutine[Any, Any, str]]:
        async def work() -> str:
            self.begun += 1
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if fails:
                raise BlobMissing("nobody has it")
            return "done"

        return work


async def settled() -> None:
    """Let everything go on that can."""
    for _ in range(9):
        await asyncio.sleep(0)


def test_one_work_serves_all_and_the_next_begins_anew() -> None:
    async def scenario() -> None:
        shared, works = SingleFlight[str](), Works()
        waiting = [asyncio.create_task(shared.do("a", works.of())) for _ in range(3)]
        other = asyncio.create_task(shared.do("b", works.of()))
        await settled()
        assert works.begun == 2
        works.may_end.set()
        assert await asyncio.gather(*waiting, other) == ["done"] * 4
        assert await shared.do("a", works.of()) == "done" and works.begun == 3

    play(scenario)


def test_it_ends_with_the_last_who_waits_for_it() -> None:
    async def scenario() -> None:
        shared, works = SingleFlight[str](), Works()
        first, second = (asyncio.create_task(shared.do("a", works.of())) for _ in range(2))
        await settled()
        first.cancel()  # who began it: the other still wants it
        await settled()
        assert (works.begun, works.cancelled) == (1, 0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await settled()
        assert (works.begun, works.cancelled) == (1, 1)

    play(scenario)


def test_who_shared_a_work_that_failed_tries_it_alone() -> None:
    async def scenario() -> None:
        shared, works = SingleFlight[str](), Works()
        first = asyncio.create_task(shared.do("a", works.of(fails=True)))
        second = asyncio.create_task(shared.do("a", works.of()))
        await settled()
        works.may_end.set()
        with pytest.raises(BlobMissing):
            await first
        assert await second == "done" and works.begun == 2

    play(scenario)
