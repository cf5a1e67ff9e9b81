"""Array types of the core, and the one float norm that gives the same bits on every machine.

Rule: whatever owners must agree on uses element-wise ufuncs only. `np.sum` and BLAS add in an order that depends on
the machine's vector width, so they are not used for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
"""A flat vector of float32: the values of a module, or something of the same length."""

Array = npt.NDArray[Any]

CHUNK = 1 << 14
"""Values that `tree_norm` adds at a time."""


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
