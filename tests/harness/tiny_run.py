"""A tiny run: a model of a few thousand parameters, its manifest, and documents that are made by hand."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dipaco_p2p.config import (
    PREFIX_TOKENS,
    PROTOCOL_VERSION,
    InnerConfig,
    LevelConfig,
    LivenessConfig,
    ModelConfig,
    RoundsConfig,
    RunConfig,
    WarmupConfig,
)
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.layout import encode_module, module_layout
from dipaco_p2p.core.model.shards import HeldOut, Shard, encode_held_out, encode_shard
from dipaco_p2p.core.model.transformer import initial_modules, path_model
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.core.outer.outer_step import OuterState
from dipaco_p2p.core.routing.features import features
from dipaco_p2p.core.routing.kmeans import fit_kmeans
from dipaco_p2p.core.routing.router import encode_router
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.version import Admitted, Made, make_version
from dipaco_p2p.protocol.documents import (
    BlobRef,
    Contribution,
    GenesisRef,
    Grant,
    Manifest,
    ModuleVersion,
    Sealed,
    ShardRef,
    seal,
)
from dipaco_p2p.protocol.gate import DRAW, Appraisal
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId

SEED_NUMBER = 200

MODEL = ModelConfig(
    vocab_size=258,
    width=16,
    heads=2,
    ffn_width=24,
    context=72,
    levels=(
        LevelConfig(modules=1, blocks=1, embedding=True, head=True),
        LevelConfig(modules=2, blocks=1),
        LevelConfig(modules=2, blocks=1),
    ),
)


# -- a run


def signer(number: int) -> Signer:
    return Signer(bytes([number]) * 32)


def tiny_config(*, rounds: int = 2, steps: int = 2, min_paths: int = 4, **changes: Any) -> RunConfig:
    """Four paths, a few thousand parameters per module."""
    return RunConfig(
        name="tiny",
        warmup=WarmupConfig(rounds=0),
        model=MODEL,
        inner=InnerConfig(steps=steps, batch=2, warmup_steps=1),
        rounds=RoundsConfig(rounds=rounds, min_paths=min_paths, deadline_s=20.0, grace_s=1.0, **changes),
        liveness=LivenessConfig(heartbeat_ttl_s=6.0, settle_s=0.5),
    )


@functools.cache
def initial() -> tuple[list[np.ndarray[Any, Any]], bytes]:
    start = initial_modules(MODEL, seed=0)
    loop = InnerLoop(InnerConfig(), 1, MODEL, device="cpu", seed=0)
    return [start[level] for level in range(len(MODEL.levels))], loop.state_bytes()


@dataclass(frozen=True)
class Text:
    """What the paths of a run train and are measured on, and the router of it, as blobs."""

    shards: list[tuple[bytes, int]]
    """And the sequences in each."""
    router: bytes
    validation: bytes
    holdout: bytes
    router_split: bytes


@functools.cache
def text_of(path_count: int) -> Text:
    """Noise with a pattern per path; most of what making a run takes."""
    generator = np.random.default_rng(1)

    def text(number: int, count: int) -> np.ndarray[Any, Any]:
        return (generator.integers(0, 8, (count, MODEL.context)) + 32 * number).astype(np.int32)

    def held_out(count: int) -> bytes:
        tokens = np.concatenate([text(number, count) for number in range(path_count)])
        return encode_held_out(HeldOut(tokens=tokens, documents=np.arange(len(tokens), dtype=np.int32)))

    shards = [text(number, 6 + number) for number in range(path_count)]
    points = features(path_model(MODEL, initial()[0]), np.concatenate(shards)[:, :PREFIX_TOKENS])
    return Text(
        shards=[(encode_shard(Shard(tokens=tokens)), len(tokens)) for tokens in shards],
        router=encode_router(fit_kmeans(points, path_count=path_count, seed=0)),
        validation=held_out(2),
        holdout=held_out(1),
        router_split=held_out(3),
    )


def make_run(store: Store, config: RunConfig, *, workers: Iterable[PeerId] = ()) -> Run:
    """A run whose blobs are in `store`, signed by the seed node. `workers` worked in a stage before."""
    flats, optimizer = initial()
    blobs = [store.put(encode_module(flat, module_layout(MODEL, level))) for level, flat in enumerate(flats)]
    text = text_of(config.topology.path_count)
    refs = tuple(
        ShardRef(path=path, blob=store.put(shard), sequences=sequences)
        for path, (shard, sequences) in zip(config.topology.paths(), text.shards, strict=True)
    )
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        config=config,
        stage="grid",
        admission=config.admission.policy,
        tokenizer=store.put(b"{}"),
        router=store.put(text.router),
        optimizer=store.put(optimizer),
        shards=refs,
        validation=store.put(text.validation),
        holdout=store.put(text.holdout),
        router_split=store.put(text.router_split),
        genesis=tuple(GenesisRef(module=module, blob=blobs[module.level]) for module in config.topology.modules()),
        workers=tuple(sorted(workers)),
        author=signer(SEED_NUMBER).peer,
    )
    run = Run(seal(signer(SEED_NUMBER), manifest))
    run.check_genesis()
    return run


# -- contributions made by hand


def appraisal_of(judge: Signer, *, run: str, work: str, of: PeerId, tokens: int, **changes: Any) -> Appraisal:
    """What `judge` says of work that gains, but for `changes`."""
    values: dict[str, Any] = {"gain": 1.0, "error": 0.1, "draw": judge.sign(DRAW, work.encode())} | changes
    return Appraisal(run=run, work=work, of=of, tokens=tokens, author=judge.peer, **values)


def contribution_of(
    run: Run, author: Signer, payload: bytes, /, *, module: ModuleId, path: PathId, **changes: Any
) -> Contribution:
    """An honest contribution to version 0, but for `changes`."""
    base = genesis_version(run.manifest, module)
    document = Contribution(
        run=run.id,
        module=module,
        path=path,
        base_version=0,
        base_digest=base.digest,
        payload=BlobRef.of(payload),
        steps=run.config.inner.steps,
        tokens=run.tokens_full,
        loss=5.0,
        author=author.peer,
    )
    return replace(document, **changes)


def gradient_bytes(run: Run, module: ModuleId, *, seed: int = 0, size: float = 1e-3) -> bytes:
    """A compressed outer gradient of random values."""
    values = np.random.default_rng(seed).normal(0, size, run.layout(module).size).astype(np.float32)
    return encode_compressed(compress(values, codec=run.config.compression.uplink)[0])


def granted(
    run: Run, module: ModuleId, *, term: int, leader: PeerId, mirrors: tuple[PeerId, ...] = ()
) -> Sealed[Grant]:
    """The coordinator's grant of a term."""
    author = signer(SEED_NUMBER)
    return seal(author, Grant(run=run.id, module=module, term=term, leader=leader, mirrors=mirrors, author=author.peer))


def version_of(
    run: Run,
    leader: Signer,
    admitted: list[tuple[Sealed[Contribution], bytes]],
    *,
    term: int,
    after: Made | None = None,
    history: Sequence[ModuleVersion] = (),
) -> tuple[Sealed[ModuleVersion], Made]:
    """The version that an honest leader makes of `admitted`, after the genesis or what was made before, which is the
    last of `history`."""
    module = admitted[0][0].document.module
    if after is None:
        parent, state = genesis_version(run.manifest, module), OuterState.fresh(initial()[0][module.level])
    else:
        parent, state = after.version, after.state
    gradients = [
        Admitted(sealed, functools.partial(run.read_contribution, payload, module)) for sealed, payload in admitted
    ]
    grant = granted(run, module, term=term, leader=leader.peer).id
    clip_norm = run.norms(module, history).clip_norm(parent.version)
    made = make_version(run, parent, state, gradients, clip_norm=clip_norm, term=term, grant=grant, author=leader.peer)
    return seal(leader, made.version), made
