"""Manifests of runs that nobody trains on text: what only training reads is a placeholder."""

from __future__ import annotations

from collections.abc import Sequence

from dipaco_p2p.config import PROTOCOL_VERSION, RunConfig
from dipaco_p2p.protocol.documents import BlobRef, GenesisRef, Manifest, Sealed, ShardRef, seal
from dipaco_p2p.protocol.signing import Signer

NOTHING = BlobRef.of(b"nobody reads it here")


def sealed_manifest(
    signer: Signer,
    config: RunConfig,
    *,
    shard: BlobRef = NOTHING,
    sequences: int = 1,
    shards: Sequence[ShardRef] | None = None,
    optimizer: BlobRef = NOTHING,
    genesis: Sequence[GenesisRef] | None = None,
) -> Sealed[Manifest]:
    """Of a run with one stage; every path has the same `shard`, of so many `sequences`, unless there are `shards`;
    `genesis` may be left out."""
    if shards is None:
        shards = [ShardRef(path=path, blob=shard, sequences=sequences) for path in config.topology.paths()]
    if genesis is None:
        genesis = [GenesisRef(module=module, blob=NOTHING) for module in config.topology.modules()]
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        config=config,
        stage="grid",
        admission="open",
        tokenizer=NOTHING,
        router=NOTHING,
        optimizer=optimizer,
        shards=tuple(shards),
        validation=NOTHING,
        holdout=NOTHING,
        router_split=NOTHING,
        genesis=tuple(genesis),
        author=signer.peer,
    )
    return seal(signer, manifest)
