"""A small run to generate from: modules made by hand, a real tokenizer and real routers, in a coordinator's folder."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typer.testing import CliRunner
from virtual_time import VirtualClock

from bootstrap import cli
from bootstrap.folder import write_sharding, write_stage
from bootstrap.text.tokenizer import train_tokenizer
from bootstrap.use.generate import Request, write_on
from dipaco_p2p.canonical import digest
from dipaco_p2p.clock import Clock
from dipaco_p2p.config import (
    PROTOCOL_VERSION,
    LevelConfig,
    ModelConfig,
    RoundsConfig,
    RoutingConfig,
    RunConfig,
    WarmupConfig,
)
from dipaco_p2p.core.model.layout import encode_module, module_layout
from dipaco_p2p.core.model.shards import HeldOut, Shard, encode_held_out, encode_shard
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, path_model
from dipaco_p2p.core.routing.router import Router, encode_router
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.node import open_member
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.owner.mirror_calls import MirrorCalls
from dipaco_p2p.protocol.documents import (
    BlobRef,
    GenesisRef,
    Grant,
    Manifest,
    ModuleVersion,
    Sealed,
    Sharding,
    ShardRef,
    Share,
    cosign,
    seal,
)
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder
from dipaco_p2p.use.served import ServedRun, open_folder, read_swarm

COORDINATOR, LEADER = Signer(bytes([200]) * 32), Signer(bytes([1]) * 32)
VOCAB_SIZE = 260
CONTEXT = 72
ROUNDS = 3
TOKENIZER = train_tokenizer(["the path of the prompt, and the rest of the text; the end"] * 4, vocab_size=VOCAB_SIZE)
TIED = ModelConfig(
    vocab_size=VOCAB_SIZE,
    width=16,
    heads=2,
    ffn_width=24,
    context=CONTEXT,
    rope_theta=500.0,
    levels=(
        LevelConfig(blocks=1, embedding=True, head=True),
        LevelConfig(modules=2, blocks=1),
        LevelConfig(modules=2, blocks=1),
    ),
)
PRIVATE = ModelConfig(  # 2x2x4p: the last level, with the head, has a module for each path
    vocab_size=VOCAB_SIZE,
    width=16,
    heads=2,
    ffn_width=24,
    context=CONTEXT,
    tied=False,
    levels=(
        LevelConfig(modules=2, blocks=1, embedding=True),
        LevelConfig(modules=2, blocks=1),
        LevelConfig(blocks=1, head=True, private=True),
    ),
)
UNTIED = replace(
    PRIVATE,
    heads=4,
    levels=(LevelConfig(modules=2, blocks=1, embedding=True), LevelConfig(modules=2, blocks=2, head=True)),
)
FLAT = replace(  # four models that share nothing
    PRIVATE, tied=True, paths=4, levels=(LevelConfig(blocks=2, embedding=True, head=True, private=True),)
)
PROMPT = "the path of the prompt, and the rest of the text"  # 35 tokens or more


def random_router(width: int, *, seed: int, path_count: int = 4) -> Router:
    """A router that sends texts hither and thither."""
    generator = np.random.default_rng(seed)
    return Router(
        weights=generator.standard_normal((path_count, width)).astype(np.float32),
        bias=np.zeros(path_count, dtype=np.float32),
        mean=generator.normal(0, 0.1, width).astype(np.float32),
        scale=np.full(width, 0.5, dtype=np.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The run in a folder, and what its maker knows of it."""

    root: Path
    run: Run
    store: Store
    flats: dict[tuple[ModuleId, int], np.ndarray[Any, Any]]
    """By module and version."""
    router: Router
    token_router: Router

    def open(self) -> ServedRun:
        return open_folder(RunFolder(self.root))

    def write_evaluations(self, holdout: dict[str, Sequence[float | None]]) -> list[dict[str, Any]]:
        """What the evaluator would have written: per path the losses on the holdout by version, from version 0 on.

        On the validation part each is greater by a half.
        """
        rows = []
        for version in range(len(next(iter(holdout.values())))):
            losses = {path: found[version] for path, found in holdout.items()}
            paths = {
                path: {"loss": loss and loss + 0.5, "tokens": 40, "holdout_loss": loss} for path, loss in losses.items()
            }
            rows.append({"version": version, "sharding": 0, "loss": 3.25, "perplexity": 25.79, "paths": paths})
        (self.store.folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def model(self, path: PathId, version: int = ROUNDS) -> PathModel:
        """A path as the core puts it together, without anything that is tested here."""
        return path_model(self.run.config.model, [self.flats[module, version] for module in path.modules()])

    def frozen(self) -> PathModel:
        return self.model(self.run.topology.path(0), 0)


class Written(NamedTuple):
    """What a request came to."""

    text: str
    said: list[str]


async def written(run: ServedRun, request: Request) -> Written:
    pieces: list[str] = []
    said: list[str] = []
    await write_on(run, request, write=pieces.append, say=said.append)
    return Written("".join(pieces), said)


def write(served: Served, request: Request) -> Written:
    return asyncio.run(written(served.open(), request))


def run_cli(*arguments: str, text: str | None = None) -> tuple[int, str, str]:
    """The exit code of a command, and what it prints on either stream."""
    result = CliRunner().invoke(cli.app, arguments, input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class Reading:
    """A swarm in memory, for tests to put peers into, and a client that reads the run there."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.clock = VirtualClock()
        self.network = MemoryNetwork(0, self.clock)
        self.reader = self.network.join(Signer(bytes([9]) * 32))

    async def read(self, host: PeerId = COORDINATOR.peer, *, expected: str | None = None) -> ServedRun:
        return await read_swarm(self.reader, host, self.clock, folder=self.folder, expected=expected)


def make_served(
    root: Path,
    *,
    model: ModelConfig = TIED,
    has_token_router: bool = True,
    router: Router | None = None,
    stage: str = GRID,
    versions: int = ROUNDS,
) -> Served:
    """A grid of four paths and three rounds, complete unless it has fewer `versions`; with a token router from a
    sharding for serving.

    Or its warm-up of as many rounds, with the grid still to come.
    """
    folder = RunFolder(root)
    store = folder.store(stage)
    document_router = router or random_router(model.width, seed=1)
    token_router = random_router(2 * model.width, seed=15)
    start = initial_modules(model, seed=0)
    manifest = _manifest(store, model, document_router, start, stage)
    run = write_stage(store, seal(COORDINATOR, manifest))
    if has_token_router and stage == GRID:
        write_sharding(store, _sharding(store, run, document_router, token_router))
    flats = {(module, 0): start[module.level] for module in run.topology.modules()}
    served = Served(root=root, run=run, store=store, flats=flats, router=document_router, token_router=token_router)
    for module, number in itertools.product(run.topology.modules(), range(1, versions + 1)):
        publish(served, module, number)
    return served


def _manifest(store: Store, model: ModelConfig, router: Router, start: dict[int, Any], stage: str) -> Manifest:
    config = RunConfig(
        name="tiny-served",
        warmup=WarmupConfig(rounds=ROUNDS if stage == WARMUP else 0),
        model=model,
        rounds=RoundsConfig(rounds=ROUNDS, min_paths=1),
        routing=RoutingConfig(reshard_rounds=(ROUNDS,)),
    )
    generator = np.random.default_rng(3)
    shards = []
    topology = (config.for_warmup() if stage == WARMUP else config).topology
    for number, path in enumerate(topology.paths()):
        tokens = generator.integers(1, VOCAB_SIZE, (4 + number, CONTEXT)).astype(np.int32)
        shards.append(ShardRef(path=path, blob=store.put(encode_shard(Shard(tokens=tokens))), sequences=len(tokens)))
    unused = store.put(b"nobody who generates reads this")
    held_out = [generator.integers(1, VOCAB_SIZE, (12, CONTEXT)).astype(np.int32) for _ in range(2)]
    parts = [HeldOut(tokens=tokens, documents=np.arange(12, dtype=np.int32)) for tokens in held_out]
    validation, holdout = (store.put(encode_held_out(part)) for part in parts)
    blobs = [store.put(encode_module(start[level], module_layout(model, level))) for level in sorted(start)]
    return Manifest(
        protocol=PROTOCOL_VERSION,
        config=config,
        stage=stage,
        admission="open",
        tokenizer=store.put(TOKENIZER),
        router=None if stage == WARMUP else store.put(encode_router(router)),
        optimizer=unused,
        shards=tuple(shards),
        validation=validation,
        holdout=holdout,
        router_split=unused,
        genesis=tuple(GenesisRef(module=module, blob=blobs[module.level]) for module in topology.modules()),
        author=COORDINATOR.peer,
    )


def _sharding(store: Store, run: Run, router: Router, token_router: Router) -> Sealed[Sharding]:
    sharding = Sharding(
        run=run.id,
        number=1,
        from_round=ROUNDS,
        router=store.put(encode_router(router)),
        token_router=store.put(encode_router(token_router)),
        shards=run.manifest.shards,
        author=run.manifest.author,
    )
    return seal(COORDINATOR, sharding)


def grant_of(run: Run, module: ModuleId) -> Sealed[Grant]:
    """The coordinator's, of the first term to the leader of all modules."""
    grant = Grant(run=run.id, module=module, term=1, leader=LEADER.peer, author=COORDINATOR.peer)
    return seal(COORDINATOR, grant)


def serve_archive(served: Served, swarm: Swarm, clock: Clock) -> None:
    """Answer as the seed node does for what is in its archive."""
    node = open_member(served.run, swarm, clock, served.store)
    MirrorCalls(ArchiveChains(node, SeedArchive(served.run, served.store))).serve()


def final(sealed: Sealed[ModuleVersion]) -> Sealed[ModuleVersion]:
    """Signed by the coordinator as well."""
    return sealed.cosigned({COORDINATOR.peer: cosign(COORDINATOR, sealed)})


def publish(served: Served, module: ModuleId, number: int) -> None:
    """The next version of a module, as a leader would sign it; its update is not there, for nobody recomputes it."""
    run, store, ledger = served.run, served.store, Ledger(served.run, served.store, module)
    assert number == len(ledger.versions) + 1
    parent, before = ledger.head, served.flats[module, number - 1]
    noise = np.random.default_rng([4, module.level, module.index]).normal(0, 0.05, (number, len(before)))[-1]
    flat = before + noise.astype(np.float32)
    outer, paths = run.config.outer, run.topology.paths_through(module)
    shares = [
        Share(
            contribution=digest(f"{module} {number} {path}".encode()),
            path=path,
            peer=LEADER.peer,
            base_version=number - 1,
            weight=1.0 / len(paths),
            tokens=1,
            norm=1.0,
            loss=5.0 - number,
        )
        for path in paths
    ]
    version = ModuleVersion(
        run=run.id,
        module=module,
        version=number,
        parent=parent.digest,
        snapshot=store.put(encode_module(flat, run.layout(module))),
        update=BlobRef.of(b"no update"),
        state=BlobRef.of(b"no state"),
        shares=tuple(shares),
        clip_norm=None,
        lr=outer.lr,
        momentum=outer.momentum,
        norm_rule=outer.norm_rule,
        weight=parent.weight + len(shares),
        term=1,
        grant=grant_of(run, module).id,
        author=LEADER.peer,
    )
    ledger.append(final(seal(LEADER, version)))
    served.flats[module, number] = flat
