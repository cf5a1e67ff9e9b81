"""Rounds of ours and of the rival in turns, for every fan-in and codec; what the figures say together."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.processes import Helper, Spent, Values, forget_peak, memory_bytes, spent, start_helper
from benchmarks.report import median_ratio
from dipaco_p2p.config import RunConfig
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.strict import plain

from .runs import config_of, model_of

HOST = "127.0.0.1"
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
            await self._start("volunteer", str(self._folder), address, *numbers)

    async def round(self) -> OurRound:
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
        return OurRound(
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
        self._folder.mkdir(parents=True, exist_ok=True)
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


Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    values: int
    fan_ins: Sequence[int]
    codecs: Sequence[str]
    rival: str
    """Its compression; empty for none."""
    runs: int
    processes: int


@dataclass(slots=True, kw_only=True)
class Case:
    """All rounds of one codec with so many contributors, and the rival's between them."""

    codec: str
    fan_in: int
    rounds: list[OurRound] = field(default_factory=list)
    rival_s: list[float] = field(default_factory=list)
    rival_spent: list[Spent] = field(default_factory=list)

    def take(self, played: OurRound, reduced: Values | None) -> str:
        """One more turn, the rival's with it if there is one; what to tell of that."""
        self.rounds.append(played)
        if reduced is None:
            return ""
        self.rival_s.append(reduced["seconds"])
        self.rival_spent.append(Spent(reduced["programs_s"], reduced["daemons_s"]))
        return f", hivemind {reduced['seconds']:.2f} s"

    @property
    def seconds(self) -> float:
        """The median of our rounds."""
        return statistics.median(played.seconds for played in self.rounds)

    @property
    def ratio(self) -> float | None:
        """Our time over the rival's, within each turn."""
        rounds = [played.seconds for played in self.rounds[: len(self.rival_s)]]
        return median_ratio(rounds, self.rival_s) if rounds else None

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
        assert name in PHASES, name
        return statistics.median(played.phases[name] for played in self.rounds)


def fan_ins(up_to: int) -> list[int]:
    """2, 4, 8, and so on."""
    found = [2]
    while 2 * found[-1] <= up_to:
        found.append(2 * found[-1])
    return found


def slope_ratio(fan_ins: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Seconds for one more contributor in the upper half of the fan-ins, over those in the lower half: 1 is linear,
    more is worse. None for fewer than three, or if the lower half costs nothing."""
    if len(fan_ins) < 3:
        return None
    middle = len(fan_ins) // 2
    upper = (seconds[-1] - seconds[middle]) / (fan_ins[-1] - fan_ins[middle])
    lower = (seconds[middle] - seconds[0]) / (fan_ins[middle] - fan_ins[0])
    return upper / lower if lower > 0 else None


async def measure(wish: Wish, work: Path, tell: Tell) -> list[Case]:
    """Every case, one after the other; raises DipacoError."""
    cases = []
    for fan_in in wish.fan_ins:
        for codec in wish.codecs:
            cases.append(await _case(wish, Case(codec=codec, fan_in=fan_in), work / f"{codec}-{fan_in}", tell))
    return cases


async def _case(wish: Wish, case: Case, folder: Path, tell: Tell) -> Case:
    config = config_of(model_of(wish.values), case.codec)
    async with AsyncExitStack() as stack:
        ours = OurSwarm(folder, config, contributors=case.fan_in, processes=wish.processes)
        stack.push_async_callback(ours.close)
        await ours.open()
        rival = None
        if wish.rival:
            rival = await _rival(wish, case.fan_in, folder)
            stack.push_async_callback(rival.end)
            await rival.ask("open")
        for turn in range(wish.runs + 1):
            played = await ours.round()
            reduced = await rival.ask("round") if rival is not None else None
            if turn:  # the first opens connections and fills caches
                told = case.take(played, reduced)
                tell(f"{case.fan_in} contributors, {case.codec}, round {turn}: {played.seconds:.2f} s{told}")
    return case


async def _rival(wish: Wish, fan_in: int, folder: Path) -> Helper:
    arguments = (str(wish.values), str(fan_in), wish.rival)
    return await start_helper("benchmarks.transfer.rival", *arguments, name="hivemind", log=folder / "hivemind.log")
