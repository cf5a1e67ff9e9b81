"""Who leads: terms, hand-over, and chains that came apart while the archive or a leader was away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from runtime_harness import Leader, World, offer
from tiny_run import contribution_of, gradient_bytes, tiny_config
from virtual_time import eventually, play

from bootstrap.verify import verify_run
from dipaco_p2p.errors import Refused, Unreachable
from dipaco_p2p.protocol.admission import Reason
from dipaco_p2p.protocol.documents import Receipt, Sealed
from dipaco_p2p.runtime.modules import ModuleReader
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.transfer import UNUSED_UPLOADS_MAX
from dipaco_p2p.topology import ModuleId, PathId

MODULE = ModuleId(1, 0)
PATH = PathId((0, 0, 0))


def on_stage(folder: Path, scene: Callable[[World, Leader, Leader, Node], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with World(folder, config=tiny_config(rounds=30)) as world:
            author = world.peer(60)
            await scene(world, world.leader(50), world.leader(51), author)

    play(scenario)


async def contribute(world: World, leader: Leader, author: Node, *, seed: int) -> Sealed[Receipt]:
    head = leader.owner(MODULE).head
    payload = gradient_bytes(world.run, MODULE, seed=seed)
    base = {"base_version": head.version, "base_digest": head.digest}
    document = contribution_of(world.run, author.swarm.signer, payload, module=MODULE, path=PATH, **base)
    return await offer(author, leader.peer, document, payload)


async def make_versions(world: World, leader: Leader, author: Node, count: int, *, seed: int = 0) -> None:
    for number in range(count):
        before = leader.owner(MODULE).head.version
        await contribute(world, leader, author, seed=seed + number)
        await eventually(lambda before=before: leader.owner(MODULE).head.version == before + 1)


def require_verified(world: World, *, versions: int) -> None:
    [report] = [
        found for found in verify_run(world.run, world.seed.node.store, world.seed.archive) if found.module == MODULE
    ]
    assert (report.versions, report.problem) == (versions, "")


def test_a_new_leader_goes_on_with_a_new_term(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        term = (await first.lead(MODULE)).term
        await make_versions(world, first, author, 2)
        await first.die(world)
        owner = await second.lead(MODULE)
        assert owner.term == term + 1 and owner.head.version == 2
        await make_versions(world, second, author, 1, seed=9)
        require_verified(world, versions=3)

    on_stage(tmp_path, scene)


def test_a_receipt_outlives_its_leader(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        await first.lead(MODULE)
        await first.node.presence.claim(PathId((0, 0, 1)), since_s=0.0)  # keeps the round open
        await first.node.watch.refresh()
        receipt = await contribute(world, first, author, seed=1)
        await first.die(world)
        owner = await second.lead(MODULE)
        await eventually(lambda: owner.head.version == 1)
        assert [share.contribution for share in owner.head.shares] == [receipt.document.contribution]

    on_stage(tmp_path, scene)


def test_a_deposed_leader_takes_nothing_more_and_resigns(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        old = await first.lead(MODULE)
        await second.lead(MODULE)
        with pytest.raises(Refused) as caught:
            await contribute(world, first, author, seed=1)
        assert caught.value.reason == Reason.NOT_LEADER
        assert not old.is_leading
        await first.ownership._check(MODULE)
        assert first.ownership.modules == []
        await second.node.watch.refresh()
        assert set(second.node.watch.heads[MODULE]) == {second.peer}
        await make_versions(world, second, author, 1)

    on_stage(tmp_path, scene)


def test_leaving_hands_over_at_once(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        await first.lead(MODULE)
        await make_versions(world, first, author, 1)
        await second.node.watch.refresh()
        await first.node.watch.refresh()
        await first.ownership.leave()
        assert second.ownership.modules == [MODULE] and first.ownership.modules == []
        assert [event["to"] for event in first.events if event["ev"] == "handed_over"] == [second.peer]
        assert second.owner(MODULE).head.version == 1

    on_stage(tmp_path, scene)


def test_nobody_leads_without_the_archive(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        await world.kill_seed()
        with pytest.raises(Unreachable):
            await first.lead(MODULE)
        assert first.ownership.modules == []

    on_stage(tmp_path, scene)


def test_versions_that_the_archive_never_got_are_handed_in_after_a_restart(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        await first.lead(MODULE)
        await world.kill_seed()
        await make_versions(world, first, author, 2)
        await first.die(world)
        await world.start_seed().node.presence.beat()
        again = world.leader(50)  # same key, same folder
        owner = await again.lead(MODULE)
        assert owner.head.version == 2
        await make_versions(world, again, author, 1, seed=9)
        await eventually(lambda: owner.is_archived)
        require_verified(world, versions=3)

    on_stage(tmp_path, scene)


def test_a_long_outage_of_the_archive_loses_no_payload(tmp_path: Path) -> None:
    """Longer than a sender's uploads are kept that nothing came of."""

    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        owner = await first.lead(MODULE)
        await world.kill_seed()
        await make_versions(world, first, author, UNUSED_UPLOADS_MAX + 2)
        await world.start_seed().node.presence.beat()
        await make_versions(world, first, author, 1, seed=50)
        await eventually(lambda: owner.is_archived)
        require_verified(world, versions=UNUSED_UPLOADS_MAX + 3)

    on_stage(tmp_path, scene)


def test_versions_that_the_archive_went_on_without_are_forgotten(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        await first.lead(MODULE)
        await make_versions(world, first, author, 1)
        await world.kill_seed()
        await make_versions(world, first, author, 2, seed=5)
        await first.die(world)
        await world.start_seed().node.presence.beat()
        await second.lead(MODULE)
        await make_versions(world, second, author, 1, seed=9)
        await second.die(world)
        again = world.leader(50)
        owner = await again.lead(MODULE)
        assert owner.head == world.seed.archive.ledgers[MODULE].head and owner.head.version == 2
        await make_versions(world, again, author, 1, seed=12)
        await eventually(lambda: owner.is_archived)
        require_verified(world, versions=3)

    on_stage(tmp_path, scene)


def test_an_author_counts_once_per_base_also_under_a_new_leader(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        genesis = (await first.lead(MODULE)).head
        await make_versions(world, first, author, 1)
        await first.die(world)
        owner = await second.lead(MODULE)
        assert owner.head.version == 1
        payload = gradient_bytes(world.run, MODULE, seed=7)
        path = world.run.topology.paths_through(MODULE)[0]
        base = {"base_version": 0, "base_digest": genesis.digest}
        document = contribution_of(world.run, author.swarm.signer, payload, module=MODULE, path=path, **base)
        with pytest.raises(Refused) as caught:
            await offer(author, second.peer, document, payload)
        assert caught.value.reason == Reason.ALREADY_CONTRIBUTED

    on_stage(tmp_path, scene)


def test_a_reader_leaves_a_branch_that_was_lost_with_its_leader(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        await first.lead(MODULE)
        await make_versions(world, first, author, 1)
        await world.kill_seed()
        await make_versions(world, first, author, 2, seed=5)
        node = world.peer(70)
        reader = ModuleReader(node, MODULE)
        await node.watch.refresh()
        await reader.sync()
        lost = reader.version
        assert lost.version == 3
        await first.die(world)
        await world.start_seed().node.presence.beat()
        await second.lead(MODULE)
        await make_versions(world, second, author, 1, seed=9)
        await node.watch.refresh()
        await reader.sync(after=lost.version)  # not for ever: that version will never come
        assert reader.version == world.seed.archive.ledgers[MODULE].head and reader.version.version == 2

    on_stage(tmp_path, scene)


def test_a_version_is_shown_after_the_archive_has_it(tmp_path: Path) -> None:
    async def scene(world: World, first: Leader, second: Leader, author: Node) -> None:
        owner = await first.lead(MODULE)
        shown: list[int] = []
        hand_in = owner._custody.hand_in

        async def slow_hand_in() -> None:
            shown.append(len(await owner.versions_after(0, wait_s=0.0)))
            await hand_in()

        owner._custody.hand_in = slow_hand_in  # type: ignore[method-assign]
        await make_versions(world, first, author, 1)
        assert shown == [0] and len(await owner.versions_after(0, wait_s=0.0)) == 1

    on_stage(tmp_path, scene)
