"""A led module, an honest contributor, and the means to let rounds pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import TinyLeader, World, offer
from tiny_run import contribution_of, gradient_bytes, tiny_config
from virtual_time import eventually

from dipaco_p2p.config import SHARES_MAX, CompressionConfig
from dipaco_p2p.core.outer.compress import INT8
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.protocol.documents import Contribution
from dipaco_p2p.topology import ModuleId, PathId

MODULE = ModuleId(1, 0)
PATH = PathId((0, 0, 0))
TTL_S = tiny_config().liveness.heartbeat_ttl_s


class Stage:
    """A led module, an honest contributor, and the means to let rounds pass."""

    def __init__(self, world: World, leader: TinyLeader, owner: Leader, node: Member) -> None:
        self.world, self.leader, self.owner, self.node = world, leader, owner, node

    def document(self, payload: bytes, **changes: Any) -> Contribution:
        head = self.owner.head
        honest = {"module": MODULE, "path": PATH, "base_version": head.version, "base_digest": head.digest}
        return contribution_of(self.world.run, self.node.swarm.signer, payload, **(honest | changes))

    async def refusal(self, payload: bytes, **changes: Any) -> str:
        with pytest.raises(Refused) as caught:
            await offer(self.node, self.leader.peer, self.document(payload, **changes), payload)
        return caught.value.reason

    async def honest_round(self, number: int) -> None:
        payload, before = gradient_bytes(self.world.run, MODULE, seed=number), self.owner.head.version
        await offer(self.node, self.leader.peer, self.document(payload), payload)
        await eventually(lambda: self.owner.head.version == before + 1)

    async def hold_round_open(self) -> None:
        """Somebody claims the other path and never contributes: rounds now wait for the deadline."""
        await self.leader.node.presence.claim(PathId((0, 0, 1)), since_s=0.0)
        await self.leader.node.watch.refresh()


@asynccontextmanager
async def on_stage(
    folder: Path, *, rounds: int = 9, staleness: int = 1, contributions_max: int = SHARES_MAX, **faults: Any
) -> AsyncIterator[Stage]:
    config = replace(tiny_config(rounds=rounds), compression=CompressionConfig(uplink=INT8))
    config = replace(config, rounds=replace(config.rounds, staleness=staleness, contributions_max=contributions_max))
    async with World(folder, config=config, **faults) as world:
        leader = world.leader(50)
        owner = await leader.lead(MODULE)
        node = world.peer(60)
        await node.watch.refresh()
        yield Stage(world, leader, owner, node)
