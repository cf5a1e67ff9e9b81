"""What this machine gives to training: threads, memory, and what its owner decided about them."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

from dipaco_p2p.core.microbatch import MicroBatch

from .config import PeerConfig
from .governor.usage import memory
from .preferences.keys import GB, Limits

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
KIB = 1024


def training_threads(wanted: int, *, offered: int, cores: int) -> int:
    """CPU threads for training: `wanted`, or if that is 0 what torch offers; but of more than two cores one is left to
    the network and to the modules that are led here."""
    if wanted:
        return wanted
    return offered - 1 if offered >= cores > 2 else offered


def use_threads(wanted: int) -> None:
    """Give torch as many threads as `training_threads` says."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(training_threads(wanted, offered=torch.get_num_threads(), cores=cores))


def give_memory_back() -> None:
    """Of a graphics card, what torch keeps there for later: others may want it while we rest."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trainer_settings(config: PeerConfig) -> dict[str, Any]:
    """What every `PathTrainer` of this process gets; made once, since what is found by trying stays with it."""
    micro = MicroBatch(size=config.micro_batch, checkpoint=config.checkpoint, memory_bytes=memory_left(config.limits))
    return {"micro": micro, "eight_bit": config.eight_bit}


def memory_left(limits: Limits) -> int | None:
    """What training may still take: what programs may, and no more than the owner's limit leaves."""
    free = free_bytes()
    if limits.ram_gb is None:
        return free
    left = max(0, int(limits.ram_gb * GB) - memory().now)
    return left if free is None else min(free, left)


def free_bytes(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Memory that programs may still take, of the machine and of its container; None where nobody says."""
    known = [value for value in (_available(meminfo), _left(cgroup)) if value is not None]
    return min(known, default=None)


def _available(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    return None


def _left(cgroup: Path) -> int | None:
    """Of a container's limit (cgroup v2); None without one. What it keeps of files is free: it would give way."""
    with contextlib.suppress(OSError, ValueError):  # `max` is no number, and no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(files.get("inactive_file", 0)), 0)
    return None
