"""Runs the two swarms: prepared once, started from copies of one folder, stopped after the same time."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.chaos.evidence import Done, Evidence
from benchmarks.chaos.gather import gather, peer_of, read_events
from benchmarks.chaos.machine import ProcessorUse
from benchmarks.chaos.observer import OBSERVER, observe
from benchmarks.chaos.play import play
from benchmarks.chaos.schedule import SEED_NODE, Action, Verb, actions, draw, volunteers
from benchmarks.chaos.start import start_volunteers
from benchmarks.chaos.swarm import LocalSwarm
from bootstrap.progress import stage

from .options import Options, run_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One of the two runs: where it lies, when its clock began and ended, and what it left."""

    folder: Path
    began_s: float
    ended_s: float
    evidence: Evidence
    busy: float
    """Share of the machine's processors that was in use, by whomever; at 1.0 times say little."""


async def run_twins(options: Options, work: Path) -> tuple[Outcome, Outcome]:
    """The fault-free twin, and the run under faults. Raises DipacoError."""
    prepared = await _prepare(options, work)
    schedule = actions(draw(options.seed, options.plan, peers=options.peers))
    runs = [_run(options, prepared, work / name, plan) for name, plan in (("twin", ()), ("faults", schedule))]
    if options.at_once:
        twin, faults = await asyncio.gather(*runs)
    else:
        twin, faults = [await each for each in runs]
    return twin, faults


async def _prepare(options: Options, work: Path) -> LocalSwarm:
    work.mkdir(parents=True, exist_ok=True)
    run_file = work / "run.toml"
    run_file.write_text(run_text(options))
    swarm = LocalSwarm(work / "prepared", run_file)
    with stage("Preparing the run"):
        try:
            await swarm.open()
        finally:
            await swarm.end()
    return swarm


async def _run(options: Options, prepared: LocalSwarm, work: Path, schedule: tuple[Action, ...]) -> Outcome:
    ignored = shutil.ignore_patterns("address.json", "history.jsonl", "*.tmp", "control.*")
    shutil.copytree(prepared.folder, work / SEED_NODE, ignore=ignored)
    swarm = LocalSwarm(work, prepared.run_file)
    duration_s = options.plan.duration_s + options.calm_s
    try:
        await swarm.open()
        async with observe(swarm.address, work / OBSERVER):
            await start_volunteers(swarm, volunteers(options.peers))
            began_s, usage = time.time(), ProcessorUse()
            with stage(f"Training, {work.name}", total=round(duration_s)) as advance:
                await play(
                    swarm,
                    schedule,
                    duration_s=duration_s,
                    on_done=_tell,
                    on_tick=lambda: advance(round(time.time() - began_s)),
                )
            ended_s, busy = time.time(), usage.busy
    finally:
        await swarm.end()
    return await asyncio.to_thread(_outcome, swarm, began_s, ended_s, busy)


def _tell(done: Done) -> None:
    words = {Verb.KILL: "killed", Verb.START: "started again"}
    print(
        f"{time.strftime('%H:%M:%S', time.localtime(done.t_s))} {words.get(done.verb, done.verb)} {done.name}",
        flush=True,
    )


def _outcome(swarm: LocalSwarm, began_s: float, ended_s: float, busy: float) -> Outcome:
    homes = {name: swarm.home(name) for name in swarm.volunteers}
    observer = {OBSERVER: read_events([swarm.work / OBSERVER / "history.jsonl"])}
    evidence = gather(swarm.folder, homes, done=swarm.done, ended_s=ended_s)
    lost = frozenset(peer_of(evidence, death.name) for death in evidence.deaths() if evidence.back_s(death) is None)
    evidence = replace(evidence, lost_disks=lost, histories=dict(evidence.histories) | observer)
    return Outcome(folder=swarm.folder, began_s=began_s, ended_s=ended_s, evidence=evidence, busy=busy)
