"""Whom a peer knows in a swarm of any size: those of its bucket, and those that it has a reason to look for.

Theory. A list of everybody grows with the swarm, and so does what each reads of it. So peers are sorted by the hash of
their id, which nobody chooses freely, into buckets: those whose hashes begin with the same bits. Each peer writes its
heartbeat into the bucket of its own bits.

- *A bucket splits as it fills*: with more than `BUCKET_MAX` members these go one bit deeper, and two halves with at
  most `BUCKET_MIN` together come back. Neighbours are those of a peer's bucket, one bit above and one below, so that
  they see each other while they move. In a small swarm there is one bucket, and everybody is everybody's neighbour.
- *The neighbours of a module* are those of the bucket that its own hash falls into: they look after it besides those
  that train, lead or mirror it. So each module has some dozens of peers that see that nobody leads it, however many
  there are.
- *A flood of keys that fall into one bucket* fills that one, and pushes its honest members deeper. Others do not look
  there.
- *A key with many records is read less often*, so that the records that a peer reads a minute have a bound. A record
  lives for three of its repetitions, so a reader that looks twice in a life sees it before it expires.

How many there are in all is an estimate from buckets that were read: the median of a few, so that a flooded one does
not move it, and its error. Source: Maymounkov and Mazieres, Kademlia (2002), for keys near an id; what a split costs is
our own reckoning (benchmarks/scale).
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BUCKET_MAX = 64
"""Members of a bucket before it splits."""
MEMBER_BYTES = 768
"""A heartbeat that is longer counts as several members: bytes fill a key as well."""
BUCKET_MIN = 16
"""Members of two halves before they are one again."""
DEPTH_MAX = 20
"""Bits of the deepest buckets: of a million buckets."""
PLACE_BITS = 64
WHOLE_MAX = 64
"""Modules, paths and peers of a swarm that is read whole: one bucket, and every key."""
CROWD = 8
"""Records under a key that is read at every look; more are read less often in proportion."""
LOOKS_MAX = 3
"""Looks between two reads of a key at most: a record lives for six looks, and is repeated every second one."""
SAMPLES_MAX = 8
"""Buckets that an estimate rests on."""


def place(name: str) -> int:
    """Where a peer or a module is among the buckets."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[: PLACE_BITS // 8], "big")


def bits(at: int, depth: int) -> str:
    """The name of the bucket of this depth around a place: its first bits; empty for the bucket of all."""
    return format(at >> (PLACE_BITS - depth), f"0{depth}b") if depth else ""


def sibling(bucket: str) -> str:
    """The other half of the bucket above."""
    return bucket[:-1] + ("0" if bucket[-1] == "1" else "1")


def next_depth(depth: int, *, here: int, below: int, beside: int | None) -> int:
    """How deep a peer should be that is at `depth`: of its bucket's bits `here` members write at this depth, and
    `below` in the two halves; `beside` are those of the other half of the bucket above, if that was read."""
    if here + below > BUCKET_MAX and depth < DEPTH_MAX:
        return depth + 1
    if depth and beside is not None and here + below + beside <= BUCKET_MIN:
        return depth - 1
    return depth


def room(sizes_bytes: Iterable[int]) -> int:
    """As how many members heartbeats of these sizes count."""
    return sum(max(1, math.ceil(size_bytes / MEMBER_BYTES)) for size_bytes in sizes_bytes)


def looks_between(records: int) -> int:
    """Every how many looks a key is read that had so many records last time."""
    return min(LOOKS_MAX, max(1, math.ceil(records / CROWD)))


def is_whole(*, depth: int, modules: int, paths: int, peers: int) -> bool:
    """Whether the swarm is so small that a peer reads every key."""
    return depth == 0 and modules + paths + peers <= WHOLE_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How many peers there are, give or take `error`, which is 0 where all were counted."""

    peers: int
    error: int = 0

    def __str__(self) -> str:
        return f"about {self.peers} (±{self.error})" if self.error else str(self.peers)


def estimate(samples: Sequence[tuple[int, int]]) -> Estimate:
    """From buckets that were read: the members of each, and its depth. The median of how many there would be in all,
    and one standard error of it: members of a bucket are counted by chance (Poisson), and a median of normal values
    errs by 1.25 times what their mean does."""
    if not samples:
        return Estimate(peers=0)
    if min(depth for _, depth in samples) == 0:
        return Estimate(peers=max(count for count, depth in samples if depth == 0))
    totals = [count << depth for count, depth in samples]
    spread = statistics.fmean(math.sqrt(max(count, 1)) * (1 << depth) for count, depth in samples)
    factor = 1.0 if len(samples) < 3 else 1.25
    return Estimate(peers=round(statistics.median(totals)), error=math.ceil(factor * spread / math.sqrt(len(samples))))
