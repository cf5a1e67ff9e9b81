"""One run of three honest volunteers, alone or beside a stranger, and what it left on disk."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.swarm_faults.churn import write_run_file
from benchmarks.swarm_faults.evidence import read_events
from benchmarks.swarm_faults.schedule import SEED_NODE, Verb, volunteers
from benchmarks.swarm_faults.swarm import OPTIONS, POLL_S, LocalSwarm, copy_prepared
from bootstrap.archives.evaluator import Evaluator
from bootstrap.processes import Children
from bootstrap.progress import stage
from bootstrap.runfile import load_run_file
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder

from .stranger import HEARD, KEYS

TTL_S = 8.0
"""Life of a heartbeat: an expiry. With half of it six programs on two cores starve the seed node, and modules change
hands for that."""
STRANGER, BESIDE = "stranger", "stranger-beside"
HISTORIES = "runs/*/history.jsonl"
FAULTS_OF_WORK = (Reason.HARMFUL, Reason.LITTLE_GAIN, Reason.NOT_REPEATED, Reason.UNJUDGED)
KILL_ROUND, AWAY_S = 3, 8.0
"""With churn, the first volunteer, which leads, is killed when the archive has this version, and comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the flags say."""

    peers: int = 3
    rounds: int = 10
    steps: int = 20
    corpus: str = "found"
    judges: int = 2
    """Who measure each work; 0: nobody does."""
    warmup: int = 0
    """Rounds before the grid opens, by the volunteers alone: they are played once, since the texts of the paths follow
    from them, and each game goes on from a copy."""
    beside: str = ""
    """The attack of a second stranger, beside each."""
    limit_s: float = 240.0
    """A run that has not come to its end by then is stopped."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What else the run file says, by section and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One attack, "" for none, and the circumstances."""

    attack: str
    has_churn: bool = False
    """Whether the first volunteer is killed once, and comes back."""
    is_first: bool = False
    """Whether the stranger is there before the volunteers are."""
    last: tuple[str, ...] = ()
    """Options of the last volunteer's program, besides everybody's."""
    joins_at: int = 0
    """The version of all modules at which the last volunteer joins."""

    @property
    def name(self) -> str:
        return (self.attack or "twin") + " first" * self.is_first + " under churn" * self.has_churn


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What one run left: the folder of its archive, and figures."""

    folder: Path
    seconds: float
    """From the start of the volunteers to the last version of all modules, or until it was stopped."""
    versions: int
    """That every module has."""
    gap_s: float
    """The longest time in which some module had no new version, also before its first one and until it was stopped."""
    counted: dict[str, float]
    """Rounds of tokens that count, by author."""
    weight: float
    """Of all strangers in a version, on average."""
    signed: int
    """Final versions that a stranger made."""
    heard: dict[str, int]
    """What the stranger was told, by reason."""
    strangers: frozenset[str]
    taken: int
    """Contributions of honest volunteers that have a receipt."""
    refused: dict[str, int]
    """Those of them that do not count since judges or auditors found fault, by reason."""
    late: int
    """Contributions that count, and that began from a version before the round's."""

    @property
    def stolen(self) -> float:
        """Tokens of all strangers that count, for each one of the best honest volunteer."""
        theirs = sum(count for peer, count in self.counted.items() if peer in self.strangers)
        honest = [count for peer, count in self.counted.items() if peer not in self.strangers]
        return theirs / max(honest, default=1)

    def perplexity(self, version: int) -> float:
        """On the validation part, after so many rounds."""
        run, store = RunFolder(self.folder).require()
        return Evaluator(run, store, SeedArchive(run, store)).evaluate(version).routed.perplexity


async def prepare(work: Path, options: Options, *, seed: int) -> LocalSwarm:
    """A run whose grid has just opened. Raises DipacoError."""
    run_file = work / "run.toml"
    write_run_file(
        run_file,
        peers=options.peers,
        seed=seed,
        corpus=options.corpus,
        steps=options.steps,
        rounds=options.rounds,
        heartbeat_ttl_s=TTL_S,
        judges=options.judges,
        warmup=options.warmup,
        settings=options.settings,
    )
    prepared = LocalSwarm(work / "prepared", run_file)
    with stage(f"Preparing run {seed}"):
        try:
            await prepared.open()
            if options.warmup:
                await _until_open(prepared, options)
        finally:
            await prepared.end()
    return prepared


async def _until_open(swarm: LocalSwarm, options: Options) -> None:
    """Play the warm-up; its volunteers are gone when the grid opens, so that it is granted to nobody yet."""
    for name in volunteers(options.peers):
        await swarm.start(name)
    folder, levels = RunFolder(swarm.folder), load_run_file(swarm.run_file).run.model.levels
    until_s = time.monotonic() + options.limit_s
    while not folder.has(GRID):
        swarm.require_up()
        if time.monotonic() > until_s:
            raise DipacoError(f"the warm-up took longer than {options.limit_s:.0f} s", hint="raise --limit")
        archived = read_events([folder.stage(WARMUP) / "history.jsonl"])
        last = {event["module"] for event in archived if event.ev == "archived" and event["version"] == options.warmup}
        if len(last) == len(levels):
            await asyncio.gather(*(swarm.members[name].end() for name in swarm.volunteers))
        await asyncio.sleep(POLL_S)


async def play(prepared: LocalSwarm, work: Path, options: Options, game: Game) -> Left:
    """Train a copy of the prepared run to its end, or until its time is over. Raises DipacoError."""
    for name in (SEED_NODE, *prepared.volunteers):
        copy_prepared(prepared.home(name), work / name)
    run, _ = RunFolder(work / SEED_NODE).require()
    swarm, strangers = LocalSwarm(work, prepared.run_file), Children(threads=1)
    try:
        with stage(f"Training, {work.name}"):
            await swarm.open()
            if game.is_first:
                await _intrude(strangers, swarm, STRANGER, game.attack)
            began_s = time.time()
            *others, last = volunteers(options.peers)
            for name in others:
                await swarm.start(name)
            if not game.joins_at:
                await swarm.start(last, *OPTIONS, *game.last)
            if not game.is_first:
                await _intrude(strangers, swarm, STRANGER, game.attack)
            await _intrude(strangers, swarm, BESIDE, options.beside if game.attack else "")
            await _until_complete(swarm, run, game, last=last, until_s=began_s + options.limit_s)
            ended_s = time.time()
    finally:
        await strangers.end_all()
        await swarm.end()
    return await asyncio.to_thread(_left, swarm, began_s, ended_s)


async def _intrude(strangers: Children, swarm: LocalSwarm, name: str, attack: str) -> None:
    if attack:
        arguments = (attack, swarm.address, str(swarm.home(name)))
        await strangers.start(name, "benchmarks.attack.strangers", *arguments, log=swarm.work / f"{name}.log")


async def _until_complete(swarm: LocalSwarm, run: Run, game: Game, *, last: str, until_s: float) -> None:
    victim, back_s = swarm.volunteers[0], math.inf
    kill_round = KILL_ROUND if game.has_churn else math.inf
    while time.time() < until_s and any(swarm.members[name].is_alive for name in swarm.volunteers):
        if game.has_churn and _versions(swarm, run) >= kill_round:
            await swarm.act(Verb.KILL, victim)
            kill_round, back_s = math.inf, time.time() + AWAY_S
        if time.time() >= back_s:
            await swarm.act(Verb.START, victim)
            back_s = math.inf
        if last not in swarm.members and _versions(swarm, run) >= game.joins_at:
            await swarm.start(last, *OPTIONS, *game.last)
        swarm.require_up()
        await asyncio.sleep(5 * POLL_S)


def _versions(swarm: LocalSwarm, run: Run) -> int:
    """That the archive has of every module."""
    return min(map(len, _archived_s(swarm.folder, run).values()))


def _archived_s(folder: Path, run: Run) -> dict[str, list[float]]:
    """When the archive got each version of each module."""
    found: dict[str, list[float]] = {str(module): [] for module in run.topology.modules()}
    for event in read_events([folder / GRID / "history.jsonl"]):
        if event.ev == "archived":
            found[event["module"]].append(event.t_s)
    return found


def _left(swarm: LocalSwarm, began_s: float, ended_s: float) -> Left:
    run, store = RunFolder(swarm.folder).require()
    archive, archived_s = SeedArchive(run, store), _archived_s(swarm.folder, run)
    homes = swarm.home(STRANGER), swarm.home(BESIDE)
    keys = frozenset(key for home in homes if (home / KEYS).exists() for key in json.loads((home / KEYS).read_text()))
    heard = json.loads((homes[0] / HEARD).read_text()) if (homes[0] / HEARD).exists() else {}
    documents = [sealed.document for ledger in archive.ledgers.values() for sealed in ledger.versions]
    shares = [share for version in documents for share in version.shares]
    late = sum(share.base_version < version.version - 1 for version in documents for share in version.shares)
    counted = Counter[str]()
    for share in shares:
        counted[share.peer] += share.tokens
    versions = min(ledger.head.version for ledger in archive.ledgers.values())
    rounds = run.config.rounds.rounds
    if versions == rounds:  # whoever leaves afterwards takes its time
        ended_s = max(map(max, archived_s.values()))
    taken, refused = honest_refused(swarm)
    return Left(
        folder=swarm.folder,
        seconds=ended_s - began_s,
        versions=versions,
        gap_s=max(longest_gap_s(times, began_s, ended_s, rounds=rounds) for times in archived_s.values()),
        counted={peer: tokens / run.tokens_full for peer, tokens in counted.items()},
        weight=math.fsum(share.weight for share in shares if share.peer in keys) / max(len(documents), 1),
        signed=sum(version.author in keys for version in documents),
        heard=heard,
        strangers=keys,
        taken=taken,
        refused=refused,
        late=late,
    )


def honest_refused(swarm: LocalSwarm) -> tuple[int, dict[str, int]]:
    """How many contributions of the volunteers were taken, and which of them leaders refused later, by reason."""
    honest = [path for name in swarm.volunteers for path in swarm.home(name).glob(HISTORIES)]
    leaders = [*swarm.work.glob(f"{STRANGER}/{HISTORIES}"), *swarm.folder.glob("*/history.jsonl"), *honest]
    receipts = {event["id"] for event in read_events(honest) if event.ev == "receipt"}
    expired = {event["id"]: event["reason"] for event in read_events(leaders) if event.ev == "expired"}
    found = Counter(expired[id_] for id_ in receipts & expired.keys() if expired[id_] in FAULTS_OF_WORK)
    return len(receipts), dict(found)


def longest_gap_s(times: Sequence[float], began_s: float, ended_s: float, *, rounds: int) -> float:
    """Between two versions of a module that came at these times, before the first, and after the last one that came if
    the run has more."""
    marks = [began_s, *times, *([ended_s] if len(times) < rounds else [])]
    return max(later - earlier for earlier, later in itertools.pairwise(marks))
