"""Verifying a live run without a folder of it: what is final is gathered from the swarm, then verified as any archive.

Chains, contributions and blobs come from the archive, the owners and the keepers of old versions (protocol/keeping.py),
whoever of them is alive; each is checked against a signature or a digest, so nobody need be believed. So this goes on
when the coordinator and its folder are gone, or its archive has forgotten the first rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.entry import is_entry
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.node import Reader, open_reader
from dipaco_p2p.node.reading import open_connection
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.shardings import learn_shardings
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.ranges import Gathering, Offers
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.protocol.keeping import RANGE_VERSIONS, Range, range_of
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.folder import RunFolder

from ..folder import write_stage
from ..progress import stage
from .verify import ChainReport, verify_folder, verify_fork, verify_run

NOBODY = "nobody alive shows it"
ASKED_AT_ONCE = 16
"""How many peers that offer to keep, or that may tell a sharding, are asked at the same time. Both prove themselves, so
all peers are asked."""
NEWEST_MAX = RANGE_VERSIONS
"""Of how many newest versions the contributions may be gone: owners drop them when a version is final, and keepers have
them a little later. If more are gone, something is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """One stage."""

    run: Run
    archive: SeedArchive | None
    """None if nobody shows any of its chains."""
    unshown: Mapping[ModuleId, int] = field(default_factory=dict)
    """How many newest versions were left out of each chain, since nobody has what made them."""


async def verify_source(source: str, to: Path | None) -> list[ChainReport]:
    """Verify the run in a folder, or the live one that `source` leads to: then all is kept in `to`, if it is named, and
    a later call goes on there. Raises ConfigError, and as joining does."""
    if not is_entry(source):
        if to is not None:
            raise ConfigError("`--dir` is for what is gathered of a live run", hint="leave it out to verify a folder")
        return verify_folder(Path(source))
    with _folder(to) as folder, folder_lock(folder, hint="end it, or choose another --dir"):
        async with open_connection(source) as found:
            stages = await fetch_stages(found.swarm, found.host, expected=found.run)
            files = RunFolder(folder)
            gathered = [
                await gather(run, ScopedSwarm(found.swarm, run.id), found.clock, files.store(run.manifest.stage))
                for run in stages
            ]
        return verify_gathered(files, gathered)


async def gather(run: Run, swarm: Swarm, clock: Clock, store: Store) -> Gathered:
    """All of a stage that is final, as far as somebody has it, in `store`; `swarm` is the stage's own."""
    write_stage(store, run.sealed)
    node = open_reader(run, swarm, clock, store)
    await node.watch.refresh()
    archive = SeedArchive(run, store, must_be_whole=False)
    gathering, offers = Gathering(node, archive), Offers(node, lambda: archive.ledgers.values())
    await _learn_shardings(node)
    silent = set[PeerId]()  # keys cost nothing, and neither do offers: each of them is waited for once
    for module in archive.ledgers:
        likely = _tellers(node, module)
        await gathering.follow(module, likely)
        others = [peer for peer, beat in node.watch.heartbeats.items() if beat.keeps and peer not in likely]
        silent.update(await gathering.follow(module, sorted({*others} - silent), at_once=ASKED_AT_ONCE))
    if not any(ledger.versions for ledger in archive.ledgers.values()):
        return Gathered(run=run, archive=None)
    await offers.learn_count()
    offers.look()
    total, done = sum(ledger.head.version for ledger in archive.ledgers.values()), 0
    lacking: dict[ModuleId, list[int]] = {}
    with stage(f"Gathering the {run.manifest.stage}'s versions", total=total) as advance:
        for module, ledger in archive.ledgers.items():
            lacking[module] = []
            await gathering.bring(ledger.genesis.snapshot, offers.holders(Range(module, 0)))
            for version in range(1, ledger.head.version + 1):
                if not await gathering.bring_version(module, version, offers.holders(range_of(module, version))):
                    lacking[module].append(version)
                done += 1
                advance(done)
    unshown = {module: _leave_newest(archive.ledgers[module], store, found) for module, found in lacking.items()}
    return Gathered(run=run, archive=SeedArchive(run, store), unshown=unshown)


def _leave_newest(ledger: Ledger, store: Store, lacking: Sequence[int]) -> int:
    """Leave the last versions out of the chain if what made them is gone, and these only; how many they are."""
    head, count = ledger.head.version, len(lacking)
    if not count or count > NEWEST_MAX or count == head or lacking[0] != head - count + 1:
        return 0
    for version in reversed(lacking):
        store.drop_document(f"version-{ledger.module}-{version:08d}")
    return count


def verify_gathered(files: RunFolder, gathered: Sequence[Gathered]) -> list[ChainReport]:
    """Verify what was gathered of all stages, and that each begins where the one before ended."""
    reports: list[ChainReport] = []
    for found in gathered:
        name, archive = found.run.manifest.stage, found.archive
        if archive is None:
            for module in found.run.topology.modules():
                reports.append(ChainReport(stage=name, module=module, versions=0, contributions=0, problem=NOBODY))
            continue
        total = sum(len(ledger.versions) for ledger in archive.ledgers.values())
        with stage(f"Verifying the {name}'s chains", total=total) as advance:
            checked = verify_run(found.run, files.store(name), archive, on_progress=advance)
        reports += [replace(report, unshown=found.unshown.get(report.module, 0)) for report in checked]
    for before, after in itertools.pairwise(gathered):
        if before.archive is not None:
            reports += verify_fork(after.run, before.archive, before.run)
    return reports


async def _learn_shardings(node: Reader) -> None:
    """From the seeds, else from anybody: a sharding proves itself."""
    await learn_shardings(node)
    gate = asyncio.Semaphore(ASKED_AT_ONCE)

    async def learn(peer: PeerId) -> None:
        async with gate:
            await learn_shardings(node, of=[peer])

    await asyncio.gather(*map(learn, sorted(node.watch.volunteers())))


def _tellers(node: Reader, module: ModuleId) -> list[PeerId]:
    """Seeds, and whoever owns the module."""
    watch, grant = node.watch, node.mandates.grant(module)
    return list(dict.fromkeys([*watch.seeds(), *watch.heads[module], *(grant.group if grant else ())]))


@contextmanager
def _folder(to: Path | None) -> Iterator[Path]:
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        yield to
        return
    with tempfile.TemporaryDirectory(prefix="dipaco-verify-") as folder:
        yield Path(folder)
