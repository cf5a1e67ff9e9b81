"""The dense control: one worker, one path-size model, the same outer step, the same steps on the same text.

It starts from the same warm-up with the same optimizer state, trains on the text of all shards, and goes through the
same compression and outer step as a module with one contributor. Steps are equal; compute is not: the grid has as many
workers as paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dipaco_p2p.core.codec import decode_module
from dipaco_p2p.core.compress import compress
from dipaco_p2p.core.evaluate import Evaluation, counted_tokens, losses
from dipaco_p2p.core.inner import InnerLoop
from dipaco_p2p.core.model import PathModel, load_modules
from dipaco_p2p.core.outer import OuterState, average, outer_gradient, outer_step
from dipaco_p2p.core.shards import Shard, Tokens
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.versions import genesis_version

from .evaluator import Evaluator


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the dense model reached."""

    evaluation: Evaluation
    steps: int


def train_dense(
    run: Run,
    store: Store,
    evaluator: Evaluator,
    tokens: Tokens,
    *,
    device: str = "cpu",
    on_progress: Callable[[int], None] = lambda done: None,
) -> Baseline:
    """Train the dense baseline on `tokens` (n, T) for as many rounds as the grid had; `on_progress` hears of each."""
    config, outer, codecs = run.config, run.config.outer, run.config.compression
    shard = Shard(tokens=tokens)
    loop = InnerLoop(config.inner, run.total_steps, config.model, device=device, seed=config.seed)
    loop.load_state(_blob(store, run.manifest.optimizer.digest))
    states = _genesis(run, store)
    residuals = [np.zeros_like(state.params) for state in states]
    for number in range(config.rounds.rounds):
        before = [state.params for state in states]
        after = loop.run(before, shard, first_step=run.first_step(number), steps=config.inner.steps).flats
        for level, (old, new) in enumerate(zip(before, after, strict=True)):
            sent, residuals[level] = compress(outer_gradient(old, new), residuals[level], codec=codecs.uplink)
            gradient = average([sent], [1.0], rule=outer.norm_rule)
            states[level], _ = outer_step(
                states[level], gradient, lr=outer.lr, momentum=outer.momentum, codec=codecs.downlink
            )
        on_progress(number + 1)
    return Baseline(evaluation=_evaluate(run, states, evaluator), steps=config.rounds.rounds * config.inner.steps)


def _genesis(run: Run, store: Store) -> list[OuterState]:
    """Version 0, one module per level: after the warm-up all modules of a level are the same."""
    modules = run.topology.path(0).modules()
    blobs = [_blob(store, genesis_version(run.manifest, module).digest) for module in modules]
    flats = [decode_module(blob, run.layout(module)) for blob, module in zip(blobs, modules, strict=True)]
    return [OuterState.fresh(flat) for flat in flats]


def _evaluate(run: Run, states: list[OuterState], evaluator: Evaluator) -> Evaluation:
    model = PathModel(run.config.model)
    load_modules(model, [state.params for state in states])
    sequences = evaluator.held_out["validation"].tokens
    nats = losses(model, sequences)
    return Evaluation(nats_total=float(nats.sum()), tokens=len(sequences) * counted_tokens(run.config.model.context))


def _blob(store: Store, digest: str) -> bytes:
    data = store.get(digest)
    if data is None:
        raise IntegrityError(f"blob {digest[:8]} is missing")
    return data
