"""What a demo showed: gathered from the files of its programs, checked, printed, and written as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.model.shards import Shard, Tokens, decode_held_out
from dipaco_p2p.core.model.transformer import path_model
from dipaco_p2p.core.outer.compress import compress
from dipaco_p2p.core.outer.outer_step import OuterState, average, outer_gradient, outer_step
from dipaco_p2p.core.routing.evaluate import Evaluation, counted_tokens, losses
from dipaco_p2p.errors import Interrupted
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.use.best_rounds import read_evaluations
from dipaco_p2p.use.folder import GRID, RunFolder

from .archives.verify import ChainReport, verify_stages
from .folder import read_stage
from .text.sequences import FILE as SEQUENCES_FILE
from .text.sequences import read_sequences

COLUMNS = 100
NICE = 10
"""Of the dense baseline: it takes what the swarm leaves of the processors."""
VOLUNTEERS_A_TABLE = 5
EXPIRIES_MAX = 3
"""A killed volunteer's path must have a new claimant within this many heartbeat lives."""


@dataclass(slots=True, kw_only=True)
class Kill:
    """One volunteer that was killed, and who took its path."""

    victim: str
    path: str
    killed_s: float
    claimant: str = ""
    claimed_s: float | None = None

    @property
    def reassigned_after_s(self) -> float | None:
        return None if self.claimed_s is None else self.claimed_s - self.killed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All figures of a demo."""

    run: Run
    modules: dict[str, list[dict[str, Any]]]
    """Per module its versions: digest, contributions, validation loss, leader."""
    peers: list[dict[str, Any]]
    """Per volunteer and round: bytes pushed and pulled, tokens, seconds."""
    kills: list[Kill]
    kills_asked: int
    chains: list[ChainReport]
    receipts: int
    receipts_lost: int
    pretrained_perplexity: float
    routed_perplexity: float
    dense_perplexity: float
    routing: dict[str, dict[str, Any]]
    """The finished model by every way to route it: perplexity, interval, bits per byte."""

    @property
    def chains_verified(self) -> bool:
        return all(not chain.problem for chain in self.chains)

    @property
    def reassigned_after_s(self) -> float | None:
        """The slowest reassignment; None when nobody was killed or a path was not taken."""
        times = [kill.reassigned_after_s for kill in self.kills]
        return max((t for t in times if t is not None), default=None) if None not in times else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run.id,
            "grid": str(self.run.topology),
            "rounds": self.run.config.rounds.rounds,
            "steps_per_path": self.run.config.rounds.rounds * self.run.config.inner.steps,
            "pretrained_perplexity": self.pretrained_perplexity,
            "routed_perplexity": self.routed_perplexity,
            "dense_perplexity": self.dense_perplexity,
            "routing": self.routing,
            "below_dense": 1 - self.routed_perplexity / self.dense_perplexity,
            "reassigned_after_s": self.reassigned_after_s,
            "heartbeat_ttl_s": self.run.config.liveness.heartbeat_ttl_s,
            "kills": [asdict(kill) for kill in self.kills],
            "chains_verified": self.chains_verified,
            "receipts": self.receipts,
            "receipts_lost": self.receipts_lost,
            "modules": self.modules,
            "peers": self.peers,
        }


def measure(
    folder: Path, homes: dict[str, Path], kills: list[Kill], *, kills_asked: int, dense: Baseline
) -> DemoResult:
    """Read what the programs left, and verify every chain."""
    files = RunFolder(folder)
    run, store = files.require()
    archive = SeedArchive(run, store)
    chains = verify_stages(files)
    judged = {row["version"]: row for row in read_evaluations(files.stage(GRID) / "evaluations.jsonl")}
    finished = json.loads((files.stage(GRID) / "finished.json").read_text())
    events = {name: _history(home, run.id) for name, home in homes.items()}
    receipts = {event["id"] for rows in events.values() for event in rows if event["ev"] == "receipt"}
    counted = {name for ledger in archive.ledgers.values() for name in ledger.counted}
    return DemoResult(
        run=run,
        modules={str(module): _versions(ledger, judged, events) for module, ledger in archive.ledgers.items()},
        peers=[_peer_round(name, event) for name, rows in events.items() for event in rows if event["ev"] == "round"],
        kills=kills,
        kills_asked=kills_asked,
        chains=chains,
        receipts=len(receipts),
        receipts_lost=len(receipts - counted),
        pretrained_perplexity=judged[0]["perplexity"],
        routed_perplexity=finished["routing"]["routed once"]["perplexity"],
        routing=finished["routing"],
        dense_perplexity=dense.evaluation.perplexity,
    )


def problems(result: DemoResult) -> list[str]:
    """The promises that did not hold, one line each; the demo's exit code depends on them."""
    limit_s = EXPIRIES_MAX * result.run.config.liveness.heartbeat_ttl_s
    bad = [chain for chain in result.chains if chain.problem]
    found = [f"the chain of {chain.module} does not verify: {chain.problem}" for chain in bad]
    if result.receipts_lost:
        found.append(f"{result.receipts_lost} contributions with a receipt are in no version")
    if len(result.kills) < result.kills_asked:
        found.append(f"only {len(result.kills)} of {result.kills_asked} kills met a volunteer in training")
    for kill in result.kills:
        if kill.reassigned_after_s is None:
            found.append(f"{kill.path} of {kill.victim} was taken by nobody")
        elif kill.reassigned_after_s > limit_s:
            found.append(f"{kill.path} was taken after {kill.reassigned_after_s:.1f} s, more than {limit_s:.0f} s")
    return found


def print_result(result: DemoResult, *, parts: Mapping[str, float], dense_s: float) -> None:
    """The tables of the demo; `parts` are what it spent its time on, in seconds."""
    console = Console(width=None if Console().is_terminal else COLUMNS)
    console.print(_module_table(result))
    names = list(dict.fromkeys(row["volunteer"] for row in result.peers))
    for first in range(0, len(names), VOLUNTEERS_A_TABLE):
        console.print(_peer_table(result, names[first : first + VOLUNTEERS_A_TABLE]))
    paths, rounds = result.run.topology.path_count, result.run.config.rounds.rounds
    lines = [
        f"routed validation perplexity    {result.routed_perplexity:8.2f}   {_compared(result)}",
        f"dense baseline, same outer step {result.dense_perplexity:8.2f}",
        f"after the warm-up, for both     {result.pretrained_perplexity:8.2f}",
        *_routing_lines(result),
        f"held equal: {rounds * result.run.config.inner.steps} steps per path, batch, text, warm-up, outer step, codec",
        f"not equal: compute ({paths} paths train, against 1) and parameters; the fairer controls (DiLoCo, random",
        "  routing) belong to the experiment: see `What the demo shows` in docs/design.md",
        *(_kill_line(result, kill) for kill in result.kills),
        f"chains: {_chains_line(result)}; receipts: {result.receipts}, lost {result.receipts_lost}",
        f"the whole demo took {sum(parts.values()):.0f} s:",
        *(f"  {name:<32}{took:6.1f} s" for name, took in parts.items()),
        f"the dense baseline trained beside the swarm, at low priority, for {dense_s:.0f} s",
        *(f"BROKEN: {problem}" for problem in problems(result)),
    ]
    console.print("\n".join(lines), highlight=False)


def _routing_lines(result: DemoResult) -> list[str]:
    return [f"  {name:<42}{found['perplexity']:8.2f}{_interval(found)}" for name, found in result.routing.items()]


def _interval(found: dict[str, Any]) -> str:
    if not found["interval"]:
        return ""
    low, high = found["interval"]
    return f"   95 %: {low:.1f} to {high:.1f}, {found['bits_per_byte']:.3f} bits per byte"


def _compared(result: DemoResult) -> str:
    below = 1 - result.routed_perplexity / result.dense_perplexity
    return f"{abs(below):.1%} {'below' if below > 0 else 'ABOVE'} the dense baseline"


def _kill_line(result: DemoResult, kill: Kill) -> str:
    if kill.reassigned_after_s is None:
        return f"{kill.victim} was killed; nobody took {kill.path}"
    lives = kill.reassigned_after_s / result.run.config.liveness.heartbeat_ttl_s
    return (
        f"{kill.victim} was killed; {kill.claimant} took {kill.path} after {kill.reassigned_after_s:.1f} s "
        f"({lives:.1f} heartbeat lives)"
    )


def _chains_line(result: DemoResult) -> str:
    good = sum(not chain.problem for chain in result.chains)
    return f"{good} of {len(result.chains)} recomputed from genesis to head, to the bit"


def _module_table(result: DemoResult) -> Table:
    title = "Module versions, with the validation loss (nats per token) of the paths through the module"
    table = _table(title)
    for name in ("module", "version", "digest", "contributions", "loss", "leader", "term"):
        table.add_column(name, justify="left" if name in ("module", "digest", "leader") else "right")
    for module, versions in result.modules.items():
        for row in versions:
            table.add_row(module if row is versions[0] else "", *_version_cells(row), end_section=row is versions[-1])
    return table


def _version_cells(row: dict[str, Any]) -> tuple[str, ...]:
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    return str(row["version"]), row["digest"][:8], str(row["contributions"]), loss, row["leader"], str(row["term"])


def _peer_table(result: DemoResult, names: list[str]) -> Table:
    table = _table("kB pushed / pulled per round, what leading modules for others takes included")
    table.add_column("round", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for number in range(result.run.config.rounds.rounds):
        rows = {row["volunteer"]: row for row in result.peers if row["round"] == number}
        table.add_row(str(number), *(_traffic(rows[name]) if name in rows else "" for name in names))
    return table


def _table(title: str) -> Table:
    """Lines only where they help; as wide as its columns, but never narrower than its title."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))


def _traffic(row: dict[str, Any]) -> str:
    return f"{row['bytes_pushed'] / 1000:,.0f} / {row['bytes_pulled'] / 1000:,.0f}"


def _versions(ledger: Any, losses: dict[int, Any], events: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    names = {event["peer"]: name for name, rows in events.items() for event in rows if event["ev"] == "joined"}
    rows = []
    for sealed in ledger.versions:
        version = sealed.document
        judged = losses.get(version.version, {}).get("modules", {})
        rows.append(
            {
                "version": version.version,
                "digest": version.digest,
                "contributions": len(version.shares),
                "loss": judged.get(str(version.module)),
                "leader": names.get(version.author, "coordinator"),
                "term": version.term,
            }
        )
    return rows


def _peer_round(name: str, event: dict[str, Any]) -> dict[str, Any]:
    kept = ("path", "round", "steps", "tokens", "loss", "seconds", "bytes_pushed", "bytes_pulled")
    return {"volunteer": name} | {key: event[key] for key in kept}


def _history(home: Path, stage_id: str) -> list[dict[str, Any]]:
    """What a volunteer did in one stage."""
    return [event for path in home.glob(f"runs/{stage_id[:16]}*/history.jsonl") for event in read_history(path)]


# -- the dense control


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the dense model reached."""

    evaluation: Evaluation
    steps: int
    seconds: float = field(compare=False)


Blob = Callable[[str], bytes]
"""A blob of the run, by its digest."""


def train_beside(folder: Path, *, device: str, is_stopped: Callable[[], bool]) -> Baseline:
    """Train the dense baseline of the grid that was just opened in the coordinator's `folder`, at low priority.

    The coordinator is at work there, so its store is only read from. Raises Interrupted soon after `is_stopped`.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    torch.set_num_threads(1)
    run = read_stage(folder, GRID)
    sequences = read_sequences(folder / SEQUENCES_FILE, run.config.model) if run is not None else None
    assert run is not None and sequences is not None

    def blob(digest: str) -> bytes:
        return (folder / GRID / "blobs" / digest[:2] / digest).read_bytes()

    return train_dense(run, blob, sequences.train.tokens, device=device, is_stopped=is_stopped)


def train_dense(
    run: Run,
    blob: Blob,
    tokens: Tokens,
    *,
    device: str = "cpu",
    is_stopped: Callable[[], bool] = lambda: False,
) -> Baseline:
    """One worker, one model of a path's size: the same steps on `tokens` (n, T), the text of all shards.

    It starts from the same warm-up with the same optimizer state, and goes through the same compression and outer step
    as a module with one contributor. Steps are equal; compute is not: the grid has as many workers as paths.
    Raises Interrupted soon after `is_stopped`.
    """
    began_s = time.monotonic()
    config, outer, codecs = run.config, run.config.outer, run.config.compression
    shard = Shard(tokens=tokens)
    loop = InnerLoop(config.inner, run.total_steps, config.model, device=device, seed=config.seed)
    loop.load_state(blob(run.manifest.optimizer.digest))
    states = _genesis(run, blob)
    residuals = [np.zeros_like(state.params) for state in states]
    for number in range(config.rounds.rounds):
        before = [state.params for state in states]
        after = loop.run(
            before,
            shard,
            first_step=run.first_step(number),
            steps=config.inner.steps,
            on_step=lambda report: not is_stopped(),
        ).flats
        if is_stopped():
            raise Interrupted("the demo was stopped")
        for level, (old, new) in enumerate(zip(before, after, strict=True)):
            sent, residuals[level] = compress(outer_gradient(old, new), residuals[level], codec=codecs.uplink)
            gradient = average([sent], [1.0], rule=outer.norm_rule)
            states[level], _ = outer_step(
                states[level], gradient, lr=outer.lr, momentum=outer.momentum, codec=codecs.downlink
            )
    return Baseline(
        evaluation=_evaluate(run, states, blob),
        steps=config.rounds.rounds * config.inner.steps,
        seconds=time.monotonic() - began_s,
    )


def _genesis(run: Run, blob: Blob) -> list[OuterState]:
    """Version 0, one module per level: after the warm-up all modules of a level are the same."""
    modules = run.topology.path(0).modules()
    blobs = [blob(genesis_version(run.manifest, module).digest) for module in modules]
    flats = [decode_module(data, run.layout(module)) for data, module in zip(blobs, modules, strict=True)]
    return [OuterState.fresh(flat) for flat in flats]


def _evaluate(run: Run, states: list[OuterState], blob: Blob) -> Evaluation:
    shape = run.config.model
    model = path_model(shape, [state.params for state in states])
    data = blob(run.manifest.validation.digest)
    sequences = decode_held_out(data, vocab_size=shape.vocab_size, context=shape.context).tokens
    nats = losses(model, sequences)
    return Evaluation(nats_total=float(nats.sum()), tokens=len(sequences) * counted_tokens(shape.context))
