"""Our side: an owner in a process of its own, contributors in some others, and the phases of a round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dipaco_p2p.config import RunConfig
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.strict import plain

from .helper import Helper, start_helper
from .processor import Spent, spent

HOST = "127.0.0.1"
PROC = Path("/proc")
KIB = 1024
RESET_PEAK = "5"
"""What sets a process's VmHWM back to what it holds now (Linux, proc(5): clear_refs)."""
PHASES = ("encode", "push", "admit", "close", "make and keep", "publish", "pull")
CLOSED = "round closed, version not made"
AVERAGED, ANNOUNCED = "averaged, version not on disk", "version announced"


@dataclass(frozen=True, slots=True, kw_only=True)
class OurRound:
    """One round: from the first encoding until every contributor has applied the next version."""

    seconds: float
    phases: Mapping[str, float]
    """Seconds of each, from when the last contributor was through the one before; together `seconds`."""
    kept_s: float
    """Seconds more until all have it on disk."""
    payload_bytes: int
    before_bytes: int
    """What the owner held when the round began."""
    peak_bytes: int
    """The most that the owner held in the round (VmHWM)."""
    owner: Spent
    contributors: Spent
    """Of the processor, until all have it on disk."""


class OurSwarm:
    """One run on loopback, from `open` to `close`."""

    def __init__(self, folder: Path, config: RunConfig, *, contributors: int, processes: int) -> None:
        self._folder = folder
        self._config = config
        self._count = contributors
        self._processes = min(processes, contributors)
        self._helpers: list[Helper] = []

    async def open(self) -> None:
        """Start all processes; raises DipacoError."""
        owner = await self._start("owner", str(self._folder / "owner"), json.dumps(plain(self._config)), HOST)
        address = (await owner.ask("open"))["address"]
        for index in range(self._processes):
            numbers = [str(number) for number in range(1, self._count + 1)[index :: self._processes]]
            await self._start("contributors", str(self._folder), address, *numbers)

    async def round(self) -> OurRound:
        """Play one; raises DipacoError if it closed without one of the contributors."""
        owner, *others = self._helpers
        await asyncio.gather(*(helper.ask("prepare") for helper in others))
        await owner.ask("tell")  # and forget what was before
        (PROC / f"{owner.pid}/clear_refs").write_text(RESET_PEAK)
        before_bytes, before = memory_bytes(owner.pid, "VmRSS"), self._spent()
        answers = await asyncio.gather(*(helper.ask("round") for helper in others))
        by_owner, by_contributors = (now.since(then) for now, then in zip(self._spent(), before, strict=True))
        peak_bytes, told = memory_bytes(owner.pid, "VmHWM"), await owner.ask("tell")
        counted = [version["contributions"] for version in told["versions"]]
        if counted != [self._count]:
            raise DipacoError(f"a round of {self._count} contributors made versions of {counted}")
        turns = [turn for answer in answers for turn in answer["turns"]]
        began_s = min(answer["began_s"] for answer in answers)
        phases = phases_of(began_s, turns, dict(told["passed"]))
        return OurRound(
            seconds=sum(phases.values()),
            phases=phases,
            kept_s=latest(turns, "kept_s") - latest(turns, "applied_s"),
            payload_bytes=max(turn["bytes"] for turn in turns),
            before_bytes=before_bytes,
            peak_bytes=peak_bytes,
            owner=by_owner,
            contributors=by_contributors,
        )

    def _spent(self) -> tuple[Spent, Spent]:
        owner, *others = (helper.pid for helper in self._helpers)
        return spent(owner), spent(*others)

    async def close(self) -> None:
        """End the contributors, then the owner."""
        await asyncio.gather(*(helper.end() for helper in self._helpers[1:]))
        await asyncio.gather(*(helper.end() for helper in self._helpers[:1]))

    async def _start(self, kind: str, *arguments: str) -> Helper:
        name = f"{kind}-{len(self._helpers)}"
        log = self._folder / f"{name}.log"
        self._folder.mkdir(parents=True, exist_ok=True)
        helper = await start_helper(f"benchmarks.transfer.{kind}", *arguments, name=name, log=log)
        self._helpers.append(helper)
        return helper


def phases_of(began_s: float, turns: Sequence[Mapping[str, Any]], passed: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase: cut where the last contributor, or the owner, was through it. They overlap: one may push
    while another still encodes, which counts as encoding."""
    ends_s = (
        began_s,
        latest(turns, "encoded_s"),
        latest(turns, "uploaded_s"),
        latest(turns, "receipt_s"),
        passed[CLOSED],
        passed[AVERAGED],
        passed[ANNOUNCED],
        latest(turns, "applied_s"),
    )
    steps = pairwise(accumulate(ends_s, max))
    return {name: after - before for name, (before, after) in zip(PHASES, steps, strict=True)}


def latest(turns: Sequence[Mapping[str, Any]], what: str) -> float:
    """When the last of them was so far."""
    return max(float(turn[what]) for turn in turns)


def memory_bytes(pid: int, name: str) -> int:
    """`VmRSS` or `VmHWM` of a process."""
    for line in (PROC / f"{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise DipacoError(f"the process {pid} does not say its {name}")
