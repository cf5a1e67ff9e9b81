"""`python -m benchmarks.averaging`: seconds and memory of an owner's average, what it costs a trainer beside it, and
the processor time that a busy leader needs for the work of a version.

Every case is measured in a process of its own. Memory is the most that it had at once (VmHWM) above what it had before,
so that neither what another measurement left behind counts, nor the outer state, which an owner holds all the time.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.processes import forget_peak, memory_bytes
from benchmarks.report import MB, JsonFile, median_ratio, run_benchmark, seconds_of, show, table, write_json
from benchmarks.trainer.loops import EXACT, loops
from dipaco_p2p.config import CompressionConfig, InnerConfig, LevelConfig, ModelConfig, RunConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.outer.compress import CODECS, INT4, compress, encode_compressed
from dipaco_p2p.core.outer.outer_step import OuterState
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.intake import Intake
from dipaco_p2p.owner.originals import Originals
from dipaco_p2p.owner.version import Admitted, Gradients, averaged, make_version, stored
from dipaco_p2p.program.console import run_command
from dipaco_p2p.protocol.documents import BlobRef, Contribution, seal
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId
from simulation.training import sealed_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags say."""

    runs: int
    round_s: float
    width: int = 512
    """Of the model: modules of 25 million values; of 2 million with 128."""
    counts: tuple[int, ...] = (2, 4, 8, 16)
    """Contributions to average."""
    steps: int = 40
    """Inner steps in each measurement of the trainer."""
    replicas: int = 4
    """Of each of the 16 paths, in a version of the busy leader."""


def main(
    runs: Annotated[int, typer.Option(min=1, help="Measurements of each figure; medians are shown.")] = 5,
    round_s: Annotated[float, typer.Option(min=0.1, help="Seconds of a round in which one version is made.")] = 30.0,
    replicas: Annotated[int, typer.Option(min=1, help="Of each of the 16 paths, for the busy leader.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="A small module, two runs: for trying.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Average 2, 4, 8 and 16 contributions of every codec, each in a fresh process; then train beside an owner, and
    take in and average the work of all replicas."""
    wish = Wish(runs=runs, round_s=round_s, replicas=replicas)
    if quick:
        wish = replace(wish, runs=2, width=128, steps=3, round_s=1.0, counts=(2, 16))
    raise typer.Exit(run_command(lambda: run(wish, json_file=json_file)))


MODULE = ModuleId(0, 0)
PATHS = 16
LEADER = Signer(b"\x01" * 32)
T = TypeVar("T")
Payload = tuple[BlobRef, float]
"""What the blob holds, and the norm of its outer gradient."""


def run_of(codec: str, *, width: int) -> Run:
    """A trunk that 16 paths share: of 25 million values with the width 512, of 2 million with 128."""
    model = ModelConfig(
        vocab_size=5000,
        width=width,
        heads=8,
        ffn_width=11 * width // 4,
        levels=(LevelConfig(blocks=7, embedding=True, head=True), LevelConfig(modules=PATHS, blocks=1)),
    )
    config = RunConfig(name="averaging", model=model, compression=CompressionConfig(uplink=codec))
    return Run(sealed_manifest(LEADER, config, sequences=1000))


def fill(folder: Path, run: Run, *, replicas: int = 1) -> list[Payload]:
    """Put payloads into the store in `folder`: one of each path, then the next replica of each."""
    store, size, found = Store(folder), run.layout(MODULE).size, list[Payload]()
    values = np.random.default_rng(0).standard_normal(size, dtype=np.float32) * np.float32(1e-3)
    for number in range(replicas * PATHS):
        compressed, _ = compress(np.roll(values, 1009 * number), codec=run.config.compression.uplink)
        found.append((store.put(encode_compressed(compressed)), compressed.norm()))
    return found


def admitted(folder: Path, run: Run, payloads: Sequence[Payload]) -> list[Admitted]:
    """Contributions of these payloads, which `fill` has put there, as the leader holds them."""
    store, paths, items = Store(folder), run.topology.paths_through(MODULE), []
    for number, (payload, norm) in enumerate(payloads):
        author = Signer((1 + number // PATHS).to_bytes(32, "big"))
        document = Contribution(
            run=run.id,
            module=MODULE,
            path=paths[number % PATHS],
            base_version=0,
            base_digest=genesis_version(run.manifest, MODULE).digest,
            payload=payload,
            steps=run.config.inner.steps,
            tokens=run.tokens_full,
            loss=5.0,
            author=author.peer,
        )
        items.append(stored(run, store, MODULE, seal(author, document), norm=norm))
    return items


def state_of(run: Run) -> OuterState:
    """What a leader holds of the module all the time; every page of it is in memory."""
    size = run.layout(MODULE).size
    return OuterState(params=_full(size, 0.5), momentum=_full(size, 1e-3), residual=_full(size, 1e-6))


def _full(size: int, value: float) -> Floats:
    return np.full(size, value, dtype=np.float32)


AVERAGE, VERSION = "average", "version"
"""The average by itself; the whole version, with its outer step and blobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one number of contributions."""

    seconds: list[float]
    """Of each run."""
    peak_bytes: int
    """The most memory at once, above what there was before."""
    values: int
    """Of the module."""


def measure(folder: Path, run: Run, payloads: Sequence[Payload], what: str, *, runs: int) -> Measured:
    """In this process, which should do nothing else."""
    work = _work(folder, run, payloads, what)
    us = os.getpid()
    before = memory_bytes(us, "VmRSS")
    forget_peak(us)
    seconds = [seconds_of(work) for _ in range(runs)]
    return Measured(seconds=seconds, peak_bytes=memory_bytes(us, "VmHWM") - before, values=run.layout(MODULE).size)


def _work(folder: Path, run: Run, payloads: Sequence[Payload], what: str) -> Callable[[], object]:
    items = admitted(folder, run, payloads)
    alphas = [1 / len(items)] * len(items)
    if what == AVERAGE:
        return lambda: averaged(run, Gradients(items), alphas, clip_norm=None)
    parent, state = genesis_version(run.manifest, MODULE), state_of(run)
    return lambda: make_version(run, parent, state, items, clip_norm=None, term=1, grant="0" * 64, author=LEADER.peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Processor seconds, of all threads, that the work of one version takes its leader."""

    contributions: int
    taken_in: float
    """To read and check each payload, measure it, and compare it with what came before."""
    version: float
    """To compare the replicas of each path, average, and make the version."""


def busy(folder: Path, run: Run, payloads: Sequence[Payload]) -> Busy:
    """In this process, which should do nothing else."""
    items, store, originals = admitted(folder, run, payloads), Store(folder), Originals(run, MODULE)
    intake = Intake(run, store, Ledger(run, store, MODULE), originals)

    def take_in() -> None:
        for item in items:
            intake.require_original(item.sealed, intake.measure(item.sealed), has_receipt=False)

    taken_in = _processor_s(take_in)
    return Busy(
        contributions=len(items),
        taken_in=taken_in,
        version=_processor_s(_work(folder, run, payloads, VERSION)),
    )


def _processor_s(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


COUNT = 4
ROUND_S = 600.0
"""Of the busy leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Tokens a second in every run, each with its twin before it."""

    alone: list[float]
    averaging: list[float]
    """While contributions are averaged without a pause."""
    averages: int
    """How many averages were made meanwhile, in all runs."""
    round_alone: list[float]
    round_once: list[float]
    """Over a round in which one whole version is made, as an owner does; the twin before it is of a round without."""


def beside(folder: Path, run: Run, payloads: Sequence[Payload], wish: Wish) -> Beside:
    """In turns, so that what disturbs one disturbs both."""
    torch.set_num_threads(1)
    model, inner = ModelConfig(), InnerConfig()
    loop, done = loops(model, inner, is_quick=True)[EXACT], 0
    average, version = (_work(folder, run, payloads[:COUNT], what) for what in (AVERAGE, VERSION))
    found: dict[str, list[float]] = {"alone": [], "averaging": [], "round_alone": [], "round_once": []}
    averages, tokens = 0, inner.batch * model.context

    def train(steps: int) -> float:
        nonlocal done
        took_s = seconds_of(lambda: loop(done, steps))
        done += steps
        return steps * tokens / took_s

    train(3)  # caches and the allocator

    for _ in range(wish.runs):
        found["alone"].append(train(wish.steps))
        with Repeated(average) as repeated:
            found["averaging"].append(train(wish.steps))
        averages += repeated.done
        round_steps = max(1, round(wish.round_s * found["alone"][-1] / tokens))
        found["round_alone"].append(train(round_steps))
        with Repeated(version, times=1):
            found["round_once"].append(train(round_steps))
    return Beside(averages=averages, **found)


class Repeated:
    """Does its work in a thread while the block runs: at least once, and then again and again, or so many `times`."""

    def __init__(self, work: Callable[[], object], *, times: int | None = None) -> None:
        self._work = work
        self._times = times
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done = 0

    def __enter__(self) -> Repeated:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.done or (self.done != self._times and not self._is_over.is_set()):
            self._work()
            self.done += 1


Found = Mapping[str, Mapping[int, Mapping[str, Measured]]]
"""By codec, number of contributions, and what was measured."""


def run(wish: Wish, *, json_file: Path | None) -> None:
    """Measure, print, and write."""
    found: dict[str, dict[int, dict[str, Measured]]] = {}
    leaders: dict[str, Busy] = {}
    with tempfile.TemporaryDirectory(prefix="averaging-") as name:
        folder, payloads = Path(name), dict[str, list[Payload]]()
        for codec in CODECS:
            run = run_of(codec, width=wish.width)
            own = payloads[codec] = fill(folder / codec, run, replicas=wish.replicas)
            found[codec] = {count: _measured(folder / codec, run, own[:count], wish) for count in wish.counts}
            leaders[codec] = _in_fresh_process(busy, folder / codec, run, own)
        trained = beside(folder / INT4, run_of(INT4, width=wish.width), payloads[INT4], wish)
    show(averages_table(found, runs=wish.runs), beside_table(trained, wish), busy_table(leaders))
    cases = [
        {"codec": codec, "contributions": count, "what": what} | asdict(measured)
        for codec, counts in found.items()
        for count, kinds in counts.items()
        for what, measured in kinds.items()
    ]
    ratios = {
        "averaging over alone": median_ratio(trained.averaging, trained.alone),
        "round with a version over one without": median_ratio(trained.round_once, trained.round_alone),
    }
    trainer = asdict(trained) | {"round_s": wish.round_s} | ratios
    figures = {"module": str(MODULE), "cases": cases, "memory of 16 over 2": memory_ratios(found), "trainer": trainer}
    figures["busy leader"] = {codec: asdict(leader) for codec, leader in leaders.items()}
    write_json(json_file, figures)


def _measured(folder: Path, run: Run, payloads: Sequence[Payload], wish: Wish) -> dict[str, Measured]:
    """Each kind of work in a process of its own."""
    kinds = (AVERAGE, VERSION)
    return {what: _in_fresh_process(partial(measure, runs=wish.runs), folder, run, payloads, what) for what in kinds}


def _in_fresh_process(work: Callable[..., T], *parts: object) -> T:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(work, *parts).result()


def memory_ratios(found: Found) -> dict[str, dict[str, float]]:
    """Of each codec and thing measured: memory with the most contributions over that with the fewest."""
    return {
        codec: {
            what: counts[max(counts)][what].peak_bytes / counts[min(counts)][what].peak_bytes
            for what in (AVERAGE, VERSION)
        }
        for codec, counts in found.items()
    }


def averages_table(found: Found, *, runs: int) -> Table:
    """A row for each codec and number of contributions; memory in sizes of the module as float32."""
    fewest, most = min(counts := next(iter(found.values()))), max(counts)
    values, rows = counts[fewest][AVERAGE].values, []
    for codec, counts in found.items():
        for count, kinds in counts.items():
            seconds = {what: statistics.median(kinds[what].seconds) for what in kinds}
            modules = {what: f"{kinds[what].peak_bytes / (4 * values):.2f}" for what in kinds}
            speed = f"{count * 4 * values / MB / seconds[AVERAGE]:,.0f}"
            average = (f"{seconds[AVERAGE]:.3f}", speed, modules[AVERAGE])
            rows.append((codec, str(count), *average, f"{seconds[VERSION]:.3f}", modules[VERSION]))
        ratios = {what: f"x{ratio:.2f}" for what, ratio in memory_ratios(found)[codec].items()}
        rows.append(("", f"{most} over {fewest}", "", "", ratios[AVERAGE], "", ratios[VERSION]))
    columns = ("contributions", "average s", "MB/s", "memory, modules", "version s", "its memory")
    title = f"Closing a round of a module of {values:,} values, one thread, medians of {runs}"
    return table(title, ("codec", *columns), rows)


def beside_table(trained: Beside, wish: Wish) -> Table:
    """The default path of `benchmarks.trainer`: alone, beside averages without a pause, beside a version a round."""
    slowed = f"{median_ratio(trained.averaging, trained.alone):.3f}"
    rounds = f"{median_ratio(trained.round_once, trained.round_alone):.3f}"
    rows = [
        ("alone", trained.alone, ""),
        (f"beside {trained.averages} averages of {COUNT} in {INT4}", trained.averaging, slowed),
        (f"a round of {wish.round_s:g} s", trained.round_alone, ""),
        ("the same, with one whole version", trained.round_once, rounds),
    ]
    cells = [(what, f"{statistics.median(speeds):,.0f}", ratio) for what, speeds, ratio in rows]
    return table("Training beside an owner, one thread of torch", ("inner loop", "tokens/s", "of alone"), cells)


def busy_table(leaders: Mapping[str, Busy]) -> Table:
    """A row for each codec."""
    rows = []
    for codec, leader in leaders.items():
        each = [1000 * seconds / leader.contributions for seconds in (leader.taken_in, leader.version)]
        share = (leader.taken_in + leader.version) / ROUND_S
        rows.append((codec, str(leader.contributions), *(f"{ms:.0f}" for ms in each), f"{share:.2%}"))
    columns = ("codec", "contributions", "taking one in, ms", "its part of the version, ms", "of a core")
    return table(f"A busy leader's processor time, rounds of {ROUND_S / 60:g} minutes", columns, rows)


if __name__ == "__main__":
    run_benchmark(main)
