"""A swarm that is not read whole: each reads what concerns it, and lies about paths cost no more than a look."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World, node_of
from tiny_run import SEED_NUMBER, granted, signer

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node import neighbourhood
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.path_counts import PathCounts
from dipaco_p2p.protocol import neighbours
from dipaco_p2p.protocol.liveness import Claim, Head, Heartbeat
from dipaco_p2p.protocol.neighbours import bits, place, sibling
from dipaco_p2p.protocol.records import check_record, peer_key, peers_key, sign_record
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.summaries import CLAIMANTS_MAX, PathSummary, write_summaries
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.strict import plain
from dipaco_p2p.topology import ModuleId, PathId

MODULE, SECOND = ModuleId(1, 0), ModuleId(1, 1)
MINE, HIDDEN, OTHER = PathId((0, 1, 1)), PathId((0, 0, 1)), PathId((0, 0, 0))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of three, and nothing is read whole."""
    monkeypatch.setattr(neighbours, "WHOLE_MAX", 0)
    monkeypatch.setattr(neighbours, "BUCKET_MAX", 3)
    monkeypatch.setattr(neighbours, "BUCKET_MIN", 1)
    monkeypatch.setattr(neighbourhood, "BUCKET_MIN", 1)
    monkeypatch.setattr(neighbourhood, "SETTLED_MIN", 1)


def head(world: World, leader: Member, *, version: int, module: ModuleId = MODULE) -> Head:
    """A head with the coordinator's grant to `leader`."""
    sealed = granted(world.run, module, term=1, leader=leader.peer)
    digest = genesis_version(world.run.manifest, module).digest
    author = sealed.document.author
    return Head(version=version, digest=digest, term=1, granted_by=author, grant=sealed.signature)


@asynccontextmanager
async def some(folder: Path, count: int) -> AsyncIterator[tuple[World, list[Member]]]:
    async with World(folder) as world:
        peers = [world.peer(40 + number) for number in range(count)]
        for peer in peers:
            peer.watch.concerns.held = set
        yield world, peers


async def settle(peers: list[Member]) -> None:
    """For two lives of a heartbeat: what was said in the bucket of all has expired then."""
    ttl_s = peers[0].run.config.liveness.heartbeat_ttl_s
    for _ in range(12):
        for peer in peers:
            await peer.watch.refresh()
            await peer.presence.say()
        await peers[0].clock.sleep(ttl_s / 6)


async def test_neighbours_are_those_of_a_bucket_and_others_are_found_when_they_are_sought(tmp_path: Path) -> None:
    async with some(tmp_path, 12) as (world, peers):
        await settle([*peers, world.seed.node])
        one = peers[0]
        depth = one.watch.neighbourhood.depth
        assert depth >= 1
        near = {peer.peer for peer in peers if bits(place(peer.peer), depth) == bits(place(one.peer), depth)}
        assert near <= one.watch.heartbeats.keys(), "whoever shares the bucket is seen"
        far = next(peer for peer in peers if peer.peer not in one.watch.heartbeats)
        await one.watch.find(far.peer)
        assert one.watch.addresses(far.peer) == far.swarm.addresses
        assert one.watch.seeds() == [world.seed.node.peer], "seed nodes are sought at every look"


async def test_whoever_fell_out_of_its_bucket_comes_back(tmp_path: Path) -> None:
    """A peer whose line was cut sees nobody, and goes up to the bucket of all; there it would stay alone."""
    async with some(tmp_path, 12) as (world, peers):
        await settle([*peers, world.seed.node])
        one, others = peers[0], [*peers[1:], world.seed.node]
        assert one.watch.neighbourhood.depth > 0
        one.watch.neighbourhood.depth = 0
        one.watch.neighbourhood._found.clear()
        await settle(others)
        await settle([*others, one])
        assert one.watch.neighbourhood.depth > 0
        assert world.seed.node.peer in one.watch.heartbeats


def in_bucket(bucket: str, count: int) -> list[int]:
    """Numbers of peers whose places begin with these bits."""
    found = (number for number in range(1, SEED_NUMBER) if bits(place(signer(number).peer), len(bucket)) == bucket)
    return list(itertools.islice(found, count))


def here(depth: int) -> str:
    """The coordinator's bucket."""
    return bits(place(signer(SEED_NUMBER).peer), depth)


NEAR = here(5), sibling(here(2))
"""Buckets that others are in: two of them wherever the coordinator's is; or nobody in its half of all places; or there
so far away that no bucket beside its own is theirs."""
FAR = sibling(here(1)) + "0", sibling(here(1)) + "1"
DEEP = sibling(here(1)) + "000", sibling(here(1)) + "001"


@asynccontextmanager
async def without_coordinator(folder: Path, buckets: tuple[str, str]) -> AsyncIterator[tuple[World, list[Member]]]:
    """Two peers in each of these buckets, and nobody else."""
    async with World(folder) as world:
        await world.kill_seed()
        peers = [world.peer(number) for bucket in buckets for number in in_bucket(bucket, 2)]
        for peer in peers:
            peer.watch.concerns.held = set
        await settle(peers)
        assert all(peer.watch.neighbourhood.depth > 1 for peer in peers)
        yield world, peers


async def come_back(
    world: World, peers: list[Member], *, also: Member, worked: Collection[PeerId] = ()
) -> tuple[list[int], Member]:
    """At which of four lives of a heartbeat's looks somebody does not see the coordinator, whose first look has shown
    it nobody; and its node. `also` looks at nothing, and says that it lives, as all others do. The coordinator knows
    who has `worked`."""
    swarm = world.network.join(signer(SEED_NUMBER))
    back = node_of(world.run, swarm, world.folder / "back", world.clock, Heartbeat(role="seed", owns=True))
    back.watch.workers = lambda: frozenset(worked)
    world.network.loss = 1.0
    await back.watch.refresh()
    world.network.loss = 0.0
    assert back.watch.neighbourhood.depth == 0
    missed = []
    for look in range(24):
        await also.presence.beat()
        for peer in [*peers, back]:
            await peer.watch.refresh()
            await peer.presence.beat()
        if not all(peer.watch.coordinators() == [back.peer] for peer in peers):
            missed.append(look)
        await world.clock.sleep(world.run.config.liveness.heartbeat_ttl_s / 6)
    return missed, back


@pytest.mark.parametrize("buckets", [NEAR, FAR, DEEP])
@pytest.mark.parametrize("does", ["lead", "claim", "wait"])
async def test_a_coordinator_that_finds_nobody_around_it_is_found_all_the_same(
    tmp_path: Path, does: str, buckets: tuple[str, str]
) -> None:
    """It leads nothing, so it has no owners to look for; nor is it alone in the bucket of all, where strangers may be.
    Once it has found whoever leads, trains, or has worked and waits for it, it can be found, too."""
    async with without_coordinator(tmp_path, buckets) as (world, peers):
        one = peers[0]
        if does == "lead":
            await one.presence.lead(MODULE, head(world, one, version=1))
        elif does == "claim":
            await one.presence.claim(OTHER, since_s=1.0)
        worked = {one.peer} if does == "wait" else set[PeerId]()
        missed, back = await come_back(world, peers, also=world.peer(SEED_NUMBER + 1), worked=worked)
        assert max(missed) < 12
        await back.watch.find(*(peer.peer for peer in peers))
        await back.watch.refresh()
        assert {peer.peer for peer in peers} <= back.watch.heartbeats.keys()
        assert (back.watch.neighbourhood.depth > 0) == (buckets != DEEP)


async def test_whoever_hides_in_a_deep_bucket_draws_nobody_after_it(tmp_path: Path) -> None:
    """Though others look for it, since it leads, and find it: those who are all in one bucket stay there."""
    async with World(tmp_path) as world:
        peers = [world.peer(number) for number in in_bucket(sibling(here(1)), 2)]
        liars = [world.peer(number) for number in in_bucket(here(4), 2)]
        for peer in peers:
            peer.watch.concerns.held = set
        for liar in liars:
            liar.watch.neighbourhood.depth = 4
        await liars[0].presence.lead(MODULE, head(world, liars[0], version=1))
        for _ in range(24):
            for liar in liars:
                await liar.presence.beat()
            for peer in peers:
                await peer.watch.refresh()
                assert peer.watch.neighbourhood.depth == 0
                await peer.presence.beat()
            await world.clock.sleep(world.run.config.liveness.heartbeat_ttl_s / 6)
        assert all(peer.watch.leader(MODULE) == liars[0].peer in peer.watch.heartbeats for peer in peers)


async def test_a_relay_looks_for_those_whom_it_serves_in_whatever_bucket_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a home in another bucket is a guest there, and has its slot for a minute."""
    async with some(tmp_path, 12) as (world, peers):
        await settle([*peers, world.seed.node])
        relay = peers[0]
        far = next(peer for peer in peers if peer.peer not in relay.watch.heartbeats)
        noted: list[set[PeerId]] = []

        def note(*, members: Collection[PeerId], **others: Any) -> Collection[PeerId]:
            noted.append(set(members))
            return [far.peer]

        monkeypatch.setattr(relay.swarm, "note_peers", note)
        for _ in range(neighbours.LOOKS_MAX + 1):
            await relay.watch.refresh()
        assert far.peer not in noted[0] and far.peer in noted[-1]


async def test_nobody_writes_under_another_ones_own_key() -> None:
    key = peer_key("0" * 64, signer(1).peer)
    body = plain(Heartbeat())
    own, foreign = (sign_record(signer(n), key=key, counter=1, expires_s=10.0, body=body) for n in (1, 2))
    check_record(own, key=key, now_s=1.0, ttl_max_s=60.0)
    with pytest.raises(IntegrityError, match="another's"):
        check_record(foreign, key=key, now_s=1.0, ttl_max_s=60.0)


async def test_a_volunteer_reads_its_path_and_hears_of_the_others(tmp_path: Path) -> None:
    async with some(tmp_path, 3) as (world, (leader, claimant, reader)):
        await settle([leader, claimant, reader])
        leader.watch.concerns.led = lambda: [MODULE]
        await claimant.presence.claim(OTHER, since_s=1.0)
        await leader.watch.refresh()
        tell = leader.watch.paths.tell(MODULE, {OTHER}, version=4)
        assert tell == "1.5.0 0.4.0"
        await leader.presence.lead(MODULE, head(world, leader, version=4), tell=lambda: tell)
        await reader.watch.read_heads(MODULE)
        assert reader.watch.heads[MODULE][leader.peer].paths == tell
        assert claimant.peer not in reader.watch.claims[OTHER], "its claims are not read"

        paths = {path: dict[PeerId, Claim]() for path in world.run.topology.paths()}
        counts = PathCounts(world.run, reader.clock, paths, is_whole=lambda: False)
        until_s = reader.clock.now_s() + world.run.config.liveness.heartbeat_ttl_s
        counts.note_head(MODULE, reader.watch.heads[MODULE][leader.peer], until_s=until_s)
        assert (counts.told(), counts.covered(), counts.training()) == ({OTHER: 1, HIDDEN: 0}, 1, 1)
        standing = counts.standing(OTHER)
        assert standing is not None and (standing.progress, standing.is_due) == (5, False)
        assert counts.elsewhere() == Counter({5: 1}) and counts.standing(MINE) is None
        await reader.clock.sleep(3 * world.run.config.liveness.heartbeat_ttl_s)
        assert counts.told() == {}, "what is old counts for nothing"


async def test_a_head_that_tells_of_thousands_costs_no_more_than_an_honest_one(tmp_path: Path) -> None:
    """Attack: 9999 claimants on each path, of whom every leader of the level made a list, twice a second."""
    async with some(tmp_path, 2) as (world, (liar, reader)):
        nobody = {path: dict[PeerId, Claim]() for path in world.run.topology.paths()}
        counts = PathCounts(world.run, reader.clock, nobody, is_whole=lambda: False)
        paths = world.run.topology.paths_through(MODULE)
        told = write_summaries([PathSummary(claimants=10**9, round=n, age_s=0.0) for n in range(len(paths))])
        until_s = reader.clock.now_s() + world.run.config.liveness.heartbeat_ttl_s
        counts.note_head(MODULE, replace(head(world, liar, version=0), paths=told), until_s=until_s)
        elsewhere = counts.elsewhere()
        assert len(elsewhere) == len(paths) and sum(elsewhere.values()) == CLAIMANTS_MAX * len(paths)


async def test_a_path_came_when_its_leader_was_first_heard_to_have_it(tmp_path: Path) -> None:
    async with some(tmp_path, 2) as (world, (leader, reader)):
        counts = PathCounts(world.run, reader.clock, {}, is_whole=lambda: False)
        began_s = reader.clock.now_s()
        for after_s, told in enumerate(["1.4.0 0.4.0", "1.5.0 0.4.0", "1.5.0 0.4.0", "1.5.0 1.5.0"]):
            await reader.clock.sleep(began_s + after_s - reader.clock.now_s())
            counts.note_head(MODULE, replace(head(world, leader, version=4), paths=told), until_s=began_s + 60.0)
        first, second = world.run.topology.paths_through(MODULE)
        assert counts.came_s(MODULE, first, number=4) == began_s + 1
        assert counts.came_s(MODULE, second, number=4) == began_s + 3
        assert counts.came_s(MODULE, first, number=3) is None is counts.came_s(MODULE, first, number=5)


async def test_what_was_read_counts_more_than_what_is_told(tmp_path: Path) -> None:
    async with some(tmp_path, 3) as (world, (liar, claimant, reader)):
        await settle([liar, claimant, reader])
        await claimant.presence.claim(OTHER, since_s=1.0)
        for lie in ("99.4.0 0.4.0", "0.4.0 0.4.0", "nonsense"):
            await liar.presence.lead(MODULE, head(world, liar, version=4), tell=partial(str, lie))
            await reader.watch.read_heads(MODULE)
            await reader.watch.read_claims([OTHER])
            assert reader.watch.paths.counts()[OTHER] == 1


async def test_a_full_bucket_sends_its_members_deeper(tmp_path: Path) -> None:
    async with some(tmp_path, 2) as (world, (victim, other)):
        await victim.presence.say()
        bucket = bits(place(victim.peer), 0)
        now_s = victim.clock.now_s()
        fakes = [signer(100 + number) for number in range(12)]
        for fake in fakes:
            record = sign_record(
                fake, key=peers_key(world.run.id, bucket), counter=1, expires_s=now_s + 5.0, body=plain(Heartbeat())
            )
            assert other.swarm.store_bytes(peers_key(world.run.id, bucket), fake.peer, record.to_bytes())
        for _ in range(4):
            await victim.watch.refresh()
        assert victim.watch.neighbourhood.depth >= 1
        await victim.presence.say()
        await other.watch.neighbourhood.find(other.swarm.get, [victim.peer])
        other.watch.neighbourhood.depth = max(other.watch.neighbourhood.depth, 1)
        await other.watch.find(victim.peer)
        assert victim.peer in other.watch.heartbeats


async def test_of_paths_with_a_crowd_one_more_is_read_seldom(tmp_path: Path) -> None:
    """Otherwise each of a crowd that waits would read another crowd's claims at every look."""
    async with some(tmp_path, 1) as (_, (peer,)):
        for crowd, most in [(1, 1), (neighbours.CROWD * 2, 2), (1000, neighbours.LOOKS_MAX)]:
            looks = []
            for _ in range(12):
                peer.watch.concerns.look()
                looks.append(len(peer.watch.concerns.one_more(random.Random(1), crowd=crowd)))
            assert sum(looks) == 12 // most, crowd
