"""A push ends with a receipt or a reason, whatever happens to the leader on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import Leader, World
from tiny_run import contribution_of, gradient_bytes, signer, tiny_config
from virtual_time import eventually, play

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import Contribution, Receipt, seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId, PathId
from peers.push import BEHIND_TTLS, push

MODULE = ModuleId(1, 0)


def on_stage(folder: Path, scene: Callable[[World, Leader, Member], Awaitable[None]], **faults: Any) -> None:
    async def scenario() -> None:
        async with World(folder, config=tiny_config(rounds=9), **faults) as world:
            node = world.peer(60)
            leader = world.leader(50)
            await leader.lead(MODULE)
            await node.watch.refresh()
            await scene(world, leader, node)

    play(scenario)


def document(world: World, node: Member, payload: bytes, **values: Any) -> Contribution:
    return contribution_of(world.run, node.swarm.signer, payload, module=MODULE, path=PathId((0, 0, 0)), **values)


def test_a_push_ends_with_the_leaders_receipt(tmp_path: Path) -> None:
    async def scene(world: World, leader: Leader, node: Member) -> None:
        payload = gradient_bytes(world.run, MODULE)
        receipt = (await push(node, document(world, node, payload), payload)).document
        assert (receipt.author, receipt.round) == (leader.peer, 0)
        await eventually(lambda: receipt.contribution in world.seed.archive.ledgers[MODULE].counted)

    on_stage(tmp_path, scene)


def test_a_push_survives_lost_and_doubled_messages(tmp_path: Path) -> None:
    async def scene(world: World, leader: Leader, node: Member) -> None:
        world.network.loss, world.network.duplication = 0.2, 0.5
        payload = gradient_bytes(world.run, MODULE)
        receipt = (await push(node, document(world, node, payload), payload)).document
        await eventually(lambda: receipt.contribution in leader.owner(MODULE)._ledger.counted)
        assert len(leader.owner(MODULE)._ledger.counted) == 1

    on_stage(tmp_path, scene)


def test_a_push_waits_for_the_successor_of_a_dead_leader(tmp_path: Path) -> None:
    async def scene(world: World, leader: Leader, node: Member) -> None:
        other = world.leader(51)
        await other.node.watch.refresh()
        await leader.die(world)
        payload = gradient_bytes(world.run, MODULE)
        pushing = asyncio.create_task(push(node, document(world, node, payload), payload))
        await asyncio.sleep(world.run.config.liveness.heartbeat_ttl_s + 1.0)  # until then it counts as alive
        assert not pushing.done()
        await other.lead(MODULE)
        assert (await pushing).document.author == other.peer

    on_stage(tmp_path, scene)


def test_a_leader_that_is_behind_what_we_trained_from_gets_time_to_find_it(tmp_path: Path) -> None:
    async def scene(world: World, leader: Leader, node: Member) -> None:
        payload, patience_s = gradient_bytes(world.run, MODULE), BEHIND_TTLS * world.run.config.liveness.heartbeat_ttl_s
        ahead = document(world, node, payload, base_version=1, base_digest="a" * 64)
        pushing = asyncio.create_task(push(node, ahead, payload))
        await asyncio.sleep(patience_s - 1.0)
        assert not pushing.done()
        await asyncio.sleep(3.0)
        assert pushing.done()
        with pytest.raises(Refused) as caught:
            await pushing
        assert caught.value.reason == Reason.UNKNOWN_BASE

    on_stage(tmp_path, scene)


def test_a_push_that_nobody_wants_ends_with_the_reason(tmp_path: Path) -> None:
    async def scene(world: World, leader: Leader, node: Member) -> None:
        with pytest.raises(Refused) as caught:
            await push(node, document(world, node, b"no tensors"), b"no tensors")
        assert caught.value.reason == Reason.MALFORMED

    on_stage(tmp_path, scene)


def test_a_receipt_for_something_else_is_not_believed(tmp_path: Path) -> None:
    async def scene(world: World, leader: Leader, node: Member) -> None:
        payload = gradient_bytes(world.run, MODULE)
        contribution = document(world, node, payload)
        handlers = leader.swarm._dispatcher._handlers
        honest, asked = handlers["module.contribute"], []

        async def lie(sender: Any, header: Any, body: Any) -> Reply:
            asked.append(sender)
            receipt = Receipt(
                run=world.run.id, contribution="0" * 64, module=MODULE, round=0, term=1, holders=(), author=leader.peer
            )
            if len(asked) == 1:
                return Reply({"receipt": seal(leader.swarm.signer, receipt).to_dict()})
            if len(asked) == 2:
                return Reply({"receipt": seal(signer(99), _by(signer(99).peer, receipt)).to_dict()})
            return await honest(sender, header, body)

        handlers["module.contribute"] = lie
        receipt = (await push(node, contribution, payload)).document
        assert len(asked) == 3
        assert receipt.contribution == seal(node.swarm.signer, contribution).id and receipt.author == leader.peer

    on_stage(tmp_path, scene)


def _by(author: Any, receipt: Receipt) -> Receipt:
    from dataclasses import replace

    return replace(receipt, author=author)
