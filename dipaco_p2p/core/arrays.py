"""Array types of the core, and the one float norm that gives the same bits on every machine.

Rule: whatever owners must agree on uses element-wise ufuncs only. `np.sum` and BLAS add in an order that depends on
the machine's vector width, so they are not used for it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
"""A flat vector of float32: the values of a module, or something of the same length."""

Array = npt.NDArray[Any]

CHUNK = 1 << 14
"""Values that `tree_norm` squares at a time."""


def tree_norm(values: Floats) -> float:
    """Euclidean norm of float32 `values`: float64 squares, added pairwise in a tree of fixed shape."""
    # The tree's first level a chunk at a time: all squares at once would take twice the memory of the values.
    half = (values.size + 1) // 2
    squares = np.square(values[:half], dtype=np.float64)
    for begin in range(half, values.size, CHUNK):
        more = np.square(values[begin : begin + CHUNK], dtype=np.float64)
        squares[begin - half : begin - half + more.size] += more
    count = half
    while count > 1:
        half = (count + 1) // 2
        squares[: count - half] += squares[half:count]
        count = half
    return math.sqrt(squares[0]) if squares.size else 0.0
