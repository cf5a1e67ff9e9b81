"""Whose turn it is to lead, when whoever asks may be a stranger that wants to stop the run."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_harness import (
    MODULE,
    OTHER_PATH,
    PATH,
    contribute,
    document,
    expired,
    lead_at_last,
    make_versions,
    of_group,
)
from leaders_harness import on_stage, seed_away, seed_back
from runtime_harness import TinyLeader, World, offer
from tiny_run import gradient_bytes, signer
from virtual_time import eventually

from dipaco_p2p.errors import Refused, Unreachable
from dipaco_p2p.node.authority import Mandates
from dipaco_p2p.node.ledger import head_record
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.watch import WORKER_TTLS
from dipaco_p2p.owner import leader
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.version import make_version
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.owners import AHEAD_MAX, rank
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId


def ahead_of(world: World, leader: TinyLeader, module: ModuleId = MODULE) -> TinyLeader:
    """A stranger with a key that was made to come before `leader`'s."""
    return world.leader(_number(leader, module, place=1), has_worked=False)


def behind(world: World, leader: TinyLeader) -> TinyLeader:
    """A peer that has worked, and comes after `leader`."""
    return world.leader(_number(leader, MODULE, place=0))


def _number(leader: TinyLeader, module: ModuleId, *, place: int) -> int:
    """Of a key beside which `leader` has this place in rank."""
    numbers = range(100, 200)
    return next(each for each in numbers if rank(module, [signer(each).peer, leader.peer])[place] == leader.peer)


async def lose_leader(world: World, leader: TinyLeader, worker: TinyLeader) -> None:
    """The work of `worker` is counted in a version, then `leader` dies, and nobody leads."""
    world.seed.ownership._may_take = lambda: False
    await leader.lead(MODULE)
    await make_versions(world, leader, worker.node)
    await eventually(lambda: world.seed.node.watch.leader(MODULE) == leader.peer)
    await leader.die(world)
    await eventually(lambda: not world.seed.node.watch.heads[MODULE])


async def make_first_version(world: World, author: Member) -> None:
    """Let the seed node, which leads, make one of the work of `author`."""
    payload, ledger = gradient_bytes(world.run, MODULE), world.seed.archive.ledgers[MODULE]
    await author.watch.refresh()
    await offer(author, world.seed.node.peer, document(world, ledger, author, payload), payload)
    await eventually(lambda: ledger.head.version == 1)


async def require_refused(leader: TinyLeader, module: ModuleId = MODULE) -> None:
    with pytest.raises(Refused) as caught:
        await leader.lead(module)
    assert caught.value.reason == Reason.NOT_LEADER


async def test_whoever_has_worked_leads_before_strangers(tmp_path: Path) -> None:
    """Attack: a stranger that asked first had three modules of a leader that died, before two volunteers."""
    async with on_stage(tmp_path) as (world, first, second, author):
        stranger = ahead_of(world, second)
        await lose_leader(world, first, second)
        await require_refused(stranger)
        await second.lead(MODULE)


async def test_before_anybody_has_worked_the_seed_leads_and_no_stranger(tmp_path: Path) -> None:
    """Attack: a stranger that was there first led all modules of a run, and none had a version for 113 s."""
    async with on_stage(tmp_path) as (world, first, second, author):
        world.known.clear()
        stranger = world.leader(70, has_worked=False)
        world.seed.ownership._may_take = lambda: False
        await require_refused(stranger)
        world.seed.ownership._may_take = lambda: True
        await eventually(lambda: MODULE in world.seed.ownership.modules)
        await make_first_version(world, first.node)
        await require_refused(stranger)
        await first.lead(MODULE)


async def test_a_stranger_in_the_seeds_group_cannot_grant_itself_what_the_seed_leads(tmp_path: Path) -> None:
    """Attack: it became a mirror in the first round, and its own word deposed a seed node that was alive."""
    async with on_stage(tmp_path, owners=3) as (world, first, second, author):
        world.known.clear()
        stranger = world.leader(70, has_worked=False)
        seed, ttl_s = world.seed, world.run.config.liveness.heartbeat_ttl_s
        await eventually(lambda: seed.node.mandates.grant(MODULE) is not None)
        await eventually(lambda: stranger.peer in seed.node.mandates.newest(MODULE)[-1].document.mirrors)
        await eventually(lambda: stranger.node.mandates.term(MODULE) == seed.term(MODULE))
        for peer in (first, second):
            await peer.die(world)

        async def obtain(module: ModuleId, *, mirrors: tuple[PeerId, ...]) -> None:
            stranger.node.mandates.grant_next(stranger.swarm.signer, module, leader=stranger.peer, mirrors=mirrors)

        stranger.ownership._granting.obtain = obtain  # type: ignore[method-assign]
        await stranger.lead(MODULE)
        term = stranger.node.mandates.term(MODULE)
        await eventually(lambda: seed.term(MODULE) > term and MODULE in seed.ownership.modules, limit_s=3 * ttl_s)
        await require_refused(world.leader(71, has_worked=False))
        assert seed.term(MODULE) > term and MODULE in seed.ownership.modules


async def test_a_stranger_in_a_group_cannot_grant_itself_a_module_while_the_seed_lives(tmp_path: Path) -> None:
    """Attack: a mirror that never worked granted itself the next term. The leader, which was alive, gave way, and the
    coordinator signed what the stranger made of its own work alone."""
    async with on_stage(tmp_path, owners=3) as (world, first, second, author):
        stranger, ttl_s = world.leader(70, has_worked=False), world.run.config.liveness.heartbeat_ttl_s
        seed, owner = world.seed, await first.lead(MODULE)
        await make_versions(world, first, second.node)
        await first.ownership._granting.obtain(MODULE, mirrors=(second.peer, stranger.peer))
        await owner.renew()
        own = Mandates(world.run)
        own.learn(MODULE, first.node.mandates.newest(MODULE))
        own.grant_next(stranger.swarm.signer, MODULE, leader=stranger.peer, mirrors=())
        term = own.term(MODULE)
        for node in (first.node, second.node, stranger.node, seed.node):
            node.mandates.learn(MODULE, own.newest(MODULE))
        await stranger.node.presence.lead(MODULE, head_record(first.chain.ledger, own.newest(MODULE)))
        assert seed.node.mandates.leader(MODULE) == stranger.peer
        await eventually(lambda: seed.term(MODULE) > term and MODULE in seed.ownership.modules, limit_s=2 * ttl_s)
        assert stranger.peer not in seed.node.mandates.newest(MODULE)[-1].document.group


async def test_work_for_another_module_counts_as_well(tmp_path: Path) -> None:
    """Attack: of two volunteers one trains each path; when one dies, nobody alive has worked for its last module."""
    other = ModuleId(1, 1)
    async with on_stage(tmp_path) as (world, first, second, author):
        stranger = ahead_of(world, second, other)
        await first.lead(other)
        await lose_leader(world, first, second)
        await eventually(lambda: not world.seed.node.watch.heads[other])
        await require_refused(stranger, other)
        await second.lead(other)


async def test_a_stranger_that_is_a_mirror_comes_after_those_who_worked(tmp_path: Path) -> None:
    """Whoever says that it owns modules becomes a mirror."""
    async with on_stage(tmp_path, owners=3) as (world, first, second, author):
        stranger = ahead_of(world, second)
        world.seed.ownership._may_take = lambda: False
        await first.lead(MODULE)
        await make_versions(world, first, second.node)
        grant = first.node.mandates.grant(MODULE)
        if grant is not None and stranger.peer not in grant.mirrors:
            await first.ownership._granting.obtain(MODULE, mirrors=(stranger.peer, second.peer))
        await eventually(lambda: world.seed.node.watch.leader(MODULE) == first.peer)
        await first.die(world)
        await eventually(lambda: not world.seed.node.watch.heads[MODULE])
        await require_refused(stranger)
        await second.lead(MODULE)


async def test_no_stranger_leads_while_the_seed_node_lives(tmp_path: Path) -> None:
    """Those who worked live, and yet they may be unable to lead: then the seed leads, however long it takes it."""
    async with on_stage(tmp_path) as (world, first, second, author):
        stranger, ttl_s = ahead_of(world, second), world.run.config.liveness.heartbeat_ttl_s
        await lose_leader(world, first, second)
        await asyncio.sleep(3 * (2 + WORKER_TTLS) * ttl_s)
        await require_refused(stranger)
        world.seed.ownership._may_take = lambda: True
        await eventually(lambda: MODULE in world.seed.ownership.modules)


async def test_a_stranger_in_the_last_group_gets_nothing_from_a_seed_that_catches_up(tmp_path: Path) -> None:
    """Seeds 547 and 787: nobody's work was on a restarted seed's chains, and a mirror had the module for 100 s."""
    async with on_stage(tmp_path, owners=2) as (world, first, second, author):
        stranger, ttl_s = world.leader(70, has_worked=False), world.run.config.liveness.heartbeat_ttl_s
        await second.die(world)
        await expired(world)
        await first.lead(MODULE)
        await eventually(lambda: stranger.node.mandates.term(MODULE) == world.seed.term(MODULE))
        await seed_away(world, stranger)
        await first.die(world)
        world.known.clear()
        await seed_back(world, stranger)
        await eventually(lambda: not world.seed.node.watch.heads[MODULE])
        await asyncio.sleep(3 * ttl_s)
        grant = world.seed.node.mandates.grant(MODULE)
        assert grant is not None and grant.mirrors == (stranger.peer,) and world.seed.terms.is_catching_up
        await require_refused(stranger)
        await eventually(lambda: not world.seed.terms.is_catching_up)
        await eventually(lambda: MODULE in world.seed.ownership.modules)


async def test_nobody_had_a_turn_while_the_seed_node_was_away(tmp_path: Path) -> None:
    """Seed 1623: the last in rank came first, for all had waited long before anybody could be granted a term."""
    async with on_stage(tmp_path) as (world, first, second, author):
        later, ttl_s = behind(world, second), world.run.config.liveness.heartbeat_ttl_s
        await lose_leader(world, first, second)
        await seed_away(world, second, later)
        await asyncio.sleep(5 * ttl_s)
        await seed_back(world, second, later)
        world.seed.ownership._may_take = lambda: False
        await eventually(lambda: bool(world.seed.node.watch.volunteers()))
        assert world.seed.terms.is_catching_up
        await eventually(lambda: not world.seed.terms.is_catching_up)
        await require_refused(later)
        await second.lead(MODULE)


async def test_a_seed_that_leads_gives_way_to_the_first_in_rank_only(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        last, best = sorted(
            (first, second), key=lambda leader: rank(MODULE, [first.peer, second.peer])[0] == leader.peer
        )
        await eventually(lambda: {first.peer, second.peer} <= world.seed.node.watch.heartbeats.keys())
        await require_refused(last)
        await best.lead(MODULE)


@pytest.mark.parametrize("method", ["mirror.state", "archive.adopt"])
async def test_a_grant_of_another_stage_deposes_nobody(tmp_path: Path, method: str) -> None:
    """Attack: anybody may show what the coordinator signed in the stage before, where modules had the same names. A
    living leader gave way at once, and a seed that was started again had forgotten what it had granted."""
    async with on_stage(tmp_path) as (world, first, second, author):
        owner = await first.lead(MODULE)
        await make_versions(world, first, second.node)
        term = owner.grant.term
        old = replace(owner.grant, run="ab" * 32, term=term + 4, leader=author.peer, mirrors=())
        shown = seal(world.seed.swarm.signer, old).to_dict()
        request: dict[str, Any] = {"module": str(MODULE), "grant": shown}
        if method == "archive.adopt":
            request = {"module": str(MODULE), "term": term + 5, "mirrors": [], "mandate": [shown]}
        for peer in (first.peer, world.seed.node.peer):
            with contextlib.suppress(Refused):
                await author.swarm.call(peer, method, request, timeout_s=5.0)
        assert owner.is_leading and world.seed.term(MODULE) == first.node.mandates.term(MODULE) == term
        await seed_away(world, first)
        await seed_back(world, first)
        assert world.seed.term(MODULE) == term


async def test_a_former_mirror_deposes_nobody_who_was_granted_the_module_since(tmp_path: Path) -> None:
    """Attack: a peer that was a mirror once granted itself two terms after the one that it was in. The leader that the
    coordinator had chosen since gave way, though the seed lived, and no version came until the seed took the module
    back. Then the former mirror granted itself two terms more."""
    async with on_stage(tmp_path, owners=2) as (world, first, second, author):
        former, seed = world.leader(70, has_worked=False), world.seed.node
        world.seed.ownership._may_take = lambda: False
        seed.mandates.grant_next(seed.swarm.signer, MODULE, leader=first.peer, mirrors=(former.peer,))
        own = Mandates(world.run)
        own.learn(MODULE, seed.mandates.newest(MODULE))
        owner = await first.lead(MODULE)
        await make_versions(world, first, second.node)
        await first.ownership._granting.obtain(MODULE, mirrors=(second.peer,))
        await owner.renew()
        assert owner.grant.group == (first.peer, second.peer)
        while own.term(MODULE) <= owner.grant.term:
            own.grant_next(former.swarm.signer, MODULE, leader=former.peer, mirrors=())
        for node in (first.node, second.node, former.node, seed):
            node.mandates.learn(MODULE, own.newest(MODULE))
        await former.node.presence.lead(MODULE, head_record(former.chain.ledger, own.newest(MODULE)))
        for node in (first.node, second.node, seed):
            await eventually(lambda node=node: former.peer in node.watch.heads[MODULE])
            assert node.watch.leader(MODULE) == first.peer
        assert owner.is_leading and first.node.mandates.leader(MODULE) == first.peer
        await make_versions(world, first, second.node, seed=5)


async def test_a_version_of_a_term_that_nobody_was_granted_is_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: all that a leader's version says was right but its term, 2^40. The coordinator signed it. Since terms do
    not fall along a chain, and no grant has a greater one, nobody could lead the module any more, for good."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await eventually(lambda: world.seed.node.watch.leader(MODULE) == first.peer)
        with monkeypatch.context() as changed:
            changed.setattr(leader, "make_version", lambda *args, **said: make_version(*args, **said | {"term": 2**40}))
            for path in (PATH, OTHER_PATH):
                await contribute(world, first, author, path=path)
            await eventually(lambda: first.chain.ledger.head.term == 2**40)
            await world.clock.sleep(world.run.config.liveness.heartbeat_ttl_s)
        assert world.seed.archive.ledgers[MODULE].head.version == 0
        await first.die(world)
        await lead_at_last(world, second)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].final == 1)


async def test_a_strangers_word_deposes_nobody_while_the_seed_node_is_away(tmp_path: Path) -> None:
    """Attack: it told the mirrors in turn to take the module, and each granted itself the next term. In 60 s there were
    58 terms and no version; after 1024 nobody could have led before the coordinator was back."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        await group.seed_away()
        leader, mirrors = group.leader, group.mirrors
        grant = leader.owner(MODULE).grant
        shown = leader.node.mandates.newest(MODULE)[-1].to_dict()
        for caller in (author, mirrors[1].node):
            for request in ({}, {"grant": shown}):
                with pytest.raises(Refused) as caught:
                    await caller.swarm.call(
                        mirrors[0].peer, "module.take", {"module": str(MODULE), **request}, timeout_s=20.0
                    )
                assert caught.value.reason == Reason.NOT_LEADER
        assert leader.leads and {member.node.mandates.grant(MODULE) for member in group.members} == {grant}
        await make_versions(world, leader, author, seed=5)


async def test_a_mirror_grants_itself_nothing_while_the_leader_lives(tmp_path: Path) -> None:
    """Whoever is told to take a module looks for itself whether it is free: there is no seed node that would."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author)
        await group.seed_away()
        leader, mirror = group.leader, group.mirrors[0]
        term = leader.owner(MODULE).grant.term
        mirror.node.watch.heads[MODULE].clear()
        with pytest.raises(Refused, match="which is alive"):
            await mirror.ownership.take(MODULE)
        assert leader.leads and mirror.node.mandates.term(MODULE) == term


async def test_one_mirror_is_the_coordinators_choice(tmp_path: Path) -> None:
    """Attack: a leader whose mirrors are its own keys has every version cosigned."""
    async with on_stage(tmp_path, owners=3) as (world, first, second, author):
        friends = [world.leader(number, has_worked=False) for number in (70, 71)]
        await first.lead(MODULE)
        await make_versions(world, first, second.node)
        await expired(world)
        await first.ownership._granting.obtain(MODULE, mirrors=tuple(friend.peer for friend in friends))
        grant = first.node.mandates.grant(MODULE)
        assert grant is not None and grant.mirrors == (second.peer, friends[0].peer)


async def test_a_leader_that_makes_no_version_loses_the_module(tmp_path: Path) -> None:
    """Attack: a stranger leads, and takes nothing: the module stands still for as long as it likes."""
    async with on_stage(tmp_path) as (world, first, second, author):
        began_s = world.clock.now_s()
        await first.lead(MODULE)
        world.known.clear()
        await eventually(lambda: MODULE in world.seed.ownership.modules)
        assert world.clock.now_s() - began_s < 8 * world.run.config.rounds.deadline_s
        await first.ownership._check(MODULE)
        await require_refused(second)  # nobody leads it before there is a version
        await make_first_version(world, second.node)
        await require_refused(first)  # while somebody lives that has not lost it so
        await second.lead(MODULE)


async def test_a_leader_that_runs_ahead_alone_loses_the_module(tmp_path: Path) -> None:
    """Attack: a leader that had worked closed each round with its own work alone, as fast as it could, and so made the
    module's last version while all other modules had their first."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, first.node, AHEAD_MAX)
        assert not world.seed.terms.takes_back(MODULE)
        await make_versions(world, first, first.node, seed=1)
        await eventually(lambda: MODULE in world.seed.ownership.modules)
        await first.ownership._check(MODULE)
        await require_refused(first)


async def test_a_module_that_was_taken_back_is_led_though_the_first_try_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed waited for a version that it could not have, did not try again, and nobody else was let lead."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        tries, start = [], Leader.start

        async def fail_at_first(leader: Leader, **how: Any) -> None:
            tries.append(leader)
            if world.seed.node.watch.leader(MODULE) is not None:
                raise Unreachable("a version is not to be had")
            await start(leader, **how)

        monkeypatch.setattr(Leader, "start", fail_at_first)
        await eventually(lambda: bool(tries))
        await first.die(world)
        await eventually(lambda: MODULE in world.seed.ownership.modules)


async def test_a_module_that_is_taken_back_waits_for_no_lost_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 1623: version 1 was lost, and when its idle leader had lost the module the seed waited for it once more."""
    async with on_stage(tmp_path) as (world, first, second, author):
        patient, start = [], Leader.start

        async def note_patience(leader: Leader, *, is_patient: bool, **how: Any) -> None:
            patient.append(is_patient)
            await start(leader, is_patient=is_patient, **how)

        await first.lead(MODULE)
        others = [module for module in world.run.topology.modules() if module != MODULE]
        await eventually(lambda: world.seed.ownership.modules == others)
        monkeypatch.setattr(Leader, "start", note_patience)
        world.seed.node.watch.seen[MODULE] = 1
        await eventually(lambda: MODULE in world.seed.ownership.modules)
        assert patient == [False]


@pytest.mark.parametrize(("is_by_seed", "ttls"), [(False, 4), (True, 8)])
async def test_a_leader_that_was_deposed_and_goes_on_is_not_waited_for(
    tmp_path: Path, is_by_seed: bool, ttls: int
) -> None:
    """Attack: a stranger said at the end that it leads a module still, at version 0, and the run did not end. Whom the
    coordinator granted it to since has the time in which any new leader announces itself."""
    async with on_stage(tmp_path) as (world, first, second, author):
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        await first.lead(MODULE)
        seed = world.seed.node
        await eventually(lambda: seed.watch.leader(MODULE) == first.peer)
        by = seed.swarm.signer if is_by_seed else first.swarm.signer
        seed.mandates.grant_next(by, MODULE, leader=second.peer, mirrors=())
        await eventually(lambda: MODULE in world.seed.ownership.modules, limit_s=ttls * ttl_s)


async def test_a_leader_that_loses_a_module_again_waits_for_twice_as_many_versions(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        grant, terms = first.node.mandates.grant(MODULE), world.seed.terms
        assert grant is not None
        for versions in (1, 2, 4):
            terms._bar(MODULE, grant)
            assert terms._barred_until[MODULE, first.peer] == versions


async def test_who_has_stopped_one_module_leads_no_other_while_others_live(tmp_path: Path) -> None:
    """Simulated: a stranger stopped one module after the other, each for as long as a round may take."""
    other = ModuleId(2, 0)
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        grant, terms = first.node.mandates.grant(MODULE), world.seed.terms
        assert grant is not None
        terms._bar(MODULE, grant)
        with pytest.raises(Refused, match="too long"):
            await first.lead(other)
        await second.die(world)
        await expired(world)
        await first.lead(other)  # nobody else is left


async def test_a_leader_is_not_idle_while_nobody_else_is_there(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await second.die(world)
        await expired(world)
        await first.lead(MODULE)
        await asyncio.sleep(30 * world.run.config.rounds.deadline_s)
        assert first.ownership.modules == [MODULE]


async def test_trainers_take_no_version_that_only_its_leader_has_made(tmp_path: Path) -> None:
    """Attack: a leader could show each trainer its own chain."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await author.watch.refresh()
        reader = Follower(author, MODULE)
        world.seed.chains.is_closed = lambda: True
        await make_versions(world, first, second.node)
        following = asyncio.create_task(reader.sync(after=0))
        await asyncio.sleep(2 * world.run.config.liveness.heartbeat_ttl_s)
        assert not following.done() and reader.version.version == 0
        world.seed.chains.is_closed = lambda: False
        await following
        assert reader.version == first.owner(MODULE).head
