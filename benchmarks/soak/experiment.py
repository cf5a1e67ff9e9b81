"""A swarm under mild churn, sampled. Half of the volunteers are never touched: in them a leak adds up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.evidence import Done
from benchmarks.chaos.observer import OBSERVER, observe
from benchmarks.chaos.play import play
from benchmarks.chaos.schedule import SEED_NODE, Kind, Plan, Verb, actions, draw, volunteers
from benchmarks.chaos.start import start_volunteers
from benchmarks.chaos.swarm import LocalSwarm
from benchmarks.churn.options import Options as ChurnOptions
from benchmarks.churn.options import run_text
from bootstrap.progress import stage
from dipaco_p2p.program.history import read_history

from .sample import Sample, take

SAMPLES = 600
"""About so many in a run, however long it is."""
LOOK_S_MIN = 0.5
YOUNG_S = 20.0
"""Who was just started again is left out so long: imports are no leak."""
MILD = (Kind.KILL, Kind.TERM, Kind.FREEZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the flags say."""

    minutes: float
    peers: int
    seed: int
    faults_per_minute: float
    corpus: str
    is_alone: bool = True
    """Whether nobody else starts peers on this machine meanwhile."""

    @property
    def duration_s(self) -> float:
        return 60 * self.minutes

    @property
    def plan(self) -> Plan:
        """Mild churn; who is back late would be sampled less."""
        return Plan(
            duration_s=self.duration_s,
            faults_per_minute=self.faults_per_minute,
            kinds=MILD,
            away_s=(3.0, 15.0),
            spared=self.peers - self.peers // 2,
        )


@dataclass(slots=True)
class Soak:
    """The samples of one run."""

    swarm: LocalSwarm
    every_s: float
    is_alone: bool = True
    samples: list[tuple[float, Sample]] = field(default_factory=list)

    def look(self) -> None:
        """One more sample, if it is time."""
        now_s = time.time()
        if not self.samples or now_s - self.samples[-1][0] >= self.every_s:
            young = {d.name for d in self.swarm.done if d.verb is Verb.START and d.t_s > now_s - YOUNG_S}
            members = self.swarm.members.items()
            up = {name: child.process.pid for name, child in members if child.is_alive and name not in young}
            homes = {name: self.swarm.home(name) for name in up}
            self.samples.append((now_s, take(up, homes, is_alone=self.is_alone) | records(self.swarm.work)))


async def soak(options: Options, work: Path) -> tuple[list[tuple[float, Sample]], Sequence[Done], float]:
    """Run it: the samples, what was done to whom, and the rounds per second. Raises DipacoError."""
    work.mkdir(parents=True, exist_ok=True)
    run_file = work / "run.toml"
    run_file.write_text(run_text(ChurnOptions(peers=options.peers, seed=options.seed, corpus=options.corpus)))
    swarm = LocalSwarm(work, run_file)
    schedule = actions(draw(options.seed, options.plan, peers=options.peers))
    looking = Soak(swarm, max(LOOK_S_MIN, options.duration_s / SAMPLES), is_alone=options.is_alone)
    try:
        await swarm.open()
        async with observe(swarm.address, work / OBSERVER):
            await start_volunteers(swarm, volunteers(options.peers))
            before, began_s = rounds(swarm.folder), time.time()
            with stage("Soaking", total=round(options.duration_s)) as advance:

                def tick() -> None:
                    looking.look()
                    advance(round(time.time() - began_s))

                await play(swarm, schedule, duration_s=options.duration_s, on_tick=tick)
            speed = (rounds(swarm.folder) - before) / (time.time() - began_s)
    finally:
        await swarm.end()
    return looking.samples, swarm.done, speed


def rounds(folder: Path) -> int:
    """The newest version in the archive of the seed node whose folder this is, of any module."""
    events = read_history(folder / "grid" / "history.jsonl")
    return max((event["version"] for event in events if event["ev"] == "archived"), default=0)


def records(work: Path) -> Sample:
    """How many live records of each kind the observer saw last."""
    events = [event for event in read_history(work / OBSERVER / "history.jsonl") if event["ev"] == "records"]
    return {name: float(events[-1][name]) for name in ("heartbeats", "claims", "heads")} if events else {}


def restarts(done: Sequence[Done]) -> int:
    """How often a volunteer was started again."""
    return sum(each.verb is Verb.START and each.name != SEED_NODE for each in done)
