"""Validation loss of both runs where they can be compared: after the same number of rounds, on the same sequences."""

from __future__ import annotations

from pathlib import Path

from bootstrap.archives.evaluator import Evaluator
from bootstrap.folder import RunFolder
from dipaco_p2p.owner.archive import SeedArchive


def losses(folders: dict[str, Path], versions: dict[str, int]) -> dict[str, float]:
    """Nats per token of each run at its version of `versions`, by the run's name."""
    found = {}
    for name, folder in folders.items():
        run, store = RunFolder(folder).require()
        evaluator = Evaluator(run, store, SeedArchive(run, store))
        found[name] = evaluator.evaluate(versions[name]).routed.loss
    return found
