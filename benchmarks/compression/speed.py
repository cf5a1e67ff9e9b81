"""Bytes and time of each codec on one vector: the code that the programs run, nothing else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.compress import CODECS, compress, decode_compressed, encode_compressed, expand

RUNS = 5
MB = 1e6

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians of `RUNS`; megabytes are those of the float32 values."""

    codec: str
    bytes: int
    ratio: float
    """Of the float32 values' bytes to its own."""
    encode_mb_s: float
    decode_mb_s: float


def speeds(count: int) -> list[Speed]:
    """Of every codec, on `count` values of a normal distribution with a residual of the round before."""
    lots = np.random.default_rng(0)
    values, before = (lots.standard_normal(count).astype(np.float32) * np.float32(1e-3) for _ in range(2))
    return [_speed(codec, values, compress(before, codec=codec)[1]) for codec in CODECS]


def _speed(codec: str, values: Floats, residual: Floats) -> Speed:
    size = values.nbytes
    encode_s, data = _timed(lambda: encode_compressed(compress(values, residual, codec=codec)[0]))
    decode_s, _ = _timed(lambda: expand(decode_compressed(data, size=values.size, codec=codec)))
    return Speed(
        codec=codec,
        bytes=len(data),
        ratio=size / len(data),
        encode_mb_s=size / MB / encode_s,
        decode_mb_s=size / MB / decode_s,
    )


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """Median seconds, and what came out last."""
    taken = []
    for _ in range(RUNS):
        began_s = time.perf_counter()
        made = work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken), made
