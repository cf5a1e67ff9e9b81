"""The holders of one blob while it is fetched: who is still worth asking, in which order, and what they bring."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DipacoError, Refused
from ..protocol.signing import PeerId, short
from .api import Swarm
from .calls import Range, ReadBlob
from .line import CUT_BYTES_MIN
from .pace import Pace, pace_of

Holder = tuple[PeerId, Sequence[str]]


@dataclass(slots=True)
class Call:
    """One range that one holder is asked for."""

    holder: Holder
    part: range
    since_s: float | None = None
    """By the loop's clock; None while it waits for our own line."""


class Holders:
    """Who may have the blob named `digest`, of `size` bytes; `timeout_s` is for each range."""

    def __init__(self, swarm: Swarm, digest: str, holders: Sequence[Holder], *, size: int, timeout_s: float) -> None:
        self._swarm, self._digest, self._timeout_s = swarm, digest, timeout_s
        self.size = size
        self._pace, self._loop = pace_of(swarm), asyncio.get_running_loop()
        self._all = _ranked(self._pace, holders)
        self._failed: set[PeerId] = set()
        self.liars: list[PeerId] = []
        """Who has something shorter under its name: a damaged blob."""
        self.problem = "nobody was asked"
        """What came of the last call that failed."""

    def trusted(self, *, but: PeerId | None = None) -> list[Holder]:
        """Those that did not fail, the most promising first, without `but`."""
        return [holder for holder in self._all if holder[0] not in {but, *self._failed}]

    async def bring(self, call: Call) -> bytes | None:
        """What the holder sends of the part, if not all of it then enough; None if it fails."""
        peer, asked, down = call.holder[0], len(call.part), self._swarm.line.down
        await down.take(asked)
        call.since_s = self._loop.time()
        reply = await self._ask(call.holder, call.part)
        elapsed_s = self._loop.time() - call.since_s
        if reply is None:
            self._pace.failed(peer, asked, elapsed_s)
            return None
        if reply.size != self.size or not min(asked, CUT_BYTES_MIN) <= len(reply.body) <= asked:
            self.problem = f"{short(peer)} sent a range of a wrong size"
            self._failed.add(peer)
            if reply.size < self.size and peer not in self.liars:
                self.liars.append(peer)
            return None
        down.give_back(asked - len(reply.body))
        self._pace.brought(peer, asked, len(reply.body), elapsed_s)
        return reply.body

    async def _ask(self, holder: Holder, part: range) -> Range | None:
        request = ReadBlob(digest=self._digest, offset=part.start, length=len(part))
        peer, addresses = holder
        try:
            return await request.call(self._swarm, peer, timeout_s=self._timeout_s, addresses=addresses)
        except DipacoError as error:
            if isinstance(error, Refused):  # nothing came
                self._swarm.line.down.give_back(len(part))
            self.problem = str(error)
            self._failed.add(peer)
            return None


def _ranked(pace: Pace, holders: Sequence[Holder]) -> list[Holder]:
    """The first stays first, since it is the likeliest to have it; of the others those that were fast come first, those
    that were slow last."""
    speeds = {peer: pace.speed(peer) for peer, _ in holders}
    known = [speed for speed in speeds.values() if speed is not None]
    middle = sum(known) / len(known) if known else 0.0
    return [*holders[:1], *sorted(holders[1:], key=lambda holder: -(speeds[holder[0]] or middle))]


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks`, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
