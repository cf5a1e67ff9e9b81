"""What closes a round when the disk has lost payloads, and that versions are made one at a time."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from group_harness import (
    MODULE,
    OTHER_PATH,
    PATH,
    Group,
    GroupMember,
    contribute,
    counted,
    expired,
    make_versions,
    of_group,
    require_safe,
)
from mirror_harness import ONE, on_shelf
from runtime_harness import World, flip, offer
from tiny_run import SEED_NUMBER, contribution_of, gradient_bytes, signer, tiny_config
from virtual_time import eventually

from dipaco_p2p.core.arrays import Floats, tree_norm
from dipaco_p2p.core.outer import outer_step as outer
from dipaco_p2p.core.outer.outer_step import OuterState
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner import version
from dipaco_p2p.protocol import admission, norms
from dipaco_p2p.protocol.admission import ADMITTED
from dipaco_p2p.protocol.documents import BlobRef, Receipt, Sealed, cosign, seal
from dipaco_p2p.protocol.signing import PeerId


def payload_name(world: World, *, seed: int) -> str:
    """Of what `contribute` sends with this seed."""
    return BlobRef.of(gradient_bytes(world.run, MODULE, seed=seed)).digest


def rot(store: Store, name: str) -> None:
    """One bit of a blob changes on the disk."""
    [path] = (store.folder / "blobs").rglob(name)
    flip(path)


def stores(world: World, group: Group) -> dict[PeerId, Store]:
    return {member.peer: member.node.store for member in group.members} | {world.seed.node.peer: world.seed.node.store}


async def everywhere(world: World, group: Group, name: str) -> None:
    """Wait until all who should keep a blob have it."""
    await eventually(lambda: all(store.size(name) is not None for store in stores(world, group).values()))


async def lost_everywhere(world: World, group: Group, author: Member) -> Sealed[Receipt]:
    """Have a contribution with a receipt, whose payload all holders then lose; the receipt."""
    name = payload_name(world, seed=1)
    receipt = await contribute(world, group.leader, author, seed=1)
    await everywhere(world, group, name)
    for store in stores(world, group).values():
        rot(store, name)
    return receipt


def expiries(member: GroupMember) -> dict[str, str]:
    return {event["id"]: event["reason"] for event in member.said("expired")}


@pytest.mark.parametrize("is_missing", [False, True], ids=["damaged", "missing"])
async def test_a_payload_that_its_leader_has_lost_comes_from_another_holder(tmp_path: Path, is_missing: bool) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, name = group.leader, payload_name(world, seed=1)
        receipt = await contribute(world, leader, author, seed=1)
        rot(leader.node.store, name)
        if is_missing:
            leader.node.store.drop(name)
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: leader.ledger.head.version == 1)
        assert len(leader.ledger.head.shares) == 2
        assert counted(leader).count(receipt.document.contribution) == 1 and not expiries(leader)
        await require_safe(world, group, versions=1)


async def test_what_all_holders_have_lost_is_reported_and_the_round_closes_without_it(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, receipt = group.leader, await lost_everywhere(world, group, author)
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: leader.ledger.head.version == 1)
        assert [share.path for share in leader.ledger.head.shares] == [OTHER_PATH]
        assert expiries(leader) == {receipt.document.contribution: "payload-lost"}
        await make_versions(world, leader, author, seed=3)
        await require_safe(world, group, versions=2)


async def test_a_round_of_which_nothing_is_left_goes_on_waiting(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, receipt = group.leader, await lost_everywhere(world, group, author)
        await eventually(lambda: receipt.document.contribution in expiries(leader))
        assert leader.ledger.head.version == 0 and leader.leads
        assert leader.owner(MODULE).open_round().entries == ()
        again = await contribute(world, leader, author, seed=1)
        assert again.document.contribution == receipt.document.contribution, "it may come once more"
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: leader.ledger.head.version == 1)
        assert counted(leader).count(receipt.document.contribution) == 1


async def test_a_disk_that_loses_it_again_and_again_does_not_hold_the_round_up(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, name = group.leader, payload_name(world, seed=1)
        receipt = await contribute(world, leader, author, seed=1)
        read = leader.node.store.get

        def get(wanted: str) -> bytes | None:
            return None if wanted == name else read(wanted)

        leader.node.store.get = get  # type: ignore[method-assign]
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: leader.ledger.head.version == 1)
        assert expiries(leader) == {receipt.document.contribution: "payload-lost"}


async def test_what_makes_no_finite_step_expires_and_the_round_closes_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two outer gradients whose sum is no float32: this leader and every later one would fail at it for ever."""
    for module in (admission, version):
        monkeypatch.setattr(module, "judge_norm", lambda norm, norms, *, base: ADMITTED)
    monkeypatch.setattr(norms, "FURTHEST_MULTIPLE", math.inf)
    step = outer.outer_step

    def outer_step(state: OuterState, gradient: Floats, **named: Any) -> Any:
        if tree_norm(gradient) > 1e20:
            raise ValueError("values that are not finite cannot be compressed")
        return step(state, gradient, **named)

    monkeypatch.setattr(outer, "outer_step", outer_step)
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        huge = await contribute(world, leader, author, seed=1, size=2e33)
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: leader.ledger.head.version == 1)
        assert leader.leads and [share.path for share in leader.ledger.head.shares] == [OTHER_PATH]
        assert expiries(leader) == {huge.document.contribution: "not-finite"}
        await make_versions(world, leader, author, seed=3)
        await require_safe(world, group, versions=2)


async def test_a_mirror_that_has_lost_a_payload_gets_it_with_the_version(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, (mirror, _), name = group.leader, group.mirrors, payload_name(world, seed=1)
        await contribute(world, leader, author, seed=1)
        await everywhere(world, group, name)
        for holder in (mirror.node, world.seed.node):
            rot(holder.store, name)
        await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: leader.ledger.head.version == 1)
        await eventually(lambda: mirror.peer in leader.ledger.versions[0].cosignatures)
        assert not expiries(leader)
        await require_safe(world, group, versions=1)


async def test_who_takes_over_gets_what_its_own_disk_has_lost_from_the_others(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, name = group.leader, payload_name(world, seed=1)
        receipt = await contribute(world, leader, author, seed=1)
        await everywhere(world, group, name)
        for mirror in group.mirrors:
            rot(mirror.node.store, name)
        await group.kill(leader)
        await expired(world)
        await eventually(lambda: len(group.leading) == 1 and group.leader.ledger.head.version == 1)
        assert counted(group.leader) == [receipt.document.contribution]
        assert not expiries(group.leader)


async def test_versions_are_made_one_at_a_time(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        async with leader.node.averaging:  # as while another module's is made
            await contribute(world, leader, author, seed=1)
            await contribute(world, leader, author, seed=2, path=OTHER_PATH)
            await expired(world)
            assert leader.ledger.head.version == 0
        await eventually(lambda: leader.ledger.head.version == 1)


async def test_versions_are_made_again_one_at_a_time(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        shelf.adopt(ONE, term=1)
        version, _ = shelf.version(1)
        async with shelf.node.averaging:
            keeping = asyncio.create_task(shelf.keep(version))
            await asyncio.sleep(2.0)
            assert not keeping.done()
        await keeping
        assert shelf.ledger.head == version.document


async def test_a_payload_stays_while_another_contribution_names_it(tmp_path: Path) -> None:
    """Anybody can send another's payload once more: the first to be final must not take it from the second."""
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        shelf.adopt(ONE, term=1)
        (first, payload), copier = shelf.contribution(1), signer(77)
        version, _ = shelf.version(1)
        copied = contribution_of(shelf.run, copier, payload, module=MODULE, path=PATH)
        shelf.chain.add(seal(copier, copied))
        await shelf.keep(version)
        shelf.chain.note_final(1, cosign(signer(SEED_NUMBER), version))
        assert first.id not in shelf.ledger.kept
        assert shelf.node.store.get(BlobRef.of(payload).digest) == payload


async def test_the_last_contribution_that_a_round_waits_for_closes_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dipaco_p2p.owner.leader.TICK_S", 1000.0)
    async with World(tmp_path, config=tiny_config(rounds=9)) as world:
        leader = world.leader(50)
        led = await leader.lead(MODULE)
        node = world.peer(60)
        await node.watch.refresh()
        base = {"module": MODULE, "base_digest": led.head.digest}
        for seed, path in enumerate(world.run.topology.paths_through(MODULE)):
            payload = gradient_bytes(world.run, MODULE, seed=seed)
            document = contribution_of(world.run, node.swarm.signer, payload, path=path, **base)
            await offer(node, leader.peer, document, payload)
        await eventually(lambda: led.head.version == 1)
