"""`python -m benchmarks.attack.other_text FOLDER`: could judges tell work that was trained on another path's text?

A judge could measure work on the shard of some other path as well, and refuse what gains significantly more there. This
measures each work of a finished run without strangers on all shards, and counts the pairs of a work and another path in
which the other shard gains significantly more (honest work that the rule would refuse), and significantly less (work
that it would find, had its author claimed the other path).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.report import JsonFile, run_benchmark, show, table, write_json
from benchmarks.swarm_faults.schedule import SEED_NODE
from bootstrap.progress import stage
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.model.shards import decode_shard
from dipaco_p2p.core.outer.outer_step import apply_update
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.judge import drawn, mean_and_error, measured_gains
from dipaco_p2p.protocol.documents import Contribution
from dipaco_p2p.protocol.gate import LITTLE_ERRORS, USUAL_SHARE
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.folder import RunFolder

ERRORS = (2.0, 3.0, 4.0)
"""Standard errors of a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One work, on its own shard and on that of another path: mean and standard error, in nats per token."""

    own: tuple[float, float]
    other: tuple[float, float]

    @property
    def excess(self) -> float:
        """Of the other shard's gain, in standard errors of the difference."""
        return (self.other[0] - self.own[0]) / max(math.hypot(self.own[1], self.other[1]), 1e-12)


def main(
    folder: Annotated[Path, typer.Argument(help="Of one game of `benchmarks.attack` or `.honest`.", exists=True)],
    json_file: JsonFile = None,
) -> None:
    """Measure each work of the grid on the shards of all paths."""
    run, store = RunFolder(folder / SEED_NODE, is_read_only=True).require()
    archive = SeedArchive(run, store)
    disks = [store, *(Store(path.parent, is_read_only=True) for path in folder.glob("*/runs/*/blobs"))]
    with stage("Measuring"):
        pairs = list(measured_pairs(run, archive, disks))
    if not pairs:
        raise ConfigError(f"`{folder}` has no work of which all parts are still on disk", hint="name another folder")
    usual = statistics.median(pair.own[0] for pair in pairs)
    little = sum(other + LITTLE_ERRORS * error < USUAL_SHARE * usual for other, error in (pair.other for pair in pairs))
    counts = [
        (errors, sum(pair.excess > errors for pair in pairs), sum(pair.excess < -errors for pair in pairs))
        for errors in ERRORS
    ]
    write_json(json_file, {"pairs": len(pairs), "too_little": little, "by_errors": counts})
    rows = [(f"{errors:g}", *(f"{count / len(pairs):.1%}" for count in found)) for errors, *found in counts]
    title = (
        f"{len(pairs)} pairs of a work and another path; too little for the gate as it is: {little / len(pairs):.1%}"
    )
    show(table(title, ("errors", "honest work refused", "work on other text found"), rows))


def measured_pairs(run: Run, archive: SeedArchive, disks: list[Store]) -> Iterator[Pair]:
    """Every work of which all parts are still on these disks, with each other path."""

    def blob(digest: str) -> bytes:
        return next(data for disk in disks if (data := disk.get(digest)) is not None)

    def shard(path: PathId) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        model = run.config.model
        data = blob(run.shard(path, 0).blob.digest)
        return decode_shard(data, vocab_size=model.vocab_size, context=model.context).tokens

    shards = {path: shard(path) for path in run.topology.paths()}
    for work in works(archive):
        try:
            parts = zip(work.path.modules(), work.parts, strict=True)
            read = [(module, blob(part.base_digest), blob(part.payload.digest)) for module, part in parts]
        except StopIteration:
            continue
        before = [decode_module(base, run.layout(module)) for module, base, _ in read]
        gradients = [run.read_contribution(payload, module) for module, _, payload in read]
        after = [apply_update(*pair) for pair in zip(before, gradients, strict=True)]
        gains = {
            path: mean_and_error(
                measured_gains(run, before, after, drawn(tokens, work.work, run.config.judging.sequences), device="cpu")
            )
            for path, tokens in shards.items()
        }
        yield from (Pair(own=gains[work.path], other=found) for path, found in gains.items() if path != work.path)


def works(archive: SeedArchive) -> list[Contribution]:
    """All that versions count, each once, in the order of rounds."""
    versions = (sealed.document for ledger in archive.ledgers.values() for sealed in ledger.versions)
    shares = itertools.chain.from_iterable(version.shares for version in versions)
    found = {(one := archive.contribution(share.contribution).document).work: one for share in shares}
    return sorted(found.values(), key=lambda one: (one.base_version, one.work))


if __name__ == "__main__":
    run_benchmark(main)
