"""A snapshot from the tables alone, when no collector is at work."""

from __future__ import annotations

from pathlib import Path

from dipaco_p2p.protocol.signing import PeerId

from .database import Database
from .live import Live
from .model import Snapshot
from .rebuild import take_documents
from .refusals import Refusals
from .rows import records_of
from .snapshot import Tables, take_snapshot
from .tables import Stage


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
    records = tuple(map(records_of, stages))
    return take_snapshot(Tables(stages=records, live=live, refused=observed.refused, join=join), now_s=now_s)
