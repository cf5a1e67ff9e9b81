"""Following a module: near by updates, far by snapshot, to the same bits, past liars and the dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_harness import TinyLeader, World, offer
from tiny_run import contribution_of, gradient_bytes, signer, tiny_config
from virtual_time import eventually

from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.core.model.layout import decode_module, encode_module
from dipaco_p2p.errors import Refused
from dipaco_p2p.node import items
from dipaco_p2p.node.items import items_reply, read_items
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner import follower as modules
from dipaco_p2p.owner import sources
from dipaco_p2p.owner.chain import Chains
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.owner.sources import TRAINERS_MAX
from dipaco_p2p.protocol.documents import ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.liveness import Claim, Heartbeat
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId, PathId

MODULE = ModuleId(1, 0)
PATH = PathId((0, 0, 0))
Scene = Callable[[World, TinyLeader, Follower, Callable[[int], Awaitable[None]]], Awaitable[None]]


@asynccontextmanager
async def on_stage(folder: Path) -> AsyncIterator[tuple[World, TinyLeader, Follower, Callable[[int], Awaitable[None]]]]:
    """`scene` gets a leader of MODULE, a reader of it, and a way to let the leader make versions."""
    async with World(folder, config=tiny_config(rounds=16)) as world:
        leader = world.leader(50)
        owner = await leader.lead(MODULE)
        author, node = world.peer(60), world.peer(61)
        for peer in (author, node):
            await peer.watch.refresh()

        async def advance(count: int) -> None:
            for _ in range(count):
                head = owner.head
                payload = gradient_bytes(world.run, MODULE, seed=head.version)
                base = {"base_version": head.version, "base_digest": head.digest}
                signer = author.swarm.signer
                document = contribution_of(world.run, signer, payload, module=MODULE, path=PATH, **base)
                await offer(author, leader.peer, document, payload)
                await eventually(lambda head=head: owner.head.version > head.version and owner._replication.is_final)

        yield world, leader, Follower(node, MODULE), advance


def require_bits(world: World, reader: Follower) -> None:
    """What the reader holds is the version that it says, and the archive has the same bytes."""
    assert reader.params is not None
    data = encode_module(reader.params, world.run.layout(MODULE))
    assert digest(data) == reader.version.digest
    kept = world.seed.node.store.get(reader.version.digest)
    assert kept == data


@pytest.mark.parametrize("change", [{"weight": 1}, {"term": 1_000}])
async def test_another_leaders_document_of_the_same_parameters_is_left_for_the_chain_that_goes_on(
    tmp_path: Path, change: dict[str, int]
) -> None:
    """Both halves of a partition trained a path: the same bytes, of other contributions, in another term."""
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await advance(2)
        await reader.sync()
        reader.version = replace(reader.version, **change)
        await advance(1)
        await asyncio.wait_for(reader.sync(after=2), 60)
        assert reader.version == leader.owner(MODULE).head
        require_bits(world, reader)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests that readers fetched."""
    found: list[str] = []
    original = modules.fetch

    async def fetch(node: Member, ref: Any, **options: Any) -> bytes:
        found.append(ref.digest)
        return await original(node, ref, **options)

    for home in (modules, sources):
        monkeypatch.setattr(home, "fetch", fetch)
    return found


async def test_the_first_sync_brings_the_genesis(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await reader.sync()
        assert reader.version.version == 0 and not reader.is_complete
        require_bits(world, reader)


async def test_near_by_updates_and_far_by_snapshot_give_the_same_bits(tmp_path: Path, fetched: list[str]) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await reader.sync()
        await advance(3)
        fetched.clear()
        await reader.sync()
        versions = [sealed.document for sealed in world.seed.archive.ledgers[MODULE].versions]
        assert fetched == [version.update.digest for version in versions if version.update]
        require_bits(world, reader)

        far = Follower(world.peer(62), MODULE)
        await far._node.watch.refresh()
        fetched.clear()
        await far.sync()
        assert fetched == [versions[-1].snapshot.digest]
        assert far.params is not None and reader.params is not None
        assert np.array_equal(far.params, reader.params)

        await advance(9)
        fetched.clear()
        await reader.sync()
        head = world.seed.archive.ledgers[MODULE].head
        assert reader.version == head and fetched == [head.snapshot.digest]
        require_bits(world, reader)


async def test_waiting_ends_with_the_next_version(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await reader.sync()
        waiting = asyncio.create_task(reader.sync(after=0))
        await asyncio.sleep(30.0)  # virtual: longer than one question may wait
        assert not waiting.done()
        await advance(1)
        await waiting
        assert reader.version.version == 1


async def test_a_holder_that_changes_bytes_is_passed_over(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await reader.sync()
        await advance(1)
        update = leader.owner(MODULE).head.update
        assert update is not None
        [path] = (leader.node.store.folder / "blobs").rglob(update.digest)
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # read_range does not check: the reader must
        await reader.sync()
        assert reader.version.version == 1
        require_bits(world, reader)


async def test_a_dead_leader_is_passed_over_for_the_archive(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await reader.sync()
        await advance(2)
        await leader.die(world)
        await reader.sync()
        assert reader.version.version == 2
        require_bits(world, reader)


async def test_a_chain_of_lies_moves_nobody(tmp_path: Path) -> None:
    """A leader that answers with a version that does not follow: the archive's chain is taken instead."""
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await reader.sync()
        await advance(2)
        second = leader.owner(MODULE)._ledger.versions[1]

        async def lie(*_: Any) -> Reply:
            return items_reply([second])

        leader.swarm._dispatcher._handlers["module.next"] = lie
        await reader.sync()
        assert reader.version.version == 2
        require_bits(world, reader)


async def test_a_complete_module_is_not_waited_for(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await advance(16)
        await reader.sync()
        assert reader.is_complete
        await reader.sync(after=9)


async def test_params_are_those_of_the_genesis_blob(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await reader.sync()
        data = world.seed.node.store.get(reader.version.digest)
        assert data is not None and reader.params is not None
        assert np.array_equal(decode_module(data, world.run.layout(MODULE)), reader.params)


async def test_a_trainer_keeps_what_others_may_ask_it_for(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        store = reader._node.store
        trainer = Follower(reader._node, MODULE, Chains(reader._node)[MODULE])
        await trainer.sync()
        await advance(2)
        await trainer.sync()
        versions = [sealed.document for sealed in world.seed.archive.ledgers[MODULE].versions]
        blobs = [(version.snapshot, version.update) for version in versions]
        held = [[store.size(ref.digest) == ref.size for ref in refs if ref] for refs in blobs]
        assert held == [[False, False], [True, True]]


@pytest.mark.parametrize("is_small", [False, True])
async def test_where_a_version_came_from_is_told_and_the_coordinator_gave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    """An update that takes no time to send waits for no turn, and there is nothing to tell of it."""
    monkeypatch.setattr(sources, "SMALL_BYTES", sources.SMALL_BYTES if is_small else 0)
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        told: list[dict[str, Any]] = []
        reader._node.history.listen(told.append)
        await reader.sync()
        await advance(2)
        await reader.sync()
        sizes = [sealed.document.update.size for sealed in world.seed.archive.ledgers[MODULE].versions]  # type: ignore[union-attr]
        fetched = [event for event in told if event["ev"] == "fetched"]
        if is_small:
            assert reader.version.version == 2 and not fetched
            return
        assert [event["version"] for event in fetched] == [1, 2]
        assert [event["from_owners"] + event["from_trainers"] for event in fetched] == sizes
        assert {event["from_seeds"] for event in fetched} == {0}


async def test_a_few_who_train_from_a_version_are_asked_for_it_before_the_archive(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await advance(1)
        await reader.sync()
        watch, elsewhere = reader._node.watch, PathId((0, 1, 0))
        peers = [signer(number).peer for number in range(80, 90)]
        *here, deaf, gone, far = peers
        rounds = dict(zip(peers, (0, 1, 2, 1, 2, 1, 3, 1, 1, 1), strict=True))
        watch.claims[PATH] = {peer: Claim(path=PATH, since_s=0.0, round=rounds[peer]) for peer in [*here, deaf, gone]}
        watch.claims[elsewhere] = {far: Claim(path=elsewhere, since_s=0.0, round=rounds[far])}
        watch.heartbeats |= {peer: Heartbeat(addresses=("/memory",)) for peer in [*here, far]}
        watch.heartbeats[deaf] = Heartbeat()
        first, *asked, last = reader.sources.holders(reader.version)
        assert (first, last) == (leader.peer, world.seed.node.peer)
        assert len(asked) == TRAINERS_MAX and {rounds[peer] for peer in asked} <= {1, 2} and set(asked) <= set(here)


async def test_who_has_another_version_of_a_number_is_told_so_at_once(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, reader, advance):
        await advance(1)
        head = leader.owner(MODULE).head

        async def ask(**known: Any) -> Reply:
            header = {"module": str(MODULE), "after": 1, "wait_s": 0.0} | known
            return await reader._node.swarm.call(leader.peer, "module.next", header, timeout_s=20.0)

        for known in ({}, {"digest": head.digest, "weight": head.weight}):
            assert await read_items(ModuleVersion, await ask(**known)) == []
        for known in ({"digest": "ab" * 32, "weight": head.weight}, {"digest": head.digest, "weight": 1}):
            with pytest.raises(Refused, match="another one here") as refused:
                await ask(**known)
            assert refused.value.reason == Reason.UNKNOWN_BASE
        for malformed in ({"digest": "ab"}, {"digest": 1}, {"digest": head.digest, "weight": "1"}):
            with pytest.raises(Refused) as refused:
                await ask(**malformed)
            assert refused.value.reason == Reason.MALFORMED


# -- coming late to a long run


async def late(world: World, number: int, *, chain: bool = True) -> tuple[Follower, int]:
    """A newcomer that has come up to the head, and what that took of its line."""
    node = world.peer(number)
    await node.watch.refresh()
    begin = node.swarm.statistics().bytes_received
    reader = Follower(node, MODULE, Chains(node)[MODULE] if chain else None)
    await reader.sync()
    return reader, node.swarm.statistics().bytes_received - begin


async def test_a_newcomer_begins_at_what_the_coordinator_signed_however_long_the_chain_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "FAR_BEHIND", 4)
    async with on_stage(tmp_path) as (world, leader, _, advance):
        taken = dict[int, int]()
        for length in (7, 14):
            await advance(length - leader.owner(MODULE).head.version)
            reader, taken[length] = await late(world, 70 + length)
            assert reader.version == leader.owner(MODULE).head
            require_bits(world, reader)
        monkeypatch.setattr(modules, "FAR_BEHIND", 100)
        _, whole = await late(world, 90)
        assert taken[14] == pytest.approx(taken[7], rel=0.05), "not a byte more for a chain twice as long"
        documents = [sealed.to_dict() for sealed in world.seed.archive.ledgers[MODULE].versions]
        saved = sum(len(canonical_bytes(one)) for one in documents[: 14 - modules.READ_BEFORE - 1])
        assert whole - taken[14] > 0.9 * saved > 0


async def test_what_was_before_a_checkpoint_is_read_at_leisure_and_then_the_chain_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "FAR_BEHIND", 4)
    monkeypatch.setattr(items, "ITEMS_BYTES_MAX", 5000)  # two or three versions a page
    async with on_stage(tmp_path) as (world, leader, _, advance):
        await advance(10)
        reader, _ = await late(world, 70)
        chain = reader._chain
        assert chain is not None and not chain.ledger.head.version and reader.version.version == 10
        await reader.sync()
        assert 0 < chain.ledger.head.version < 6
        assert reader.shares[PATH], "who trained a path last"
        await advance(1)
        for _ in range(5):
            await reader.sync()
        kept = world.seed.archive.ledgers[MODULE].versions
        assert [sealed.document for sealed in chain.ledger.versions] == [sealed.document for sealed in kept]
        assert chain.ledger.workers and chain.ledger.standings.has_worked(signer(60).peer)
        await advance(1)
        await reader.sync()
        assert chain.ledger.head == leader.owner(MODULE).head
        assert reader._node.store.size(chain.ledger.head.digest) is not None, "others read it from us, too"


async def test_a_version_that_the_coordinator_did_not_sign_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader may show any chain that it has made; one that nobody else signed is read from its genesis on."""
    monkeypatch.setattr(modules, "FAR_BEHIND", 4)
    shown = list[int]()
    original = RemoteLedger.page

    async def unsigned(self: RemoteLedger, *, after: int) -> list[Sealed[ModuleVersion]]:
        shown.append(after)
        return [replace(sealed, cosignatures={}) for sealed in await original(self, after=after)]

    async with on_stage(tmp_path) as (world, leader, _, advance):
        await advance(8)
        monkeypatch.setattr(RemoteLedger, "page", unsigned)
        reader, _ = await late(world, 70)
        assert shown and set(shown) == {8 - modules.READ_BEFORE - 1}
        assert reader.version == leader.owner(MODULE).head and reader._checkpoint is None


async def test_a_page_that_was_made_up_does_not_come_into_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "FAR_BEHIND", 4)
    original = RemoteLedger.page

    async def forged(self: RemoteLedger, *, after: int) -> list[Sealed[ModuleVersion]]:
        page = await original(self, after=after)
        if after or self.peer != world.seed.swarm.peer:
            return page
        return [seal(signer(99), replace(page[0].document, author=signer(99).peer)), *page[1:]]

    async with on_stage(tmp_path) as (world, leader, _, advance):
        await advance(8)
        monkeypatch.setattr(RemoteLedger, "page", forged)
        reader, _ = await late(world, 70)
        await reader.sync()
        assert reader._chain is not None
        found = [sealed.document for sealed in reader._chain.ledger.versions]
        kept = [sealed.document for sealed in world.seed.archive.ledgers[MODULE].versions]
        assert found == kept[: len(found)], "read from another peer, or not at all"
