"""What a leader says of who holds a contribution, and what it shows of a version: true on the disks of others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_harness import (
    MODULE,
    OTHER_PATH,
    Group,
    GroupMember,
    contribute,
    deaf,
    document,
    expired,
    make_versions,
    of_group,
)
from runtime_harness import TinySeed, World, offer
from tiny_run import gradient_bytes
from virtual_time import eventually

from dipaco_p2p.errors import Refused, Unreachable
from dipaco_p2p.node.calls import Commit, KeepContribution
from dipaco_p2p.node.ledger import AUTHOR_BYTES_S, Ledger
from dipaco_p2p.node.node import CALL_TIMEOUT_S, CONTROL_TIMEOUT_S, WAIT_S, Member, serve_store
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.mirror_calls import COMING_BYTES_MAX
from dipaco_p2p.owner.replication import LOST_TTLS
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Custody, Sealed, is_cosigned, seal, unseal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import Known
from dipaco_p2p.strict import plain
from dipaco_p2p.swarm.api import Reply


def on_disk(world: World, group: Group, peer: str) -> tuple[Store, Ledger]:
    """What a holder would find after a crash."""
    if peer == world.seed.node.peer:
        store = Store(world.seed.node.store.folder)
    else:
        store = Store(next(member.node.store.folder for member in group.members if member.peer == peer))
    return store, Ledger(world.run, store, MODULE)


def slow(member: GroupMember | TinySeed, method: str, may_answer: asyncio.Event, begun: list[str]) -> None:
    """It answers `method` only when it may; each call that has begun is noted."""
    answer = member.swarm._dispatcher._handlers[method]

    async def wait(*request: Any) -> Reply:
        begun.append(member.swarm.peer)
        await may_answer.wait()
        return await answer(*request)

    member.swarm._dispatcher._handlers[method] = wait


@pytest.mark.parametrize("with_seed", [True, False])
async def test_every_holder_of_a_receipt_has_the_contribution_on_disk(tmp_path: Path, with_seed: bool) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        if not with_seed:
            await group.seed_away()
        payload = gradient_bytes(world.run, MODULE, seed=1)
        sealed = seal(author.swarm.signer, document(world, group.leader.ledger, author, payload))
        receipt = await offer(author, group.leader.peer, sealed, payload)
        holders = receipt.document.holders
        assert holders[0] == group.leader.peer and len(holders) >= 2
        allowed = {mirror.peer for mirror in group.mirrors} | ({world.seed.node.peer} if with_seed else set())
        assert set(holders[1:]) <= allowed
        for holder in holders:
            store, ledger = on_disk(world, group, holder)
            assert ledger.kept[sealed.id] == sealed and store.get(BlobRef.of(payload).digest) == payload


async def test_no_receipt_while_mirrors_live_that_do_not_take_it(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        for mirror in group.mirrors:
            deaf(mirror, "mirror.contribution")
        signed = len(group.leader.said("receipt_signed"))
        with pytest.raises(Refused) as caught:
            await contribute(world, group.leader, author, seed=1)
        assert caught.value.reason == Reason.NO_MIRROR
        assert len(group.leader.said("receipt_signed")) == signed


async def test_what_no_mirror_takes_leaves_nothing_but_its_commitment(tmp_path: Path) -> None:
    """Attack: each try stayed on the leader's disk, and its author could make the next one at once."""
    async with of_group(tmp_path) as (world, group, author):
        leader, copier = group.leader, world.peer(61)
        await make_versions(world, leader, author, seed=99)
        await group.seed_away()
        handlers = [mirror.swarm._dispatcher._handlers for mirror in group.mirrors]
        answers = [each["mirror.contribution"] for each in handlers]
        for mirror in group.mirrors:
            deaf(mirror, "mirror.contribution")
        payload = gradient_bytes(world.run, MODULE, seed=1)
        original = seal(author.swarm.signer, document(world, leader.ledger, author, payload))
        copy = seal(copier.swarm.signer, document(world, leader.ledger, copier, payload))
        for node, sealed in ((author, original), (copier, copy)):
            await Commit(contribution=sealed).call(node.swarm, leader.peer, timeout_s=5.0)
        for _ in range(2):
            with pytest.raises(Refused) as caught:
                await offer(author, leader.peer, original, payload)
            assert caught.value.reason == Reason.NO_MIRROR
            assert not leader.ledger.open and not leader.node.store.documents("open-")
            assert leader.node.store.get(BlobRef.of(payload).digest) is None
        for each, answer in zip(handlers, answers, strict=True):
            each["mirror.contribution"] = answer
        assert (await offer(author, leader.peer, original, payload)).document.contribution == original.id
        works = leader.chain.originals._works
        assert works[original.id].sketch is not None and works[original.id].place < works[copy.id].place


async def test_a_leader_that_is_deposed_in_the_middle_of_a_try_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the mirror of the next leader it may have signed that it keeps this very contribution."""
    async with of_group(tmp_path) as (world, group, author):
        leader, owner = group.leader, group.leader.owner(MODULE)
        await make_versions(world, leader, author, seed=99)
        payload = gradient_bytes(world.run, MODULE, seed=1)
        sealed = seal(author.swarm.signer, document(world, leader.ledger, author, payload))

        async def deposed(sealed: Sealed[Contribution], payload: bytes) -> tuple[Custody, ...]:
            leader.chain.add(sealed)
            monkeypatch.setattr(type(owner), "is_leading", False)
            raise Refused("it leads no more", reason=Reason.NOT_LEADER)

        monkeypatch.setattr(owner, "_keep", deposed)
        with pytest.raises(Refused):
            await offer(author, leader.peer, sealed, payload)
        assert sealed.id in leader.ledger.open
        assert leader.node.store.get(BlobRef.of(payload).digest) == payload
        monkeypatch.undo()


@pytest.mark.parametrize(("reason", "is_deaf"), [(Reason.PAYLOAD_MISSING, False), (Reason.BUSY, True)])
async def test_who_refuses_a_contribution_for_a_reason_in_it_is_not_deaf(
    tmp_path: Path, reason: Reason, is_deaf: bool
) -> None:
    """Attack: a contribution that no honest mirror can take, again and again, had all mirrors replaced."""
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        await make_versions(world, leader, author, seed=99)
        await group.seed_away()

        async def refuse(*_: object) -> Reply:
            raise Refused("not this one", reason=reason)

        owner, mirrors = leader.owner(MODULE), group.mirrors
        for mirror in mirrors:
            mirror.swarm._dispatcher._handlers["mirror.contribution"] = refuse
        leader.ownership._mirrors = lambda *_, **__: owner.grant.mirrors  # type: ignore[method-assign]
        since_s, ttl_s = world.clock.now_s(), world.run.config.liveness.heartbeat_ttl_s
        while world.clock.now_s() - since_s < (LOST_TTLS + 1) * ttl_s:
            with pytest.raises(Refused) as caught:
                await contribute(world, leader, author, seed=1)
            assert caught.value.reason == Reason.NO_MIRROR
            await asyncio.sleep(0.5)
        assert owner.deaf == ({mirror.peer for mirror in mirrors} if is_deaf else set())


async def test_one_mirror_that_takes_it_is_enough(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        silent, other = group.mirrors
        world.network.cut(group.leader.peer, silent.peer)
        receipt = await contribute(world, group.leader, author, seed=1)
        assert receipt.document.holders == (group.leader.peer, other.peer)


async def test_the_seed_is_a_holder_when_no_mirror_takes_it(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        for mirror in group.mirrors:
            deaf(mirror, "mirror.contribution")
        receipt = await contribute(world, group.leader, author, seed=1)
        assert receipt.document.holders == (group.leader.peer, world.seed.node.peer)
        assert receipt.document.contribution in on_disk(world, group, world.seed.node.peer)[1].open


async def test_a_leader_that_is_alone_names_itself_alone(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        await make_versions(world, leader, author, seed=99)
        await group.seed_away()
        for mirror in list(group.mirrors):
            await group.kill(mirror)
        await eventually(lambda: len(leader.node.watch.heartbeats) == 1)
        receipt = await contribute(world, leader, author, seed=1)
        assert receipt.document.holders == (leader.peer,)
        await eventually(lambda: leader.ledger.head.version == 2)


async def test_a_receipt_waits_for_a_holder_that_its_leader_did_not_choose(tmp_path: Path) -> None:
    """Any stranger may have become a mirror, and say at once that it keeps what it does not."""
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        chosen = leader.owner(MODULE).grant.mirrors[0]
        may_answer, begun = asyncio.Event(), list[str]()
        slow(group.of(chosen), "mirror.contribution", may_answer, begun)
        slow(world.seed, "mirror.contribution", may_answer, begun)
        pushing = asyncio.ensure_future(contribute(world, leader, author, seed=1))
        await eventually(lambda: set(begun) == {chosen, world.seed.node.peer})
        await asyncio.sleep(5.0)
        assert not pushing.done(), "though another mirror has it"
        may_answer.set()
        holder = (await pushing).document.holders[1]
        assert holder in {chosen, world.seed.node.peer}


async def test_whoever_only_says_that_it_is_a_seed_is_handed_nothing(tmp_path: Path) -> None:
    """Attack: three liars that said "kept" were named in 77 of 80 receipts, and were handed every version."""
    async with of_group(tmp_path) as (world, group, author):
        liar, leader, asked = world.peer(80), group.leader, list[str]()

        async def keep(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            id_ = unseal(Contribution, header["contribution"]).id
            asked.append(id_)
            return Reply({"custody": plain(Custody.sign(liar.swarm.signer, id_))})

        async def write(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            return Reply({"have": header["size"], "done": True, "range": 2**20})

        liar.swarm.serve("mirror.contribution", keep)
        liar.swarm.serve("blob.write", write)
        await liar.presence.say(role="seed", owns=True)
        await eventually(lambda: liar.peer in leader.node.watch.heartbeats)
        receipt = await contribute(world, leader, author, seed=1)
        await asyncio.sleep(5.0)
        assert liar.peer not in receipt.document.holders and asked == []
        decrees = world.seed.node.decrees
        decrees.issue(world.seed.node.swarm.signer, "appoint", at_s=world.clock.now_s(), reason="", peer=liar.peer)
        await eventually(lambda: leader.node.decrees.count == 1)
        await liar.presence.say()
        await eventually(lambda: liar.peer in leader.node.watch.seeds())
        receipt = await contribute(world, leader, author, seed=2, path=OTHER_PATH)
        await eventually(lambda: asked == [receipt.document.contribution])


async def test_the_receipt_of_a_contribution_stays_the_same_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        payload = gradient_bytes(world.run, MODULE, seed=1)
        sealed = seal(author.swarm.signer, document(world, group.leader.ledger, author, payload))
        first = await offer(author, group.leader.peer, sealed, payload)
        assert await offer(author, group.leader.peer, sealed, payload) == first
        assert [event["id"] for event in group.leader.said("receipt_signed")] == [sealed.id] * 2


async def test_what_is_on_its_way_to_a_holder_is_not_sent_once_more(tmp_path: Path) -> None:
    """On a slow line that takes longer than a call lasts, and the author asks again and again."""
    async with of_group(tmp_path) as (world, group, author):
        await group.seed_away()
        may_arrive, begun = asyncio.Event(), list[str]()
        for mirror in group.mirrors:
            slow(mirror, "mirror.contribution", may_arrive, begun)
        payload = gradient_bytes(world.run, MODULE, seed=1)
        sealed = seal(author.swarm.signer, document(world, group.leader.ledger, author, payload))
        for _ in range(3):
            with pytest.raises(Unreachable):
                await offer(author, group.leader.peer, sealed, payload, timeout_s=1.0)
        assert sorted(begun) == sorted(mirror.peer for mirror in group.mirrors)
        may_arrive.set()
        receipt = await offer(author, group.leader.peer, sealed, payload)
        assert len(receipt.document.holders) == 2 and receipt.document.contribution == sealed.id


async def test_a_mirror_that_never_answers_holds_up_no_receipt_no_round_and_no_successor(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, clock = group.leader, world.network.clock
        never, begun = asyncio.Event(), list[str]()
        slow(group.mirrors[0], "mirror.version", never, begun)
        for seed in (1, 2, 3):
            began_s = clock.now_s()
            await make_versions(world, leader, author, seed=seed)
            assert clock.now_s() - began_s < CONTROL_TIMEOUT_S
            await eventually(lambda: len(begun) > 0)
        began_s = clock.now_s()
        await leader.ownership.drop(MODULE)
        assert clock.now_s() - began_s < CONTROL_TIMEOUT_S


async def test_a_mirror_that_takes_contributions_and_cosigns_nothing_is_replaced(tmp_path: Path) -> None:
    """Attack: whenever it took a contribution its leader thought that it hears again. While the coordinator was away,
    or had a light archive, each version waited for it."""
    async with of_group(tmp_path) as (world, group, author):
        await group.seed_away()
        leader, chosen, clock = group.leader, group.mirrors[0], world.network.clock
        deaf(chosen, "mirror.version")
        ttl_s, seed = world.run.config.liveness.heartbeat_ttl_s, 0
        until_s = clock.now_s() + 2 * (LOST_TTLS * ttl_s + world.run.config.rounds.deadline_s)
        while chosen.peer in leader.owner(MODULE).grant.mirrors:
            await make_versions(world, leader, author, seed=(seed := seed + 1))
            await asyncio.sleep(2 * ttl_s)
            assert clock.now_s() < until_s
        assert leader.leads and group.mirrors


async def test_the_other_holders_get_it_as_well_though_the_receipt_does_not_wait(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        receipt = await contribute(world, group.leader, author, seed=1)
        everybody = [*(member.peer for member in group.members), world.seed.node.peer]
        await eventually(
            lambda: all(receipt.document.contribution in on_disk(world, group, peer)[1].open for peer in everybody)
        )


async def test_a_version_is_shown_when_one_has_cosigned_it_and_all_cosign_in_the_end(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader = group.leader
        await make_versions(world, leader, author)
        [shown] = await leader.owner(MODULE).versions_after(Known(version=0), wait_s=0.0)
        assert shown.cosignatures and leader.peer not in shown.cosignatures
        others = {mirror.peer for mirror in group.mirrors} | {world.seed.node.peer}
        await eventually(lambda: set(leader.ledger.versions[0].cosignatures) == others)
        [sealed] = leader.ledger.versions
        assert all(is_cosigned(sealed, peer, signature) for peer, signature in sealed.cosignatures.items())


async def test_a_mirror_that_signs_something_else_is_not_believed(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        liar, honest = group.mirrors

        async def lie(*_: object) -> Reply:
            return Reply({"cosignature": "0" * 128})

        liar.swarm._dispatcher._handlers["mirror.version"] = lie
        await make_versions(world, group.leader, author)
        others = {honest.peer, world.seed.node.peer}
        await eventually(lambda: set(group.leader.ledger.versions[0].cosignatures) == others)
        await expired(world)
        assert set(group.leader.ledger.versions[0].cosignatures) == others


async def test_a_mirror_that_missed_a_contribution_is_given_it_with_the_version(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, (mirror, _) = group.leader, group.mirrors
        handlers = mirror.swarm._dispatcher._handlers
        keep = handlers["mirror.contribution"]
        deaf(mirror, "mirror.contribution")
        await contribute(world, leader, author, seed=1)
        assert not mirror.ledger.open
        handlers["mirror.contribution"] = keep
        await eventually(lambda: leader.ledger.head.version == 1)  # at its deadline
        await eventually(lambda: mirror.peer in leader.ledger.versions[0].cosignatures)
        assert mirror.ledger.head == leader.ledger.head


async def test_a_leader_that_hears_of_a_newer_one_from_a_mirror_stops(tmp_path: Path) -> None:
    async with of_group(tmp_path) as (world, group, author):
        leader, (mirror, other) = group.leader, group.mirrors
        owner = leader.owner(MODULE)
        await make_versions(world, leader, author, seed=99)
        await group.seed_away()
        for member in (mirror, other):
            mandates = member.node.mandates
            if member is mirror:
                mandates.grant_next(mirror.swarm.signer, MODULE, leader=mirror.peer, mirrors=())
            else:
                assert mandates.believes(MODULE, mirror.node.mandates.newest(MODULE)[-1])
        with pytest.raises(Refused) as caught:
            await contribute(world, leader, author, seed=1)
        assert caught.value.reason == Reason.NOT_LEADER and not owner.is_leading


# -- payloads come from their authors


async def at_home(world: World, author: Member, payload: bytes) -> list[str]:
    """The author can be dialled, as the owners know, and has its payload; the methods that others call it by."""
    author.store.put(payload)
    serve_store(author.swarm, author.store)
    await author.presence.beat()
    for node in (member.node for member in world.leaders):
        await node.watch.refresh()
        assert node.watch.addresses(author.peer)
    called: list[str] = []
    handlers = author.swarm._dispatcher._handlers  # type: ignore[attr-defined]
    read = handlers["blob.read"]

    async def noted(*request: Any) -> Any:
        called.append("blob.read")
        return await read(*request)

    handlers["blob.read"] = noted
    return called


def uploads_to(group: Group) -> list[PeerId]:
    """Mirrors to which parts of a blob are brought, from now on."""
    brought: list[PeerId] = []
    for mirror in group.mirrors:
        handlers = mirror.swarm._dispatcher._handlers

        async def noted(*request: Any, peer: PeerId = mirror.peer, write: Any = handlers["blob.write"]) -> Any:
            brought.append(peer)
            return await write(*request)

        handlers["blob.write"] = noted
    return brought


async def test_mirrors_fetch_a_payload_from_its_author_not_over_the_leaders_line(tmp_path: Path) -> None:
    """With 8 contributors and 2 mirrors the leader's uplink carried 16 payloads of others in each round."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        payload = gradient_bytes(world.run, MODULE, seed=1)
        read, brought = await at_home(world, author, payload), uploads_to(group)
        sealed = seal(author.swarm.signer, document(world, group.leader.ledger, author, payload))
        await offer(author, group.leader.peer, sealed, payload)
        await eventually(lambda: all(sealed.id in mirror.ledger.kept for mirror in group.mirrors))
        assert brought == [] and len(read) >= len(group.mirrors)
        for mirror in group.mirrors:
            assert mirror.node.store.get(BlobRef.of(payload).digest) == payload


async def test_a_mirror_takes_its_own_work_from_where_it_lies(tmp_path: Path) -> None:
    """A volunteer keeps what it pushes in its outbox, and may be a mirror of the module, too."""
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        mirror, outbox = group.mirrors[0], Store(tmp_path / "outbox")
        payload = gradient_bytes(world.run, MODULE, seed=1)
        outbox.put(payload)
        del mirror.swarm._dispatcher._handlers["blob.read"]  # of its own store alone
        serve_store(mirror.swarm, mirror.node.store, outbox)
        brought = uploads_to(group)
        sealed = seal(mirror.swarm.signer, document(world, group.leader.ledger, mirror.node, payload))
        await offer(mirror.node, group.leader.peer, sealed, payload)
        await eventually(lambda: all(sealed.id in each.ledger.kept for each in group.mirrors))
        assert brought == [] and mirror.node.store.get(BlobRef.of(payload).digest) == payload


@pytest.mark.parametrize("fault", ["gone", "silent", "wrong bytes", "another size"])
async def test_what_an_author_does_not_give_the_leader_brings(tmp_path: Path, fault: str) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        payload = gradient_bytes(world.run, MODULE, seed=1)
        await at_home(world, author, payload)
        brought = uploads_to(group)
        handlers = author.swarm._dispatcher._handlers  # type: ignore[attr-defined]

        async def answer(*request: Any) -> Reply:
            if fault == "silent":
                await world.clock.sleep(3600.0)
            if fault == "gone":
                raise Refused("it is not here", reason=Reason.MISSING)
            size = len(payload) + (fault == "another size")
            return Reply({"size": size}, bytes(min(size, 4096)))

        handlers["blob.read"] = answer
        sealed = seal(author.swarm.signer, document(world, group.leader.ledger, author, payload))
        began_s = world.clock.now_s()
        await offer(author, group.leader.peer, sealed, payload, timeout_s=200.0)
        assert world.clock.now_s() - began_s < WAIT_S + len(payload) / AUTHOR_BYTES_S + CALL_TIMEOUT_S
        await eventually(lambda: all(sealed.id in mirror.ledger.kept for mirror in group.mirrors))
        assert set(brought) == {mirror.peer for mirror in group.mirrors}


async def test_nobody_but_the_leader_has_a_mirror_fetch_and_no_more_than_it_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, seed=99)
        await group.seed_away()
        payload = gradient_bytes(world.run, MODULE, seed=1)
        read, mirror = await at_home(world, author, payload), group.mirrors[0]
        sealed = seal(author.swarm.signer, document(world, group.leader.ledger, author, payload))
        request = KeepContribution(module=MODULE, contribution=sealed)
        with pytest.raises(Refused) as caught:
            await request.call(author.swarm, mirror.peer, timeout_s=5.0)
        assert caught.value.reason == Reason.NOT_LEADER and not read
        great = BlobRef(digest=sealed.document.payload.digest, size=world.run.payload_bytes_max(MODULE) + 1)
        for changed, most in (({"payload": great}, COMING_BYTES_MAX), ({}, len(payload) - 1)):
            monkeypatch.setattr("dipaco_p2p.owner.mirror_calls.COMING_BYTES_MAX", most)
            asked = seal(author.swarm.signer, replace(sealed.document, **changed))
            with pytest.raises(Refused) as caught:
                await replace(request, contribution=asked).call(group.leader.swarm, mirror.peer, timeout_s=5.0)
            assert caught.value.reason == Reason.PAYLOAD_MISSING and not read
