"""Two peers that lead when they are told to, and a seed node that comes and goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from group_harness import MODULE
from runtime_harness import TinyLeader, World
from tiny_run import tiny_config
from virtual_time import eventually

from dipaco_p2p.node.node import Member


@asynccontextmanager
async def on_stage(folder: Path, **changes: int) -> AsyncIterator[tuple[World, TinyLeader, TinyLeader, Member]]:
    """`scene` gets two peers that lead when they are told to; by default in groups of one."""
    config = tiny_config(**({"rounds": 30, "owners": 1} | changes))
    async with World(folder, config=config) as world:
        author = world.peer(60)
        await author.watch.refresh()
        yield world, world.leader(50), world.leader(51), author


async def seed_away(world: World, *leaders: TinyLeader) -> None:
    await world.kill_seed()
    await eventually(lambda: not any(leader.node.watch.seeds() for leader in leaders))


async def seed_back(world: World, *leaders: TinyLeader) -> None:
    await world.start_seed().node.presence.beat()
    await eventually(lambda: all(leader.node.watch.seeds() for leader in leaders))


def is_safe(leader: TinyLeader) -> bool:
    return leader.owner(MODULE)._replication.is_final
