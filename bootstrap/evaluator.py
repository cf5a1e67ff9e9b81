"""Validation of published versions: every path on its own held-out sequences, round by round.

Round v is judged when every module has version v. The first 32 tokens count for nobody (core/evaluate.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.core.codec import decode_module
from dipaco_p2p.core.evaluate import Evaluation, counted_tokens, losses
from dipaco_p2p.core.model import PathModel, load_modules
from dipaco_p2p.core.shards import decode_shard
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.topology import ModuleId, PathId

from .archive import SeedArchive

Flat = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvaluation:
    """The whole grid at one version, on all validation sequences."""

    version: int
    routed: Evaluation
    """Every sequence under the path that the router gave it."""
    modules: dict[ModuleId, Evaluation]
    """Per module: the sequences whose path goes through it."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "loss": self.routed.loss,
            "perplexity": self.routed.perplexity,
            "tokens": self.routed.tokens,
            "modules": {str(module): evaluation.loss for module, evaluation in self.modules.items()},
        }


class Evaluator:
    """Evaluates a run's rounds from the archive's snapshots; the validation sequences stay in memory."""

    def __init__(self, run: Run, store: Store, archive: SeedArchive) -> None:
        self._run = run
        self._store = store
        self._archive = archive
        self._model = PathModel(run.config.model)
        self.sequences: dict[PathId, NDArray[np.int32]] = {
            ref.path: self._read_sequences(ref.blob.digest) for ref in run.manifest.validation
        }

    def complete_version(self) -> int:
        """The newest version that all modules have reached."""
        return min(ledger.head.version for ledger in self._archive.ledgers.values())

    def evaluate(self, version: int) -> RoundEvaluation:
        """Judge one round; raises IntegrityError if a snapshot is missing or damaged."""
        by_path = {path: self._path_losses(path, version) for path in self.sequences}
        through = {
            module: {path: values for path, values in by_path.items() if module in path.modules()}
            for module in self._run.topology.modules()
        }
        return RoundEvaluation(
            version=version,
            routed=self._total(by_path),
            modules={module: self._total(part) for module, part in through.items() if part},
        )

    def _path_losses(self, path: PathId, version: int) -> NDArray[np.float64]:
        load_modules(self._model, [self._flat(module, version) for module in path.modules()])
        return losses(self._model, self.sequences[path])

    def _flat(self, module: ModuleId, version: int) -> Flat:
        if version:
            digest = self._archive.ledgers[module].versions[version - 1].document.digest
        else:
            digest = genesis_version(self._run.manifest, module).digest
        return decode_module(self._blob(digest), self._run.layout(module))

    def _read_sequences(self, digest: str) -> NDArray[np.int32]:
        model = self._run.config.model
        return decode_shard(self._blob(digest), vocab_size=model.vocab_size, context=model.context).tokens

    def _blob(self, digest: str) -> bytes:
        data = self._store.get(digest)
        if data is None:
            raise IntegrityError(f"blob {digest[:8]} is missing from the archive")
        return data

    def _total(self, by_path: dict[PathId, NDArray[np.float64]]) -> Evaluation:
        nats = math.fsum(value for values in by_path.values() for value in values.tolist())
        count = sum(len(values) for values in by_path.values())
        return Evaluation(nats_total=nats, tokens=count * counted_tokens(self._run.config.model.context))


def append_evaluation(path: Path, evaluation: RoundEvaluation) -> None:
    """One JSON line per judged round."""
    with path.open("a") as file:
        file.write(json.dumps(evaluation.to_dict()) + "\n")


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The judged rounds, in order of version."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return sorted({row["version"]: row for row in rows}.values(), key=lambda row: row["version"])
