"""The same tables from a coordinator's folder alone, so that nobody needs to believe a collector; and snapshots without
one.

The folder holds a store for each stage, `warmup` and `grid`, with the signed documents of the run. They come in through
the same door as what peers tell. What was only ever observed (database.py) is not in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.run import open_run
from dipaco_p2p.node.stages import check_next_stage
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Sealed
from dipaco_p2p.protocol.judgement import Check, Judgement
from dipaco_p2p.protocol.signing import PeerId

from .database import Database
from .ledger import Stage
from .model import Snapshot
from .refusals import Refusals
from .snapshot import Inputs, Live, take_snapshot

STAGES = ("warmup", "grid")

D = TypeVar("D", Check, Contribution, Judgement, ModuleVersion)


def rebuild(folder: Path, database: Database) -> list[Stage]:
    """Fill an empty `database` from a coordinator's `folder`; the stages, the first one first.

    Raises ConfigError if the folder holds no run, and IntegrityError for manifests that do not belong together; other
    documents that are damaged are left out, and counted.
    """
    refusals = Refusals()
    runs = [open_run(_read(path)) for name in STAGES if (path := _documents(folder / name) / "manifest.json").exists()]
    if not runs:
        raise ConfigError(f"`{folder}` holds no prepared run", hint="give the folder that `start --dir` was given")
    for before, after in zip(runs, runs[1:], strict=False):
        check_next_stage(before, after)
    database.require_run(runs[0])
    stages = [Stage(run, refusals) for run in runs]
    for stage in stages:
        take_documents(stage, folder / stage.run.manifest.stage)
        stage.first_seen.clear()  # nobody saw them
        database.write([write for write in stage.drain() if write[0] != "seen"])
    database.write([("refused", (reason, count)) for reason, count in refusals.counts.items()])
    return stages


def take_documents(stage: Stage, store: Path) -> None:
    """Take in what lies in a coordinator's `store` of the stage; nothing, if there is none."""
    refusals = stage.refusals
    for module in stage.run.topology.modules():
        versions = [*_sealed(ModuleVersion, store, f"version-{module}-*.json", refusals)]
        stage.take_versions(module, versions, now_s=0.0)
    stage.take_judgements(_sealed(Judgement, store, "judgement-*.json", refusals))
    counted = set(stage.missing())
    found = _sealed(Contribution, store, "contribution-*.json", refusals)
    stage.take_contributions([sealed for sealed in found if sealed.id in counted])
    stage.take_checks(_sealed(Check, store, "check-*.json", refusals))  # as far as this coordinator kept them


def _sealed(kind: type[D], store: Path, pattern: str, refusals: Refusals) -> Iterator[Any]:
    """The documents of a kind, in the order of their names."""
    for path in sorted(_documents(store).glob(pattern)):
        try:
            value = _read(path)
        except IntegrityError:
            value = None
        sealed: Sealed[D] | None = refusals.read(kind, value)
        if sealed is not None:
            yield sealed


def _documents(store: Path) -> Path:
    return store / "documents"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise IntegrityError(f"{path.name} was damaged on disk: {error}") from None


# -- a snapshot, when no collector is at work


def load_stages(database: Database) -> list[Stage]:
    """What `database` holds, every signature checked again, and what it remembers to have refused. Raises as
    `Database.load`."""
    return database.load(Refusals(dict(database.observed().refused)))


def with_documents(database: Database, folder: Path, *, now_s: float) -> Snapshot | None:
    """The same, and what a coordinator's `folder` has besides: a collector that was ended may lack the end of a run.
    The database is not changed."""
    stages = load_stages(database)
    for stage in stages:
        take_documents(stage, folder / stage.run.manifest.stage)
    return stored_snapshot(database, stages, now_s=now_s)


def stored_snapshot(database: Database, stages: list[Stage], *, now_s: float, join: str = "") -> Snapshot | None:
    """Of what was loaded from `database`; None if that is nothing."""
    if not stages:
        return None
    observed = database.observed()
    judged_s = [sealed.document.at_s for stage in stages for sealed in stage.judgements.values()]
    heard_s = max([*judged_s, *([observed.heard_s] if observed.heard_s is not None else [])], default=None)
    live = Live(last_seen_s={PeerId(peer): at_s for peer, at_s in observed.last_seen_s.items()}, heard_s=heard_s)
    return take_snapshot(Inputs(stages=tuple(stages), live=live, refused=observed.refused, join=join), now_s=now_s)
