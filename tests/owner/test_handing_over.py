"""What a leader does before it goes: its modules are led by others before anybody waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from group_harness import MODULE, make_versions, require_verified
from leaders_harness import is_safe, on_stage, seed_away, seed_back
from virtual_time import eventually

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.swarm.api import HEADER_BYTES_MAX


async def test_leaving_hands_over_at_once(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, author)
        await second.node.watch.refresh()
        await first.node.watch.refresh()
        await first.ownership.leave()
        assert second.ownership.modules == [MODULE] and first.ownership.modules == []
        assert [event["to"] for event in first.events if event["ev"] == "handed_over"] == [second.peer]
        assert second.owner(MODULE).head.version == 1
        await make_versions(world, second, author, seed=9)
        require_verified(world, versions=2)


async def test_leaving_hands_over_what_it_was_just_taking(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await second.node.watch.refresh()
        await first.node.watch.refresh()
        read, may_read = first.chain.state.read_patiently, asyncio.Event()

        async def slow(*args: Any, **kwargs: Any) -> Any:
            await may_read.wait()
            return await read(*args, **kwargs)

        first.chain.state.read_patiently = slow  # type: ignore[method-assign]
        taking = asyncio.create_task(first.ownership.take(MODULE))
        await eventually(lambda: first.ownership._taking[MODULE].locked())
        leaving = asyncio.create_task(first.ownership.leave())
        await asyncio.sleep(0.01)  # longer, and the seed node would take it back
        may_read.set()
        await asyncio.gather(taking, leaving)
        assert second.ownership.modules == [MODULE] and first.ownership.modules == []
        assert [event["ev"] for event in first.events if event["ev"] in ("leads", "handed_over")][-1] == "handed_over"


async def test_leaving_hands_over_without_the_seed_as_well(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, author)
        await seed_away(world, first, second)
        await first.ownership.leave()
        assert second.ownership.modules == [MODULE] and first.ownership.modules == []
        assert second.owner(MODULE).head.version == 1
        await make_versions(world, second, author, seed=9)
        await seed_back(world, second)
        await eventually(lambda: is_safe(second))
        require_verified(world, versions=2)


async def test_leaving_hands_over_though_no_heartbeat_came_in_time(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, author)
        first.node.watch.heartbeats.clear()
        await first.ownership.leave()
        assert [event["to"] for event in first.events if event["ev"] == "handed_over"] == [world.seed.node.peer]
        assert MODULE in world.seed.ownership.modules


async def test_leaving_hands_over_after_more_terms_than_a_call_has_room_for(tmp_path: Path) -> None:
    """Attack: a member of the group granted itself some hundred terms while the seed was away, and then the next to
    somebody else. That leader's call to its successor had no room for the grants of all, so its program failed when it
    left, before it had handed over anything."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, author)
        await seed_away(world, first, second)
        for _ in range(700):
            first.node.mandates.grant_next(first.swarm.signer, MODULE, leader=first.peer, mirrors=(second.peer,))
        await first.owner(MODULE).renew()
        assert len(canonical_bytes([one.to_dict() for one in first.node.mandates.newest(MODULE)])) > HEADER_BYTES_MAX
        await first.ownership.leave()
        assert second.ownership.modules == [MODULE] and first.ownership.modules == []
        await make_versions(world, second, author, seed=9)
        await seed_back(world, second)
        await eventually(lambda: is_safe(second))
        require_verified(world, versions=2)
