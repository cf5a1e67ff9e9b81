"""What a smaller card would train: torch may take no more than such a card has, and a volunteer finds what fits.

The chip stays that of the large card, so that a speed here says what the smaller batches cost, and not what the smaller
card gives. CUDA's own context, which a real card has to hold as well, is taken off first.
"""

from __future__ import annotations

import functools

import torch

from dipaco_p2p.core.model.microbatch import MicroBatch
from peers.governor.nvml import limit_memory

from .case import Bench, Case, Figures, Found, Part, number, table, verdict
from .fast import GIB, path_of, speed, way_of
from .utilisation import Bare

CARDS_GB = (8, 12, 16, 24)
GB = 10**9
CONTEXT_GB = 0.6
"""What CUDA takes for itself, roughly; drivers differ."""
SLACK = 1.01


def _card(bench: Bench, *, gigabytes: int, is_compiled: bool) -> Figures:
    way = way_of(bench, is_compiled=is_compiled)
    allowed = int((gigabytes - CONTEXT_GB) * GB)
    limit_memory(bench.device, share_of(allowed, bench.device))
    # Where a GPU says that it is full, a CPU is told before: here so little that everything has to be tried.
    micro = MicroBatch() if torch.device(bench.device).type == "cuda" else MicroBatch(memory_bytes=1)
    bare = Bare(bench.device, way, model=path_of(bench.is_small), micro=micro)
    figures = speed(bench, bare, way)
    return figures | {"allowed_gib": allowed / GIB, "ok": number(figures, "memory_gib") * GIB <= SLACK * allowed}


def share_of(allowed: int, device: str) -> float | None:
    """So many bytes as a share of a GPU's memory; None elsewhere."""
    if torch.device(device).type != "cuda":
        return None
    return min(allowed / torch.cuda.get_device_properties(device).total_memory, 1.0)


def _rows(found: Found) -> list[str]:
    rows: list[tuple[object, ...]] = [("memory, way", "tokens/s", "taken, GiB", "of, GiB", "trained with", "kept")]
    for name, own in found.items():
        taken, allowed = (f"{number(own, key):.1f}" for key in ("memory_gib", "allowed_gib"))
        rows.append((name, f"{number(own, 'tokens_per_s'):,.0f}", taken, allowed, own["setup"], verdict(own)))
    return table(*rows)


CASES = tuple(
    Case(
        name=f"{size} GB, {'compiled' if is_compiled else 'eager'}",
        limit_s=180 if is_compiled else 60,
        ask=functools.partial(_card, gigabytes=size, is_compiled=is_compiled),
        is_small_too=not is_compiled and size in (CARDS_GB[0], CARDS_GB[-1]),
    )
    for is_compiled in (False, True)
    for size in CARDS_GB
)
PART = Part(name="cards", about="What do smaller cards hold?", cases=CASES, rows=_rows)
