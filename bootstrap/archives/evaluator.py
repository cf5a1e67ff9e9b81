"""Judging published versions: every path on the held-out sequences that are routed to it, round by round.

Round v is judged when every module has version v, with the newest router that is known by then of those that held in
round v - 1. A sharding can be published rounds after the one that it is for, so what is said of a round names its
sharding, and whoever measures again goes by that. What would go to a path that nobody has trained until then goes to
the next best one (node/measuring.py). The first 32 tokens count for nobody (core/routing/evaluate.py). Early
stopping: of the rounds since the last sharding, each path's best on the holdout is what it is served with; what is
trained is always the newest (DiPaCo section 2.7).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.model.engine import on_device
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.model.shards import HeldOut, decode_held_out
from dipaco_p2p.core.model.transformer import PathModel, path_model
from dipaco_p2p.core.routing.evaluate import (
    Evaluation,
    counted_tokens,
    held,
    oracle_once,
    rerouted,
    routed_once,
    summarise,
    window_nats,
    window_starts,
)
from dipaco_p2p.core.routing.features import document_features, token_features
from dipaco_p2p.core.routing.router import Router, decode_router
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.measuring import assign, trained_paths, witnesses
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.tokenizer import Tokenizer

from .early_stopping import stopped_evaluation, total

Flat = NDArray[np.float32]
Indices = NDArray[np.int64]
PARTS = ("validation", "holdout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLosses:
    """One path at one version, on what is routed to it; None where nothing is."""

    validation: Evaluation | None
    holdout: Evaluation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvaluation:
    """The whole grid at one version, on all validation sequences."""

    version: int
    sharding: int
    """Whose router sent the sequences to their paths."""
    routed: Evaluation
    """Every sequence under the path that the router gave it."""
    modules: dict[ModuleId, Evaluation]
    """Per module: the sequences whose path goes through it."""
    paths: dict[PathId, PathLosses]
    texts: tuple[Evaluation, ...] = ()
    """Of each text apart, the run file's first, where growths have brought some."""

    def to_dict(self) -> dict[str, Any]:
        apart = [{"loss": text.loss, "perplexity": text.perplexity, "tokens": text.tokens} for text in self.texts]
        row = {
            "version": self.version,
            "sharding": self.sharding,
            "loss": self.routed.loss,
            "perplexity": self.routed.perplexity,
            "tokens": self.routed.tokens,
            "modules": {str(module): evaluation.loss for module, evaluation in self.modules.items()},
            "paths": {
                str(path): {
                    "loss": found.validation and found.validation.loss,
                    "tokens": found.validation.tokens if found.validation else 0,
                    "holdout_loss": found.holdout and found.holdout.loss,
                }
                for path, found in self.paths.items()
            },
        }
        return row | ({"texts": apart} if apart else {})


class Evaluator:
    """Evaluates a stage's rounds from the archive's snapshots; the held-out sequences stay in memory."""

    def __init__(
        self, run: Run, store: Store, archive: SeedArchive, *, device: str = "cpu", texts: Sequence[int] = ()
    ) -> None:
        """Losses are computed on the `device`, or if that refuses on the processor. What routes is always computed
        there: a document between two paths then goes to the same one everywhere. `texts` says at which validation
        sequence each text begins that came with a growth."""
        self.run = run
        self._store = store
        self._archive = archive
        self.device = device
        self._frozen: PathModel | None = None
        self._routers: dict[int, Router] = {}
        self.held_out = {name: self._read(getattr(run.manifest, name)) for name in PARTS}
        self._features: dict[str, Flat] = {}
        self._texts = tuple(texts)

    def complete_version(self) -> int:
        """The newest version that all modules have reached."""
        return self._archive.complete_version

    def evaluate(self, version: int, *, signed: int | None = None) -> RoundEvaluation:
        """Judge one round, by the sharding that a `signed` judgement of it names if there is one already; raises
        IntegrityError if a snapshot or that sharding is missing, or damaged."""
        sharding = self.sharding(version, signed=signed)
        assigned = {name: self.assign(name, sharding, version=version) for name in PARTS}
        found = {path: self._nats(path, version, assigned) for path in self.run.topology.paths()}
        paths = {
            path: PathLosses(**{name: self._evaluation(own) for name, own in zip(PARTS, nats, strict=True)})
            for path, nats in found.items()
        }
        texts = self._apart(assigned["validation"], [nats for nats, _ in found.values()])
        return self.summary(version, sharding, paths, texts=texts)

    def sharding(self, version: int, *, signed: int | None) -> int:
        """By which one a round is judged; raises IntegrityError if a `signed` judgement names one that is not known."""
        sharding = self.run.sharding_at(max(version - 1, 0)) if signed is None else signed
        if sharding and self.run.sharding(sharding) is None:
            raise IntegrityError(f"sharding {sharding} is not known here")
        return sharding

    def has(self, path: PathId, version: int) -> bool:
        """Whether the parameters of a path at a round are in the archive."""
        digests = (self.version(module, version).digest for module in path.modules())
        return all(self._store.size(digest) is not None for digest in digests)

    def forget(self, version: int) -> None:
        """Drop parameters of a round that were fetched to measure it, unless the archive keeps them."""
        for ledger in self._archive.ledgers.values():
            self._archive.thinning.forget(ledger, version)

    def measure(self, path: PathId, assigned: Indices, snapshots: Sequence[bytes]) -> Evaluation:
        """One path on the validation sequences that are `assigned` to it, from parameters that need not be in the
        archive."""
        modules, chosen = path.modules(), assigned == self.run.topology.number(path)
        flats = [decode_module(data, self.run.layout(module)) for data, module in zip(snapshots, modules, strict=True)]
        found = self._evaluation(self._windows(flats, self.held_out["validation"].tokens[chosen]).sum(axis=1))
        assert found is not None, "a path that nothing is routed to is not measured"
        return found

    def summary(
        self, version: int, sharding: int, paths: Mapping[PathId, PathLosses], *, texts: tuple[Evaluation, ...] = ()
    ) -> RoundEvaluation:
        """A round whose paths are measured."""
        judged = {path: found.validation for path, found in paths.items() if found.validation}
        through = {
            module: [found for path, found in judged.items() if module in path.modules()]
            for module in self.run.topology.modules()
        }
        return RoundEvaluation(
            version=version,
            sharding=sharding,
            routed=total(list(judged.values())),
            modules={module: total(part) for module, part in through.items() if part},
            paths=dict(paths),
            texts=texts,
        )

    def assign(self, part: str, sharding: int, *, version: int) -> Indices:
        """The path number (n,) of each sequence of a held-out part, by the router of a sharding, among the paths that
        were trained up to `version`."""
        if self.run.manifest.router is None:
            return np.zeros(len(self.held_out[part]), dtype=np.int64)
        return assign(self.router(sharding), self._features_of(part), self.usable(version))

    def usable(self, version: int) -> list[int]:
        """The numbers of the paths that were trained up to `version`."""
        topology = self.run.topology
        chains = [self._archive.ledgers[module].versions[:version] for module in witnesses(topology)]
        found = trained_paths(topology, (sealed.document for chain in chains for sealed in chain))
        return [topology.number(path) for path in found]

    def untrained(self, version: int) -> tuple[PathId, ...]:
        """The others."""
        usable = set(self.usable(version))
        return tuple(path for path in self.run.topology.paths() if self.run.topology.number(path) not in usable)

    def router(self, sharding: int) -> Router:
        """The router of a sharding; raises IntegrityError if it does not fit the run."""
        if sharding not in self._routers:
            known = self.run.sharding(sharding)
            ref = known.document.router if known else self.run.manifest.router
            assert ref is not None
            data, width = self.blob(ref.digest), self.run.config.feature_width
            self._routers[sharding] = decode_router(data, path_count=self.run.config.model.path_count, width=width)
        return self._routers[sharding]

    def token_router(self, sharding: int) -> Router:
        """What routes inside a document, of a sharding after the first."""
        known = self.run.sharding(sharding)
        assert known is not None, sharding
        model = self.run.config.model
        data = self.blob(known.document.token_router.digest)
        return decode_router(data, path_count=model.path_count, width=2 * model.width)

    def router_split(self) -> HeldOut:
        """The sequences that paths score."""
        return self._read(self.run.manifest.router_split)

    def frozen(self) -> PathModel:
        """The warm-up model, version 0 of every level, whose features everything is routed by."""
        if self._frozen is None:
            self._frozen = path_model(self.run.config.model, self.flats(self.run.topology.path(0), 0))
        return self._frozen

    def flats(self, path: PathId, version: int) -> list[Flat]:
        """A path's modules at one version, from the first level on."""
        return [self._flat(module, version) for module in path.modules()]

    def version(self, module: ModuleId, version: int) -> ModuleVersion:
        """One version of a module, which the archive has."""
        if not version:
            return genesis_version(self.run.manifest, module)
        return self._archive.ledgers[module].versions[version - 1].document

    def score(self, path: PathId, version: int, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """Nats (n, J) of one path at one version, from the archive's snapshots."""
        return self._windows(self.flats(path, version), tokens)

    def _windows(self, flats: Sequence[Flat], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        model = self.run.config.model
        return on_device(self.device, lambda device: window_nats(path_model(model, flats).to(device), tokens))

    def _nats(self, path: PathId, version: int, assigned: dict[str, Indices]) -> list[NDArray[np.float64]]:
        """Of each part what is routed to this path, sequence by sequence."""
        number, parts = self.run.topology.number(path), [self.held_out[name] for name in PARTS]
        chosen = [assigned[name] == number for name in PARTS]
        tokens = np.concatenate([part.tokens[which] for part, which in zip(parts, chosen, strict=True)])
        return np.split(self.score(path, version, tokens).sum(axis=1), [int(chosen[0].sum())])

    def _apart(self, assigned: Indices, found: Sequence[NDArray[np.float64]]) -> tuple[Evaluation, ...]:
        """Of each text, the nats that were `found` of what each path was assigned; nothing while there is one text."""
        if not self._texts:
            return ()
        nats = np.empty(len(assigned))
        for number, own in enumerate(found):
            nats[assigned == number] = own
        texts = (self._evaluation(part) for part in np.split(nats, self._texts))
        return tuple(text for text in texts if text is not None)

    def _evaluation(self, nats: NDArray[np.float64]) -> Evaluation | None:
        if not nats.size:
            return None
        tokens = len(nats) * counted_tokens(self.run.config.model.context)
        return Evaluation(nats_total=math.fsum(nats.tolist()), tokens=tokens)

    def _features_of(self, part: str) -> Flat:
        if part not in self._features:
            has_counts = self.run.config.routing.has_counts
            tokens = self.held_out[part].tokens
            self._features[part] = document_features(self.frozen(), tokens, has_counts=has_counts)
        return self._features[part]

    def _flat(self, module: ModuleId, version: int) -> Flat:
        return decode_module(self.blob(self.version(module, version).digest), self.run.layout(module))

    def _read(self, ref: BlobRef) -> HeldOut:
        model = self.run.config.model
        return decode_held_out(self.blob(ref.digest), vocab_size=model.vocab_size, context=model.context)

    def blob(self, digest: str) -> bytes:
        """A blob of the archive; raises IntegrityError if it is missing or damaged."""
        return self._archive.blob(digest)


def told_texts(row: Mapping[str, Any]) -> str:
    """The perplexity of each text of a judged round, for people; nothing while there is one text."""
    if not row.get("texts"):
        return ""
    first, *added = (f"{text['perplexity']:.1f}" for text in row["texts"])
    return f" (the run's first text {first}, that of growths {', '.join(added)})"


def append_evaluation(path: Path, evaluation: RoundEvaluation) -> None:
    """One JSON line per judged round."""
    with path.open("a+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        is_cut = file.read() not in (b"", b"\n")  # whoever wrote last was killed at it
        file.write(b"\n" * is_cut + json.dumps(evaluation.to_dict()).encode() + b"\n")


EVERY_TOKENS = (128, 64, 32, 16)


def judge_finished(evaluator: Evaluator, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity, 95 % interval and bits per byte for each way to route; raises IntegrityError for missing blobs."""
    run = evaluator.run
    part = evaluator.held_out["validation"]
    table = score_table(evaluator, run.rounds, part.tokens)
    last = run.rounds
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
        name: _routing_row(
            summarise(nats, tokens=tokens, bytes=text_bytes, documents=part.documents, seed=run.config.seed)
        )
        for name, nats in ways.items()
    }
    stopped = stopped_evaluation(rows)
    if stopped is not None:
        routing["routed once, each path at its best round"] = _routing_row(stopped)
    return {"run": run.id, "version": run.rounds, "sharding": newest, "routing": routing}


def score_table(evaluator: Evaluator, version: int, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Nats (n, J, P) of every path at one version; one path is in memory at a time."""
    return np.stack([evaluator.score(path, version, tokens) for path in evaluator.run.topology.paths()], axis=2)


def _choices(evaluator: Evaluator, sharding: int) -> NDArray[np.int64]:
    """The path (n, J) that is chosen for each window: the first by the router, the others by the token router."""
    tokens = evaluator.held_out["validation"].tokens
    points = token_features(evaluator.frozen(), tokens, at=window_starts(tokens.shape[1]))
    count, windows, width = points.shape
    last = evaluator.run.rounds
    router, usable = evaluator.token_router(sharding), evaluator.usable(last)
    choices = assign(router, points.reshape(-1, width), usable).reshape(count, windows)
    choices[:, 0] = evaluator.assign("validation", sharding, version=last)
    return choices


def _routing_row(found: Evaluation) -> dict[str, Any]:
    interval = (
        None if found.low is None or found.high is None else [float(np.exp(found.low)), float(np.exp(found.high))]
    )
    return {"perplexity": found.perplexity, "interval": interval, "bits_per_byte": found.bits_per_byte}
