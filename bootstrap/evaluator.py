"""Judging published versions: every path on the held-out sequences that are routed to it, round by round.

Round v is judged when every module has version v, with the newest router that is known by then of those that held in
round v - 1. A sharding can be published rounds after the one that it is for, so what is said of a round names its
sharding, and whoever measures again goes by that. What would go to a path that nobody has trained until then goes to
the next best one (trained.py). The first 32 tokens count for nobody (core/evaluate.py). Early
stopping: of the rounds since the last sharding, each path's best on the holdout is what it is served with; what is
trained is always the newest (DiPaCo section 2.7).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.core.codec import decode_module
from dipaco_p2p.core.evaluate import Evaluation, counted_tokens, losses
from dipaco_p2p.core.features import document_features
from dipaco_p2p.core.heldout import HeldOut, decode_held_out
from dipaco_p2p.core.model import PathModel, load_modules
from dipaco_p2p.core.router import Router, decode_router
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.trained import assign, trained_paths, witnesses
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId

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

    def to_dict(self) -> dict[str, Any]:
        return {
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


class Evaluator:
    """Evaluates a stage's rounds from the archive's snapshots; the held-out sequences stay in memory."""

    def __init__(self, run: Run, store: Store, archive: SeedArchive) -> None:
        self.run = run
        self._store = store
        self._archive = archive
        self._model = PathModel(run.config.model)
        self._frozen: PathModel | None = None
        self._routers: dict[int, Router] = {}
        self.held_out = {name: self._read(getattr(run.manifest, name)) for name in PARTS}
        self._features: dict[str, Flat] = {}

    def complete_version(self) -> int:
        """The newest version that all modules have reached."""
        return min(ledger.head.version for ledger in self._archive.ledgers.values())

    def evaluate(self, version: int, *, signed: int | None = None) -> RoundEvaluation:
        """Judge one round, by the sharding that a `signed` judgement of it names if there is one already; raises
        IntegrityError if a snapshot or that sharding is missing, or damaged."""
        sharding = self.run.sharding_at(max(version - 1, 0)) if signed is None else signed
        if sharding and self.run.sharding(sharding) is None:
            raise IntegrityError(f"sharding {sharding} is not known here")
        assigned = {name: self.assign(name, sharding, version=version) for name in PARTS}
        paths = {path: self._path(path, version, assigned) for path in self.run.topology.paths()}
        judged = {path: found.validation for path, found in paths.items() if found.validation}
        through = {
            module: [found for path, found in judged.items() if module in path.modules()]
            for module in self.run.topology.modules()
        }
        return RoundEvaluation(
            version=version,
            sharding=sharding,
            routed=_total(list(judged.values())),
            modules={module: _total(part) for module, part in through.items() if part},
            paths=paths,
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
            self._frozen = PathModel(self.run.config.model)
            load_modules(self._frozen, self.flats(self.run.topology.path(0), 0))
        return self._frozen

    def flats(self, path: PathId, version: int) -> list[Flat]:
        """A path's modules at one version, from the first level on."""
        return [self._flat(module, version) for module in path.modules()]

    def version(self, module: ModuleId, version: int) -> ModuleVersion:
        """One version of a module, which the archive has."""
        if not version:
            return genesis_version(self.run.manifest, module)
        return self._archive.ledgers[module].versions[version - 1].document

    def _path(self, path: PathId, version: int, assigned: dict[str, Indices]) -> PathLosses:
        load_modules(self._model, self.flats(path, version))
        number = self.run.topology.number(path)
        return PathLosses(**{name: self._losses(name, assigned[name] == number) for name in PARTS})

    def _losses(self, part: str, chosen: NDArray[np.bool_]) -> Evaluation | None:
        if not chosen.any():
            return None
        nats = losses(self._model, self.held_out[part].tokens[chosen])
        tokens = int(chosen.sum()) * counted_tokens(self.run.config.model.context)
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
        data = self._store.get(digest)
        if data is None:
            raise IntegrityError(f"blob {digest[:8]} is missing from the archive")
        return data


def _total(parts: list[Evaluation]) -> Evaluation:
    return Evaluation(
        nats_total=math.fsum(part.nats_total for part in parts), tokens=sum(part.tokens for part in parts)
    )


def append_evaluation(path: Path, evaluation: RoundEvaluation) -> None:
    """One JSON line per judged round."""
    with path.open("a+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        is_cut = file.read() not in (b"", b"\n")  # whoever wrote last was killed at it
        file.write(b"\n" * is_cut + json.dumps(evaluation.to_dict()).encode() + b"\n")


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The judged rounds, in order of version; a line that was not written to its end is passed over."""
    if not path.exists():
        return []
    rows = [row for line in path.read_bytes().splitlines() if (row := _row(line)) is not None]
    return sorted({row["version"]: row for row in rows}.values(), key=lambda row: row["version"])


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "version" in row else None


def best_rounds(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Per path the round that it is served with: the best on the holdout since the last sharding; ties to the newer."""
    last = max((row["sharding"] for row in rows), default=0)
    best: dict[str, tuple[float, int]] = {}
    for row in sorted(rows, key=lambda row: int(row["version"])):
        if row["sharding"] == last:
            for path, found in row["paths"].items():
                loss = found["holdout_loss"]
                loss_known = math.inf if loss is None or math.isnan(loss) else loss  # NaN: the path diverged
                if path not in best or loss is None or loss_known <= best[path][0]:
                    best[path] = (loss_known, row["version"])
    return {path: version for path, (_, version) in best.items()}


def stopped_evaluation(rows: list[dict[str, Any]]) -> Evaluation | None:
    """All validation sequences, each path at its best round; None before anything was judged."""
    if not rows:
        return None
    by_version = {row["version"]: row for row in rows}
    found = [by_version[version]["paths"][path] for path, version in best_rounds(rows).items()]
    parts = [Evaluation(nats_total=row["loss"] * row["tokens"], tokens=row["tokens"]) for row in found if row["tokens"]]
    return _total(parts)
