"""Fetching a blob from several holders at once, each bringing as many of its ranges as it is fast.

A holder that has brought a range gets the next one, so nobody has to know beforehand who is fast. A holder that fails
is dropped, and the next one on the list steps in. A range that is late is asked of a second holder as well, so the
fetch never waits for a slow one. What arrived without a hole is kept on disk for a later attempt.

No bytes are returned whose digest is not the one asked for. If the digest is wrong, each holder's ranges in turn are
fetched again from the others; if that does not help, the whole blob is fetched from each holder alone, which exposes
the liars.
"""

from __future__ import annotations

import asyncio
import bisect
import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...canonical import digest as digest_of
from ...canonical import is_digest
from ...errors import BlobMissing, DipacoError, IntegrityError, Refused
from ...protocol.signing import PeerId, short
from ..api import Swarm
from ..calls import Range, ReadBlob
from .bandwidth import CUT_BYTES_MIN
from .blobs import RANGE_BYTES, SLOW_S, OnProgress, pace_of

HOLDERS_AT_ONCE = 4
IN_FLIGHT_MAX = 4
"""Ranges on their way from one holder that is alone."""
IN_FLIGHT_MIN = 2
"""From one of several: so its line is not idle while an answer travels."""
KEEP_EVERY_S = 1.0
"""What has arrived is on this disk after at most this long."""
LATE_S = 1.0
LATE_TIMES = 2.0
"""A range is late after this many times what another holder would take for it, and what the last ranges took; but not
before a second."""
AHEAD_BYTES_MAX = 16 * RANGE_BYTES
"""How far beyond the first hole ranges are asked for."""

Holder = tuple[PeerId, Sequence[str]]
"""A peer, and addresses at which it may be dialled."""


async def fetch_blob(
    swarm: Swarm,
    digest: str,
    *,
    size: int,
    holders: Sequence[Holder],
    partial: Path | None = None,
    timeout_s: float,
    on_progress: OnProgress | None = None,
    brought: Counter[PeerId] | None = None,
    wrong: list[Ranges] | None = None,
) -> bytes:
    """The blob named `digest`, of `size` bytes, from `holders`, of whom the likeliest comes first.

    `timeout_s` is for each range. What arrived is kept in `partial` until the blob is whole, so that a later fetch goes
    on from there. `on_progress` gets (bytes so far, bytes in all), and `brought` counts those of each holder. Raises
    BlobMissing when no holder gives it, and IntegrityError when the only bytes to be had are wrong ones.

    With `wrong` nobody is asked for the whole blob once more when more than one of them lies: what came is added there,
    so that whoever has the blob from others can say who lied.
    """
    assert is_digest(digest), f"not a digest: {digest}"
    known = Holders(swarm, digest, holders, size=size, timeout_s=timeout_s, brought=brought)
    fetch = _Fetch(swarm, digest, known, on_progress or (lambda done, size: None))
    data = await fetch.together(partial, wrong) or await fetch.one_by_one(partial)
    await asyncio.to_thread(_discard, partial)
    return data.value()


class _Fetch:
    """One blob on its way."""

    def __init__(self, swarm: Swarm, digest: str, known: Holders, on_progress: OnProgress) -> None:
        self._swarm, self._digest, self._known, self._on_progress = swarm, digest, known, on_progress

    async def together(self, partial: Path | None, wrong: list[Ranges] | None) -> Ranges | None:
        """The blob, from all holders; None if they do not bring it, or more than one of them lies: with `wrong`, which
        takes what came, that raises IntegrityError."""
        ranges = await self._bring(self._known.trusted(), partial)
        if ranges is None or await self._is_right(ranges):
            return ranges
        await asyncio.to_thread(_discard, partial)
        for suspect in ranges.sources():
            lost = ranges.forget(suspect)
            if not await self._fill(ranges, self._known.trusted(but=suspect), None):
                ranges.restore(lost, suspect)
                break
            if await self._is_right(ranges):
                self._known.convict(suspect)
                return ranges
            ranges.restore(lost, suspect)
        if wrong is not None:
            wrong.append(ranges)
            raise IntegrityError(f"some sent bytes that are not the blob {self._digest[:12]}")
        return None

    async def one_by_one(self, partial: Path | None) -> Ranges:
        """The blob from the first holder that has it right; raises as `fetch_blob`."""
        liars = self._known.liars
        for holder in self._known.trusted():
            await asyncio.to_thread(_discard, partial)
            ranges = await self._bring([holder], partial)
            if ranges is None:
                continue
            if await self._is_right(ranges):
                return ranges
            liars.append(holder[0])
            self._known.convict(holder[0])
        if liars:
            await asyncio.to_thread(_discard, partial)
            names = ", ".join(map(short, liars))
            raise IntegrityError(f"{names} sent bytes that are not the blob {self._digest[:12]}")
        raise BlobMissing(f"nobody gave the blob {self._digest[:12]}: {self._known.problem}")

    async def _bring(self, holders: Sequence[Holder], partial: Path | None) -> Ranges | None:
        """All parts, those of `partial` first, not yet verified; None if the holders do not bring them."""
        kept = await asyncio.to_thread(_read_partial, partial, self._known.size)
        ranges = Ranges(self._known.size, kept)
        return ranges if await self._fill(ranges, holders, partial) else None

    async def _fill(self, ranges: Ranges, holders: Sequence[Holder], partial: Path | None) -> bool:
        """Ask `holders` for all that is missing; whether it came."""
        errands, keeper = _Errands(self._swarm, self._known, holders, ranges), _Keeper(partial, ranges)
        try:
            while not ranges.is_whole:
                wait_s = errands.hand_out()
                if not errands.calls:
                    await keeper.keep()
                    return False
                await errands.take_answers(wait_s)
                await keeper.keep_now_and_then()
                self._on_progress(ranges.here, ranges.size)
            return True
        finally:  # nothing is awaited here: a simulated crash closes what is left in the middle
            errands.drop()

    async def _is_right(self, ranges: Ranges) -> bool:
        return await asyncio.to_thread(digest_of, ranges.value()) == self._digest


class _Keeper:
    """Keeps the beginning of a blob that is on its way in `partial`: once a second, since a crash that costs a second
    is better than one more copy of every blob that comes at once."""

    def __init__(self, partial: Path | None, ranges: Ranges) -> None:
        self._partial, self._ranges, self._loop = partial, ranges, asyncio.get_running_loop()
        self._kept, self._kept_s = ranges.whole, self._loop.time()

    async def keep_now_and_then(self) -> None:
        """If it is time, and something is missing yet."""
        if not self._ranges.is_whole and self._loop.time() >= self._kept_s + KEEP_EVERY_S:
            await self.keep()

    async def keep(self) -> None:
        """All that is here without a hole."""
        self._kept_s, begin, end = self._loop.time(), self._kept, self._ranges.whole
        if self._partial is not None and end > begin:
            await asyncio.to_thread(_write_partial, self._partial, begin, self._ranges.read(begin, end))
            self._kept = end


class _Errands:
    """Which holder is asked for which part."""

    def __init__(self, swarm: Swarm, known: Holders, holders: Sequence[Holder], ranges: Ranges) -> None:
        self._line, self._pace, self._loop = swarm.line, pace_of(swarm), asyncio.get_running_loop()
        self._known, self._ranges = known, ranges
        self._holders = list(holders)
        self._typical_s = 0.0
        """What the last ranges took, whoever brought them: where many fetch at once, more than one alone would."""
        self.calls: dict[asyncio.Task[bytes | None], Call] = {}

    def hand_out(self) -> float | None:
        """Give everybody something to bring; in how many seconds to do so again, if there is no answer before."""
        while (holder := self._idle()) is not None:
            length = self._line.down.range_bytes(self._pace.range_bytes(holder[0]))
            part = self._ranges.take(length)
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
        return max(LATE_S, LATE_TIMES * max(len(part) / speed if speed else SLOW_S, self._typical_s))

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
            took_s = 0.0 if call.since_s is None else self._loop.time() - call.since_s
            self._typical_s = (self._typical_s + took_s) / 2 if self._typical_s else took_s
            self._ranges.put(call.part.start, data, call.holder[0])
            self._ranges.give_back(call.part[len(data) :])
            await self._give_up(rivals)
            return
        self._holders = [holder for holder in self._holders if holder != call.holder]
        if not rivals:
            self._ranges.give_back(call.part)

    async def _give_up(self, rivals: dict[asyncio.Task[bytes | None], Call]) -> None:
        """Another holder was quicker."""
        for task, call in rivals.items():
            del self.calls[task]
            if call.since_s is not None:
                self._pace.failed(call.holder[0], len(call.part), self._loop.time() - call.since_s)
            task.cancel()
        await asyncio.gather(*rivals, return_exceptions=True)


@dataclass(slots=True)
class Call:
    """One range that one holder is asked for."""

    holder: Holder
    part: range
    since_s: float | None = None
    """By the loop's clock; None while it waits for our own line."""


class Holders:
    """The peers that may have the blob named `digest`, of `size` bytes; `timeout_s` is for each range."""

    def __init__(
        self,
        swarm: Swarm,
        digest: str,
        holders: Sequence[Holder],
        *,
        size: int,
        timeout_s: float,
        brought: Counter[PeerId] | None = None,
    ) -> None:
        self._swarm, self._digest, self._timeout_s = swarm, digest, timeout_s
        self._brought = Counter[PeerId]() if brought is None else brought
        self.size = size
        self._pace, self._loop = pace_of(swarm), asyncio.get_running_loop()
        self._all = self._ranked(holders)
        self._failed: set[PeerId] = set()
        self.liars: list[PeerId] = []
        """Holders of something shorter under this name: a damaged blob."""
        self.problem = "nobody was asked"
        """Why the last failed call failed."""

    def trusted(self, *, but: PeerId | None = None) -> list[Holder]:
        """Those that did not fail, without `but`, the most promising first."""
        return [holder for holder in self._all if holder[0] not in {but, *self._failed}]

    async def bring(self, call: Call) -> bytes | None:
        """The range, or enough of its beginning, as the holder sends it; None if the holder fails."""
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
        self._brought[peer] += len(reply.body)
        return reply.body

    def convict(self, peer: PeerId | None) -> None:
        """What it brought was wrong; None: it came from our own disk."""
        if peer is not None:
            self._pace.lied(peer)

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

    def _ranked(self, holders: Sequence[Holder]) -> list[Holder]:
        """The first stays first, since it is the likeliest to have the blob; of the others, those that were fast come
        first and those that were slow last. Who has sent wrong bytes comes after all."""
        holders = sorted(holders, key=lambda holder: self._pace.has_lied(holder[0]))
        speeds = {peer: self._pace.speed(peer) for peer, _ in holders}
        known = [speed for speed in speeds.values() if speed is not None]
        middle = sum(known) / len(known) if known else 0.0

        def rank(holder: Holder) -> tuple[bool, float]:
            return self._pace.has_lied(holder[0]), -(speeds[holder[0]] or middle)

        return [*holders[:1], *sorted(holders[1:], key=rank)]


class Ranges:
    """A blob of `size` bytes on its way, of which the first are `kept`: which ranges are here and who brought them, and
    which are still to be asked for. No I/O.

    Ranges are given out from the start on and not far ahead of the first hole, since only what lies before it is kept
    for a later fetch. A range that comes back unfilled is given out again first.
    """

    def __init__(self, size: int, kept: bytes = b"") -> None:
        self.size = size
        self.whole = 0
        """Contiguous bytes received so far."""
        self._bytes = io.BytesIO()  # its value is taken without a copy
        self._brought: list[tuple[range, PeerId | None]] = []
        self._ends: dict[int, int] = {}
        """Of what is here beyond `whole`: where it begins, and where it ends."""
        self._missing = [range(len(kept), size)] if len(kept) < size else []
        self.put(0, kept, None)

    @property
    def is_whole(self) -> bool:
        return self.whole == self.size

    @property
    def here(self) -> int:
        """Bytes received, including those beyond a hole."""
        return self.whole + sum(end - start for start, end in self._ends.items())

    def take(self, length: int) -> range | None:
        """The next range to ask for, at most `length` long; None if all are asked for, or lie too far ahead."""
        if not self._missing or self._missing[0].start >= self.whole + AHEAD_BYTES_MAX:
            return None
        part, rest = self._missing[0][:length], self._missing[0][length:]
        self._missing[:1] = [rest] if rest else []
        return part

    def give_back(self, part: range) -> None:
        """`part` is not being asked for any more."""
        if part:
            bisect.insort(self._missing, part, key=lambda missing: missing.start)

    def put(self, start: int, data: bytes, peer: PeerId | None) -> None:
        """Add a range that was taken, or its beginning, as `peer` brought it; None: it comes from a file."""
        if not data:
            return
        self._bytes.seek(start)
        self._bytes.write(data)
        self._brought.append((range(start, start + len(data)), peer))
        self._ends[start] = start + len(data)
        self._join()

    def sources(self) -> Sequence[PeerId | None]:
        """Everybody who brought some of it; who brought least comes first."""
        shares = Counter[PeerId | None]()
        for part, peer in self._brought:
            shares[peer] += len(part)
        return sorted(shares, key=lambda peer: shares[peer])

    def liars(self, data: bytes) -> set[PeerId]:
        """Who brought anything that is not so in `data`, the blob."""
        wrong = {
            peer for part, peer in self._brought if self.read(part.start, part.stop) != data[part.start : part.stop]
        }
        return {peer for peer in wrong if peer is not None}

    def forget(self, suspect: PeerId | None) -> Sequence[tuple[range, bytes]]:
        """Take out what `suspect` brought, and return it; the rest stays."""
        lost = [(part, self.read(part.start, part.stop)) for part, peer in self._brought if peer == suspect]
        for part, _ in lost:
            self.give_back(part)
        self._brought = [(part, peer) for part, peer in self._brought if peer != suspect]
        self._ends = {part.start: part.stop for part, _ in self._brought}
        self.whole = 0
        self._join()
        return lost

    def restore(self, lost: Sequence[tuple[range, bytes]], peer: PeerId | None) -> None:
        """Put back what `forget` returned: what others brought in its place was no better."""
        for part, data in lost:
            self._brought = [(other, by) for other, by in self._brought if other.start not in part]
            self._brought.append((part, peer))
            self._bytes.seek(part.start)
            self._bytes.write(data)

    def read(self, start: int, stop: int) -> bytes:
        self._bytes.seek(start)
        return self._bytes.read(stop - start)

    def value(self) -> bytes:
        """All the bytes; nothing may be missing."""
        assert self.is_whole, f"{self.size - self.here} bytes are missing"
        return self._bytes.getvalue()

    def _join(self) -> None:
        while self.whole in self._ends:
            self.whole = self._ends.pop(self.whole)


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
