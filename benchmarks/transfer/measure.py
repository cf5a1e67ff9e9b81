"""Rounds of ours and of the rival in turns, for every fan-in and codec; what the figures say together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from .helper import Helper, Values, start_helper
from .ours import PHASES, OurRound, OurSwarm
from .processor import Spent
from .runs import config_of, model_of

FAN_IN_MIN = 2

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
        """Our time over the rival's: the median of the ratios within each turn."""
        pairs = zip(self.rounds, self.rival_s, strict=False)
        ratios = [played.seconds / rival_s for played, rival_s in pairs]
        return statistics.median(ratios) if ratios else None

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
    found = [FAN_IN_MIN]
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
