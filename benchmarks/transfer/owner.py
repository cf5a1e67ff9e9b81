"""A run without text, and its seed node's process, which evaluates no version.

    python -m benchmarks.transfer.owner FOLDER CONFIG [LISTEN]      CONFIG is the run's, as JSON

It leads every module as long as no volunteer does. One that is told where to listen is there for volunteers that lead:
its archive is light, so that contributions do not come to its line. Modules have a wanted size and random weights: the
swarm is real, and nobody trains in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.processes import Handler, Values, serve
from bootstrap.coordinator.stage import SeedStage
from bootstrap.folder import write_stage
from dipaco_p2p import strict
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.config import (
    DOWNLINKS,
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
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.files import listening
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.addresses import best_address
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from dipaco_p2p.swarm.identity import KEY_NAME
from dipaco_p2p.use.folder import GRID
from simulation.training import NoEvaluator, no_text, sealed_manifest

ROUNDS = 10_000
"""More than any benchmark plays."""
TTL_S = 30.0
"""Of a heartbeat: a claim that lapses on a busy machine would close a round too early."""
WEIGHT_STD = 0.02
WIDE, NARROW = 512, 64
WIDE_FROM = 10_000_000
"""Values of a module from which on it is a wide model, so that it has as many tensors as a real one."""
HEAD_WIDTH, CONTEXT, VOCAB_MIN = 32, 128, 258
LISTEN = "/ip4/127.0.0.1/tcp/0"
HISTORY = "history.jsonl"
LIGHT = Retention(rounds=2, remade=0.0, measured=0.0)
POLL_S = 0.1
POINTS = "owner: "
"""What the names of the points begin with that a leader passes (program/files.py)."""


def model_of(values: int, *, modules: int = 1) -> ModelConfig:
    """A path of `values` parameters, up to a row of its embedding, in modules that are about as large; 9 of 10 are in
    decoder blocks."""
    width = WIDE if values >= WIDE_FROM else NARROW
    small = ModelConfig(
        vocab_size=VOCAB_MIN,
        width=width,
        heads=width // HEAD_WIDTH,
        ffn_width=width * 11 // 4,
        context=CONTEXT,
        levels=(LevelConfig(blocks=1, embedding=True, head=True),),
    )
    block = module_layout(small, 0).size - VOCAB_MIN * width - width
    each = values // modules
    blocks = max(1, each * 9 // 10 // block)
    vocab = max(VOCAB_MIN, (each - width - blocks * block) // width)
    [only] = small.levels
    others = (LevelConfig(blocks=max(1, round(each / block))),) * (modules - 1)
    return replace(small, vocab_size=vocab, levels=(replace(only, blocks=blocks), *others))


def config_of(model: ModelConfig, codec: str) -> RunConfig:
    """What a run file with this model says, and else nothing; with `codec` both ways, or int4 down beside a sparse
    one."""
    return RunConfig(
        name="benchmark",
        model=model,
        warmup=WarmupConfig(rounds=0),
        compression=CompressionConfig(uplink=codec, downlink=codec if codec in DOWNLINKS else "int4"),
        rounds=RoundsConfig(rounds=ROUNDS),
        liveness=LivenessConfig(heartbeat_ttl_s=TTL_S),
    )


def make_run(store: Store, config: RunConfig, signer: Signer) -> Run:
    """The run's only stage, its blobs in `store`; what only training reads is a placeholder."""
    lots = np.random.default_rng(config.seed)
    shard = store.put(encode_shard(Shard(tokens=np.zeros((1, config.model.context), dtype=np.int32))))
    genesis = {}
    for module in config.topology.modules():
        layout = module_layout(config.model, module.level)
        flat = lots.standard_normal(layout.size, dtype=np.float32) * np.float32(WEIGHT_STD)
        genesis[module] = store.put(encode_module(flat, layout))
    return write_stage(store, sealed_manifest(signer, config, shard=shard, genesis=genesis))


class Leader:
    """Notes when the leader of the modules passed which point, since it was last asked."""

    def __init__(self, history: Path) -> None:
        self._history = history
        self._passed: list[tuple[str, float]] = []
        self._since_s = time.time()

    def passed(self, name: str) -> None:
        if name.startswith(POINTS):
            self._passed.append((name.removeprefix(POINTS), time.time()))

    def tell(self) -> Values:
        """When each point was passed, and the versions that were made; and forget them."""
        passed, self._passed = self._passed, []
        since_s, self._since_s = self._since_s, time.time()
        events = [event for event in read_history(self._history) if event["t"] >= since_s]
        versions = [
            {"module": event["module"], "at_s": event["t"], "contributions": len(event["contributions"])}
            for event in events
            if event["ev"] == "version"
        ]
        return {"passed": passed, "versions": versions}


@contextlib.asynccontextmanager
async def opened(folder: Path, config: RunConfig, listen: str | None = None) -> AsyncIterator[Handler]:
    """A run is made and served while the block runs; with `listen`, for volunteers that lead."""
    clock, grid = SystemClock(), folder / GRID
    store = Store(grid)
    swarm = await open_libp2p(folder / KEY_NAME, listen=listen or LISTEN, clock=clock)
    try:
        run = await asyncio.to_thread(make_run, store, config, swarm.signer)
        Stages(swarm).add(run)
        kept = None if listen is None else LIGHT
        evaluator = cast(Any, NoEvaluator)
        stage = SeedStage(run, swarm, store, sequences=no_text, clock=clock, make_evaluator=evaluator, retention=kept)
        stage.begin()
        history = grid / HISTORY
        while sum(event["ev"] == "leads" for event in read_history(history)) < len(run.manifest.genesis):
            await asyncio.sleep(POLL_S)
        leader = Leader(history)

        async def handle(values: Values) -> Values:
            return {"address": best_address(swarm.addresses)} if values["do"] == "open" else leader.tell()

        with listening(leader.passed):
            yield handle
        stage.cancel()
    finally:
        await swarm.close()


if __name__ == "__main__":
    place, text, *where = sys.argv[1:]
    loaded = strict.load(RunConfig, json.loads(text), where="the benchmark's run")
    serve(lambda: opened(Path(place), loaded, *where))
