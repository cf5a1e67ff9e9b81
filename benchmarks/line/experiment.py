"""The rounds: an owner and an observer at one end of the line, a volunteer at the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Helper, start_helper
from benchmarks.transfer.runs import config_of
from dipaco_p2p.config import LevelConfig, LivenessConfig, ModelConfig, RunConfig
from dipaco_p2p.strict import plain

from .network import Line, home_line

PATH_150M = ModelConfig(
    width=896,
    heads=16,
    ffn_width=3392,
    context=1024,
    levels=(LevelConfig(blocks=6, embedding=True, head=True), LevelConfig(blocks=6)),
)
"""149.8 M parameters in two modules of equal depth, with the run file's default vocabulary."""
QUICK_PATH = ModelConfig(levels=(LevelConfig(blocks=2, embedding=True, head=True), LevelConfig(blocks=2)))
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    model: ModelConfig
    codec: str
    rounds: int
    up_mbit: float
    down_mbit: float

    @property
    def config(self) -> RunConfig:
        """With heartbeats as in the run file."""
        return config_of(self.model, self.codec, ttl_s=LivenessConfig().heartbeat_ttl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRound:
    """One round's traffic."""

    push_s: float
    """From the first byte until both receipts are there."""
    pull_s: float
    """Time in which at least one published version was not applied here yet."""
    wait_s: float
    """Neither: the owner averages, writes, and looks twice a second whether a round can be closed."""
    payload_bytes: int
    up_bytes: int
    """What the line carried in the round, with headers, heartbeats and acknowledgements."""
    down_bytes: int
    gap_s: float
    """The greatest time between two heartbeats that the other side saw."""
    missed: int
    """Looks of the other side at which the volunteer's heartbeat had expired."""

    @property
    def traffic_s(self) -> float:
        """What the line takes of a round."""
        return self.push_s + self.pull_s

    @property
    def total_s(self) -> float:
        return self.traffic_s + self.wait_s


async def play(wish: Wish, folder: Path, tell: Tell) -> list[LineRound]:
    """All rounds over one line. Raises DipacoError, and EnvironmentUnfit without root."""
    rounds = []
    with home_line() as line:
        async with AsyncExitStack() as stack:
            owner, observer, volunteer = await _start(wish, folder, line, stack)
            line.limit(up_mbit=wish.up_mbit, down_mbit=wish.down_mbit)
            await observer.ask("look", **await volunteer.ask("open"))
            for number in range(1, wish.rounds + 1):
                rounds.append(await _round(owner, observer, volunteer))
                tell(
                    f"{wish.codec}, round {number}: traffic {rounds[-1].traffic_s:.1f} s of {rounds[-1].total_s:.1f} s"
                )
    return rounds


async def _start(wish: Wish, folder: Path, line: Line, stack: AsyncExitStack) -> tuple[Helper, Helper, Helper]:
    """The three processes; the volunteer has fetched version 0, over a line that is not slow yet."""

    async def start(module: str, name: str, inside: tuple[str, ...], *arguments: str) -> Helper:
        helper = await start_helper(module, *arguments, name=name, log=folder / f"{name}.log", inside=inside)
        stack.push_async_callback(helper.end)
        return helper

    arguments = (str(folder / "owner"), json.dumps(plain(wish.config)), line.far.address)
    owner = await start("benchmarks.transfer.owner", "owner", line.far.inside, *arguments)
    address = (await owner.ask("open"))["address"]
    observer = await start("benchmarks.line.observer", "observer", line.far.inside, str(folder), address)
    volunteer = await start("benchmarks.transfer.volunteer", "volunteer", line.home.inside, str(folder), address, "1")
    await volunteer.ask("open")
    return owner, observer, volunteer


async def _round(owner: Helper, observer: Helper, volunteer: Helper) -> LineRound:
    await volunteer.ask("prepare")
    await owner.ask("tell")  # and forget what was before
    await observer.ask("tell")
    [turn] = (await volunteer.ask("round"))["turns"]
    made_s = {version["module"]: version["at_s"] for version in (await owner.ask("tell"))["versions"]}
    seen = await observer.ask("tell")
    began_s, pushed_s, applied_s = turn["encoded_s"], turn["receipt_s"], turn["applied_s"]
    push_s = pushed_s - began_s
    pull_s = covered_s((max(at_s, pushed_s), applied_s[module]) for module, at_s in made_s.items())
    return LineRound(
        push_s=push_s,
        pull_s=pull_s,
        wait_s=max(applied_s.values()) - began_s - push_s - pull_s,
        payload_bytes=turn["bytes"],
        up_bytes=turn["up_bytes"],
        down_bytes=turn["down_bytes"],
        gap_s=seen["greatest_s"],
        missed=seen["missed"],
    )


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are within at least one of the spans, which are of beginnings and ends."""
    covered, until_s = 0.0, float("-inf")
    for began_s, ended_s in sorted(spans):
        covered += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return covered
