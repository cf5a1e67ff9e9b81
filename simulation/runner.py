"""Many seeds, in a few worker processes: each is played, checked, and summed up; and what came of them on disk.

Rule: a seed names a run of one state of the code, so any change to a Python file of the programs or of the simulation,
or to a version that numbers depend on, begins a new record: `<digest of the code and of the wish>.jsonl`, with a line
for each seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .checks import broken
from .faults import FAULTS
from .history import Broken
from .mutants import MUTANTS, planted
from .outcome import simulate
from .plan import make_plan
from .world import disks_folder, keep_disks_in

REPO = Path(__file__).parents[1]
CODE = ("dipaco_p2p", "peers", "bootstrap", "simulation")
SEED_CPU_S = 60
"""At most. A run takes two; one that does not end goes round in circles at one moment of its time."""
SEEDS_A_PROCESS = 200
"""On average; then another takes its place: a run leaves its process with memory that is free and not given back."""


class Hung(KeyboardInterrupt):
    """A run does not end. No program and no loop takes this for a failure of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one seed."""

    seed: int
    broken: tuple[Broken, ...]
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    virtual_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How seeds are to be played."""

    faults: tuple[str, ...] = tuple(FAULTS)
    peers: int | None = None
    mutant: str | None = None

    @property
    def flags(self) -> str:
        """What to add to the command that repeats a seed."""
        parts = [f" --peers {self.peers}"] if self.peers else []
        parts += [f' --mutant "{self.mutant}"'] if self.mutant else []
        parts += [f' --faults "{",".join(self.faults)}"'] if self.faults != tuple(FAULTS) else []
        return "".join(parts)


DEFAULT = Wish()


def end_in_good_order() -> None:
    """On SIGTERM remove the disks of what is being played: they are in memory."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def play_seed(seed: int, wish: Wish = DEFAULT) -> Result:
    """Play one seed here."""
    began_s = time.process_time()
    plan = make_plan(seed, wish.faults, volunteers=wish.peers)
    try:
        with planted(wish.mutant), _no_longer_than(SEED_CPU_S):
            outcome, world = simulate(plan)
    except Hung:
        return Result(seed=seed, broken=(Broken(0, f"the run did not end within {SEED_CPU_S} s of CPU time"),))
    return Result(
        seed=seed,
        broken=tuple(broken(outcome)),
        faults=Counter(str(event.facts["fault"]) for event in outcome.of("fault")),
        points=world.points,
        cpu_s=time.process_time() - began_s,
        virtual_s=outcome.end_s,
    )


def play_seeds(
    seeds: Sequence[int], wish: Wish = DEFAULT, *, workers: int, on_result: Callable[[Result], None]
) -> list[Result]:
    """Play many, and tell of each as it comes."""
    if workers < 2 or len(seeds) < 2:
        results = []
        for seed in seeds:
            results.append(play_seed(seed, wish))
            on_result(results[-1])
        return results
    results, size = [], workers * SEEDS_A_PROCESS
    # New processes by our own hand: those of `max_tasks_per_child` can wait for each other for ever (CPython #115634).
    for begin in range(0, len(seeds), size):
        with pool_of(workers) as pool:
            futures = [pool.submit(partial(play_seed, seed, wish)) for seed in seeds[begin : begin + size]]
            for future in as_completed(futures):
                on_result(future.result())
            results += [future.result() for future in futures]
    return results


@contextlib.contextmanager
def pool_of(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that play runs. When we are told to stop, they are killed in the middle of theirs: the disks are here,
    since an exit that is raised in a run is one more event to its programs."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="dipaco-simulations-", dir=disks_folder()) as home,
        ProcessPoolExecutor(workers, context, initializer=keep_disks_in, initargs=(home,)) as pool,
    ):
        try:
            yield pool
        except BaseException:
            for child in multiprocessing.active_children():
                child.kill()
            raise


@contextlib.contextmanager
def _no_longer_than(duration_s: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, duration_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- results on disk, so that a range that was stopped is continued


def state_of_the_code(wish: Wish) -> str:
    """A digest of all that a run depends on but its seed."""
    found = hashlib.sha256(f"{platform.python_version()} {np.__version__} {wish!r}".encode())
    for path in sorted(path for folder in CODE for path in (REPO / folder).rglob("*.py")):
        found.update(str(path.relative_to(REPO)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


class Played:
    """The results of one state of the code and one wish, in memory and on disk."""

    def __init__(self, folder: Path, wish: Wish) -> None:
        """Read what was played before. A line that was cut short when the process died is played again."""
        self.path = folder / f"{state_of_the_code(wish)[:16]}.jsonl"
        self.results: dict[int, Result] = {}
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                if (result := _read(line)) is not None:
                    self.results[result.seed] = result

    def add(self, result: Result) -> None:
        """Keep one more result."""
        self.results[result.seed] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(file.seek(0, 2) - 1, 0))
            is_cut = file.read() not in (b"", b"\n")
            file.write(b"\n" * is_cut + json.dumps(_plain(result)).encode() + b"\n")

    def of(self, seeds: Sequence[int]) -> list[Result]:
        """What is known of these seeds, in their order."""
        return [self.results[seed] for seed in seeds if seed in self.results]


def _plain(result: Result) -> dict[str, Any]:
    """As JSON has it. `asdict` would make each Counter anew, from pairs, and count these."""
    counters = {"faults": dict(result.faults), "points": dict(result.points)}
    return asdict(replace(result, faults=Counter(), points=Counter())) | counters


def _read(line: bytes) -> Result | None:
    try:
        values = json.loads(line)
        broken = tuple(Broken(**each) for each in values.pop("broken"))
        faults, points = Counter(values.pop("faults")), Counter(values.pop("points"))
        return Result(**values, broken=broken, faults=faults, points=points)
    except (ValueError, TypeError, KeyError):
        return None


# -- mutants


def hunt(seeds: int, *, first: int, workers: int, names: Sequence[str] = ()) -> int:
    """Try every mutant, or those of these names, on up to so many seeds; prints a table, and gives the exit code."""
    survivors = 0
    for name, found in _catches(names or tuple(MUTANTS), range(first, first + seeds), workers):
        survivors += found is None
        where = f"seed {found.seed:4}  {found.broken[0]}" if found else f"SURVIVED {seeds} seeds"
        print(f"{name:48} {where}", flush=True)
    print(f"{len(names or MUTANTS)} mutants, " + (f"{survivors} survived" if survivors else "all caught"))
    return 1 if survivors else 0


def catch(name: str, seeds: Sequence[int]) -> Result | None:
    """The first run with the error that breaks something which the same run without it keeps."""
    mutant = MUTANTS[name]
    faults = mutant.faults or Wish().faults
    for seed in seeds:
        result = play_seed(seed, Wish(mutant=name, faults=faults))
        if result.broken and not play_seed(seed, Wish(faults=faults)).broken:
            return result
    return None


def _catches(names: Sequence[str], seeds: range, workers: int) -> Iterator[tuple[str, Result | None]]:
    if workers < 2:
        yield from ((name, catch(name, seeds)) for name in names)
        return
    with pool_of(workers) as pool:
        yield from zip(names, pool.map(partial(catch, seeds=seeds), names), strict=True)
