"""Who leads: terms, and chains that came apart while the archive or a leader was away."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_harness import MODULE, PATH, contribute, expired, lead_at_last, make_versions, require_verified
from leaders_harness import is_safe, on_stage, seed_away, seed_back
from runtime_harness import TinyLeader, World, offer
from tiny_run import contribution_of, gradient_bytes, granted
from virtual_time import eventually

from dipaco_p2p.errors import IntegrityError, Refused, SwarmError, Unreachable
from dipaco_p2p.node.node import CALL_TIMEOUT_S
from dipaco_p2p.node.uploads import UNUSED_UPLOADS_MAX
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.owner.leader import TICK_S
from dipaco_p2p.owner.replication import LOST_TTLS
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.versions import Known
from dipaco_p2p.swarm.api import Reply


async def test_a_new_leader_goes_on_with_a_new_term(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        term = (await first.lead(MODULE)).grant.term
        await make_versions(world, first, author, 2)
        await first.die(world)
        await expired(world)
        owner = await second.lead(MODULE)
        assert owner.grant.term == term + 1 and owner.head.version == 2
        await make_versions(world, second, author, seed=9)
        require_verified(world, versions=3)


async def test_a_leader_that_returns_asks_for_a_new_term(tmp_path: Path) -> None:
    """Its disk says that it leads; a later leader is gone already, so that no head tells it otherwise."""
    async with on_stage(tmp_path) as (world, first, second, author):
        world.seed.ownership._may_take = lambda: False
        await first.lead(MODULE)
        await make_versions(world, first, author)
        await first.die(world)
        await expired(world)
        term = (await second.lead(MODULE)).grant.term
        await make_versions(world, second, author, seed=3)
        await second.die(world)
        await expired(world)
        again = world.leader(50)
        owner = await lead_at_last(world, again)
        assert owner.grant.term > term and owner.head.version == 2
        await make_versions(world, again, author, seed=5)
        require_verified(world, versions=3)


async def test_a_leader_that_is_alive_is_not_displaced(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        with pytest.raises(Refused, match="which is alive"):
            await second.lead(MODULE)
        assert second.ownership.modules == []
        await make_versions(world, first, author)


async def test_a_new_term_is_no_reason_to_be_patient_anew(tmp_path: Path) -> None:
    """Peers that take turns in waiting for a version that is lost would never come to lead."""
    async with on_stage(tmp_path) as (world, first, second, author):
        ttl_s, began_s = world.run.config.liveness.heartbeat_ttl_s, world.clock.now_s()
        world.known.discard(second.peer)
        for each in (first, second, world.seed):
            each.ownership._may_take = lambda: False
        first.node.watch.seen[MODULE] = 1
        while not first.ownership.modules:
            with contextlib.suppress(Unreachable):
                await first.lead(MODULE)
            waited_s = world.clock.now_s() - began_s
            assert bool(first.ownership.modules) == (waited_s >= LOST_TTLS * ttl_s), "patient at first"
            relief = granted(world.run, MODULE, term=world.seed.term(MODULE) + 1, leader=second.peer)
            assert all(each.node.mandates.believes(MODULE, relief) for each in (first, world.seed))
            world.seed.node.watch.is_taking_over(MODULE)  # from here on it counts how long
            await asyncio.sleep(1.2 * ttl_s)


async def test_patience_is_spent_once_whoever_takes_turns(tmp_path: Path) -> None:
    """Nobody led a module for eighty seconds: a dozen volunteers tried, and each waited as long as the first."""
    async with on_stage(tmp_path) as (world, first, second, author):
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        world.known.discard(second.peer)
        for each in (first, second, world.seed):
            each.ownership._may_take = lambda: False
        first.node.watch.seen[MODULE] = 1
        for turn in range(1, 3 + int(LOST_TTLS)):
            silent = granted(world.run, MODULE, term=turn, leader=second.peer)
            assert all(each.node.mandates.believes(MODULE, silent) for each in (first, world.seed))
            world.seed.node.watch.is_taking_over(MODULE)
            await first.ownership._check(MODULE)
            await asyncio.sleep(1.1 * ttl_s)
        await first.lead(MODULE)
        assert first.ownership.modules == [MODULE], "at its first try"


async def test_what_is_usual_outlives_the_leader(tmp_path: Path) -> None:
    """Attack: norms lived in the leader's memory, and after a takeover one contribution made a module useless."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, author, 3)
        await first.die(world)
        await expired(world)
        await second.lead(MODULE)
        with pytest.raises(Refused) as caught:
            await contribute(world, second, author, seed=9, size=2e-2)
        assert caught.value.reason == Reason.NORM
        await make_versions(world, second, author, seed=10)


async def test_a_receipt_outlives_its_leader(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        receipt = await contribute(world, first, author)
        assert set(receipt.document.holders) == {first.peer, world.seed.node.peer}
        await first.die(world)
        await expired(world)
        owner = await second.lead(MODULE)
        await eventually(lambda: owner.head.version == 1)
        assert [share.contribution for share in owner.head.shares] == [receipt.document.contribution]


async def test_a_deposed_leader_takes_nothing_more_and_resigns(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        old = await first.lead(MODULE)
        world.network.freeze(first.peer)
        await expired(world)
        await second.lead(MODULE)
        world.network.thaw(first.peer)
        with pytest.raises(Refused) as caught:
            await contribute(world, first, author)
        assert caught.value.reason == Reason.NOT_LEADER
        assert not old.is_leading
        await first.ownership._check(MODULE)
        assert first.ownership.modules == []
        [told] = [event for event in first.events if event["ev"] == "deposed"]
        assert (told["module"], told["term"]) == (str(MODULE), old.grant.term)
        await second.node.watch.refresh()
        assert set(second.node.watch.heads[MODULE]) == {second.peer}
        await make_versions(world, second, author)


def depose(world: World, leader: TinyLeader, other: TinyLeader) -> None:
    """The coordinator grants the next term to `other`, and `leader` knows."""
    mandates = leader.node.mandates
    sealed = granted(world.run, MODULE, term=mandates.term(MODULE) + 1, leader=other.peer)
    assert mandates.believes(MODULE, sealed)


async def test_a_version_of_a_later_term_deposes_a_leader_that_has_heard_of_no_mandate(tmp_path: Path) -> None:
    """Bug, seed 584: after a partition it went over to the archive's branch, which another leader had made, and made a
    version of its own term after that."""
    async with on_stage(tmp_path) as (world, leader, _, author):
        old = await leader.lead(MODULE)
        await make_versions(world, leader, author)
        ledger, head = leader.chain.ledger, leader.chain.ledger.versions[-1]
        signer = world.seed.swarm.signer
        later = replace(head.document, term=old.grant.term + 1, author=signer.peer)
        ledger.versions[-1] = seal(signer, later)
        assert not old.is_leading
        await leader.ownership._check(MODULE)
        assert leader.ownership.modules == []


async def test_a_leader_that_was_deposed_for_a_moment_begins_anew(tmp_path: Path) -> None:
    """Its rounds ended with the first mandate, and the second one names it again: it would lead and close no round."""
    async with on_stage(tmp_path) as (world, leader, other, author):
        old = await leader.lead(MODULE)
        depose(world, leader, other)
        await asyncio.sleep(1.5 * TICK_S)
        depose(world, leader, leader)
        assert not old.is_leading, "for good"
        await leader.ownership._check(MODULE)
        assert leader.ownership.modules == []
        assert await lead_at_last(world, leader) is not old
        await make_versions(world, leader, author)


async def test_whoever_takes_over_while_it_copies_payloads_takes_no_version_more(tmp_path: Path) -> None:
    """A mirror that fetched from a leader that died waited for each payload; meanwhile it was granted the module."""
    async with on_stage(tmp_path) as (world, leader, mirror, author):
        world.seed.chains.is_closed = lambda: True  # nobody cosigns: the version must be made again
        await leader.lead(MODULE)
        await make_versions(world, leader, author)
        for member in (leader, mirror):
            grant = granted(world.run, MODULE, term=2, leader=leader.peer, mirrors=(mirror.peer,))
            assert member.node.mandates.believes(MODULE, grant)
        copy = mirror.chain.copy

        async def copy_slowly(contributions: Any, peer: Any) -> None:
            await copy(contributions, peer)
            mirror.node.mandates.believes(MODULE, granted(world.run, MODULE, term=3, leader=mirror.peer))

        mirror.chain.copy = copy_slowly  # type: ignore[method-assign]
        with pytest.raises(Refused) as caught:
            await mirror.chain.welcome(leader.peer)
        assert caught.value.reason == Reason.NOT_LEADER
        assert mirror.chain.ledger.head.version == 0 and len(mirror.chain.ledger.open) == 2


async def test_a_mirror_that_asked_in_vain_looks_who_leads_by_now(tmp_path: Path) -> None:
    """The seed's answer was lost; it was the other mirror that had asked before, and led for a moment."""
    async with on_stage(tmp_path, owners=3) as (world, first, second, author):
        world.seed.ownership._may_take = lambda: False
        for member in (first, second, world.seed):
            last = granted(world.run, MODULE, term=1, leader=author.peer, mirrors=(first.peer, second.peer))
            assert member.node.mandates.believes(MODULE, last)
        await expired(world)
        second.tasks[-1].cancel()  # it looks no more by itself
        world.network.cut(second.peer, world.seed.node.peer)
        leading = asyncio.ensure_future(second.ownership.take(MODULE))
        await asyncio.sleep(1.0)
        await first.lead(MODULE)
        with pytest.raises(SwarmError):
            await leading
        assert first.ownership.modules == [MODULE] and second.ownership.modules == []


async def test_who_is_deposed_while_it_makes_a_version_publishes_none(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, other, author):
        await leader.lead(MODULE)
        async with leader.node.averaging:  # the round closes, and its version has to wait
            await contribute(world, leader, author, seed=1)
            await asyncio.sleep(world.run.config.rounds.deadline_s)
            depose(world, leader, other)
        await asyncio.sleep(2.0)
        ledger = leader.chain.ledger
        assert (ledger.head.version, len(ledger.open)) == (0, 1), "whoever leads now counts it"


async def test_who_is_deposed_while_it_takes_over_never_leads(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, other, author):
        await leader.node.watch.refresh()
        read = leader.chain.state.read_patiently

        async def slow(*args: Any, **kwargs: Any) -> Any:
            depose(world, leader, other)
            return await read(*args, **kwargs)

        leader.chain.state.read_patiently = slow  # type: ignore[method-assign]
        with pytest.raises(Refused, match="not led here"):
            await leader.ownership.take(MODULE)
        assert MODULE not in leader.ownership.modules and not leader.node.presence._heads


async def test_nobody_leads_without_a_grant(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await seed_away(world, first, second)
        with pytest.raises(IntegrityError, match="nobody who may has granted"):
            await first.lead(MODULE)
        assert first.ownership.modules == []


async def test_versions_that_the_archive_never_got_are_handed_in_after_a_restart(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await seed_away(world, first)
        await make_versions(world, first, author, 2)
        await first.die(world)
        await world.start_seed().node.presence.beat()
        again = world.leader(50)  # same key, same folder
        owner = await again.lead(MODULE)
        assert owner.head.version == 2
        await make_versions(world, again, author, seed=9)
        await eventually(lambda: is_safe(again))
        require_verified(world, versions=3)


async def test_a_long_outage_of_the_archive_loses_no_payload(tmp_path: Path) -> None:
    """Longer than a sender's uploads are kept that nothing came of."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await seed_away(world, first)
        count = UNUSED_UPLOADS_MAX // 2 + 1
        await make_versions(world, first, author, count)
        await seed_back(world, first)
        await make_versions(world, first, author, seed=50)
        await eventually(lambda: is_safe(first))
        require_verified(world, versions=count + 1)
        assert not first.node.store.documents(f"open-{MODULE}"), "nothing is kept here that the archive has"


async def test_versions_that_the_archive_went_on_without_are_forgotten(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, author)
        await seed_away(world, first)
        await make_versions(world, first, author, 2, seed=5)
        await first.die(world)
        await world.start_seed().node.presence.beat()
        await expired(world)
        await lead_at_last(world, second)
        await make_versions(world, second, author, seed=9)
        await second.die(world)
        await expired(world)
        again = world.leader(50)
        owner = await lead_at_last(world, again)
        assert owner.head == world.seed.archive.ledgers[MODULE].head and owner.head.version == 2
        await make_versions(world, again, author, seed=12)
        await eventually(lambda: is_safe(again))
        require_verified(world, versions=3)


async def test_an_author_counts_once_per_base_also_under_a_new_leader(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        genesis = (await first.lead(MODULE)).head
        await make_versions(world, first, author)
        await first.die(world)
        await expired(world)
        owner = await second.lead(MODULE)
        assert owner.head.version == 1
        payload = gradient_bytes(world.run, MODULE, seed=7)
        base = {"base_version": 0, "base_digest": genesis.digest}
        document = contribution_of(world.run, author.swarm.signer, payload, module=MODULE, path=PATH, **base)
        with pytest.raises(Refused) as caught:
            await offer(author, second.peer, document, payload)
        assert caught.value.reason == Reason.ALREADY_CONTRIBUTED


async def test_a_reader_leaves_a_branch_that_was_lost_with_its_leader(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await make_versions(world, first, author)
        await seed_away(world, first)
        await make_versions(world, first, author, 2, seed=5)
        node = world.peer(70)
        reader = Follower(node, MODULE)
        await node.watch.refresh()
        await reader.sync()
        lost = reader.version
        assert lost.version == 3
        await first.die(world)
        await world.start_seed().node.presence.beat()
        await expired(world)
        await lead_at_last(world, second)
        await make_versions(world, second, author, seed=9)
        await node.watch.refresh()
        await reader.sync(after=lost.version)  # not for ever: that version will never come
        assert reader.version == world.seed.archive.ledgers[MODULE].head and reader.version.version == 2


async def test_a_version_is_shown_after_another_has_made_it_again(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, first, second, author):
        owner = await first.lead(MODULE)
        shown: list[int] = []
        publish = owner._replication.publish

        async def slow_publish() -> None:
            shown.append(len(await owner.versions_after(Known(version=0), wait_s=0.0)))
            await publish()

        owner._replication.publish = slow_publish  # type: ignore[method-assign]
        await make_versions(world, first, author)
        [sealed] = await owner.versions_after(Known(version=0), wait_s=0.0)
        assert shown == [0] and set(sealed.cosignatures) == {world.seed.node.peer}


async def test_a_seed_that_leads_and_is_slow_to_answer_is_not_deposed(tmp_path: Path) -> None:
    """Two halves that each granted themselves a term would have made two chains."""

    async def never(*_: object) -> Reply:
        await asyncio.sleep(CALL_TIMEOUT_S)
        raise Refused("too late", reason="busy")

    async with on_stage(tmp_path, owners=2) as (world, first, second, author):
        await world.seed.ownership.take(MODULE)
        await eventually(lambda: first.peer in world.seed.ownership._leaders[MODULE].grant.mirrors)
        term, handlers = world.seed.term(MODULE), world.seed.swarm._dispatcher._handlers
        await eventually(lambda: first.node.mandates.term(MODULE) == term)
        adopt, handlers["archive.adopt"] = handlers["archive.adopt"], never
        with pytest.raises(SwarmError):
            await first.lead(MODULE)
        assert first.node.mandates.term(MODULE) == world.seed.term(MODULE) == term
        handlers["archive.adopt"] = adopt
        assert (await lead_at_last(world, first)).grant.term > term


async def test_a_term_whose_grant_came_too_late_is_led_as_soon_as_it_is_heard_of(tmp_path: Path) -> None:
    """And no further one is asked for: its answer could be as late, while nobody leads."""
    async with on_stage(tmp_path) as (world, first, _, author):
        term, handlers = first.node.mandates.term(MODULE), world.seed.swarm._dispatcher._handlers
        adopt = handlers["archive.adopt"]

        async def late(*request: Any) -> Reply:
            reply = await adopt(*request)
            await asyncio.sleep(2 * CALL_TIMEOUT_S)
            return reply

        handlers["archive.adopt"] = late
        with pytest.raises(IntegrityError):  # nobody else may grant it
            await first.lead(MODULE)
        await first.node.watch.mandate_news.learn(MODULE, world.seed.node.peer)
        owner = await first.lead(MODULE)
        assert owner.grant.term == first.node.mandates.term(MODULE) == term + 1
        await make_versions(world, first, author)
        require_verified(world, versions=1)


async def test_when_a_seed_that_led_is_gone_a_mirror_goes_on(tmp_path: Path) -> None:
    async with on_stage(tmp_path, owners=3) as (world, first, second, author):
        await world.seed.ownership.take(MODULE)
        await eventually(lambda: first.peer in world.seed.ownership._leaders[MODULE].grant.mirrors)
        term = world.seed.term(MODULE)
        await eventually(lambda: first.node.mandates.term(MODULE) == term)
        await seed_away(world, first)
        await eventually(lambda: first.node.watch.leader(MODULE) is None)
        assert (await first.lead(MODULE)).grant.term == term + 1


async def test_a_module_is_followed_until_what_its_versions_here_count_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volunteer of a large swarm that led it once, and looked no more whether what it took is in: it never left."""
    async with on_stage(tmp_path) as (world, first, second, author):
        await first.lead(MODULE)
        await seed_away(world, first)
        await make_versions(world, first, author)
        chain = first.ownership.chains[MODULE]
        assert chain.ledger.spent and not chain.ledger.open and not chain.lost
        monkeypatch.setattr(first.node.mandates, "grant", lambda module: None)  # others own it by now
        assert first.ownership.held() == {MODULE}
