"""Rounds for every fan-in and codec, and what their figures say together."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.processes import Helper, Spent, forget_peak, memory_bytes, spent, start_helper
from benchmarks.report import show
from dipaco_p2p.config import RunConfig
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.strict import plain

from .owner import config_of, model_of

PROCESSES = 2
"""That the contributors share."""
PHASES = ("encode", "push", "admit", "close", "make and keep", "publish", "pull")
CLOSED = "round closed, version not made"
AVERAGED, ANNOUNCED = "averaged, version not on disk", "version announced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
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


class Swarm:
    """One run on loopback, from `open` to `close`."""

    def __init__(self, folder: Path, config: RunConfig, *, contributors: int) -> None:
        self._folder = folder
        self._config = config
        self._count = contributors
        self._helpers: list[Helper] = []

    async def open(self) -> None:
        """Start all processes; raises DipacoError."""
        owner = await self._start("owner", str(self._folder / "owner"), json.dumps(plain(self._config)))
        address = (await owner.ask("open"))["address"]
        for index in range(PROCESSES):
            numbers = [str(number) for number in range(1, self._count + 1)[index::PROCESSES]]
            await self._start("volunteer", str(self._folder), address, *numbers)

    async def round(self) -> Round:
        """Play one; raises DipacoError if it closed without one of the contributors."""
        owner, *others = self._helpers
        await asyncio.gather(*(helper.ask("prepare") for helper in others))
        await owner.ask("tell")  # and forget what was before
        forget_peak(owner.pid)
        before_bytes, before = memory_bytes(owner.pid, "VmRSS"), self._spent()
        answers = await asyncio.gather(*(helper.ask("round") for helper in others))
        by_owner, by_contributors = (now.since(then) for now, then in zip(self._spent(), before, strict=True))
        peak_bytes, told = memory_bytes(owner.pid, "VmHWM"), await owner.ask("tell")
        counted = [version["contributions"] for version in told["versions"]]
        if counted != [self._count]:
            raise DipacoError(f"a round of {self._count} contributors made versions of {counted}")
        turns = [turn for answer in answers for turn in answer["turns"]]
        began_s = min(answer["began_s"] for answer in answers)
        ends_s = ends_of(turns, dict(told["passed"]))
        phases = phases_of(began_s, ends_s)
        return Round(
            seconds=sum(phases.values()),
            phases=phases,
            kept_s=max(turn["kept_s"] for turn in turns) - ends_s[-1],
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
        helper = await start_helper(f"benchmarks.transfer.{kind}", *arguments, name=name, log=log)
        self._helpers.append(helper)
        return helper


def ends_of(turns: Sequence[Mapping[str, Any]], passed: Mapping[str, float]) -> list[float]:
    """When the last contributor, or the owner, was through each phase."""
    pushed = [max(float(turn[name]) for turn in turns) for name in ("encoded_s", "uploaded_s", "receipt_s")]
    applied_s = max(max(turn["applied_s"].values()) for turn in turns)
    return [*pushed, *(passed[point] for point in (CLOSED, AVERAGED, ANNOUNCED)), applied_s]


def phases_of(began_s: float, ends_s: Sequence[float]) -> dict[str, float]:
    """Seconds of each phase. They overlap: one may push while another still encodes, which counts as encoding."""
    steps = pairwise(accumulate((began_s, *ends_s), max))
    return {name: after - before for name, (before, after) in zip(PHASES, steps, strict=True)}


@dataclass(slots=True, kw_only=True)
class Case:
    """All rounds of one codec and number of contributors."""

    codec: str
    fan_in: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(played.seconds for played in self.rounds)

    @property
    def peak_bytes(self) -> int:
        """The most that the owner held, in any round."""
        return max(played.peak_bytes for played in self.rounds)

    @property
    def grown_bytes(self) -> int:
        """The most that the owner held above what it held before the round, in any."""
        return max(played.peak_bytes - played.before_bytes for played in self.rounds)

    def phase(self, name: str) -> float:
        """Median seconds of one phase."""
        return statistics.median(played.phases[name] for played in self.rounds)


def fan_ins(up_to: int) -> list[int]:
    """2, 4, 8, and so on."""
    found = [2]
    while 2 * found[-1] <= up_to:
        found.append(2 * found[-1])
    return found


async def measure(case: Case, values: int, *, runs: int, folder: Path) -> None:
    """Play the rounds of a case with a module of so many values, and tell of each; raises DipacoError."""
    swarm = Swarm(folder, config_of(model_of(values), case.codec), contributors=case.fan_in)
    try:
        await swarm.open()
        await swarm.round()  # opens connections and fills caches
        for number in range(1, runs + 1):
            case.rounds.append(await swarm.round())
            seconds = case.rounds[-1].seconds
            show(f"{case.fan_in} contributors, {case.codec}, round {number}: {seconds:.2f} s")
    finally:
        await swarm.close()
