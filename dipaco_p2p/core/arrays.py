"""Array types of the core, the one float norm that gives the same bits on every machine, and work on several cores.

Rule 1: whatever owners must agree on uses element-wise ufuncs only. `np.sum` and BLAS add in an order that depends on
the machine's vector width, so they are not used for it.
Rule 2: the number of threads never changes a result: each call of `spread` works on a part of its own, and the results
come back in the order of the items. Plain threads are enough, since numpy and hashing release the interpreter.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
"""A flat vector of float32: the values of a module, or something of the same length."""

Halves = npt.NDArray[np.uint16]
"""The bits of bfloat16 values, which numpy has no type for."""

Array = npt.NDArray[Any]

T = TypeVar("T")
P = TypeVar("P")

CHUNK = 1 << 14
"""Values that `tree_norm` adds at a time."""
HALVED = 1 << 18
"""Values that are made bfloat16, or were that, at a time on one core."""
CORES_MAX = 4
TRAINER_NICENESS = 10
"""Of the thread that trains on the CPU, where each may have its own (Linux): answers to others, a program that starts
and whatever else the machine's owner does come first."""
NICENESS = 15
"""Of the threads of `spread`: a trainer on the same machine comes first, and yet no version has to wait for the
trainer."""


def tree_norm(values: Floats) -> float:
    """Euclidean norm of float32 `values`: float64 squares, added pairwise in a tree of fixed shape."""
    # Level by level they would take twice the memory of the values: each stretch of a level is made of two of the one
    # below when it is wanted, so that no more than one stretch a level is there.
    counts = [values.size]
    while counts[-1] > CHUNK:
        counts.append(_half(counts[-1]))
    squares = _sums(values, counts, 0, counts[-1])
    count = squares.size
    while count > 1:
        half = _half(count)
        squares[: count - half] += squares[half:count]
        count = half
    return math.sqrt(squares[0]) if squares.size else 0.0


def _sums(values: Floats, counts: Sequence[int], start: int, stop: int) -> npt.NDArray[np.float64]:
    """Of the level that has the last of `counts` sums: those from `start` up to `stop`. The squares have the first."""
    if len(counts) == 1:
        return np.square(values[start:stop], dtype=np.float64)
    *below, half = counts
    found = _sums(values, below, start, stop)
    if start + half < below[-1]:
        more = _sums(values, below, start + half, min(stop + half, below[-1]))
        found[: more.size] += more
    return found


def _half(count: int) -> int:
    return (count + 1) // 2


def spread(work: Callable[[P], T], items: Sequence[P]) -> list[T]:
    """`work` of each, on as many cores as there may be; raises what the first that fails raises."""
    threads = min(CORES_MAX, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else CORES_MAX)
    if threads < 2 or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, initializer=_give_way, initargs=(NICENESS,)) as pool:
        return list(pool.map(work, items))


def trainer_thread() -> ThreadPoolExecutor:
    """One thread that gives way to all that does not train."""
    return ThreadPoolExecutor(1, initializer=_give_way, initargs=(TRAINER_NICENESS,))


def _give_way(niceness: int) -> None:
    if sys.platform == "linux":
        us = 0  # there: the thread that calls
        with contextlib.suppress(OSError):  # whoever is nicer already may not become less so
            os.setpriority(os.PRIO_PROCESS, us, max(niceness, os.getpriority(os.PRIO_PROCESS, us)))


def at_once(*works: Callable[[], T]) -> list[T]:
    """Each of `works`, side by side."""
    return spread(lambda work: work(), works)


def to_bfloat16(values: Floats) -> Halves:
    """The bits of float32 `values` (N,) as bfloat16, rounded half to even; they must be finite."""
    found = np.empty(values.shape, dtype=np.uint16)

    def halve(part: slice) -> None:
        bits = values[part].view(np.uint32)
        found[part] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16

    spread(halve, spans(0, values.size, HALVED))
    return found


def from_bfloat16(halves: Halves) -> Floats:
    """The float32 values that these bits stand for."""
    found = np.empty(halves.shape, dtype=np.float32)

    def fill(part: slice) -> None:
        np.left_shift(halves[part], 16, out=found[part].view(np.uint32), dtype=np.uint32)

    spread(fill, spans(0, halves.size, HALVED))
    return found


def is_finite(halves: Halves) -> bool:
    """Whether all bfloat16 values with these bits are."""
    return not ((halves & 0x7F80) == 0x7F80).any()


def spans(start: int, stop: int, length: int) -> list[slice]:
    """All places of a vector from `start` up to `stop`, `length` at a time."""
    return [slice(begin, min(begin + length, stop)) for begin in range(start, stop, length)]
