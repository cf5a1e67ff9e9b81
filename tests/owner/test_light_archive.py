"""A light archive: final by a quorum of owners, with the parameters alone, and no contribution but what it draws."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_harness import MODULE, Group, GroupMember, asked, contribute, deaf, expired, lighten, make_versions, of_group
from mirror_harness import ONE, OTHER, Shelf, on_shelf, refusal
from runtime_harness import World
from tiny_run import granted, signer
from virtual_time import eventually

from bootstrap.archives.verify import verify_run
from dipaco_p2p.core.outer.outer_step import OuterState
from dipaco_p2p.errors import IntegrityError, Unreachable
from dipaco_p2p.node.node import CALL_TIMEOUT_S, CONTROL_TIMEOUT_S, Member
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.uploads import Uploads, _Upload
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.protocol.audits import Audit
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, Sealed, cosign, seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.standing import Findings

THIRD = signer(3)


@asynccontextmanager
async def light_group(
    folder: Path, *, remade: float = 0.0, rounds: int = 30
) -> AsyncIterator[tuple[World, Group, Member]]:
    """A group whose coordinator's archive is light."""
    async with of_group(folder, rounds=rounds) as (world, group, author):
        await lighten(world, group, Retention(remade=remade))
        yield world, group, author


def hang(member: GroupMember, method: str) -> None:
    """It never answers `method`."""

    async def wait(*request: Any) -> Any:
        await asyncio.Event().wait()

    member.swarm._dispatcher._handlers[method] = wait


def delay(member: GroupMember, method: str, for_s: float) -> None:
    """It answers `method` so much later."""
    answer = member.swarm._dispatcher._handlers[method]

    async def later(*request: Any) -> Any:
        await asyncio.sleep(for_s)
        return await answer(*request)

    member.swarm._dispatcher._handlers[method] = later


async def final(world: World, group: Group, version: int) -> None:
    await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == version)
    await eventually(lambda: group.leader.ledger.final == version)


async def live_through_an_outage(world: World, group: Group, author: Member, *, archived: int) -> None:
    """While the coordinator is away more versions are made than owners keep the updates of; it signs all of them."""
    await group.seed_away()
    more = world.run.config.rounds.staleness + 4
    await make_versions(world, group.leader, author, more, seed=2)
    assert group.leader.ledger.final == 2
    world.start_seed().archive.thinning.retention = Retention(remade=0.0)
    world.seed.node.presence.note(light=True)
    await world.seed.node.presence.beat()
    await final(world, group, archived + more)
    assert not any(event for member in group.members for event in member.said("gave_up"))


async def test_a_quorum_makes_versions_final_and_no_contribution_comes_to_the_archive(tmp_path: Path) -> None:
    async with light_group(tmp_path) as (world, group, author):
        calls = asked(world)
        ids = await make_versions(world, group.leader, author, 3, seed=1)
        await final(world, group, 3)
        assert "mirror.contribution" not in calls and "mirror.version" in calls
        store, archive = world.seed.node.store, world.seed.archive
        assert [archive.find(id_) for id_ in ids] == [None] * len(ids)
        for sealed in archive.ledgers[MODULE].versions:
            assert store.size(sealed.document.digest) and not store.size(sealed.document.state.digest)
        [report] = [one for one in verify_run(world.run, store, archive) if one.module == MODULE]
        assert (report.versions, report.signed, report.problem) == (3, 3, "")


async def test_a_receipt_names_the_mirror_that_the_coordinator_chose(tmp_path: Path) -> None:
    async with light_group(tmp_path) as (world, group, author):
        receipt = await contribute(world, group.leader, author, seed=1)
        chosen = group.leader.owner(MODULE).grant.mirrors[0]
        assert receipt.document.holders == (group.leader.peer, chosen)


async def test_what_is_drawn_is_made_again_from_its_contributions(tmp_path: Path) -> None:
    async with light_group(tmp_path, remade=0.999_999) as (world, group, author):
        calls = asked(world)
        await make_versions(world, group.leader, author, 2, seed=1)
        await final(world, group, 2)
        assert calls.count("mirror.contribution") == 4


async def test_the_draw_depends_on_module_and_number_and_on_nothing_that_a_leader_says(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=True) as shelf:
        chains = shelf.world.seed.chains
        shelf.world.seed.archive.thinning.retention = Retention(remade=0.5)
        first, _ = shelf.version(1)
        drawn = [chains.draws(replace(first.document, version=number)) for number in range(1, 201)]
        assert 60 < sum(drawn) < 140
        other, _ = shelf.version(1, variant=1, leader=OTHER, term=2)
        assert chains.draws(other.document) == drawn[0]


@pytest.mark.parametrize("method", ["mirror.contribution", "mirror.version"])
async def test_without_the_chosen_mirror_the_archive_gets_all_as_any_other(tmp_path: Path, method: str) -> None:
    async with light_group(tmp_path) as (world, group, author):
        chosen = group.of(group.leader.owner(MODULE).grant.mirrors[0])
        deaf(chosen, method)
        calls = asked(world)
        await make_versions(world, group.leader, author, 1, seed=1)
        await final(world, group, 1)
        assert "mirror.contribution" in calls


async def test_the_last_version_comes_with_its_outer_state(tmp_path: Path) -> None:
    """A grid that grows goes on from it."""
    async with light_group(tmp_path, rounds=2) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await final(world, group, 2)
        state = world.seed.archive.ledgers[MODULE].head.state
        assert state is not None and world.seed.node.store.size(state.digest) == state.size


# -- by word of mouth


@asynccontextmanager
async def light_shelf(folder: Path) -> AsyncIterator[Shelf]:
    async with on_shelf(folder, keeps_everything=True) as shelf:
        shelf.world.seed.archive.thinning.retention = Retention(remade=0.0)
        grant = granted(shelf.run, MODULE, term=1, leader=ONE.peer, mirrors=(OTHER.peer, THIRD.peer))
        assert shelf.node.mandates.believes(MODULE, grant)
        yield shelf


def settled(shelf: Shelf, *signers: Signer, **changes: Any) -> Sealed[ModuleVersion]:
    """The first version, whose contributions nobody has brought, made again by these."""
    sealed, made = shelf.version(1, is_handed_in=False)
    grant = shelf.node.mandates.newest(MODULE)[-1]
    sealed = seal(ONE, replace(sealed.document, **{"grant": grant.id} | changes))
    for ref, parts in made.blobs:
        shelf.node.store.keep(ref, *parts)
    return sealed.cosigned({each.peer: cosign(each, sealed) for each in signers})


async def test_a_version_with_a_quorum_is_signed(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        await shelf.keep(settled(shelf, OTHER))
        assert shelf.ledger.final == 1


@pytest.mark.parametrize("signers", [(), (THIRD,), (signer(4), THIRD)], ids=["alone", "another", "a stranger"])
async def test_the_word_of_others_than_the_chosen_mirror_settles_nothing(
    tmp_path: Path, signers: tuple[Signer, ...]
) -> None:
    async with light_shelf(tmp_path) as shelf:
        assert await refusal(shelf.keep(settled(shelf, *signers))) == Reason.CONTRIBUTION_MISSING
        assert shelf.ledger.head.version == 0


async def test_of_a_group_of_five_two_are_no_quorum(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        five = tuple(signer(number).peer for number in (2, 3, 4, 5))
        assert shelf.node.mandates.believes(MODULE, granted(shelf.run, MODULE, term=2, leader=ONE.peer, mirrors=five))
        assert await refusal(shelf.keep(settled(shelf, OTHER, term=2))) == Reason.CONTRIBUTION_MISSING
        await shelf.keep(settled(shelf, OTHER, THIRD, term=2))
        assert shelf.ledger.final == 1


async def test_a_group_that_granted_itself_its_term_has_no_quorum(tmp_path: Path) -> None:
    """Its leader chose every mirror."""
    async with light_shelf(tmp_path) as shelf:
        mandates = shelf.node.mandates
        own = replace(mandates.newest(MODULE)[-1].document, term=2, after=1, author=ONE.peer)
        assert mandates.believes(MODULE, seal(ONE, own))
        assert await refusal(shelf.keep(settled(shelf, OTHER, THIRD, term=2))) == Reason.CONTRIBUTION_MISSING


async def test_a_banned_mirror_settles_nothing(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        shelf.node.mandates._is_banned = lambda peer: peer == OTHER.peer
        assert await refusal(shelf.keep(settled(shelf, OTHER, THIRD))) == Reason.CONTRIBUTION_MISSING


async def test_one_lost_answer_before_that_loses_nothing_either(tmp_path: Path) -> None:
    async with light_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await final(world, group, 2)
        keep = world.seed.chains[MODULE].keep_version

        async def loses_the_answer(*arguments: Any) -> str:
            await keep(*arguments)
            raise Unreachable("lost")

        world.seed.chains[MODULE].keep_version = loses_the_answer
        await make_versions(world, group.leader, author, 1, seed=3)
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == 3)
        await live_through_an_outage(world, group, author, archived=3)


async def test_a_slow_chosen_mirror_does_not_bring_everything_to_the_archive(tmp_path: Path) -> None:
    async with light_group(tmp_path) as (world, group, author):
        chosen = group.of(group.leader.owner(MODULE).grant.mirrors[0])
        for method in ("mirror.contribution", "mirror.version"):
            delay(chosen, method, CONTROL_TIMEOUT_S - 1)
        calls = asked(world)
        await make_versions(world, group.leader, author, 1, seed=1)
        await final(world, group, 1)
        assert "mirror.contribution" not in calls


@pytest.mark.parametrize("has_quorum", [True, False])
async def test_who_brings_another_version_when_one_is_drawn_is_noted(tmp_path: Path, has_quorum: bool) -> None:
    async with light_shelf(tmp_path) as shelf:
        noted: list[dict[str, Any]] = []
        shelf.node.history.listen(noted.append)
        shelf.world.seed.archive.thinning.retention = Retention(remade=1 - 1e-9)
        assert await refusal(shelf.keep(settled(shelf, OTHER))) == Reason.CONTRIBUTION_MISSING
        honest, _ = shelf.version(1, variant=1)
        sealed = seal(ONE, replace(honest.document, grant=shelf.node.mandates.newest(MODULE)[-1].id))
        await shelf.keep(sealed.cosigned({OTHER.peer: cosign(OTHER, sealed)} if has_quorum else {}))
        [event] = [event for event in noted if event["ev"] == "withdrawn"]
        assert event["by"] == sorted([ONE.peer, OTHER.peer])
        assert shelf.node.store.documents("settled-") == []


async def test_what_an_answer_says_does_not_tell_what_the_lot_drew(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        wrong = settled(shelf, OTHER, findings=Findings(failed=(THIRD.peer,), works=(shelf.run.id,)))
        for remade in (0.0, 1 - 1e-9):
            shelf.world.seed.archive.thinning.retention = Retention(remade=remade)
            with pytest.raises(IntegrityError):
                await shelf.keep(wrong)
        assert shelf.node.store.documents("settled-") == []


async def test_who_hides_an_update_learns_nothing_that_helps_to_lie(tmp_path: Path) -> None:
    """If no lot is drawn the archive asks for the update: a false version after that is made again."""
    async with light_shelf(tmp_path) as shelf:
        sealed, _ = shelf.version(1, is_handed_in=False)
        grant = shelf.node.mandates.newest(MODULE)[-1]
        honest = seal(ONE, replace(sealed.document, grant=grant.id))
        honest = honest.cosigned({OTHER.peer: cosign(OTHER, honest)})
        assert await refusal(shelf.keep(honest)) == Reason.CONTRIBUTION_MISSING, "nobody has its update"
        false, made = shelf.version(1, variant=1, is_handed_in=False)
        for ref, parts in made.blobs:
            shelf.node.store.keep(ref, *parts)
        false = seal(ONE, replace(false.document, grant=grant.id))
        false = false.cosigned({OTHER.peer: cosign(OTHER, false)})
        assert await refusal(shelf.keep(false)) == Reason.CONTRIBUTION_MISSING
        assert shelf.ledger.head.version == 0


async def test_nothing_is_signed_for_a_leader_that_was_followed_meanwhile(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        sealed = settled(shelf, OTHER)
        check = shelf.chain._check_told

        async def slowly(version: ModuleVersion, **named: Any) -> None:
            await check(version, **named)
            later = granted(shelf.run, MODULE, term=2, leader=OTHER.peer, mirrors=(THIRD.peer,))
            assert shelf.node.mandates.believes(MODULE, later)

        shelf.chain._check_told = slowly
        assert await refusal(shelf.keep(sealed)) == Reason.NOT_LEADER
        assert shelf.ledger.head.version == 0


async def test_a_mirror_of_an_earlier_term_settles_nothing(tmp_path: Path) -> None:
    """It may be a friend of the leader, for whom another one was chosen since."""
    async with light_shelf(tmp_path) as shelf:
        before = shelf.node.mandates.newest(MODULE)[-1]
        later = granted(shelf.run, MODULE, term=2, leader=ONE.peer, mirrors=(THIRD.peer, OTHER.peer))
        assert shelf.node.mandates.believes(MODULE, later)
        for term in (1, 2):
            sealed = settled(shelf, OTHER, term=term, grant=before.id)
            assert await refusal(shelf.keep(sealed)) == Reason.CONTRIBUTION_MISSING
        last = granted(shelf.run, MODULE, term=3, leader=signer(4).peer, mirrors=(THIRD.peer,))
        assert shelf.node.mandates.believes(MODULE, last)
        inherited = settled(shelf, OTHER, term=1, grant=before.id)
        assert await refusal(shelf.keep(inherited, sender=signer(4))) == Reason.CONTRIBUTION_MISSING
        await shelf.keep(settled(shelf, THIRD, term=2, grant=later.id), sender=signer(4))
        assert shelf.ledger.final == 1


async def test_a_leader_that_calls_the_chosen_mirror_deaf_is_made_again_in_full(tmp_path: Path) -> None:
    """Else it would have mirrors chosen until one is its friend."""
    async with light_group(tmp_path) as (world, group, author):
        leader, terms = group.leader, world.seed.terms
        grant = leader.owner(MODULE).grant
        chosen, others = grant.mirrors[0], grant.mirrors[1:]
        await world.seed.node.watch.refresh()
        assert terms._with_ours(MODULE, leader.peer, others)[0] != chosen
        calls = asked(world)
        await make_versions(world, leader, author, 1, seed=1)
        await final(world, group, 1)
        assert "mirror.contribution" in calls
        assert Store(world.seed.node.store.folder).documents("doubted-"), "also after a restart"


async def test_nobody_says_that_an_outer_state_is_lost_which_another_has(tmp_path: Path) -> None:
    async with light_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 1, seed=1)
        await final(world, group, 1)
        leader = group.leader.owner(MODULE)
        leader._is_fresh, leader._state = True, OuterState.fresh(leader._state.params)
        await contribute(world, group.leader, author, seed=50)
        await eventually(lambda: group.leader.ledger.head.version == 2)
        assert group.leader.ledger.head.is_fresh
        await expired(world)
        assert world.seed.archive.ledgers[MODULE].head.version == 1


async def test_what_was_made_while_the_coordinator_was_away_becomes_final(tmp_path: Path) -> None:
    """More versions than owners keep the updates of: the first of them are made again, of an outer state that the
    owners still have."""
    async with light_group(tmp_path) as (world, group, author):
        await make_versions(world, group.leader, author, 2, seed=1)
        await final(world, group, 2)
        await live_through_an_outage(world, group, author, archived=2)


def note(uploads: Uploads, ref: BlobRef) -> None:
    """A stranger has uploaded this."""
    uploads._finished(_Upload(uploads._store.folder / ref.digest, PeerId("a stranger"), ref.digest, ref.size))


async def test_a_blob_that_anybody_has_sent_before_stays(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        sealed = settled(shelf, OTHER)
        uploads, snapshot = shelf.node.uploads, sealed.document.snapshot
        note(uploads, snapshot)
        await shelf.keep(sealed)
        for number in range(64):
            note(uploads, BlobRef(digest=f"{number:064x}", size=1))
        assert shelf.node.store.size(snapshot.digest) == snapshot.size


async def test_a_chosen_mirror_that_lives_and_hangs_keeps_nothing_waiting(tmp_path: Path) -> None:
    async with light_group(tmp_path) as (world, group, author):
        chosen = group.of(group.leader.owner(MODULE).grant.mirrors[0])
        hang(chosen, "mirror.version")
        began_s = world.clock.now_s()
        await make_versions(world, group.leader, author, 1, seed=1)
        await final(world, group, 1)
        assert world.clock.now_s() - began_s < CALL_TIMEOUT_S


async def test_what_a_version_tells_of_itself_is_checked_whoever_has_signed_it(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        honest = settled(shelf, OTHER).document
        many = tuple(replace(share, tokens=shelf.run.tokens_full + 1) for share in honest.shares)
        weight = sum(share.tokens for share in many)
        huge = replace(honest.snapshot, size=10**12)
        invented = Findings(failed=(THIRD.peer,), works=(shelf.run.id,))
        repeated = Audit(work=shelf.run.id, by=OTHER.peer, tokens=1)
        lies = ({"findings": invented}, {"audits": (repeated,)}, {"shares": many, "weight": weight}, {"snapshot": huge})
        for told in lies:
            with pytest.raises(IntegrityError):
                await shelf.keep(settled(shelf, OTHER, THIRD, **told))
        assert shelf.ledger.head.version == 0


async def test_parameters_that_do_not_follow_from_the_update_are_not_signed(tmp_path: Path) -> None:
    async with light_shelf(tmp_path) as shelf:
        other, _ = shelf.version(1, variant=1, is_handed_in=False)
        with pytest.raises(IntegrityError):
            await shelf.keep(settled(shelf, OTHER, THIRD, snapshot=other.document.snapshot))
        assert shelf.ledger.head.version == 0
