"""A swarm under mild churn, sampled for an hour. Half of the volunteers have no faults: in them a leak adds up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from benchmarks.report import show, table, write_json
from dipaco_p2p.program.history import read_history
from dipaco_p2p.use.folder import GRID

from .churn import write_run_file
from .growth import MIB, Sample, Trend, take, trends
from .observer import OBSERVER
from .schedule import SEED_NODE, Kind, Plan, Verb, actions, draw
from .swarm import LocalSwarm, Span, require_new, stoppable

SAMPLES = 600
"""About as many in a run, however long it is."""
LOOK_S_MIN = 0.5
YOUNG_S = 20.0
"""A member that has just started again is left out this long: imports are not a leak."""
MILD = (Kind.KILL, Kind.TERM, Kind.FREEZE)


@dataclass(slots=True)
class Sampler:
    """The samples of one run, each with its time."""

    swarm: LocalSwarm
    every_s: float
    is_alone: bool
    """Whether nobody else starts peers on this machine meanwhile."""
    samples: list[tuple[float, Sample]] = field(default_factory=list)

    def look(self) -> None:
        """Take one more sample, if it is time."""
        now_s = time.time()
        if not self.samples or now_s - self.samples[-1][0] >= self.every_s:
            young = {d.name for d in self.swarm.done if d.verb is Verb.START and d.t_s > now_s - YOUNG_S}
            members = self.swarm.members.items()
            up = {name: child.process.pid for name, child in members if child.is_alive and name not in young}
            homes = {name: self.swarm.home(name) for name in up}
            self.samples.append((now_s, take(up, homes, is_alone=self.is_alone) | records(self.swarm.work)))


async def run_soak(
    out: Path,
    *,
    minutes: float,
    peers: int,
    seed: int,
    faults_per_minute: float,
    warm_up: float,
    corpus: str,
    is_alone: bool,
) -> bool:
    """Run and report; whether nothing grows after the share `warm_up` of the time. Raises DipacoError."""
    require_new(out)
    run_file, duration_s = out / "run.toml", 60 * minutes
    write_run_file(run_file, peers=peers, seed=seed, corpus=corpus)
    swarm = LocalSwarm(out, run_file)
    sampler = Sampler(swarm, max(LOOK_S_MIN, duration_s / SAMPLES), is_alone)
    spared = peers - peers // 2
    # A member that is away for long would be sampled less.
    mild = Plan(
        duration_s=duration_s, faults_per_minute=faults_per_minute, kinds=MILD, away_s=(3.0, 15.0), spared=spared
    )
    schedule = actions(draw(seed, mild, peers=peers))
    with stoppable():
        span = await swarm.live(peers, schedule, duration_s=duration_s, title="Soaking", on_tick=sampler.look)
    speed = rounds_per_s(swarm.folder, span)
    found = trends(sampler.samples, rounds_per_s=speed, warm_up=warm_up)
    began_s = sampler.samples[0][0]
    told = {
        "rounds_per_s": speed,
        "restarts": sum(each.verb is Verb.START and each.name != SEED_NODE for each in swarm.done),
        "warm_up": warm_up,
        "trends": [asdict(one) | {"grows": one.grows} for one in found],
        "samples": [{"at_s": at_s - began_s, **sample} for at_s, sample in sampler.samples],
    }
    write_json(out / "soak.json", told)
    show(trends_table(found, minutes=minutes, faults=len(swarm.done) // 2))
    print(f"everything is in {out}")
    return not any(trend.grows for trend in found)


def rounds_per_s(folder: Path, span: Span) -> float:
    """How quickly the newest version of any module grew in the archive of the seed node whose folder this is."""
    events = [event for event in read_history(folder / GRID / "history.jsonl") if event["ev"] == "archived"]
    newest = [
        max((event["version"] for event in events if event["t"] <= until_s), default=0)
        for until_s in (span.began_s, span.ended_s)
    ]
    return (newest[1] - newest[0]) / (span.ended_s - span.began_s)


def records(work: Path) -> Sample:
    """How many live records of each kind the observer saw last."""
    events = [event for event in read_history(work / OBSERVER / "history.jsonl") if event["ev"] == "records"]
    return {name: float(events[-1][name]) for name in ("heartbeats", "claims", "heads")} if events else {}


def trends_table(found: Sequence[Trend], *, minutes: float, faults: int) -> Table:
    """Every measure with its level and its rise; what grows is marked."""
    rows = []
    for trend in found:
        cells = [_cell(trend.measure, value) for value in (trend.level, trend.highest, trend.rise, trend.allowed)]
        rows.append((trend.measure, *cells, "GROWS" if trend.grows else "flat"))
    title = f"{minutes:.1f} minutes, {faults} faults; rises are those of the line after the warm-up"
    return table(title, ("measure", "median", "highest", "rise", "allowed", ""), rows, left=("",))


def _cell(measure: str, value: float) -> str:
    return f"{value / MIB:,.2f} MiB" if measure.split()[0].endswith("_bytes") else f"{value:,.1f}"
