"""How long a leaderboard takes to read its tables at a start: documents made by hand, signed, of a run that never was.

No tensors: a version names digests of nothing, since only whoever has the blobs looks at them.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.manifests import sealed_manifest
from dipaco_p2p.config import LevelConfig, ModelConfig, RoundsConfig, RunConfig, WarmupConfig
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.documents import (
    BlobRef,
    Contribution,
    GenesisRef,
    ModuleVersion,
    Sealed,
    Share,
    cosign,
    seal,
)
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId
from leaderboard.database import Database
from leaderboard.refusals import Refusals
from leaderboard.tables import Stage

MODULES = 16
"""Of each of two levels."""
SHARES = 6
PEERS = 64
TOKENS = 1024
_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """Of one start."""

    versions: int
    shares: int
    first_s: float
    """Every signature checked: a database that comes from elsewhere."""
    again_s: float
    """One that this program has written."""


def load_cost(seed: int, versions: int) -> LoadCost:
    """Write about `versions` versions, and read them in both ways."""
    with tempfile.TemporaryDirectory(prefix="dipaco-") as folder:
        path = Path(folder) / "leaderboard.sqlite"
        run, documents = _run(seed, versions), 0
        stage = Stage(run, Refusals())
        database = Database.open(path)
        for module in run.topology.modules():
            chain = list(_chain(run, module, random.Random(f"{seed} {module}")))
            stage.take_versions(module, [version for version, _ in chain], now_s=0.0)
            stage.take_contributions(one for _, contributions in chain for one in contributions)
            documents += len(chain)
            database.write(stage.drain())
        again_s = _timed_s(database, documents)
        database.close()
        path.with_suffix(".key").unlink()
        database = Database.open(path)
        first_s = _timed_s(database, documents)
        database.close()
    return LoadCost(versions=documents, shares=documents * SHARES, first_s=first_s, again_s=again_s)


def _timed_s(database: Database, versions: int) -> float:
    began_s = time.perf_counter()
    [stage] = database.load(Refusals())
    taken_s = time.perf_counter() - began_s
    assert sum(len(chain.versions) for chain in stage.chains.values()) == versions and not stage.missing()
    return taken_s


def _run(seed: int, versions: int) -> Run:
    levels = (LevelConfig(modules=MODULES, embedding=True, head=True), LevelConfig(modules=MODULES, blocks=1))
    config = RunConfig(
        name="loading",
        seed=seed,
        model=ModelConfig(width=16, heads=2, ffn_width=16, context=128, levels=levels),
        warmup=WarmupConfig(rounds=0),
        rounds=RoundsConfig(rounds=max(1, versions // (2 * MODULES))),
    )
    genesis = [
        GenesisRef(module=module, blob=BlobRef(digest=_DIGEST, size=4 * module_layout(config.model, module.level).size))
        for module in config.topology.modules()
    ]
    return Run(sealed_manifest(_signer(0), config, genesis=genesis))


def _chain(
    run: Run, module: ModuleId, chance: random.Random
) -> Iterator[tuple[Sealed[ModuleVersion], list[Sealed[Contribution]]]]:
    """Every version of one module, and what it counts."""
    parent, paths = genesis_version(run.manifest, module), run.topology.paths_through(module)
    coordinator, leader = _signer(0), _signer(1)
    for number in range(1, run.config.rounds.rounds + 1):
        work = sorted(
            (
                _contribution(run, parent, path, _signer(2 + chance.randrange(PEERS)), chance)
                for path in chance.sample(paths, SHARES)
            ),
            key=lambda sealed: (sealed.document.path, sealed.id),
        )
        version = ModuleVersion(
            run=run.id,
            module=module,
            version=number,
            parent=parent.digest,
            snapshot=_blob(chance),
            update=_blob(chance),
            state=_blob(chance),
            shares=tuple(_share(sealed) for sealed in work),
            clip_norm=None,
            lr=parent.lr,
            momentum=parent.momentum,
            norm_rule=parent.norm_rule,
            weight=parent.weight + SHARES * TOKENS,
            term=1,
            grant="0" * 64,
            author=leader.peer,
        )
        sealed = seal(leader, version)
        yield sealed.cosigned({coordinator.peer: cosign(coordinator, sealed)}), work
        parent = version


def _contribution(
    run: Run, base: ModuleVersion, path: PathId, author: Signer, chance: random.Random
) -> Sealed[Contribution]:
    document = Contribution(
        run=run.id,
        module=base.module,
        path=path,
        base_version=base.version,
        base_digest=base.digest,
        payload=_blob(chance),
        steps=30,
        tokens=TOKENS,
        loss=3.0,
        author=author.peer,
    )
    return seal(author, document)


def _share(sealed: Sealed[Contribution]) -> Share:
    document = sealed.document
    return Share(
        contribution=sealed.id,
        path=document.path,
        peer=document.author,
        base_version=document.base_version,
        weight=1 / SHARES,
        tokens=document.tokens,
        loss=document.loss,
    )


def _blob(chance: random.Random) -> BlobRef:
    return BlobRef(digest=chance.randbytes(32).hex(), size=1000)


def _signer(number: int) -> Signer:
    return Signer(bytes([number]) * 32)
