"""Reads what a swarm left on disk into `Evidence`: histories, the seed's chains, and what recomputing them gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bootstrap.archives.verify import verify_stages
from bootstrap.folder import GRID, RunFolder
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.documents import ModuleVersion

from .evidence import Done, Event, Evidence, Link, Share
from .schedule import SEED_NODE


def gather(
    folder: Path, homes: Mapping[str, Path], *, done: Sequence[Done], ended_s: float, lost_disks: Iterable[str] = ()
) -> Evidence:
    """The evidence of the grid's stage; `folder` is the seed's, `homes` those of the volunteers by name.

    All programs must have ended. Raises DipacoError when there is no run.
    """
    files = RunFolder(folder)
    run, store = files.require()
    archive = SeedArchive(run, store)
    histories = {name: read_events(home.glob(f"runs/{run.id[:16]}*/history.jsonl")) for name, home in homes.items()}
    return Evidence(
        ttl_s=run.config.liveness.heartbeat_ttl_s,
        ended_s=ended_s,
        histories=histories | {SEED_NODE: read_events([files.stage(GRID) / "history.jsonl"])},
        chains={
            str(module): tuple(_link(sealed.document) for sealed in ledger.versions)
            for module, ledger in archive.ledgers.items()
        },
        kept=_kept([files.stage(GRID), *(path for home in homes.values() for path in home.glob("runs/*"))]),
        staleness=run.config.rounds.staleness,
        done=tuple(done),
        problems=tuple(f"{r.module}: {r.problem}" for r in verify_stages(files) if r.problem),
        lost_disks=frozenset(lost_disks),
    )


def peer_of(evidence: Evidence, name: str) -> str:
    """The peer id of a volunteer, as it said when it joined; empty if it never did."""
    return next((str(event["peer"]) for event in evidence.histories.get(name, ()) if event.ev == "joined"), "")


def read_events(paths: Iterable[Path]) -> tuple[Event, ...]:
    """The events of these history files, in the order of time."""
    rows = [row for path in paths for row in read_history(path)]
    rows.sort(key=lambda row: float(row["t"]))
    return tuple(
        Event(ev=row["ev"], t_s=float(row["t"]), values={k: v for k, v in row.items() if k not in ("ev", "t")})
        for row in rows
    )


def _kept(folders: Iterable[Path]) -> frozenset[str]:
    """Contributions in any ledger (dipaco_p2p/node/ledger.py names its files so)."""
    paths = (path for folder in folders for path in folder.glob("documents/open-*.json"))
    return frozenset(path.stem.rpartition("-")[2] for path in paths)


def _link(version: ModuleVersion) -> Link:
    shares = tuple(
        Share(
            id=share.contribution, path=str(share.path), peer=share.peer, base=share.base_version, tokens=share.tokens
        )
        for share in version.shares
    )
    return Link(version=version.version, digest=version.digest, term=version.term, shares=shares)
