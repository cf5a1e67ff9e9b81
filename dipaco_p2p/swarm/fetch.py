"""Fetching a blob from several holders at once, each bringing as many of its ranges as it is fast.

Whoever has brought a range gets the next one, so nobody has to know beforehand who is fast. A holder that fails is
dropped, and the next one of the list steps in. A range that is late is asked of a second holder too: so nobody slow is
waited for. What arrived is kept, without holes, for a later try.

Nothing is returned whose digest is not the one asked for. Of wrong bytes one holder's after the other are fetched again
from the rest; if that is no cure, the whole from each alone, which names the liars.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..canonical import digest as digest_of
from ..canonical import is_digest
from ..errors import BlobMissing, IntegrityError
from ..protocol.signing import PeerId, short
from .api import Swarm
from .blobs import OnProgress
from .holders import Call, Holder, Holders, end
from .pace import SLOW_S, pace_of
from .pieces import Pieces

HOLDERS_AT_ONCE = 4
IN_FLIGHT_MAX = 4
"""Ranges on their way from one holder that is alone."""
IN_FLIGHT_MIN = 2
"""From one of several: so its line is not idle while an answer travels."""
KEEP_EVERY_S = 1.0
"""What arrived is on this disk after so long."""
LATE_S = 1.0
LATE_TIMES = 2.0
"""A range is late after so many times what another holder would take for it, but not before a second."""


async def fetch_blob(
    swarm: Swarm,
    digest: str,
    *,
    size: int,
    holders: Sequence[Holder],
    partial: Path | None = None,
    timeout_s: float,
    on_progress: OnProgress | None = None,
) -> bytes:
    """The blob named `digest`, of `size` bytes, from `holders`, of whom the likeliest comes first.

    `timeout_s` is for each range. What arrived is kept in `partial` until the blob is whole, so that a later fetch goes
    on from there. `on_progress` gets (bytes so far, bytes in all). Raises BlobMissing when no holder gives it, and
    IntegrityError when the only bytes to be had are wrong ones.
    """
    assert is_digest(digest), f"not a digest: {digest}"
    known = Holders(swarm, digest, holders, size=size, timeout_s=timeout_s)
    fetch = _Fetch(swarm, digest, known, on_progress or (lambda done, size: None))
    data = await fetch.together(partial) or await fetch.one_by_one(partial)
    await asyncio.to_thread(_discard, partial)
    return data.value()


class _Fetch:
    """One blob on its way."""

    def __init__(self, swarm: Swarm, digest: str, known: Holders, on_progress: OnProgress) -> None:
        self._swarm, self._digest, self._known, self._on_progress = swarm, digest, known, on_progress

    async def together(self, partial: Path | None) -> Pieces | None:
        """The blob, from all holders; None if they do not bring it, or more than one of them lies."""
        pieces = await self._bring(self._known.trusted(), partial)
        if pieces is None or await self._is_right(pieces):
            return pieces
        await asyncio.to_thread(_discard, partial)
        for suspect in pieces.sources():
            lost = pieces.forget(suspect)
            if not await self._fill(pieces, self._known.trusted(but=suspect), None):
                return None
            if await self._is_right(pieces):
                return pieces
            pieces.restore(lost, suspect)
        return None

    async def one_by_one(self, partial: Path | None) -> Pieces:
        """The blob from the first holder that has it right; raises as `fetch_blob`."""
        liars = self._known.liars
        for holder in self._known.trusted():
            await asyncio.to_thread(_discard, partial)
            pieces = await self._bring([holder], partial)
            if pieces is None:
                continue
            if await self._is_right(pieces):
                return pieces
            liars.append(holder[0])
        if liars:
            await asyncio.to_thread(_discard, partial)
            names = ", ".join(map(short, liars))
            raise IntegrityError(f"{names} sent bytes that are not the blob {self._digest[:12]}")
        raise BlobMissing(f"nobody gave the blob {self._digest[:12]}: {self._known.problem}")

    async def _bring(self, holders: Sequence[Holder], partial: Path | None) -> Pieces | None:
        """All parts, those of `partial` first, not yet verified; None if the holders do not bring them."""
        kept = await asyncio.to_thread(_read_partial, partial, self._known.size)
        pieces = Pieces(self._known.size, kept)
        return pieces if await self._fill(pieces, holders, partial) else None

    async def _fill(self, pieces: Pieces, holders: Sequence[Holder], partial: Path | None) -> bool:
        """Ask `holders` for all that is missing; whether it came."""
        errands, keeper = _Errands(self._swarm, self._known, holders, pieces), _Keeper(partial, pieces)
        try:
            while not pieces.is_whole:
                wait_s = errands.hand_out()
                if not errands.calls:
                    await keeper.keep()
                    return False
                await errands.take_answers(wait_s)
                await keeper.keep_now_and_then()
                self._on_progress(pieces.here, pieces.size)
            return True
        finally:  # nothing is awaited here: a simulated crash closes what is left in the middle
            errands.drop()

    async def _is_right(self, pieces: Pieces) -> bool:
        return await asyncio.to_thread(digest_of, pieces.value()) == self._digest


class _Keeper:
    """Keeps the beginning of a blob that is on its way in `partial`: once a second, since a crash that costs a second
    is better than one more copy of every blob that comes at once."""

    def __init__(self, partial: Path | None, pieces: Pieces) -> None:
        self._partial, self._pieces, self._loop = partial, pieces, asyncio.get_running_loop()
        self._kept, self._kept_s = pieces.whole, self._loop.time()

    async def keep_now_and_then(self) -> None:
        """If it is time, and something is missing yet."""
        if not self._pieces.is_whole and self._loop.time() >= self._kept_s + KEEP_EVERY_S:
            await self.keep()

    async def keep(self) -> None:
        """All that is here without a hole."""
        self._kept_s, begin, end = self._loop.time(), self._kept, self._pieces.whole
        if self._partial is not None and end > begin:
            await asyncio.to_thread(_write_partial, self._partial, begin, self._pieces.read(begin, end))
            self._kept = end


class _Errands:
    """Which holder is asked for which part."""

    def __init__(self, swarm: Swarm, known: Holders, holders: Sequence[Holder], pieces: Pieces) -> None:
        self._line, self._pace, self._loop = swarm.line, pace_of(swarm), asyncio.get_running_loop()
        self._known, self._pieces = known, pieces
        self._holders = list(holders)
        self.calls: dict[asyncio.Task[bytes | None], Call] = {}

    def hand_out(self) -> float | None:
        """Give everybody something to bring; in how many seconds to do so again, if there is no answer before."""
        while (holder := self._idle()) is not None:
            length = self._line.down.range_bytes(self._pace.range_bytes(holder[0]))
            part = self._pieces.take(length)
            if part is None:
                return self._hand_out_late()
            self._start(holder, part)
        return None

    def _hand_out_late(self) -> float | None:
        """Ask somebody else for what is late, too; in how many seconds more may be late."""
        waits_s, now_s = [], self._loop.time()
        times = Counter(call.part for call in self.calls.values())
        for call in list(self.calls.values()):
            other = self._idle(but=call.holder) if times[call.part] == 1 else None
            if other is None:
                continue
            began_s = now_s if call.since_s is None else call.since_s
            wait_s = began_s + self._late_s(other, call.part) - now_s
            if wait_s <= 0.0:
                self._start(other, call.part)
            else:
                waits_s.append(wait_s)
        return min(waits_s, default=None)

    def _late_s(self, other: Holder, part: range) -> float:
        """After what time it pays to ask `other` for a part that somebody was asked for."""
        speed = self._pace.speed(other[0])
        return max(LATE_S, LATE_TIMES * (len(part) / speed if speed else SLOW_S))

    def _idle(self, *, but: Holder | None = None) -> Holder | None:
        """Who may be asked for one more range: of the first few holders the one that has the fewest to bring."""
        active = self._holders[:HOLDERS_AT_ONCE]
        most = max(IN_FLIGHT_MIN, IN_FLIGHT_MAX // max(1, len(active)))
        asked = Counter[PeerId](call.holder[0] for call in self.calls.values())
        free = [holder for holder in active if asked[holder[0]] < most and holder != but]
        return min(free, key=lambda holder: asked[holder[0]], default=None)

    def _start(self, holder: Holder, part: range) -> None:
        call = Call(holder, part)
        self.calls[asyncio.create_task(self._known.bring(call))] = call

    def drop(self) -> None:
        """Nobody waits for the answers any more."""
        for task in self.calls:
            task.cancel()

    async def take_answers(self, wait_s: float | None) -> None:
        """Wait for an answer, or `wait_s`, and put what came where it belongs."""
        done, _ = await asyncio.wait(self.calls, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in self.calls if task in done]:
            call = self.calls.pop(task, None)
            if call is not None:  # else another brought the same in the same moment
                await self._take(call, task.result())

    async def _take(self, call: Call, data: bytes | None) -> None:
        rivals = {task: other for task, other in self.calls.items() if other.part == call.part}
        if data is not None:
            self._pieces.put(call.part.start, data, call.holder[0])
            self._pieces.give_back(call.part[len(data) :])
            await self._give_up(rivals)
            return
        self._holders = [holder for holder in self._holders if holder != call.holder]
        if not rivals:
            self._pieces.give_back(call.part)

    async def _give_up(self, rivals: dict[asyncio.Task[bytes | None], Call]) -> None:
        """Another holder was quicker."""
        for task, call in rivals.items():
            del self.calls[task]
            if call.since_s is not None:
                self._pace.failed(call.holder[0], len(call.part), self._loop.time() - call.since_s)
        await end(rivals)


def _read_partial(partial: Path | None, size: int) -> bytes:
    """What an earlier try has kept; what is longer than the blob is of no use."""
    if partial is None or not partial.is_file():
        return b""
    if partial.stat().st_size > size:
        partial.unlink()
        return b""
    return partial.read_bytes()


def _write_partial(partial: Path, offset: int, data: bytes) -> None:
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.seek(offset)
        file.write(data)


def _discard(partial: Path | None) -> None:
    if partial is not None:
        partial.unlink(missing_ok=True)
