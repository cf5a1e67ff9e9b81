"""Every way to route the finished model, on the same validation sequences: once, every W tokens, by hindsight.

Sources: DiPaCo (arXiv 2403.10616) sections 2.4.3 (re-routing), 2.7 (early stopping). Intervals are over documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.evaluate import Evaluation, counted_tokens, held, oracle_once, rerouted, routed_once, summarise
from dipaco_p2p.core.features import token_features
from dipaco_p2p.core.model import PathModel, load_modules
from dipaco_p2p.core.scores import window_nats, window_starts
from dipaco_p2p.node.trained import assign
from dipaco_p2p.topology import PathId

from .evaluator import Evaluator, stopped_evaluation
from .tokenizer import Tokenizer

EVERY_TOKENS = (128, 64, 32, 16)


def judge_finished(evaluator: Evaluator, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity, 95 % interval and bits per byte for each way to route; raises IntegrityError for missing blobs."""
    run = evaluator.run
    part = evaluator.held_out["validation"]
    table = score_table(evaluator, run.config.rounds.rounds, part.tokens)
    last = run.config.rounds.rounds
    newest = max((sealed.document.number for sealed in run.shardings), default=0)
    ways = {"routed once": routed_once(table, evaluator.assign("validation", newest, version=last))}
    if newest:
        by_first = evaluator.assign("validation", 0, version=last)
        ways = {"routed once by the first router": routed_once(table, by_first)} | ways
        choices = _choices(evaluator, newest)
        fits = [every for every in EVERY_TOKENS if every < run.config.model.context - PREFIX_TOKENS]
        ways |= {f"re-routed every {every} tokens": rerouted(table, held(choices, every=every)) for every in fits}
    ways["best path by hindsight"] = oracle_once(table)
    lengths = Tokenizer(evaluator.blob(run.manifest.tokenizer.digest)).byte_lengths()
    text_bytes = lengths[part.tokens[:, PREFIX_TOKENS:]].sum(axis=1)
    tokens = counted_tokens(run.config.model.context)
    routing = {
        name: _row(summarise(nats, tokens=tokens, bytes=text_bytes, documents=part.documents, seed=run.config.seed))
        for name, nats in ways.items()
    }
    stopped = stopped_evaluation(rows)
    if stopped is not None:
        routing["routed once, each path at its best round"] = _row(stopped)
    return {"run": run.id, "version": run.config.rounds.rounds, "sharding": newest, "routing": routing}


def score_table(evaluator: Evaluator, version: int, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Nats (n, J, P) of every path at one version; one path is in memory at a time."""
    return np.stack([score_path(evaluator, path, version, tokens) for path in evaluator.run.topology.paths()], axis=2)


def score_path(evaluator: Evaluator, path: PathId, version: int, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Nats (n, J) of one path at one version, from the archive's snapshots."""
    model = PathModel(evaluator.run.config.model)
    load_modules(model, evaluator.flats(path, version))
    return window_nats(model, tokens)


def _choices(evaluator: Evaluator, sharding: int) -> NDArray[np.int64]:
    """The path (n, J) that is chosen for each window: the first by the router, the others by the token router."""
    tokens = evaluator.held_out["validation"].tokens
    points = token_features(evaluator.frozen(), tokens, at=window_starts(tokens.shape[1]))
    count, windows, width = points.shape
    last = evaluator.run.config.rounds.rounds
    router, usable = evaluator.token_router(sharding), evaluator.usable(last)
    choices = assign(router, points.reshape(-1, width), usable).reshape(count, windows)
    choices[:, 0] = evaluator.assign("validation", sharding, version=last)
    return choices


def _row(found: Evaluation) -> dict[str, Any]:
    interval = (
        None if found.low is None or found.high is None else [float(np.exp(found.low)), float(np.exp(found.high))]
    )
    return {"perplexity": found.perplexity, "interval": interval, "bits_per_byte": found.bits_per_byte}
