"""From a run file to signed stages: first the warm-up of one path, then, forked from it, the grid, then larger ones.

Read `prepare` and `fork`, then growth.py, from top to bottom: they are the whole story in its order. A stage's manifest
is written last: whatever was interrupted before is done again, and a prepared stage is opened, never redone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.config import PROTOCOL_VERSION, RunConfig
from dipaco_p2p.core.model.engine import on_device, spare_device
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.layout import decode_module, encode_module, module_layout
from dipaco_p2p.core.model.optimizer import check_optimizer
from dipaco_p2p.core.model.shards import Shard, encode_held_out, encode_shard
from dipaco_p2p.core.model.transformer import initial_modules, path_model
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import BlobRef, GenesisRef, Manifest, ShardRef, seal
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.topology import Topology
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder

from ..checkpoint import Checkpoint
from ..folder import write_stage
from ..progress import stage
from ..runfile import RunFile
from ..text.sequences import Sequences, prepare_sequences
from .routing import cut_shards, first_router, router_blob, routing_features

Flat = NDArray[np.float32]

MOMENT_STEPS = 40
"""Gradients from which AdamW's moments are taken at the fork: with the usual betas, all but a few per cent of them."""
WARMUP_REPLICAS = 8
"""The text of the warm-up is enough for this many replicas to see no sequence twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a stage is made from."""

    config: RunConfig
    signer: Signer
    tokenizer: bytes
    sequences: Sequences
    flats: Sequence[Flat]
    """Version 0 of each level."""
    is_trained: bool = False
    """Whether these are more than random weights, though there was no warm-up."""
    workers: tuple[PeerId, ...] = ()
    """Who trained them, as the manifest names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a stage's manifest says besides."""

    stage: str
    origin: str = ""
    follows: str = ""
    spent: int = 0
    router: BlobRef | None
    optimizer: bytes
    shards: tuple[ShardRef, ...]


def prepare(file: RunFile, folder: RunFolder, signer: Signer) -> Run:
    """Make the first stage of the run that `file` describes, or open the newest there is.

    It begins from random weights, or from the checkpoint that the file names. Raises DipacoError.
    """
    found = folder.newest()
    if found is not None:
        _require_same(file.run, folder)
        return found[0]
    check_optimizer(file.run.inner)
    tokenizer, sequences = prepare_sequences(file, folder.root)
    start = Start(
        config=file.run,
        signer=signer,
        tokenizer=tokenizer,
        sequences=sequences,
        flats=first_flats(file),
        is_trained=bool(file.checkpoint),
    )
    if file.run.warmup.rounds:
        return _open_warmup(start, folder.store(WARMUP))
    return _open_grid(start, folder.store(GRID), origin="")


def fork(file: RunFile, folder: RunFolder, signer: Signer) -> Run:
    """Make the grid from the finished warm-up: its head becomes version 0 of every module. Raises DipacoError."""
    warmup, store = folder.open(WARMUP), folder.store(WARMUP)
    assert warmup is not None, "nothing to fork from"
    tokenizer, sequences = prepare_sequences(file, folder.root, is_begun=True)
    archive = SeedArchive(warmup, store)
    flats = [_head(warmup, store, archive, level) for level in range(len(file.run.model.levels))]
    start = Start(
        config=file.run,
        signer=signer,
        tokenizer=tokenizer,
        sequences=sequences,
        flats=flats,
        workers=archive.workers_named(),
    )
    return _open_grid(start, folder.store(GRID), origin=warmup.id)


def first_flats(file: RunFile) -> list[Flat]:
    """What a path begins with, one per level: random weights, or those of the checkpoint. Raises DipacoError."""
    if file.checkpoint:
        return Checkpoint(Path(file.checkpoint), file.run.model).flats()
    return list(initial_modules(file.run.model, seed=file.run.seed).values())


def _require_same(config: RunConfig, folder: RunFolder) -> None:
    """As the first stage has it: what a later one has more was decreed."""
    run = folder.stages()[0]
    if run.manifest.config != config:
        raise ConfigError(
            f"{folder.root} holds {run.name}, which was made from another run file",
            hint="choose another --dir, or take the run file back to what it was",
        )


def _head(warmup: Run, store: Store, archive: SeedArchive, level: int) -> Flat:
    module = warmup.topology.path(0).modules()[level]
    head = archive.ledgers[module].head
    data = store.get(head.digest)
    if data is None or head.version < warmup.rounds:
        raise IntegrityError(f"{module} is not through the warm-up: version {head.version} is the newest here")
    return decode_module(data, warmup.layout(module))


def _open_warmup(start: Start, store: Store) -> Run:
    """The one-path stage: fresh weights, no optimizer state, and as much text as it can use."""
    config, rows = start.config, start.sequences.train.tokens
    chosen = np.random.default_rng(config.seed).permutation(len(rows))
    chosen = np.sort(chosen[: WARMUP_REPLICAS * config.warmup_steps * config.inner.batch])
    blob = store.put(encode_shard(Shard(tokens=rows[chosen])))
    [path] = config.for_warmup().topology.paths()
    shards = (ShardRef(path=path, blob=blob, sequences=len(chosen)),)
    opening = Opening(stage=WARMUP, router=None, optimizer=_loop(config).state_bytes(), shards=shards)
    return open_stage(start, store, opening, genesis=_genesis(start, store, config.for_warmup().topology))


def _open_grid(start: Start, store: Store, *, origin: str) -> Run:
    """The stage of all paths: optimizer state, router, shards."""
    config, sequences = start.config, start.sequences
    optimizer = _moments(start)
    vectors = routing_features(config, path_model(config.model, start.flats), sequences)
    with stage("Routing the sequences"):
        router = first_router(config, vectors["train"], sequences.train.tokens)
        shards = cut_shards(config, store, router, sequences.train.tokens, vectors["train"])
    ref = router_blob(store, router)
    opening = Opening(stage=GRID, origin=origin, router=ref, optimizer=optimizer, shards=shards)
    return open_stage(start, store, opening, genesis=_genesis(start, store, config.topology))


def _genesis(start: Start, store: Store, topology: Topology) -> tuple[GenesisRef, ...]:
    """All modules of a level begin alike."""
    layouts = (module_layout(start.config.model, level) for level in range(len(start.flats)))
    blobs = [store.put(encode_module(flat, layout)) for flat, layout in zip(start.flats, layouts, strict=True)]
    return tuple(GenesisRef(module=module, blob=blobs[module.level]) for module in topology.modules())


def open_stage(start: Start, store: Store, opening: Opening, *, genesis: tuple[GenesisRef, ...]) -> Run:
    """Sign the manifest, and write it down: from here on the stage is there."""
    config, sequences = start.config, start.sequences
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        config=config,
        stage=opening.stage,
        origin=opening.origin,
        follows=opening.follows,
        spent=opening.spent,
        admission=config.admission.policy,
        tokenizer=store.put(start.tokenizer),
        router=opening.router,
        optimizer=store.put(opening.optimizer),
        shards=opening.shards,
        validation=store.put(encode_held_out(sequences.validation)),
        holdout=store.put(encode_held_out(sequences.holdout)),
        router_split=store.put(encode_held_out(sequences.router)),
        genesis=genesis,
        workers=start.workers,
        author=start.signer.peer,
    )
    return write_stage(store, seal(start.signer, manifest))


def _moments(start: Start) -> bytes:
    """AdamW's state as if it had come here: moments of the gradients at the fork, taken without moving.

    Each volunteer of the warm-up has a state of its own, and none need be believed: this one anyone can recompute.
    Without moments every path would begin with steps that are far too long for its gradients.
    """
    config = start.config
    if not config.warmup.rounds and not start.is_trained:
        return _loop(config).state_bytes()
    return moments(config, lambda step: (start.flats, Shard(tokens=start.sequences.train.tokens)))


def moments(config: RunConfig, at: Callable[[int], tuple[Sequence[Flat], Shard]]) -> bytes:
    """AdamW's state after `MOMENT_STEPS` gradients, each of the weights and text that `at` gives for its number."""
    still = replace(config, inner=replace(config.inner, lr=0.0))

    def taken(device: str) -> bytes:
        with stage("Taking the optimizer's moments", total=MOMENT_STEPS) as advance:
            loop = _loop(still, device)
            for step in range(MOMENT_STEPS):
                flats, shard = at(step)
                loop.run(list(flats), shard, first_step=step, steps=1)
                advance(step + 1)
        return loop.state_bytes()

    return on_device(
        spare_device(), taken
    )  # 20 million parameters: 97 s on four cores beside an idle H200, 2.4 s on it


def _loop(config: RunConfig, device: str = "cpu") -> InnerLoop:
    return InnerLoop(config.inner, config.total_steps, config.model, device=device, seed=config.seed)
