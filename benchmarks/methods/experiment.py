"""The whole experiment, in its order: text, warm-ups, tuning, scoring, ablations, figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError

from .data import Data, prepare_data
from .jobs import Job
from .plan import ABLATIONS, DRILLS, KMEANS, LRS, MAIN, METHODS, drill, is_scored, job, needed, quick_lr, tuning
from .plots import can_plot, draw
from .pool import Pool
from .report import print_summary
from .store import Folder, Results
from .summary import Summary, chosen_lrs, summarise_experiment
from .work import Task

VERSION = 2
"""Of what the tasks compute: results of another version are not gone on with."""
BYTES_MAX = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user asked for."""

    corpus: tuple[str, ...]
    quick: bool
    everything: bool
    seeds: int
    only: tuple[str, ...]
    processes: int | None
    fast: bool

    @property
    def methods(self) -> list[str]:
        names = METHODS if self.everything else MAIN
        return [name for name in METHODS if name in (self.only or names)]

    @property
    def ablations(self) -> list[str]:
        names = ABLATIONS if self.everything else {}
        return [name for name in ABLATIONS if name in (self.only or names)]

    @property
    def drills(self) -> list[str]:
        names = DRILLS if self.everything else {}
        return [name for name in DRILLS if name in (self.only or names)]


def run_experiment(choice: Choice, out: Path) -> bool:
    """Do what is not done yet, and show everything; whether DiPaCo beat dense in all seeds. Raises DipacoError."""
    names = [*METHODS, *ABLATIONS, *DRILLS]
    unknown = [name for name in choice.only if name not in names]
    if unknown:
        raise ConfigError(f"no method is called `{unknown[0]}`", hint="one of: " + ", ".join(names))
    folder = Folder(out)
    settings = {"version": VERSION, "corpus": list(choice.corpus), "bytes_max": BYTES_MAX, "fast": choice.fast}
    folder.open(settings)
    if not folder.data.exists():
        prepare_data(choice.corpus, bytes_max=BYTES_MAX).save(folder.data)
    runner = _Runner(folder, choice)
    runner.run()
    summary = summarise_experiment(
        runner.results, Data.load(folder.data), runner.chosen, seeds=runner.seeds, lrs=runner.lrs, settings=settings
    )
    _write(folder, summary)
    print_summary(summary)
    print(f"{out}: summary.json, results.jsonl" + (", plots" if can_plot() else "; no plots without matplotlib"))
    return bool(summary["beats_dense"])


class _Runner:
    """Brings the tasks to the pool and their results to the folder."""

    def __init__(self, folder: Folder, choice: Choice) -> None:
        self.results: Results = folder.read_results()
        self.chosen: dict[str, float] = {}
        self.seeds = range(choice.seeds)
        self.lrs = sorted({quick_lr(method) for method in METHODS}) if choice.quick else list(LRS)
        self._folder = folder
        self._choice = choice
        processes = choice.processes or len(os.sched_getaffinity(0))
        self._pool = Pool(folder, processes=processes, threads=1, fast=choice.fast)

    def run(self) -> None:
        """All phases; what is finished is passed over."""
        choice = self._choice
        # An ablation needs the outer learning rate of what it changes.
        methods = needed([*choice.methods, *([KMEANS] if choice.ablations else [])])
        drills = {name: [drill(name, seed=seed) for seed in self.seeds] for name in choice.drills}
        with self._pool.running():
            jobs = self._tuning(methods)
            final = [job(m, seed=s, lr=1.0) for m in methods for s in self.seeds]
            self._warm_up([*jobs, *final, *(one for found in drills.values() for one in found)])
            self._do("Training", "train", jobs)
            self.chosen = self._choose(methods)
            final = [job(m, seed=s, lr=self.chosen[m]) for m in methods for s in self.seeds]
            self._do("Training with the chosen rates", "train", final)
            scored = [one for one in final if is_scored(one.method)]
            self._do("Scoring by all paths", "score", [o for o in scored if o.method == KMEANS or not choice.quick])
            changed = [job(a, seed=s, lr=self.chosen[KMEANS]) for a in choice.ablations for s in self.seeds]
            self._do("Ablations", "train", changed)
            for name, found in drills.items():
                self._do(f"Drill: {name}", DRILLS[name], found)

    def _tuning(self, methods: Sequence[str]) -> list[Job]:
        if self._choice.quick:
            return [job(m, seed=s, lr=quick_lr(m)) for m in methods for s in self.seeds]
        return tuning(methods, seeds=self.seeds, lrs=self.lrs)

    def _choose(self, methods: Sequence[str]) -> dict[str, float]:
        if self._choice.quick:
            return {method: quick_lr(method) for method in methods}
        return chosen_lrs(methods, self.results, seeds=self.seeds, lrs=self.lrs)

    def _warm_up(self, jobs: Sequence[Job]) -> None:
        wanted = {(one.seed, one.width): one for one in jobs}
        tasks = [Task(kind="warmup", job=one) for key, one in wanted.items() if not self._folder.warm(*key).exists()]
        self._pool.run("Warm-up", tasks, lambda task, result: None)

    def _do(self, title: str, kind: str, jobs: Sequence[Job]) -> None:
        wanted = {one.key: Task(kind=kind, job=one) for one in jobs if (kind, one.key) not in self.results}
        self._pool.run(title, list(wanted.values()), self._keep)

    def _keep(self, task: Task, result: dict[str, Any]) -> None:
        line = {"kind": task.kind, "key": task.job.key, "job": task.job.to_dict(), "result": result}
        self._folder.append(line)
        self.results[task.kind, task.job.key] = line


def _write(folder: Folder, summary: Summary) -> None:
    path = folder.root / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    if can_plot():
        draw(summary, folder.root / "plots")
