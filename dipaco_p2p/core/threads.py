"""Work of one step on more than one core: numpy and hashing let go of the interpreter, so plain threads do.

Rule: what comes out never depends on how many threads there were: each call has a part of its own, and what comes back
is in the order in which it was asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
P = TypeVar("P")

CORES_MAX = 2
NICENESS = 10
"""Of the threads, where each may have its own (Linux): a trainer on the same machine comes first, and yet who waits for
the version does not wait for the trainer."""


def spread(work: Callable[[P], T], items: Sequence[P]) -> list[T]:
    """`work` of each, on as many cores as there may be; raises what the first that fails raises."""
    threads = min(CORES_MAX, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else CORES_MAX)
    if threads < 2 or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, initializer=_give_way) as pool:
        return list(pool.map(work, items))


def _give_way() -> None:
    if sys.platform == "linux":
        us = 0  # there: the thread that calls
        with contextlib.suppress(OSError):  # whoever is nicer already may not become less so
            os.setpriority(os.PRIO_PROCESS, us, max(NICENESS, os.getpriority(os.PRIO_PROCESS, us)))


def at_once(*works: Callable[[], T]) -> list[T]:
    """Each of `works`, side by side."""
    return spread(lambda work: work(), works)


def spans(size: int, length: int) -> list[slice]:
    """All places of a vector (size,), `length` at a time."""
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]
