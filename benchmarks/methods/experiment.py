"""The experiment in its order: text, warm-ups, tuning, training, scoring, ablations, figures; or one comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import show, write_json
from dipaco_p2p.core.outer.compress import Sent
from dipaco_p2p.errors import ConfigError

from .comparisons import COMPARISONS, curves_of, tables
from .data import OWN, Data, prepare_data
from .jobs import SIZES, Job
from .plan import ABLATIONS, KMEANS, MAIN, METHODS, Rates, changed, is_scored, job, needed, quick_rates, tuning
from .pool import Pool
from .report import told
from .store import Folder, Results
from .summary import chosen_rates, summarise_experiment, untried
from .work import Task

VERSION = 2
"""Of what the tasks compute: results of another version are not continued."""
BYTES_MAX = 16_000_000
COMPARED_BYTES_MAX = 4_000_000
QUICK_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user asked for."""

    corpus: tuple[str, ...]
    quick: bool
    everything: bool
    seeds: int | None
    only: tuple[str, ...]
    processes: int | None
    fast: bool

    def chosen(self, names: Sequence[str], default: Sequence[str]) -> list[str]:
        """Those of `names` that were asked for; without --only those of `default`."""
        return [name for name in names if name in (self.only or default)]


class Runner:
    """Brings tasks to the pool and their results to the folder."""

    def __init__(self, folder: Folder, choice: Choice) -> None:
        self.results: Results = folder.read_results()
        self._folder = folder
        processes = choice.processes or len(os.sched_getaffinity(0))
        self.pool = Pool(folder, processes=processes, fast=choice.fast)

    def _warm_up(self, jobs: Sequence[Job]) -> None:
        """The models that these jobs start from."""
        wanted = {(one.seed, one.width): one for one in jobs}
        tasks = [Task(kind="warmup", job=one) for key, one in wanted.items() if not self._folder.warm(*key).exists()]
        if tasks:
            self.pool.run("Warm-up", tasks, lambda task, result: None)

    def do(self, title: str, kind: str, jobs: Sequence[Job]) -> None:
        """What is not finished yet of these tasks, and of the models that they start from."""
        self._warm_up(jobs)
        wanted = {one.key: Task(kind=kind, job=one) for one in jobs if (kind, one.key) not in self.results}
        self.pool.run(title, list(wanted.values()), self._keep)

    def _keep(self, task: Task, result: dict[str, Any]) -> None:
        line = {"kind": task.kind, "key": task.job.key, "job": task.job.to_dict(), "result": result}
        self._folder.append(line)
        self.results[task.kind, task.job.key] = line


def run_experiment(choice: Choice, out: Path) -> bool:
    """Do what is not done yet, and show everything; whether DiPaCo beat dense in all seeds. Raises DipacoError."""
    names = [*METHODS, *ABLATIONS]
    if unknown := [name for name in choice.only if name not in names]:
        raise ConfigError(f"no method is called `{unknown[0]}`", hint="one of: " + ", ".join(names))
    corpus = choice.corpus or ("found",)
    folder, settings = _opened(out, corpus, choice, bytes_max=BYTES_MAX, size="small")
    runner, seeds = Runner(folder, choice), range(choice.seeds or (1 if choice.quick else 2))
    chosen = _train_all(runner, choice, seeds)
    data = Data.load(folder.data)
    summary = summarise_experiment(runner.results, data, chosen, seeds=seeds, settings=settings)
    write_json(folder.root / "summary.json", summary)
    show(*told(summary), f"{out}: summary.json, results.jsonl")
    return bool(summary["beats_dense"])


def _train_all(runner: Runner, choice: Choice, seeds: range) -> dict[str, Rates]:
    """All phases; what is finished is passed over. The chosen rates of every method."""
    ablations = choice.chosen(list(ABLATIONS), list(ABLATIONS) if choice.everything else [])
    asked = choice.chosen(list(METHODS), list(METHODS if choice.everything else MAIN))
    # An ablation is shown beside what it changes, and needs its rates.
    methods = needed([*asked, *map(changed, ablations), *([KMEANS] if ablations else [])])
    chosen = {method: quick_rates(method) for method in methods}
    with runner.pool.running():
        if not choice.quick:
            jobs = tuning(methods)
            while jobs:
                runner.do("Tuning", "train", jobs)
                jobs = untried(methods, runner.results)
            chosen = chosen_rates(methods, runner.results)
        final = [job(m, seed=s, rates=chosen[m]) for m in methods for s in seeds]
        runner.do("Training with the chosen rates", "train", final)
        scored = [one for one in final if is_scored(one.method)]
        runner.do("Scoring by all paths", "score", [o for o in scored if o.method == KMEANS or not choice.quick])
        runner.do("Ablations", "train", [job(a, seed=s, rates=chosen[changed(a)]) for a in ablations for s in seeds])
    return chosen


def run_comparison(name: str, choice: Choice, out: Path, *, rounds: int | None, steps: int | None) -> None:
    """Train every variation of one comparison, and show what each costs. Raises DipacoError."""
    comparison = COMPARISONS[name]
    rounds = rounds or (QUICK_ROUNDS if choice.quick else comparison.rounds)
    comparison = replace(comparison, rounds=rounds, steps=steps or comparison.steps)
    seeds = range(choice.seeds or (1 if choice.quick else comparison.seeds))
    folder, _ = _opened(out, choice.corpus or (OWN,), choice, bytes_max=COMPARED_BYTES_MAX, size="short")
    runner, jobs = Runner(folder, choice), comparison.jobs(seeds)
    everything = [one for found in jobs.values() for one in found]
    with runner.pool.running():
        runner.do(f"Comparing: {name}", "train", everything)
    results = {each: [runner.results["train", one.key]["result"] for one in found] for each, found in jobs.items()}
    curves = curves_of(results, comparison.steps)
    told = {"comparison": name, "seeds": list(seeds), "rounds": rounds, "steps": comparison.steps, "losses": curves}
    write_json(folder.root / f"{name}.json", told)
    sent = {each: [Sent(**one) for one in found[0].get("sent", [])] for each, found in results.items()}
    show(*tables(comparison, curves, sent))


def _opened(
    out: Path, corpus: Sequence[str], choice: Choice, *, bytes_max: int, size: str
) -> tuple[Folder, dict[str, object]]:
    """The folder of an experiment with its text, and its settings."""
    folder = Folder(out)
    settings: dict[str, object] = {"version": VERSION, "corpus": list(corpus), "bytes_max": bytes_max}
    folder.open(settings | {"fast": choice.fast} | ({} if size == "small" else {"size": size}))
    if not folder.data.exists():
        prepare_data(corpus, bytes_max=bytes_max, size=SIZES[size]).save(folder.data)
    return folder, settings | {"fast": choice.fast}
