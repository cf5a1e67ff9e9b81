"""A run whose volunteers are killed, beside a twin that nothing kills: both runs, their losses, tables and JSON.

Both are prepared once, start from copies of one folder, and are stopped after the same time. docs/churn.md defines
every figure.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.report import show, table, write_json
from bootstrap.archives.evaluator import Evaluator
from bootstrap.progress import stage
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.use.folder import RunFolder

from .evidence import Done, Evidence, gather, peer_of, read_events
from .figures import Bar, Figures, bars, figures, median
from .observer import OBSERVER
from .schedule import SEED_NODE, Action, Plan, Verb, actions, draw
from .swarm import LocalSwarm, Span, copy_prepared, require_new, stoppable

TWIN, FAULTS = "twin", "faults"
HEARTBEAT_TTL_S = 10.0
CALM_S = 45.0
"""After the last fault both go on this long: an interrupted failover is not a lost contribution."""
STEPS = 100
"""A round then takes about as long as a heartbeat lives: in real runs it takes many times as long."""
KEPT = {True: "kept", False: "MISSED", None: "not tested"}
VERBS = {Verb.KILL: "killed", Verb.START: "started again"}
RUN = """\
[run]
name = "churn"
seed = {seed}

[model]
vocab_size = 512
width = 32
ffn_width = 64
context = 72
{levels}
[warmup]
rounds = {warmup}

[inner]
steps = {steps}
batch = 4
warmup_steps = 4

[rounds]
rounds = {rounds}
min_paths = {min_paths}
deadline_s = 20.0
grace_s = 1.0

[liveness]
heartbeat_ttl_s = {heartbeat_ttl_s}
settle_s = 0.5

[judging]
judges = {judges}

[corpus]
source = {source}
bytes_max = 4000000

[archive]
rounds = 0
[leaderboard]
serve = false
[node]
port = 0
"""
LEVELS = """\
[[model.levels]]
modules = 1
embedding = true
head = true
[[model.levels]]
modules = 2
blocks = 1
[[model.levels]]
modules = 2
blocks = 1
"""
"""A grid of 2x2 paths so small that a dozen processes fit on two cores. Without re-sharding and warm-up, since neither
run ends: what is compared is the rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the flags say."""

    peers: int = 8
    minutes: float = 10.0
    away_s: tuple[float, float] = (15.0, 25.0)
    never_back: float = 0.0
    seed: int = 0
    steps: int = STEPS
    corpus: str = "found"
    at_once: bool = False
    """Both swarms at the same time."""

    @property
    def plan(self) -> Plan:
        """The schedule of the run under faults."""
        return Plan(duration_s=60 * self.minutes, away_s=self.away_s, never_back=self.never_back)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one of the two runs left."""

    folder: Path
    span: Span
    evidence: Evidence

    def loss(self, version: int) -> float:
        """Validation loss in nats per token after so many rounds."""
        run, store = RunFolder(self.folder).require()
        return Evaluator(run, store, SeedArchive(run, store)).evaluate(version).routed.loss


def write_run_file(
    path: Path,
    *,
    peers: int,
    seed: int,
    corpus: str,
    steps: int = STEPS,
    rounds: int = 100_000,
    heartbeat_ttl_s: float = HEARTBEAT_TTL_S,
    judges: int = 2,
    warmup: int = 0,
    levels: str = LEVELS,
    settings: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """The run file that the swarms of these benchmarks train, with these tables of levels, and settings by section and
    key; by default the run does not end by itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"min_paths": min(peers, 4), "source": json.dumps(corpus), "judges": judges}
    lengths = {"rounds": rounds, "warmup": warmup, "heartbeat_ttl_s": heartbeat_ttl_s}
    text = RUN.format(seed=seed, steps=steps, levels=levels, **lengths, **values)
    for section, wanted in (settings or {}).items():
        before, _, rest = text.partition(f"[{section}]\n")
        found, mark, after = rest.partition("\n[")
        kept = [line for line in found.splitlines() if line.partition(" = ")[0] not in wanted]
        lines = [f"[{section}]", *(f"{key} = {value}" for key, value in wanted.items()), *kept]
        text = before + "\n".join(lines) + mark + after
    path.write_text(text)


async def run_churn(options: Options, out: Path) -> bool:
    """Play both runs and report; whether every bar that was tested was kept. Raises DipacoError."""
    require_new(out)
    with stoppable():
        twin, faults = await run_twins(options, out)
    return await asyncio.to_thread(report, options, {TWIN: twin, FAULTS: faults}, out)


async def run_twins(options: Options, work: Path) -> list[Outcome]:
    """The fault-free twin, and the run under faults. Raises DipacoError."""
    run_file = work / "run.toml"
    write_run_file(run_file, peers=options.peers, seed=options.seed, corpus=options.corpus, steps=options.steps)
    prepared = LocalSwarm(work / "prepared", run_file)
    with stage("Preparing the run"):
        try:
            await prepared.open()
        finally:
            await prepared.end()
    schedule = actions(draw(options.seed, options.plan, peers=options.peers))
    runs = [_run(options, prepared, work / name, plan) for name, plan in ((TWIN, ()), (FAULTS, schedule))]
    return list(await asyncio.gather(*runs)) if options.at_once else [await each for each in runs]


async def _run(options: Options, prepared: LocalSwarm, work: Path, schedule: tuple[Action, ...]) -> Outcome:
    copy_prepared(prepared.folder, work / SEED_NODE)
    swarm = LocalSwarm(work, prepared.run_file)
    duration_s = options.plan.duration_s + CALM_S
    span = await swarm.live(
        options.peers, schedule, duration_s=duration_s, title=f"Training, {work.name}", on_done=_tell
    )
    return await asyncio.to_thread(_outcome, swarm, span)


def _tell(done: Done) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(done.t_s))
    print(f"{at} {VERBS.get(done.verb, done.verb)} {done.name}", flush=True)


def _outcome(swarm: LocalSwarm, span: Span) -> Outcome:
    homes = {name: swarm.home(name) for name in swarm.volunteers}
    seen = {OBSERVER: read_events([swarm.work / OBSERVER / "history.jsonl"])}
    evidence = gather(swarm.folder, homes, done=swarm.done, ended_s=span.ended_s)
    lost = frozenset(peer_of(evidence, death.name) for death in evidence.deaths() if evidence.back_s(death) is None)
    evidence = replace(evidence, lost_disks=lost, histories={**evidence.histories, **seen})
    return Outcome(folder=swarm.folder, span=span, evidence=evidence)


def report(options: Options, outcomes: dict[str, Outcome], out: Path) -> bool:
    """Write and print what the two runs showed; losses are compared after the same number of rounds."""
    runs = {name: figures(outcome.evidence, began_s=outcome.span.began_s) for name, outcome in outcomes.items()}
    version = min(run.versions for run in runs.values())
    more: dict[str, Any] = {
        "version": version,
        "loss": {name: outcome.loss(version) for name, outcome in outcomes.items()},
        "last_loss": {name: outcome.loss(runs[name].versions) for name, outcome in outcomes.items()},
        "busy": {name: outcome.span.busy for name, outcome in outcomes.items()},
    }
    found = bars(runs[TWIN], runs[FAULTS], loss=more["loss"], ttl_s=HEARTBEAT_TTL_S)
    told = {
        "options": asdict(options),
        **more,
        "runs": {name: _run_dict(figures) for name, figures in runs.items()},
        "bars": [asdict(bar) for bar in found],
    }
    write_json(out / "churn.json", told)
    show(runs_table(runs, more), kills_table(runs[FAULTS], HEARTBEAT_TTL_S), bars_table(found))
    print(f"everything is in {out}")
    return all(bar.is_kept is not False for bar in found)


def _run_dict(run: Figures) -> dict[str, Any]:
    rates = {"goodput": run.goodput, "tokens_per_s": run.tokens_per_s}
    return asdict(run) | rates | {"breaches": [str(breach) for breach in run.breaches]}


def runs_table(runs: dict[str, Figures], more: dict[str, Any]) -> Table:
    """A column for each of the two runs."""
    rows = {
        "seconds": [f"{run.seconds:.0f}" for run in runs.values()],
        "contributions counted per second": [f"{run.goodput:.3f}" for run in runs.values()],
        "tokens counted per second": [f"{run.tokens_per_s:,.0f}" for run in runs.values()],
        "median round, s": [f"{run.round_s:.1f}" for run in runs.values()],
        "rounds of every module": [str(run.versions) for run in runs.values()],
        "receipts": [str(run.receipts) for run in runs.values()],
        "  lost": [str(run.lost) for run in runs.values()],
        "  reported as expired": [str(run.expired) for run in runs.values()],
        "  kept for an open round": [str(run.kept) for run in runs.values()],
        "counted twice": [str(run.twice) for run in runs.values()],
        "processors in use": [f"{more['busy'][name]:.0%}" for name in runs],
        f"validation loss after {more['version']} rounds": [f"{more['loss'][name]:.4f}" for name in runs],
        "validation loss at its own end": [f"{more['last_loss'][name]:.4f}" for name in runs],
    }
    title = "The run under faults beside its twin"
    return table(title, ("", *runs), [(label, *cells) for label, cells in rows.items()])


def kills_table(faults: Figures, ttl_s: float) -> Table:
    """A row for each kill, and the medians."""
    times = ("detected_s", "reassigned_s", "resumed_s", "started_s", "back_s")
    texts = ("victim", "path", "led, next version")
    columns = ("at", *texts[:2], "T_detect", "reassigned", "T_resume", "started", "T_back", texts[2])
    rows = []
    for kill in faults.kills:
        led = ", ".join(f"{module} {_cell(gap)}" for module, gap in kill.led.items())
        cells = [_cell(getattr(kill, name)) for name in times]
        rows.append((f"{kill.at_s:.0f}", kill.victim, kill.path or "none", *cells, led))
    if faults.kills:
        found = [[value for kill in faults.kills if (value := getattr(kill, name)) is not None] for name in times]
        rows.append(("", "median", "", *(_cell(median(values)) for values in found), ""))
    return table(f"After each kill, in seconds (an expiry is {ttl_s:g} s)", columns, rows, left=texts)


def bars_table(found: list[Bar]) -> Table:
    """What the run must show, and what it did."""
    rows = [(bar.name, bar.measured, bar.wanted, KEPT[bar.is_kept]) for bar in found]
    return table("What it must show", ("", "measured", "wanted", " "), rows, left=("measured", "wanted", " "))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
