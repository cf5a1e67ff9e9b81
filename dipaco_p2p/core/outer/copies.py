"""The same work, handed in more than once: which outer gradients of a path are all but equal, and what they count.

Replicas of a path train different text, so their outer gradients differ; one that somebody copies, with another length
or a little noise, has a cosine near 1. Such copies count once, whoever signed them: nothing tells whose was first.

Rule 1: everybody who makes a version again finds the same: scalar products are exact sums, rounded once.
Rule 2: what counts depends on what is near alone. A chain of copies, each a little further off, does not make two
honest gradients one, and around each gradient no more counts than the longest work there.
Rule 3: memory and time have a bound, whatever a crowd hands in: of many long gradients only a part is compared, which
nobody knows before all of them are in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from .codec import Compressed

ALIKE: Mapping[str, float] = {
    "int8": 0.999,
    "int4": 0.999,
    "int2": 0.99,
    "ternary640": 0.99,
    "ternary320": 0.99,
    "ternary160": 0.99,
    "top128": 0.99,
}
"""From this cosine on two gradients in the codec are the same work. Honest replicas come near: in the first round, with
batches of 640 sequences, to 0.988, and with one step of 1024 to 0.945 in top128 (docs/log.md, 2026-11-26). Lower bounds
would take their credit, and cost a copier no more than a little more noise."""
VALUES_MAX = 1 << 25
"""Of one path in memory at once, all gradients together: a byte each, or less."""


def alike(reads: Sequence[Callable[[], Compressed]], *, size: int, lot: int) -> list[list[int]]:
    """For each gradient of a path the places of those that are the same work, its own among them. Each is of `size`
    values and is read once; `lot` says which part is compared, if not all."""
    every = max(1, -(-len(reads) * size // VALUES_MAX))
    parts = [read() if every == 1 else read().thinned(every, lot % every) for read in reads]
    norms = [part.norm() for part in parts]
    near = [[place] for place in range(len(parts))]
    for one, other in itertools.combinations(range(len(parts)), 2):
        if _is_near(parts[one], parts[other], norms[one] * norms[other]):
            near[one].append(other)
            near[other].append(one)
    return near


def are_alike(one: Compressed, other: Compressed) -> bool:
    """Whether two gradients, or the same parts of them, are the same work."""
    return _is_near(one, other, one.norm() * other.norm())


def _is_near(one: Compressed, other: Compressed, norms: float) -> bool:
    # A gradient of zeros has no direction, and is like nothing.
    return one.dot(other) >= ALIKE[one.codec] * norms > 0


def counted(amounts: Sequence[float], near: Sequence[Sequence[int]]) -> list[float]:
    """What counts of the `amounts` of work: those of copies are shared out, in proportion, so that they count as much
    as the greatest. A copier that says that it did little thus takes little from the one that it copies."""
    shares = [max(found) / math.fsum(found) for found in ([amounts[place] for place in places] for places in near)]
    return [amount * min(shares[place] for place in places) for amount, places in zip(amounts, near, strict=True)]
