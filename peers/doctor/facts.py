"""What the probes find out, before anybody judges it. None always means: nobody here says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Graphics cards, as the driver and torch see them."""

    driver: str | None
    """Its version, from nvidia-smi; None: no NVIDIA driver here."""
    torch_cuda: str | None
    """The CUDA version that this torch was built for; None: a CPU build."""
    devices: tuple[str, ...] = ()
    """Names of those that torch can use."""
    unsupported: tuple[str, ...] = ()
    """Of these, the ones that this torch has no code for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """The folder that a volunteer lives in."""

    path: Path
    problem: str | None
    """Why nothing can be written there."""
    free_bytes: int
    key_mode: int | None
    """Of the identity file; None: there is none yet."""
    key_problem: str | None = None
    """What is wrong with its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedFacts:
    """What one seed said when it was asked alone."""

    address: str
    problem: DipacoError | None = None
    """Why it does not open the run."""
    latency_s: float | None = None
    """Of one small question."""
    ahead_s: float | None = None
    """How far its clock is ahead of ours."""
    run: Run | None = None
    """The newest stage that it shows, and that passed all checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """What the line to one seed carried for a moment, in bytes per second; None: nothing could be moved."""

    up: float | None
    down: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What dead processes of ours have left."""

    sockets: tuple[Path, ...] = ()
    segments: tuple[Path, ...] = ()
    """Shared memory."""
    daemons: tuple[int, ...] = ()
    """Process ids of libp2p daemons whose program is gone."""

    @property
    def count(self) -> int:
        return len(self.sockets) + len(self.segments) + len(self.daemons)
