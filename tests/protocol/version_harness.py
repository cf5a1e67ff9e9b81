"""A chain of made-up versions: a manifest, and good successors to change something in."""

from __future__ import annotations

import dataclasses
from typing import Any

from dipaco_p2p.canonical import digest
from dipaco_p2p.config import OuterConfig, RoundsConfig, RunConfig
from dipaco_p2p.protocol.documents import (
    BlobRef,
    GenesisRef,
    Manifest,
    ModuleVersion,
    Sealed,
    ShardRef,
    Share,
    seal,
)
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId

COORDINATOR, LEADER = Signer(bytes([1]) * 32), Signer(bytes([2]) * 32)
MODULE, PATH = ModuleId(1, 1), PathId((0, 1, 0))
ROUNDS = 3


def blob(text: str) -> BlobRef:
    return BlobRef.of(text.encode())


CONFIG = RunConfig(rounds=RoundsConfig(rounds=ROUNDS), outer=OuterConfig(lr=0.5))
SHARDS = tuple(ShardRef(path=path, blob=blob(f"shard {path}"), sequences=7) for path in CONFIG.topology.paths())
MANIFEST = Manifest(
    protocol=1,
    config=CONFIG,
    stage="grid",
    admission="open",
    tokenizer=blob("tokenizer"),
    router=blob("router"),
    optimizer=blob("optimizer"),
    shards=SHARDS,
    validation=blob("validation"),
    holdout=blob("holdout"),
    router_split=blob("router split"),
    genesis=tuple(GenesisRef(module=m, blob=blob(f"genesis {m}")) for m in CONFIG.topology.modules()),
    author=COORDINATOR.peer,
)
GENESIS = genesis_version(MANIFEST, MODULE)


def share(name: str, *, weight: float = 1.0, tokens: int = 100, base: int = 0) -> Share:
    return Share(
        contribution=digest(name.encode()),
        path=PATH,
        peer=PeerId(f"peer {name}"),
        base_version=base,
        weight=weight,
        tokens=tokens,
        norm=1.0,
        loss=2.0,
    )


def shares(*names: str, base: int = 0) -> tuple[Share, ...]:
    """Of equal weight, in the order of the contributions' ids."""
    found = (share(name, weight=1 / len(names), base=base) for name in names)
    return tuple(sorted(found, key=lambda one: one.contribution))


def child(parent: ModuleVersion = GENESIS, /, **changes: Any) -> ModuleVersion:
    """A good successor, but for the changes."""
    number = parent.version + 1
    good: dict[str, Any] = {
        "version": number,
        "parent": parent.digest,
        "snapshot": blob(f"snapshot {number}"),
        "update": blob(f"update {number}"),
        "state": blob(f"state {number}"),
        "rollback": None,
        "shares": shares(f"a{number}", f"b{number}", f"c{number}", base=number - 1),
        "author": LEADER.peer,
    }
    values = {**good, **changes}
    weight = parent.weight + sum(one.tokens for one in values["shares"])
    return dataclasses.replace(parent, **{"grant": digest(b"a grant"), "weight": weight, **values})


def chain(*documents: ModuleVersion) -> list[Sealed[ModuleVersion]]:
    return [seal(LEADER, document) for document in documents]
