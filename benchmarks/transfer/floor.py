"""What a round cannot do without, whoever programs it: to hash bytes, and to have them on a disk before others hear.

The speeds are measured on this machine, on all its cores, next to the rounds. What crosses the line, the arithmetic and
all waiting come on top, so no round reaches this.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.core.compress import bytes_max
from dipaco_p2p.core.layout import module_layout

from .runs import config_of, model_of

BYTES = 100_000_000
RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes a second of this machine; the best of some runs."""

    hashed: float
    written: float
    """And synced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Of one round, by all who take part."""

    bytes: int
    """The payloads and the version at the owner; the update and the snapshot at each contributor."""
    hashed_s: float
    written_s: float


def measured(folder: Path, *, size: int = BYTES) -> Rates:
    """With a file for each core in `folder`."""
    data, cores = bytes(size), len(os.sched_getaffinity(0))

    def write(number: int) -> None:
        with (folder / f"floor-{number}").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    return Rates(
        hashed=_rate(lambda number: hashlib.sha256(data).digest(), size, cores), written=_rate(write, size, cores)
    )


def _rate(work: Callable[[int], object], size: int, cores: int) -> float:
    best_s = float("inf")
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(RUNS):
            began_s = time.perf_counter()
            list(pool.map(work, range(cores)))
            best_s = min(best_s, time.perf_counter() - began_s)
    return cores * size / best_s


def floor(rates: Rates, *, values: int, codec: str, fan_in: int) -> Floor:
    """Of a round of `fan_in` contributors to a module of `values` float32."""
    size, downlink = module_layout(model_of(values), 0).size, config_of(model_of(values), codec).compression.downlink
    payload, update, snapshot, state = bytes_max(size, codec), bytes_max(size, downlink), 4 * size, 8 * size
    total = fan_in * payload + update + snapshot + state + fan_in * (update + snapshot)
    return Floor(bytes=total, hashed_s=total / rates.hashed, written_s=total / rates.written)
