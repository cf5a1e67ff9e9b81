"""What a new leader gathers before it leads, when some of those whom it asks are hostile: any stranger may have been a
mirror, and while the new leader waits for it nobody leads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_harness import MODULE, OTHER_PATH, Group, GroupMember, contribute, counted, document, make_versions, of_group
from runtime_harness import World
from virtual_time import eventually

from dipaco_p2p.node.calls import GetBranch, GetOpen
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Sealed, seal
from dipaco_p2p.protocol.versions import Branch
from dipaco_p2p.swarm.calls import Range, ReadBlob
from dipaco_p2p.topology import PathId

TRICKLE_S, TRICKLE_BYTES = 10.0, 4096
"""As slowly and as little as one may answer and is still believed to send a blob."""
MADE_UP = "ab" * 32


def made_up(world: World, group: Group, bad: GroupMember, **changes: Any) -> Sealed[Contribution]:
    """What a leader could have admitted, but for `changes`; nobody has its payload."""
    payload = BlobRef(digest=MADE_UP, size=world.run.payload_bytes_max(MODULE))
    honest = replace(document(world, group.leader.chain.ledger, bad.node, b"x"), payload=payload)
    return seal(bad.swarm.signer, replace(honest, **changes))


def turn_hostile(bad: GroupMember, listed: Sequence[Sealed[Contribution]], sizes: dict[str, int]) -> list[str]:
    """It lists what it made up beside what it keeps, trickles all blobs, and leads nothing; the blobs that are asked of
    it. `sizes` are those of blobs that it does not have."""
    asked: list[str] = []

    async def opens(sender: Any, request: GetOpen) -> Any:
        kept = {sealed.id: sealed for sealed in [*bad.ledger.kept.values(), *listed]}
        return items_reply(kept[id_] for id_ in sorted(kept) if id_ > request.after)

    async def trickle(sender: Any, request: ReadBlob) -> Range:
        asked.append(request.digest)
        await asyncio.sleep(TRICKLE_S)
        size = bad.node.store.size(request.digest) or sizes.get(request.digest, 0)
        body = bad.node.store.get(request.digest) or bytes(size)
        return Range(size=size, body=body[request.offset :][: min(request.length, TRICKLE_BYTES)])

    bad.swarm._dispatcher._handlers[GetOpen.METHOD] = GetOpen.door(opens)
    bad.swarm._dispatcher._handlers[ReadBlob.METHOD] = ReadBlob.door(trickle)
    bad.ownership._may_take = lambda: False
    return asked


async def led_anew(world: World, group: Group) -> float:
    """Kill the leader; how long it takes until another leads."""
    old, began_s = group.leader, world.clock.now_s()
    await group.kill(old)
    await eventually(lambda: bool(group.leading) or MODULE in world.seed.ownership.modules)
    return world.clock.now_s() - began_s


async def test_a_holder_that_trickles_what_it_made_up_keeps_nobody_from_leading(tmp_path: Path) -> None:
    """Attack: one mirror listed a contribution of its own, and nobody led the module for as long as it sent 4 KiB in
    ten seconds: for 900 s, where the honest case takes 7."""
    async with of_group(tmp_path, numbers=(50, 51, 52, 53)) as (world, group, author):
        await make_versions(world, group.leader, author)
        receipt = await contribute(world, group.leader, author, seed=5, path=OTHER_PATH)
        bad = group.mirrors[-1]
        listed = [made_up(world, group, bad, tokens=100 + number) for number in range(20)]
        asked = turn_hostile(bad, listed, {MADE_UP: listed[0].document.payload.size})
        assert await led_anew(world, group) < 5 * world.run.config.liveness.heartbeat_ttl_s
        assert MADE_UP in asked
        await eventually(lambda: receipt.document.contribution in counted(group.leader))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "cd" * 32},
        {"path": PathId((0, 1, 0))},
        {"payload": BlobRef(digest=MADE_UP, size=2**40)},
    ],
    ids=["of another run", "of a path elsewhere", "too large"],
)
async def test_what_no_leader_can_have_admitted_is_not_fetched(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Attack: a mirror that sent quickly filled the new leader's memory with a payload of 2^40 bytes."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        bad = group.mirrors[-1]
        listed = made_up(world, group, bad, **changes)
        asked = turn_hostile(bad, [listed], {MADE_UP: listed.document.payload.size})
        await led_anew(world, group)
        assert MADE_UP not in asked


async def test_whoever_lies_about_its_branch_and_trickles_it_keeps_nobody_from_leading(tmp_path: Path) -> None:
    async with of_group(tmp_path, numbers=(50, 51, 52, 53)) as (world, group, author):
        await make_versions(world, group.leader, author)
        bad = group.mirrors[-1]
        listed = [made_up(world, group, bad, tokens=100 + number) for number in range(20)]
        turn_hostile(bad, listed, {MADE_UP: listed[0].document.payload.size})

        async def lie(sender: Any, request: GetBranch) -> Branch:
            branch = bad.ledger.branch
            return replace(branch, final=branch.version, weight=branch.weight + 1)

        bad.swarm._dispatcher._handlers[GetBranch.METHOD] = GetBranch.door(lie)
        assert await led_anew(world, group) < 8 * world.run.config.liveness.heartbeat_ttl_s
