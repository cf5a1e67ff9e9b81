"""Audits at a module's leader: who waits for them, what a later version says of them, and what follows."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest
from audit_scene import OFF, AuditScene, accusation
from judging_scene import BAD, GOOD, MODULE, OTHER_PATH, PATH
from runtime_harness import TinyLeader, claim
from tiny_run import signer
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.calls import GetDraw, KeepEvidence
from dipaco_p2p.node.node import Member, ask, silent_s
from dipaco_p2p.owner import trials
from dipaco_p2p.owner.auditing import LATE_VERSIONS
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.trials import Trials
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.gate import DRAW, GIVEN_SLOWLY, NOTHING_GIVEN, Repetition
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.rounds import Entry
from dipaco_p2p.protocol.standing import FORGERS_WAIT, PROBATION_WEIGHT, Findings
from dipaco_p2p.protocol.versions import Known
from dipaco_p2p.topology import ModuleId

OTHER_MODULE = ModuleId(2, 0)


Play = AbstractAsyncContextManager[AuditScene]


async def trusted(on: AuditScene, *authors: Member) -> None:
    """These have one work that was repeated."""
    on.auditors.may_end.set()
    for author, path in zip(authors, (PATH, OTHER_PATH), strict=False):
        await on.push(author, GOOD, path=path)
    await on.version(1)
    assert on.findings(1) == Findings(repeated=tuple(sorted(author.swarm.peer for author in authors)))
    on.auditors.may_end.clear()
    on.auditors.asked.clear()


async def test_a_round_waits_for_the_audit_of_a_newcomer(audit_scene: Play) -> None:
    async with audit_scene as on:
        author = await on.author(60)
        await on.push(author, GOOD)
        await eventually(lambda: bool(on.auditors.asked))
        await asyncio.sleep(on.run.config.rounds.deadline_s / 2)
        assert on.owner.head.version == 0
        on.auditors.may_end.set()
        await on.version(1)
        assert on.findings(1) == Findings(repeated=(author.swarm.peer,))


async def test_versions_name_the_auditors_of_what_they_count_and_of_what_ended_since_each_once(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "AGAIN", 1.0)
    async with audit_scene as on:
        author, ledger = await on.author(60), on.leader.chain.ledger
        await trusted(on, author)
        [share], audits = on.owner.head.shares, on.owner.head.audits
        assert {one.work for one in audits} == {share.work} and {one.tokens for one in audits} == {share.tokens}
        assert len(audits) == 2 and not {one.by for one in audits} & {author.swarm.peer, on.leader.peer}
        late = await on.push(author, GOOD)
        await on.version(2)
        assert on.owner.head.audits == ()
        on.auditors.may_end.set()
        await on.audited()
        for number in (3, 4, 5):
            await on.push(author, GOOD)
            await on.version(number)
        named = [(version, one.work) for version, one in ledger.standings.audited.named]
        [share] = [one for one in ledger.versions[1].document.shares if one.contribution == late]
        assert [version for version, work in named if work == share.work] == [3, 3]
        assert len({(one.work, one.by) for _, one in ledger.standings.audited.named}) == len(named)
        await on.verified()


async def test_work_of_a_newcomer_that_nobody_repeats_in_time_weighs_a_quarter(audit_scene: Play) -> None:
    async with audit_scene as on:
        known, new = await on.author(60), await on.author(61)
        await trusted(on, known)
        await on.push(known, GOOD)
        await on.push(new, GOOD, path=OTHER_PATH)
        await on.version(2)
        share, other = on.owner.head.shares
        assert (share.peer, other.peer) == (known.swarm.peer, new.swarm.peer)
        shards = on.run.shard_tokens(OTHER_PATH, 0) / on.run.shard_tokens(PATH, 0)
        assert other.weight == pytest.approx(PROBATION_WEIGHT * shards * share.weight)
        assert other.tokens == share.tokens
        await on.verified()


async def test_in_the_first_version_nobody_weighs_less_for_being_new(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chance whose work others could audit by then."""
    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        on.auditors.may_end.set()
        monkeypatch.setattr(Trials, "_is_audited", lambda self, document, draw: document.author == author.swarm.peer)
        await on.push(author, GOOD)
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.version(1)
        share, late = on.owner.head.shares
        shards = on.run.shard_tokens(OTHER_PATH, 0) / on.run.shard_tokens(PATH, 0)
        assert on.findings(1) == Findings(repeated=(author.swarm.peer,))
        assert late.weight == pytest.approx(shards * share.weight)
        await on.verified()


async def test_an_audit_of_a_trusted_author_is_told_of_later_and_a_forger_waits(audit_scene: Play) -> None:
    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        await trusted(on, author, other)
        on.auditors.found[author.swarm.peer] = OFF
        forged = await on.push(author, GOOD)
        await on.version(2)
        assert on.findings(2) is None and forged in on.counted()  # nobody waits for auditors
        on.auditors.may_end.set()
        await on.audited()
        again = await on.push(author, GOOD)
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.version(3)
        findings = on.findings(3)
        assert findings is not None and set(findings.forged) == {author.swarm.peer}
        assert on.authors_of(3) == {other.swarm.peer} and on.expired() == {again: Reason.NOT_REPEATED}
        with pytest.raises(Refused) as caught:
            await on.push(author, GOOD)
        assert caught.value.reason == Reason.NOT_REPEATED
        for number in range(4, 4 + FORGERS_WAIT):
            await on.push(other, GOOD, path=OTHER_PATH)
            await on.version(number)
        on.auditors.found.clear()  # it is honest from now on
        await on.push(author, GOOD)
        await on.version(4 + FORGERS_WAIT)
        assert on.authors_of(4 + FORGERS_WAIT) == {author.swarm.peer}
        await on.verified()


async def told_as_withheld(on: AuditScene, author: Member, other: Member) -> None:
    """Audits end, and the version after the author's work, with work of the other, tells that it gave nothing."""
    on.auditors.may_end.set()
    await on.audited()
    await on.push(other, GOOD, path=OTHER_PATH)
    await on.version(3)
    findings = on.findings(3)
    assert findings is not None and findings.withheld == (author.swarm.peer,)
    await on.verified()


async def test_who_gives_auditors_nothing_has_withheld_it_however_short_rounds_are(audit_scene: Play) -> None:
    """Attack: it takes an auditor a while to be sure that it is given nothing. Leaders waited as long as for a path,
    which may be less, and the audit ended without a result."""
    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        await trusted(on, author)
        on.owner.trials._limit_s = lambda: 1.0
        on.auditors.found[author.swarm.peer] = NOTHING_GIVEN
        await on.push(author, GOOD)
        await on.version(2)
        await asyncio.sleep(silent_s(on.run.config.rounds))
        await told_as_withheld(on, author, other)


NOTHING = pytest.mark.parametrize("nothing", [NOTHING_GIVEN, GIVEN_SLOWLY], ids=["not given", "given slowly"])


@NOTHING
async def test_two_auditors_that_say_they_were_given_nothing_take_nobodys_standing(
    audit_scene: Play, nothing: Repetition
) -> None:
    """Attack: nobody contradicts that, since an author could give a state to one and not to another, so the lie was
    free. Two that were drawn one after the other took an honest author's standing."""
    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        await trusted(on, author)
        auditors = {on.world.leader(number).peer for number in (54, 55)} | {one.peer for one in on.world.leaders[1:4]}
        on.leader.chain.chains.is_proven = lambda peer: peer in auditors  # type: ignore[method-assign]
        await on.leader.node.watch.refresh()
        on.auditors.lying_calls, on.auditors.lie = 2, nothing
        on.auditors.may_end.set()
        await on.push(author, GOOD)
        await on.version(2)
        for number in (3, 4, 5):
            await on.push(other, GOOD, path=OTHER_PATH)
            await on.version(number)
        assert not on.auditors.lying_calls and len(on.auditors.asked) >= 5
        found = [on.findings(number) for number in (2, 3, 4, 5)]
        assert not any(one.withheld for one in found if one is not None)
        assert author.swarm.peer in {peer for one in found if one is not None for peer in one.repeated}
        await on.verified()


@NOTHING
async def test_who_gives_nothing_to_the_only_two_auditors_there_are_has_withheld_it(
    audit_scene: Play, nothing: Repetition
) -> None:
    """Others are asked as well, if there are any."""
    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        await trusted(on, author)
        auditors = {one.peer for one in on.world.leaders[1:3]}
        on.leader.chain.chains.is_proven = lambda peer: peer in auditors  # type: ignore[method-assign]
        on.auditors.found[author.swarm.peer] = nothing
        await on.push(author, GOOD)
        await on.version(2)
        await told_as_withheld(on, author, other)


async def test_a_newcomer_whose_line_is_too_slow_for_audits_is_not_blamed(audit_scene: Play) -> None:
    """Its work counts a quarter, as if nobody had been there to repeat it."""
    async with audit_scene as on:
        known, new = await on.author(60), await on.author(61)
        await trusted(on, known)
        on.auditors.may_end.set()
        on.auditors.found[new.swarm.peer] = GIVEN_SLOWLY
        for number in (2, 3, 4):
            await on.push(known, GOOD)
            pushed = await on.push(new, GOOD, path=OTHER_PATH)
            await on.version(number)
            assert pushed in on.counted()
        found = [on.findings(number) for number in (2, 3, 4)]
        assert new.swarm.peer in {work.author for work in on.auditors.asked}
        assert not any(one.withheld or one.contradicted for one in found if one is not None)
        await on.verified()


async def test_what_auditors_found_outlives_a_round_that_counts_nothing(audit_scene: Play) -> None:
    """The forger's own work was all there was, so no version could say what auditors found of it."""
    async with audit_scene as on:
        forger, other = await on.forger(), await on.author(61)
        forged = await on.push(forger, GOOD)
        await eventually(lambda: on.expired() == {forged: Reason.NOT_REPEATED})
        with pytest.raises(Refused):
            await on.push(forger, GOOD)
        await on.push(other, GOOD)
        await on.version(1)
        findings = on.findings(1)
        assert findings is not None and findings.forged == (forger.swarm.peer,)
        await on.verified()


async def next_leader(on: AuditScene, module: ModuleId = MODULE) -> tuple[TinyLeader, Leader]:
    """The one whose turn it is."""
    for each in on.world.leaders[1:]:
        with contextlib.suppress(Refused):
            return each, await each.lead(module)
    raise AssertionError("nobody may lead")


async def test_a_later_leader_knows_who_forged(audit_scene: Play) -> None:
    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        await trusted(on, author, other)
        on.auditors.found[author.swarm.peer] = OFF
        await on.push(author, GOOD)
        await on.version(2)
        on.auditors.may_end.set()
        await on.audited()
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.version(3)
        await on.verified()
        await on.leader.die(on.world)
        await asyncio.sleep(3 * on.run.config.liveness.heartbeat_ttl_s)
        on.leader, on.owner = await next_leader(on)
        await author.watch.refresh()
        with pytest.raises(Refused) as caught:
            await on.push(author, GOOD)
        assert caught.value.reason == Reason.NOT_REPEATED


async def test_what_a_leader_refused_stays_refused_under_the_next_one(audit_scene: Play) -> None:
    """Attack: forged work was open with the mirrors, and a leader that had not heard its auditors took it in again."""
    async with audit_scene as on:
        forger, other = await on.forger(), await on.author(61)
        forged = await on.push(forger, GOOD)
        await eventually(lambda: on.expired() == {forged: Reason.NOT_REPEATED})
        on.auditors.found.clear()  # whoever looks from now on has been bribed
        await asyncio.sleep(10.0)
        await on.leader.die(on.world)
        await asyncio.sleep(3 * on.run.config.liveness.heartbeat_ttl_s)
        on.leader, on.owner = await next_leader(on)
        await forger.watch.refresh()
        with pytest.raises(Refused) as caught:
            await on.push(forger, 2 * GOOD)
        assert caught.value.reason == Reason.NOT_REPEATED
        await other.watch.refresh()
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.version(1)
        findings = on.findings(1)
        assert findings is not None and findings.forged == (forger.swarm.peer,)
        assert on.authors_of(1) == {other.swarm.peer}
        await on.verified()


async def test_a_leader_that_comes_back_knows_what_auditors_said_before_it_died(audit_scene: Play) -> None:
    """Attack: a forger whose work counted hands in more, as soon as the leader that heard of it has started again."""
    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        await trusted(on, author, other)
        on.auditors.found[author.swarm.peer] = OFF
        await on.push(author, GOOD)
        await on.version(2)
        on.auditors.may_end.set()
        await on.audited()
        await on.leader.ownership.drop(MODULE)
        on.owner = await on.leader.lead(MODULE)
        with pytest.raises(Refused) as caught:
            await on.push(author, GOOD)
        assert caught.value.reason == Reason.NOT_REPEATED
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.version(3)
        findings = on.findings(3)
        assert findings is not None and findings.forged == (author.swarm.peer,)
        await on.verified()


@pytest.mark.parametrize("number", [51, 70])
async def test_friends_of_a_stranger_refuse_nobody_s_work_under_the_next_leader(audit_scene: Play, number: int) -> None:
    """Attack: whoever is no leader brings what two keys say, and so does a leader whose friends have never worked."""
    async with audit_scene as on:
        honest, friends = await on.author(60), [signer(71), signer(72)]
        on.auditors.may_end.set()
        document = (await on.work(honest, GOOD)).document
        said = [seal(friend, accusation(document, friend)) for friend in friends]
        asker = await on.author(number) if number == 70 else on.world.leaders[1].node
        for to in (on.run.manifest.author, on.leader.peer):
            with pytest.raises(Refused) as caught:
                await ask(asker, to, KeepEvidence(module=MODULE, appraisals=tuple(said)))
            assert caught.value.reason == Reason.NOT_LEADER
        on.leader.chain.evidence.keep(said)
        await on.leader.ownership.drop(MODULE)
        on.owner = await on.leader.lead(MODULE)
        await on.push(honest, GOOD)
        await on.version(1)
        assert on.authors_of(1) == {honest.swarm.peer}


async def test_who_withholds_a_state_is_on_probation_again(audit_scene: Play) -> None:
    async with audit_scene as on:
        author = await on.author(60)
        await trusted(on, author)
        on.auditors.found[author.swarm.peer] = NOTHING_GIVEN
        await on.push(author, GOOD)
        await on.version(2)
        on.auditors.may_end.set()
        await on.audited()
        on.auditors.may_end.clear()
        await on.push(author, GOOD)
        await on.version(3)
        assert on.findings(3) == Findings(withheld=(author.swarm.peer,))
        assert on.leader.chain.ledger.standings.of(author.swarm.peer).is_on_probation(1)


async def test_an_audit_that_comes_too_late_is_left(audit_scene: Play) -> None:
    """Its author has the states no more: that nobody gives them would say nothing."""
    async with audit_scene as on:
        author = await on.author(60)
        await trusted(on, author)
        last = LATE_VERSIONS + 3
        for number in range(2, last):
            await on.push(author, GOOD)
            await on.version(number)
        assert len(on.owner.trials._audits) <= LATE_VERSIONS
        await on.push(author, GOOD)
        await on.version(last)
        assert [on.findings(number) for number in range(2, last + 1)] == [None] * (last - 1)


# -- who is asked


async def test_leaders_of_a_path_ask_the_same_judges_and_none_gives_its_part_before_it_has_taken_the_work(
    audit_scene: Play,
) -> None:
    async with audit_scene as on:
        author = await on.author(60)
        other, owner = await next_leader(on, OTHER_MODULE)
        await eventually(lambda: on.leader.node.watch.leader(OTHER_MODULE) == other.peer)
        sealed = await on.work(author, GOOD)
        ours, theirs = on.owner.trials, owner.trials
        with pytest.raises(Refused) as caught:
            await ask(author, other.peer, GetDraw(module=OTHER_MODULE, work=sealed.document.work))
        assert caught.value.reason == Reason.CONTRIBUTION_MISSING
        alone = await ours._joint_draw(sealed.document)
        theirs._taken[sealed.document.work] = ours._taken[sealed.document.work] = 0
        both = await ours._joint_draw(sealed.document)
        assert both == await theirs._joint_draw(sealed.document) != alone
        assert alone in both.split(" ")


async def test_a_part_of_the_draw_that_is_not_its_leaders_own_is_left_out(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with audit_scene as on:
        author = await on.author(60)
        other, _ = await next_leader(on, OTHER_MODULE)
        await eventually(lambda: on.leader.node.watch.leader(OTHER_MODULE) == other.peer)
        sealed = await on.work(author, GOOD)
        monkeypatch.setattr(Trials, "draw", lambda self, work: author.swarm.signer.sign(DRAW, work.encode()))
        draw = await on.owner.trials._joint_draw(sealed.document)
        assert draw == on.leader.swarm.signer.sign(DRAW, sealed.document.work.encode())


async def test_who_waits_for_a_version_is_told_at_once_that_a_path_is_free_again(audit_scene: Play) -> None:
    """Attack: the path of a forger was free when its work was refused, and others looked a deadline later."""
    async with audit_scene as on:
        forger, other = await on.forger(), await on.author(61)
        waiting = asyncio.ensure_future(on.owner.versions_after(Known(version=0), wait_s=1000.0))
        await on.push(other, GOOD, path=OTHER_PATH)
        forged = await on.push(forger, GOOD)
        await eventually(lambda: on.expired() == {forged: Reason.NOT_REPEATED})
        assert on.owner.head.version == 0 and [entry.path for entry in on.owner.open_round().entries] == [OTHER_PATH]
        await eventually(waiting.done, limit_s=1.0)
        assert await waiting == []
        again = await on.push(other, GOOD, path=PATH)
        await on.version(1)
        assert again in on.counted()


async def test_what_auditors_caught_is_told_before_the_round_could_close(audit_scene: Play) -> None:
    """Attack, seed 2 of `benchmarks.attack flip`: a round waited for an idle claim, and meanwhile whoever took the
    forger's path over saw it in there, and trained it for the other modules alone."""
    async with audit_scene as on:
        forger = await on.forger()
        await on.push(forger, GOOD)
        entry = Entry(path=PATH, peer=forger.swarm.peer)
        assert on.owner.open_round().has(PATH)
        await eventually(lambda: entry in on.owner.open_round().refused)
        assert not on.owner.open_round().has(PATH) and on.owner.head.version == 0
        other = await on.author(61)
        await on.push(other, BAD)  # not a copy
        assert on.owner.open_round().entries == (Entry(path=PATH, peer=other.swarm.peer),)


async def test_what_auditors_caught_covers_no_path(audit_scene: Play) -> None:
    """Attack, seed 0 of `benchmarks.attack permuted` on five domains: whoever came to the forger's path as its second
    one was refused, and the module waited 21 s for nobody."""
    async with audit_scene as on:
        forger, other = await on.forger(), await on.author(61)
        on.auditors.may_end.clear()
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.push(forger, 2 * GOOD)
        with pytest.raises(Refused) as caught:
            await on.push(other, BAD)
        assert caught.value.reason == Reason.COVERED
        document, arrivals = (await on.work(other, BAD)).document, on.leader.chain.timing.arrivals
        hold = partial(on.owner._intake.hold, document, since_s=0.0, before=(), arrivals=arrivals)
        entry = Entry(path=PATH, peer=forger.swarm.peer)
        assert hold().is_covered and not hold(refused=[entry]).is_covered
        on.auditors.may_end.set()
        await eventually(lambda: entry in on.owner.open_round().refused)
        await on.push(other, BAD)


async def test_the_claim_of_a_forger_weighs_nothing_whatever_path_it_goes_to(audit_scene: Play) -> None:
    """Attack: refused on one path, it claimed the next, and others left that one to it for a round."""
    async with audit_scene as on:
        forger, other = await on.forger(), await on.author(61)
        await on.push(forger, GOOD)
        await on.push(other, GOOD, path=OTHER_PATH)
        await on.version(1)
        await claim(forger, OTHER_PATH)
        await on.leader.node.watch.refresh()
        told = on.owner.open_round().refused
        assert Entry(path=OTHER_PATH, peer=forger.swarm.peer) in told
        assert all(entry.peer != other.swarm.peer for entry in told)


async def test_evidence_of_a_module_that_makes_no_version_does_not_grow_without_end(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "EVIDENCE_MAX", 3)
    async with audit_scene as on:
        for number in range(60, 64):
            author = await on.forger(number)
            forged = await on.push(author, GOOD)
            await eventually(lambda id_=forged: id_ in on.expired())  # type: ignore[misc]
        assert on.owner.head.version == 0 and len(on.owner.trials._evidence) == 3


async def test_leaders_that_do_not_answer_leave_judges_the_time_that_they_need(audit_scene: Play) -> None:
    """Waiting for a dead leader's part of the draw took all of a short deadline, and newcomers' work was lost."""
    async with audit_scene as on:
        author = await on.author(60)
        other, _ = await next_leader(on, OTHER_MODULE)
        await eventually(lambda: on.leader.node.watch.leader(OTHER_MODULE) == other.peer)
        on.world.network.kill(other.peer)
        limit_s, began_s = 4.0, on.leader.node.clock.now_s()
        on.owner.trials._limit_s = lambda: limit_s
        await on.owner.trials._joint_draw((await on.work(author, GOOD)).document)
        assert on.leader.node.clock.now_s() - began_s <= limit_s / 4
