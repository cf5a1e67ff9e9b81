"""A leader whose work is judged, and authors that make work for it by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from runtime_harness import TinyLeader, World, offer
from tiny_run import contribution_of, tiny_config
from virtual_time import eventually

from dipaco_p2p.config import CompressionConfig, JudgingConfig, RunConfig
from dipaco_p2p.core.outer.compress import INT8, compress, encode_compressed
from dipaco_p2p.node.node import Member, send
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.judge import Measure
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Part, Sealed, seal
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId
from simulation.training import toy_gains

MODULE = ModuleId(1, 0)
PATH, OTHER_PATH = PathId((0, 0, 0)), PathId((0, 0, 1))
GOOD, BAD = 1e-3, -1e-3


def judged_config(*, judges: int = 2, rounds: int = 9, min_paths: int = 1, **changes: Any) -> RunConfig:
    config = tiny_config(rounds=rounds, min_paths=min_paths, **changes)
    return replace(
        config,
        judging=JudgingConfig(judges=judges, sequences=8, audited=0),
        compression=CompressionConfig(uplink=INT8),
    )


def gradient(run: Run, module: ModuleId, size: float) -> bytes:
    """Takes `size` from every parameter, more or less: so that the toy loss falls by that."""
    noise = np.random.default_rng(0).normal(0, abs(size) / 10, run.layout(module).size)
    return encode_compressed(compress((size + noise).astype(np.float32), codec=run.config.compression.uplink)[0])


class Scene:
    """A leader of MODULE, and authors that make work by hand."""

    def __init__(self, world: World, leader: TinyLeader, owner: Leader) -> None:
        self.world, self.run, self.leader, self.owner = world, world.run, leader, owner

    async def author(self, number: int) -> Member:
        node = self.world.peer(number)
        await node.watch.refresh()
        return node

    async def work(
        self,
        author: Member,
        size: float,
        *,
        path: PathId = PATH,
        gives: bool = True,
        to: PeerId | None = None,
    ) -> Sealed[Contribution]:
        """A contribution to MODULE whose other parts are like it; `gives` says whether anybody has these: the seed
        node, or `to`."""
        parts = []
        for module in path.modules():
            if module != MODULE:
                payload = gradient(self.run, module, size)
                base = genesis_version(self.run.manifest, module)
                parts.append(Part(base_digest=base.digest, payload=BlobRef.of(payload)))
                if gives:
                    await send(author, to or self.run.manifest.author, payload)
        head, payload = self.owner.head, gradient(self.run, MODULE, size)
        document = contribution_of(
            self.run,
            author.swarm.signer,
            payload,
            module=MODULE,
            path=path,
            base_version=head.version,
            base_digest=head.digest,
            others=tuple(parts),
        )
        return seal(author.swarm.signer, document)

    async def push(self, author: Member, size: float, **how: Any) -> str:
        """Its id."""
        sealed = await self.work(author, size, **how)
        await offer(author, self.leader.peer, sealed, gradient(self.run, MODULE, size))
        return sealed.id

    async def version(self, number: int) -> None:
        await eventually(lambda: self.owner.head.version >= number)

    def expired(self) -> dict[str, str]:
        return {event["id"]: event["reason"] for event in self.leader.events if event["ev"] == "expired"}

    def counted(self) -> set[str]:
        return {share.contribution for one in self.leader.chain.ledger.versions for share in one.document.shares}


@asynccontextmanager
async def scene(
    folder: Path, *, measure: Measure = toy_gains, others: Sequence[int] = (), **config: Any
) -> AsyncIterator[Scene]:
    """With a leader, and `others` that own modules."""
    async with World(folder, config=judged_config(**config), measure=measure) as world:
        for number in others:
            world.leader(number)
        leader = world.leader(50)
        yield Scene(world, leader, await leader.lead(MODULE))
