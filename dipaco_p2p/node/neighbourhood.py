"""Who lives around this peer: the heartbeats of its bucket, and of those it has a reason to look for.

The rules are in protocol/neighbours.py; here they meet the swarm. Everything here is a hint.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from ..clock import Clock
from ..protocol.neighbours import (
    BUCKET_MIN,
    PLACE_BITS,
    SAMPLES_MAX,
    Estimate,
    bits,
    estimate,
    looks_between,
    next_depth,
    place,
    room,
    sibling,
)
from ..protocol.records import Record, peer_key, peers_key
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from .run import Run

PROBED_MAX = 12
"""Bits of the deepest bucket that a newcomer looks into: for a quarter of a million peers."""
SETTLED_MIN = 8
"""Members of a bucket that a newcomer joins, if there are several buckets."""
SELDOM = 1000
"""Records of which a key is taken to have more than it has: it is read as seldom as any."""

Get = Callable[[str], Awaitable[Mapping[PeerId, Record]]]


class Rhythm:
    """Every how many looks a key is read, by what was under it last time."""

    def __init__(self) -> None:
        self._looks = 0
        self._due: dict[str, int] = {}

    def begin(self) -> None:
        """One more look."""
        self._looks += 1
        self._due = {key: due for key, due in self._due.items() if due > self._looks - 64}

    def is_due(self, key: str) -> bool:
        return self._looks >= self._due.get(key, 0)

    def read(self, key: str, records: int) -> None:
        self._due[key] = self._looks + looks_between(records)


class Neighbourhood:
    """The buckets around one peer. `swarm` is its own; `get` reads a key for it."""

    def __init__(self, run: Run, swarm: Swarm, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self.peer = swarm.peer
        self._place = place(swarm.peer)
        self._swarm = swarm
        self.depth = 0
        """Of the bucket that this peer's heartbeat goes into."""
        self._is_settled = False
        self._are_several = False
        """Whether somebody was found in another bucket while we were in that of all."""
        self._rhythm = Rhythm()
        self._found: dict[str, Mapping[PeerId, Record]] = {}
        """By key, what was read of it last."""
        self._fresh: set[str] = set()
        """What was read at this look."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES_MAX)
        self._chance = random.Random(self._place)

    # -- where this peer says that it lives

    @property
    def keys(self) -> tuple[str, ...]:
        """Where its heartbeat goes: into its bucket, and if there are several also where it alone writes, so that
        whoever has a reason to look for it reads one record."""
        bucket = peers_key(self._run.id, self.bucket)
        return (bucket,) if self.is_all else (bucket, peer_key(self._run.id, self.peer))

    @property
    def bucket(self) -> str:
        return bits(self._place, self.depth)

    @property
    def is_all(self) -> bool:
        """Whether there is one bucket, and everybody is in it."""
        return self.depth == 0 and not self._are_several

    def is_in_our_bucket(self, at: int) -> bool:
        """Whether this place of a module is."""
        return self.is_same_bucket(at, self._place)

    def is_same_bucket(self, one: int, other: int) -> bool:
        """Whether two places are in one bucket that is as deep as ours."""
        return not (one ^ other) >> (PLACE_BITS - self.depth)

    def estimate(self) -> Estimate:
        """How many live in all."""
        return estimate(self._samples)

    # -- looking

    async def look(self, get: Get, *, sought: Collection[PeerId], samples: int = 0) -> dict[PeerId, Record]:
        """One look at the bucket, at `sought` who are not seen there, and at `samples` other buckets; the newest record
        of each peer that was found now or at the last looks, and lives."""
        self._rhythm.begin()
        self._fresh.clear()
        await self._settle(get)
        around = self._around()
        await asyncio.gather(*(self._read(get, bucket) for bucket in around))
        self._adapt()
        drawn = [bits(self._chance.getrandbits(PLACE_BITS), self.depth) for _ in range(samples if self.depth else 0)]
        await asyncio.gather(*(self._read(get, bucket) for bucket in drawn))
        self._sample([self.bucket, *drawn])
        seen = self._merged()
        missing = [peer for peer in sought if peer not in seen and peer != self.peer]
        keys = [key for key in (peer_key(self._run.id, peer) for peer in missing) if self._rhythm.is_due(key)]
        await asyncio.gather(*(self._read_key(get, key) for key in keys))
        for key in keys:
            self._rhythm.read(key, SELDOM)
        if not self.depth and any(map(self._lives_under, keys)):
            # There are buckets, and we are in none: our line was cut when we looked, or nobody was around us.
            self._is_settled, self._are_several = False, True
        return self._merged()

    async def find(self, get: Get, peers: Iterable[PeerId]) -> None:
        """Look for these peers now, wherever they are."""
        if not self.is_all:
            await asyncio.gather(*(self._read_key(get, peer_key(self._run.id, peer)) for peer in peers))

    async def look_around(self, get: Get, name: str) -> None:
        """Look at the bucket of a module's or a peer's own place: who should look after it."""
        if not self.depth:
            return
        at = place(name)
        for depth in (self.depth, self.depth + 1, self.depth - 1):
            key = peers_key(self._run.id, bits(at, depth))
            await self._read_key(get, key)
            if len(self._found[key]) > 1:
                return

    def heard(self) -> dict[PeerId, Record]:
        """What was found, without looking."""
        return self._merged()

    def _around(self) -> list[str]:
        """Our bucket, and those that our neighbours may be in while it splits or joins its other half."""
        below = bits(self._place, self.depth + 1)
        found = [self.bucket, below]
        if self._count(below):
            found.append(sibling(below))
        if self.depth:
            found.append(bits(self._place, self.depth - 1))
            if self._population(self.bucket) <= BUCKET_MIN:
                found += [sibling(self.bucket), sibling(self.bucket) + "0", sibling(self.bucket) + "1"]
        return [bucket for bucket in found if self._rhythm.is_due(peers_key(self._run.id, bucket))]

    async def _settle(self, get: Get) -> None:
        """Before the first look: as deep as others around us are. The deepest of the buckets with a few members counts:
        who fills one above it with keys leads nobody astray, and one below it only those few who fall into that. If
        nobody is around us, but elsewhere, we begin below the bucket of all: from there we see more, and can be seen.
        No deeper: whom we found may lie about where it is."""
        if self._is_settled:
            return
        self._is_settled = True
        buckets = [bits(self._place, depth) for depth in range(PROBED_MAX + 1)]
        await asyncio.gather(*(self._read_key(get, peers_key(self._run.id, bucket)) for bucket in buckets))
        settled = [depth for depth, bucket in enumerate(buckets) if self._count(bucket) >= SETTLED_MIN]
        fullest = max(range(len(buckets)), key=lambda depth: self._count(buckets[depth]))
        self.depth = max(int(self._are_several), max(settled, default=fullest))

    def _adapt(self) -> None:
        """Split with our bucket, or join the other half."""
        below = bits(self._place, self.depth + 1)
        under = self._room(below) + self._room(sibling(below))
        beside = self._population(sibling(self.bucket)) if self.depth and self._was_read(sibling(self.bucket)) else None
        self.depth = next_depth(self.depth, here=self._room(self.bucket), below=under, beside=beside)

    def _lives_under(self, key: str) -> bool:
        """Whether somebody says under a key of its own that it lives."""
        return any(not record.body.get("left") for record in self._found.get(key, {}).values())

    def _population(self, bucket: str) -> int:
        return self._count(bucket) + self._count(bucket + "0") + self._count(bucket + "1")

    def _sample(self, buckets: Iterable[str]) -> None:
        for bucket in buckets:
            if self._was_read(bucket):
                self._samples.append((self._population(bucket), len(bucket)))

    def _was_read(self, bucket: str) -> bool:
        return peers_key(self._run.id, bucket) in self._found

    def _count(self, bucket: str) -> int:
        """Who lives there by what was read last."""
        now_s = self._clock.now_s()
        found = self._found.get(peers_key(self._run.id, bucket), {})
        return sum(record.expires_s > now_s and not record.body.get("left") for record in found.values())

    def _room(self, bucket: str) -> int:
        """As how many members those who live there count."""
        found = self._found.get(peers_key(self._run.id, bucket), {})
        return room(len(record.to_bytes()) for record in found.values() if record.expires_s > self._clock.now_s())

    async def _read(self, get: Get, bucket: str) -> None:
        key = peers_key(self._run.id, bucket)
        await self._read_key(get, key)
        self._rhythm.read(key, len(self._found[key]) if bucket == self.bucket else SELDOM)

    async def _read_key(self, get: Get, key: str) -> None:
        self._found[key] = await get(key)
        self._fresh.add(key)

    def _merged(self) -> dict[PeerId, Record]:
        """The newest of each peer. What was not read at this look is kept until it expires."""
        now_s, found = self._clock.now_s(), dict[PeerId, Record]()
        for key, records in list(self._found.items()):
            if key not in self._fresh:
                records = {peer: record for peer, record in records.items() if record.expires_s > now_s}
                self._found[key] = records
            for peer, record in records.items():
                if peer not in found or found[peer].counter < record.counter:
                    found[peer] = record
        self._found = {key: records for key, records in self._found.items() if records or key in self._fresh}
        return found
