"""What a peer says of itself, and what others see of it until it leaves or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World, offer
from tiny_run import contribution_of, gradient_bytes, granted, tiny_config
from virtual_time import end, eventually

from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import Grant, seal
from dipaco_p2p.protocol.liveness import Claim, Head, Heartbeat
from dipaco_p2p.protocol.owners import rank
from dipaco_p2p.protocol.records import claims_key, heads_key, peers_key
from dipaco_p2p.protocol.rounds import Standing
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId, PathId

MODULE = ModuleId(1, 0)
PATH, MOVED_TO = PathId((0, 0, 1)), PathId((0, 1, 1))


@asynccontextmanager
async def between_two(folder: Path) -> AsyncIterator[tuple[World, Member, Member]]:
    async with World(folder) as world:
        yield world, world.peer(40), world.peer(41)


def head(world: World, leader: Member, *, module: ModuleId = MODULE, version: int = 0, term: int = 1) -> Head:
    """A head with the coordinator's grant to `leader`."""
    sealed = granted(world.run, module, term=term, leader=leader.peer)
    return Head(
        version=version,
        digest=genesis_version(world.run.manifest, MODULE).digest,
        term=term,
        granted_by=sealed.document.author,
        grant=sealed.signature,
    )


async def test_what_is_said_is_seen(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        await one.presence.say(doing="training", path=PATH)
        await one.presence.claim(PATH, since_s=5.0, round_number=2)
        await one.presence.lead(MODULE, head(world, one, version=3))
        await other.watch.refresh()
        beat = other.watch.heartbeats[one.peer]
        assert (beat.doing, beat.path, beat.addresses) == ("training", PATH, one.swarm.addresses)
        assert other.watch.addresses(one.peer) == one.swarm.addresses
        assert other.watch.claims[PATH][one.peer].round == 2
        assert other.watch.leader(MODULE) == one.peer
        assert world.seed.node.peer in other.watch.seeds() and one.peer not in other.watch.seeds()


async def test_a_busy_peer_looks_at_what_others_train_every_third_time(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        busy, topology = True, world.run.topology
        watch = other.watch
        watch.concerns.own, watch.concerns.held, watch.concerns.is_busy = PATH, set, lambda: busy

        async def reads() -> int:
            before = other.swarm.statistics().keys_read
            await watch.refresh()
            return other.swarm.statistics().keys_read - before

        every = topology.path_count + len(topology.modules())  # and who lives
        await watch.refresh()
        assert [await reads() > every for _ in range(5)] == [False, False, True, False, False]
        await watch.refresh()
        await one.presence.claim(MOVED_TO, since_s=5.0, round_number=2)
        for _ in range(2):
            await watch.refresh()
            assert one.peer not in watch.claims[MOVED_TO], "not at this look"
        await watch.refresh()
        assert one.peer in watch.claims[MOVED_TO]
        busy = False
        assert [await reads() > every for _ in range(2)] == [True, True]


async def test_relays_are_the_seeds_and_then_who_offers_it_at_an_address_of_its_own(tmp_path: Path) -> None:
    direct, behind = "/ip4/203.0.113.7/tcp/1/p2p/A", "/ip4/203.0.113.7/tcp/1/p2p/R/p2p-circuit/p2p/A"
    async with between_two(tmp_path) as (world, one, other):
        seed, watch = world.seed.node.peer, other.watch
        await watch.refresh()
        beats = {PeerId("a"): (direct, True), PeerId("b"): (direct, False), PeerId("c"): (behind, True)}
        watch.heartbeats |= {who: Heartbeat(addresses=(at,), relays=does) for who, (at, does) in beats.items()}
        assert watch.relays() == ["a"], "the seed of this test does not relay"
        watch.heartbeats[seed] = replace(watch.heartbeats[seed], relays=True)
        assert watch.relays() == [seed, "a"]


async def test_an_address_that_no_heartbeat_can_hold_is_left_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: somebody relays at a name of 190 letters, too. The guest's address there did not fit into a heartbeat, so
    that none was said any more: the guest seemed dead, and what it led was taken over."""
    async with between_two(tmp_path) as (_, one, other):
        name = ".".join(["a" * 60] * 3)
        long = f"/dns4/{name}/tcp/31337/p2p/{other.peer}/p2p-circuit/p2p/{one.peer}"
        short = one.swarm.addresses
        monkeypatch.setattr(type(one.swarm), "addresses", property(lambda swarm: (long, *short)))
        await one.presence.say(owns=True)
        await other.watch.refresh()
        assert other.watch.heartbeats[one.peer].addresses == short and other.watch.heartbeats[one.peer].owns


async def test_who_cannot_be_dialled_any_more_owns_nothing_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with between_two(tmp_path) as (_, one, other):
        places = one.swarm.addresses
        found = [places]
        monkeypatch.setattr(type(one.swarm), "addresses", property(lambda swarm: found[-1]))
        await one.presence.say(owns=True)
        for now in (places, (), places):
            found.append(now)
            await one.presence.say()
            await other.watch.refresh()
            assert other.watch.heartbeats[one.peer].owns == bool(now)


async def test_a_stranger_is_dialled_at_two_of_its_addresses_and_who_has_worked_at_all(tmp_path: Path) -> None:
    """It may name eight of somebody else."""
    async with between_two(tmp_path) as (_, one, other):
        loopback, *outside = (f"/ip4/{host}/tcp/1/p2p/{one.peer}" for host in ("127.0.0.1", "10.0.0.1", "10.0.0.2"))
        told = (loopback, *outside, *(f"/dns/a{n}/tcp/1/p2p/{one.peer}" for n in range(5)))
        await one.presence.say()
        await other.watch.refresh()
        watch = other.watch
        watch.heartbeats[one.peer] = replace(watch.heartbeats[one.peer], addresses=told)
        drawn = [watch.addresses(one.peer) for _ in range(100)]
        assert all(len(set(pair)) == 2 and loopback not in pair for pair in drawn), "what leaves a machine comes first"
        assert {address for pair in drawn for address in pair} == set(told) - {loopback}, "each has its chance"
        watch.typed[one.peer] = ("typed",)
        assert watch.addresses(one.peer)[0] == "typed" and len(watch.addresses(one.peer)) == 3
        watch.workers = lambda: [one.peer]
        await watch.refresh()
        watch.heartbeats[one.peer] = replace(watch.heartbeats[one.peer], addresses=told)
        assert watch.addresses(one.peer) == ("typed", *told)


async def test_a_heartbeat_is_as_old_as_the_newest_that_came(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        assert other.watch.beaten_s(one.peer) is None
        await one.presence.say(doing="training")
        said_s = other.clock.now_s()
        for _ in range(2):
            await other.watch.read_peers()
            assert other.watch.beaten_s(one.peer) == said_s
            await other.clock.sleep(1.0)
        await one.presence.say()
        await other.watch.read_peers()
        assert other.watch.beaten_s(one.peer) == said_s + 2.0
        await one.presence.say(left=True)
        await other.watch.read_peers()
        assert other.watch.beaten_s(one.peer) is None


async def test_a_note_waits_for_the_next_heartbeat(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        await one.presence.say(doing="training")
        one.presence.note(doing="pushing")
        await other.watch.refresh()
        assert other.watch.heartbeats[one.peer].doing == "training"
        await one.presence.beat()
        await other.watch.refresh()
        assert other.watch.heartbeats[one.peer].doing == "pushing"


async def test_all_is_repeated_before_it_expires_and_gone_after_silence(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        await one.presence.claim(PATH, since_s=5.0)
        await one.presence.lead(MODULE, head(world, one))
        beating = asyncio.create_task(one.presence.run())
        for _ in range(10):
            await asyncio.sleep(ttl_s / 2)
            await other.watch.refresh()
            assert one.peer in other.watch.heartbeats
            assert one.peer in other.watch.claims[PATH] and one.peer in other.watch.heads[MODULE]
        await end(beating)
        await asyncio.sleep(ttl_s + 0.1)
        await other.watch.refresh()
        assert one.peer not in other.watch.heartbeats
        assert not other.watch.claims[PATH] and one.peer not in other.watch.heads[MODULE]


async def test_leaving_is_seen_at_once(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        await one.presence.say()
        await one.presence.claim(PATH, since_s=5.0)
        await one.presence.lead(MODULE, head(world, one))
        await one.presence.leave()
        await other.watch.refresh()
        assert one.peer not in other.watch.heartbeats
        assert not other.watch.claims[PATH] and one.peer not in other.watch.heads[MODULE]
        await one.presence.release()  # nothing is left to release
        await one.presence.resign(MODULE)


async def test_junk_under_a_key_is_left_out(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        run = world.run.id
        junk: list[dict[str, object]] = [{}, {"doing": 5}, {"digest": "x", "version": -1, "term": 0}]
        for body in junk:
            for key in (peers_key(run), claims_key(run, PATH), heads_key(run, MODULE)):
                await one.swarm.put(key, body, ttl_s=5.0)
            await other.watch.refresh()
            assert not other.watch.claims[PATH] and one.peer not in other.watch.heads[MODULE]
        wrong_path = {"path": "P0-0-0", "since_s": 1.0, "round": 0, "released": False}
        await one.swarm.put(claims_key(run, PATH), wrong_path, ttl_s=5.0)
        await other.watch.read_claims([PATH])
        assert not other.watch.claims[PATH], "a claim of another path under this path's key"


async def test_the_round_of_a_path_is_that_of_its_slowest_module(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        for module, version in zip(PATH.modules(), (3, 1, 2), strict=True):
            await one.presence.lead(module, head(world, one, module=module, version=version, term=50))
        await other.watch.refresh()
        assert other.watch.round(PATH) == 1


async def test_how_far_a_path_is_the_leaders_say(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        modules = PATH.modules()
        leaders = {leader.peer: leader for leader in map(world.leader, (50, 51))}
        await asyncio.sleep(1.0)
        led_by = {module: rank(module, leaders)[0] for module in modules}
        for module, peer in led_by.items():
            await leaders[peer].lead(module)
        await other.watch.refresh()
        assert other.watch.standing(PATH) is None, "nobody was asked"
        await other.watch.read_rounds()
        assert other.watch.standing(PATH) == Standing(progress=0, is_due=True)
        for module in modules:
            payload = gradient_bytes(world.run, module)
            document = contribution_of(world.run, one.swarm.signer, payload, module=module, path=PATH)
            await offer(one, led_by[module], document, payload)
            await other.watch.read_rounds([module])
            is_last = module == modules[-1]
            assert other.watch.standing(PATH) == Standing(progress=int(is_last), is_due=not is_last)
        gone = led_by[modules[0]]
        await leaders[gone].die(world)
        await other.watch.read_rounds(modules)
        told = {module for module in modules if led_by[module] != gone}
        assert other.watch.standing(PATH) is None and set(other.watch.rounds) >= told


@pytest.mark.parametrize("min_paths", [1, 2])
async def test_nobody_is_idle_before_enough_paths_are_claimed(tmp_path: Path, min_paths: int) -> None:
    """Volunteers that came to a run one after the other took those who waited for them for idle, and so waited on."""
    async with World(tmp_path, config=tiny_config(min_paths=min_paths)) as world:
        one, other, leader = world.peer(40), world.peer(41), world.leader(50)
        await other.watch.refresh()
        for module in PATH.modules():
            await leader.lead(module)
        for _ in range(20):
            await one.presence.claim(PATH, since_s=world.clock.now_s(), round_number=0)
            await other.watch.refresh()
            await asyncio.sleep(world.run.config.liveness.heartbeat_ttl_s / 3)
        assert bool(other.watch.claims[PATH]) == (min_paths == 2)


async def test_the_chance_of_a_claim_begins_when_enough_paths_are_claimed(tmp_path: Path) -> None:
    """Attack: idle claims that were there first. A volunteer that had asked the leaders too early asked them again
    after a whole life of a heartbeat, and began to count only then."""
    async with World(tmp_path, config=tiny_config(min_paths=2)) as world:
        one, other, watching, leader = world.peer(40), world.peer(41), world.peer(42), world.leader(50)
        await watching.watch.refresh()
        for module in {*PATH.modules(), *MOVED_TO.modules()}:
            await leader.lead(module)
        look_s, deadline_s = world.run.config.liveness.heartbeat_ttl_s / 3, world.run.config.rounds.deadline_s

        async def looked(*, has_begun: bool = True) -> bool:
            """Whether the first claim still weighs."""
            if has_begun:
                await other.presence.claim(MOVED_TO, since_s=began_s, round_number=0)
            await one.presence.claim(PATH, since_s=world.clock.now_s(), round_number=0)
            await watching.watch.refresh()
            await asyncio.sleep(look_s)
            return bool(watching.watch.claims[PATH])

        began_s = world.clock.now_s()
        assert await looked(has_begun=False)
        began_s = world.clock.now_s()
        for _ in range(20):
            if not await looked():
                break
        assert world.clock.now_s() - began_s < deadline_s / 2 + 3 * look_s


async def test_a_path_is_free_as_soon_as_its_leaders_have_told(tmp_path: Path) -> None:
    """Attack: idle claims on every path. Whoever asked the leaders acted on the answer one look later, and each look
    without a round is time in which a path waits."""
    async with World(tmp_path, config=tiny_config(min_paths=1)) as world:
        one, watching, leader = world.peer(40), world.peer(42), world.leader(50)
        for module in PATH.modules():
            await leader.lead(module)
        since_s = world.clock.now_s()
        for after_s in (0.0, world.run.config.rounds.deadline_s / 2):
            await asyncio.sleep(after_s)
            await one.presence.claim(PATH, since_s=since_s, round_number=0)
            await watching.watch.refresh()
            assert set(watching.watch.claims[PATH]) == {one.peer}
            await asyncio.sleep(1.0)
        assert not watching.watch.claims[PATH]


async def test_the_round_of_a_claim_goes_out_with_its_next_repetition(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        one.presence.note_round(7)  # without a claim it says nothing
        await one.presence.claim(PATH, since_s=5.0, round_number=2)
        one.presence.note_round(3)
        await other.watch.read_claims([PATH])
        assert other.watch.claims[PATH][one.peer].round == 2
        await one.presence.beat()
        await other.watch.read_claims([PATH])
        assert other.watch.claims[PATH][one.peer] == Claim(path=PATH, since_s=5.0, round=3)


async def test_the_newest_term_leads(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        await one.presence.lead(MODULE, head(world, one, version=5, term=50))
        await other.presence.lead(MODULE, head(world, other, version=4, term=51))
        for node in (one, other):
            await node.watch.read_heads(MODULE)
            assert node.watch.leader(MODULE) == other.peer
        await other.presence.resign(MODULE)
        await one.watch.read_heads(MODULE)
        assert one.watch.leader(MODULE) is None, "an earlier grant of the coordinator's has ended"


async def test_a_module_that_is_resigned_during_a_beat_is_not_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volunteer that paused handed a module over, and its next leader was told that it was alive and leading."""
    async with between_two(tmp_path) as (world, one, other):
        modules = list(world.run.topology.modules())[:2]
        for module in modules:
            await one.presence.lead(module, head(world, one, module=module))
        put = one.swarm.put

        async def resign_meanwhile(key: str, body: dict[str, Any], *, ttl_s: float) -> bool:
            stored = await put(key, body, ttl_s=ttl_s)
            if key.endswith(str(modules[0])) and not body["resigned"]:
                await one.presence.resign(modules[1])
            return stored

        monkeypatch.setattr(one.presence._swarm, "put", resign_meanwhile)
        await one.presence.beat()
        await other.watch.refresh()
        assert other.watch.leader(modules[0]) == one.peer
        assert other.watch.leader(modules[1]) is None


async def test_a_seed_node_leads_only_until_a_volunteer_can(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        await eventually(lambda: len(world.seed.ownership.modules) == 5)
        await one.presence.say(owns=True)
        await other.watch.refresh()
        modules, seed = list(other.watch.heads), world.seed.node.peer
        assert {tuple(other.watch.successors(module)) for module in modules} == {(seed, one.peer)}
        worked = {tuple(other.watch.successors(module, workers={one.peer})) for module in modules}
        assert worked == {(one.peer, seed)}, "who has worked comes first"


async def test_who_leads_is_the_coordinators_word(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (world, one, other):
        granted = head(world, one, term=50)
        await one.presence.lead(MODULE, granted)
        for claim in (replace(granted, term=99), replace(granted, term=99, grant=""), granted):
            await other.presence.lead(MODULE, claim)
            await one.watch.read_heads(MODULE)
            assert set(one.watch.heads[MODULE]) == {one.peer}


async def test_a_stranger_that_grants_itself_a_term_is_believed_by_nobody(tmp_path: Path) -> None:
    """Neither by its head nor by the mandate that it shows; who really leads still does."""
    async with between_two(tmp_path) as (world, one, other):
        await one.presence.lead(MODULE, head(world, one, term=50))
        await other.watch.refresh()
        own = [
            seal(
                other.swarm.signer,
                Grant(run=world.run.id, module=MODULE, term=term, leader=other.peer, after=50, author=other.peer),
            )
            for term in (51, 99)
        ]

        async def show(*_: object) -> Reply:
            return items_reply([granted(world.run, MODULE, term=50, leader=one.peer), *own])

        other.swarm.serve("module.mandate", show)
        reader = world.peer(42)
        for node in (one, reader):
            for sealed in own:
                said = replace(head(world, other, version=9), term=sealed.document.term, after=50)
                said = replace(said, granted_by=other.peer, grant=sealed.signature)
                await other.presence.lead(MODULE, said)
                await node.watch.refresh()
                assert set(node.watch.heads[MODULE]) == {one.peer} and node.watch.leader(MODULE) == one.peer
                assert node.mandates.term(MODULE) == 50
