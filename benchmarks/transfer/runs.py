"""Runs without text: modules of a wanted size with random weights. Their swarm is real, and nobody trains in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.manifests import sealed_manifest
from bootstrap.folder import write_stage
from dipaco_p2p.config import (
    CompressionConfig,
    LevelConfig,
    LivenessConfig,
    ModelConfig,
    RoundsConfig,
    RunConfig,
    WarmupConfig,
)
from dipaco_p2p.core.model.layout import encode_module, module_layout
from dipaco_p2p.core.model.shards import Shard, encode_shard
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import GenesisRef
from dipaco_p2p.protocol.signing import Signer

ROUNDS = 10_000
"""More than any benchmark plays."""
TTL_S = 30.0
"""Of a heartbeat: a claim that lapses on a busy machine would close a round too early."""
WEIGHT_STD = 0.02
WIDE, NARROW = 512, 64
WIDE_FROM = 10_000_000
"""Values of a module from which on it is a wide model, so that it has as many tensors as a real one."""
HEAD_WIDTH, CONTEXT, VOCAB_MIN = 32, 128, 258


def model_of(values: int) -> ModelConfig:
    """A path of one module of `values` parameters, up to a row of its embedding; 9 of 10 are in decoder blocks."""
    width = WIDE if values >= WIDE_FROM else NARROW
    small = ModelConfig(
        vocab_size=VOCAB_MIN,
        width=width,
        heads=width // HEAD_WIDTH,
        ffn_width=width * 11 // 4,
        context=CONTEXT,
        levels=_one_level(1),
    )
    block = module_layout(small, 0).size - VOCAB_MIN * width - width
    blocks = max(1, values * 9 // 10 // block)
    vocab = max(VOCAB_MIN, (values - width - blocks * block) // width)
    return replace(small, vocab_size=vocab, levels=_one_level(blocks))


def _one_level(blocks: int) -> tuple[LevelConfig, ...]:
    return (LevelConfig(blocks=blocks, embedding=True, head=True),)


def config_of(model: ModelConfig, codec: str | None = None, *, ttl_s: float = TTL_S) -> RunConfig:
    """What a run file with this model says, and else nothing; with `codec` both ways, int4 down beside top128."""
    compression = CompressionConfig()
    if codec is not None:
        compression = CompressionConfig(uplink=codec, downlink="int8" if codec == "int8" else "int4")
    return RunConfig(
        name="benchmark",
        model=model,
        warmup=WarmupConfig(rounds=0),
        compression=compression,
        rounds=RoundsConfig(rounds=ROUNDS),
        liveness=LivenessConfig(heartbeat_ttl_s=ttl_s),
    )


def make_run(store: Store, config: RunConfig, signer: Signer) -> Run:
    """The run's only stage, its blobs in `store`; what only training reads is a placeholder."""
    lots = np.random.default_rng(config.seed)
    shard = store.put(encode_shard(Shard(tokens=np.zeros((1, config.model.context), dtype=np.int32))))
    genesis = []
    for module in config.topology.modules():
        layout = module_layout(config.model, module.level)
        flat = lots.standard_normal(layout.size, dtype=np.float32) * np.float32(WEIGHT_STD)
        genesis.append(GenesisRef(module=module, blob=store.put(encode_module(flat, layout))))
    return write_stage(store, sealed_manifest(signer, config, shard=shard, genesis=genesis))
