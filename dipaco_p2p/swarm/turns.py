"""Who may have how much of a server at once, when strangers ask: shares that shrink as it fills, and turns.

Theory. A caller may take a fixed fraction of what is *still free* (dynamic thresholds: Choudhury and Hahne, "Dynamic
queue length thresholds for shared-memory packet switches", 1998). One caller alone gets all that a caller may have;
the more there are, the less each gets; and something stays free for the next, whatever the others do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator

from ..protocol.signing import PeerId


class Share:
    """Counts what callers hold of `in_all`; nobody holds more than `per_peer`, or than its fraction of what is free."""

    def __init__(self, in_all: int, *, per_peer: int) -> None:
        assert 2 * per_peer <= in_all, "one caller could keep everybody else out"
        self._in_all, self._per_peer = in_all, per_peer
        self._fraction = in_all // (2 * per_peer)
        self._held: Counter[PeerId] = Counter()

    def take(self, peer: PeerId) -> bool:
        """Take one for `peer`; False if it has its share already."""
        free = self._in_all - self._held.total()
        limit = min(self._per_peer, max(1, free // self._fraction))
        if not free or self._held[peer] >= limit:
            return False
        self._held[peer] += 1
        return True

    def give_back(self, peer: PeerId) -> None:
        """One that `peer` took is free again."""
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]


class Turns:
    """Lets work through as the share allows; the rest waits, and the peers that wait take turns."""

    def __init__(self, at_once: int, *, per_peer: int) -> None:
        self._share = Share(at_once, per_peer=per_peer)
        self._waiting: OrderedDict[PeerId, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, peer: PeerId) -> AsyncIterator[None]:
        """Wait for a turn of `peer`, and have it while the block runs."""
        await self._begin(peer)
        try:
            yield
        finally:
            self._share.give_back(peer)
            self._wake()

    async def _begin(self, peer: PeerId) -> None:
        if peer not in self._waiting and self._share.take(peer):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the very moment that nobody wants it any more
                self._share.give_back(peer)
                self._wake()
            raise

    def _wake(self) -> None:
        """Give what is free to those who wait, one each, the one that waited longest for a turn of its first."""
        for peer in list(self._waiting):
            turns = self._waiting[peer]
            while turns and turns[0].done():  # given up
                turns.popleft()
            if turns and self._share.take(peer):
                turns.popleft().set_result(None)
                self._waiting.move_to_end(peer)
            if not turns:
                del self._waiting[peer]
