"""Whom a leader asks to repeat work, how long each may take, and what becomes of one that does not look."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from audit_scene import OFF, SAME, Auditors, AuditScene
from judging_scene import GOOD, OTHER_PATH, PATH
from tiny_run import signer
from virtual_time import eventually

from dipaco_p2p.errors import Refused
from dipaco_p2p.owner import trials
from dipaco_p2p.owner.judge import FETCHED_AT_ONCE, TURN_S, WAITING_MAX, Judge
from dipaco_p2p.owner.trials import Trials
from dipaco_p2p.protocol.documents import Contribution, Sealed, seal
from dipaco_p2p.protocol.gate import Appraisal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.standing import Findings
from simulation.training import toy_gains

Play = AbstractAsyncContextManager[AuditScene]


async def test_an_auditor_has_as_long_as_a_round_waits(audit_scene: Play) -> None:
    """It takes the same steps: with half of that time no audit of slow work ever ended in time, and nobody was off
    probation. Near the end another one is asked as well."""
    async with audit_scene as on:
        author = await on.author(60)
        await on.push(author, GOOD)
        await eventually(lambda: bool(on.auditors.asked))
        await asyncio.sleep(0.7 * on.run.config.rounds.deadline_s)
        assert len(on.auditors.asked) == 1
        await asyncio.sleep(0.2 * on.run.config.rounds.deadline_s)
        assert len(on.auditors.asked) == 2 and on.owner.head.version == 0
        on.auditors.may_end.set()
        await on.version(1)
        assert on.findings(1) == Findings(repeated=(author.swarm.peer,))


@pytest.mark.parametrize("round_share", [0.2, 0.5])
async def test_an_auditor_that_is_busy_for_ever_keeps_no_work_from_being_repeated(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch, round_share: float
) -> None:
    """Attack: a forger's friend that was drawn first said until the audit was over that it was at it."""
    appraise = Judge.appraise

    async def busy(self: Judge, contribution: Contribution, *, is_audit: bool = False) -> Sealed[Appraisal]:
        if is_audit and self._node.peer in order[:1]:
            raise Refused("the work is being repeated", reason=Reason.BUSY)
        return await appraise(self, contribution, is_audit=is_audit)

    async with audit_scene as on:
        author, other = await on.author(60), await on.author(61)
        order = [leader.peer for leader in on.world.leaders if leader.peer != on.leader.peer]
        order += [on.leader.peer]
        on.auditors.may_end.set()
        await on.push(author, GOOD)
        await on.version(1)
        monkeypatch.setattr(Trials, "_candidates", lambda self, document, draw: order)
        monkeypatch.setattr(Judge, "appraise", busy)
        on.auditors.found[author.swarm.peer] = OFF
        limit_s = on.owner.trials._limit_s()
        await on.push(author, GOOD)
        await on.version(2)
        for number in range(3, 8):
            await asyncio.sleep(round_share * limit_s)
            await on.push(other, GOOD, path=OTHER_PATH)
            await on.version(number)
        found = [on.findings(number) for number in range(2, 8)]
        assert [one.forged for one in found if one is not None and one.forged] == [(author.swarm.peer,)]
        await on.verified()


async def test_two_works_are_repeated_by_two_auditors_at_once(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever repeats one says so to whoever asks for another, though it is the first choice for both."""
    monkeypatch.setattr(trials, "AGAIN", 0.0)
    async with audit_scene as on:
        first, second = await on.author(60), await on.author(61)
        order = [leader.peer for leader in on.world.leaders if leader.peer != on.leader.peer]
        monkeypatch.setattr(Trials, "_candidates", lambda self, document, draw: order)
        await on.push(first, GOOD)
        await on.push(second, GOOD, path=OTHER_PATH)
        await eventually(lambda: len(on.auditors.asked) == 2)
        assert {work.author for work in on.auditors.asked} == {first.swarm.peer, second.swarm.peer}
        on.auditors.may_end.set()
        await on.version(1)
        found = on.findings(1)
        assert found is not None and set(found.repeated) == {first.swarm.peer, second.swarm.peer}
        assert {audit.by for audit in on.owner.head.audits} == set(order[:2])


async def test_a_leader_with_ever_more_works_keeps_no_auditor_from_others(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: the leader of one module asked for an audit of a work that it made up whenever the last one had ended.
    Others heard that the auditor was at work, each time, and nobody audited the work in their modules."""
    async with audit_scene as on:
        node = on.world.leaders[1].node
        judge = Judge(node, measure=toy_gains, repeat=on.auditors)
        leaders = dict(zip(on.run.topology.modules(), ("hostile", "honest", "also hostile"), strict=False))
        monkeypatch.setattr(node.mandates, "leader", leaders.__getitem__)
        work = (await on.work(await on.author(60), GOOD)).document
        number = work.tokens
        monkeypatch.setattr(Judge, "_audit", lambda *parts: on.auditors.may_end.wait())

        async def asks(leader: str) -> bool:
            """Whether it gets an audit of one more work."""
            nonlocal number
            number -= 1
            module = next(module for module, name in leaders.items() if name == leader)
            try:
                await judge.appraise(replace(work, module=module, tokens=number), is_audit=True)
            except Refused as refused:
                return refused.reason == Reason.BUSY
            return True

        on.auditors.may_end.clear()
        assert await asks("hostile") and not await asks("honest")
        on.auditors.may_end.set()
        await asyncio.sleep(1.0)
        assert not await asks("hostile") and await asks("also hostile")
        assert not await asks("also hostile") and not await asks("hostile") and await asks("honest")
        assert await asks("hostile")
        await asyncio.sleep(TURN_S)
        assert await asks("hostile"), "nobody else has come for a while"


@pytest.mark.parametrize("count", [FETCHED_AT_ONCE, WAITING_MAX])
async def test_a_leader_with_ever_more_works_keeps_no_judge_from_others(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Attack: the leader of one module asked what works of made-up authors gain, who give nothing. Others waited behind
    these, or heard that the judge was busy, and nobody measured the work in their modules."""
    fetch, may_end = Judge._fetch, asyncio.Event()

    async def held(self: Judge, contribution: Contribution) -> dict[str, bytes]:
        if contribution.module != work.module:
            await may_end.wait()
        return await fetch(self, contribution)

    async with audit_scene as on:
        node = on.world.seed.node
        judge, work = Judge(node, measure=toy_gains), (await on.work(await on.author(60), GOOD)).document
        other = next(module for module in on.run.topology.modules() if module != work.module)
        leaders = {work.module: "honest", other: "hostile"}
        monkeypatch.setattr(node.mandates, "leader", leaders.__getitem__)
        monkeypatch.setattr(Judge, "_fetch", held)
        made_up = [replace(work, module=other, author=signer(100 + number).peer) for number in range(count)]
        asking = [asyncio.ensure_future(judge.appraise(each)) for each in made_up]
        await asyncio.sleep(1.0)
        honest = asyncio.ensure_future(judge.appraise(work))
        await asyncio.sleep(1.0)
        assert honest.done() and (await honest).document.of == work.author
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_round_does_not_wait_for_whoever_repeats_a_work_once_more(
    audit_scene: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "AGAIN", 1.0)
    async with audit_scene as on:
        ended = asyncio.Event()
        repeat = Auditors.__call__

        async def once_fast(self: Auditors, work: Contribution, *parts: Any) -> Any:
            found = await repeat(self, work, *parts)
            if [one.work for one in self.asked].count(work.work) > 1:
                await ended.wait()
            return found

        monkeypatch.setattr(Auditors, "__call__", once_fast)
        on.auditors.may_end.set()
        began_s = on.leader.node.clock.now_s()
        for number, path in ((60, PATH), (61, OTHER_PATH)):
            await on.push(await on.author(number), GOOD, path=path)
        await on.version(1)
        assert len({one.work for one in on.auditors.asked}) == 2 < len(on.auditors.asked)
        assert on.leader.node.clock.now_s() - began_s < on.run.config.rounds.deadline_s / 2


async def test_nobody_names_itself_an_auditor(audit_scene: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a judge that is only asked to measure says that it has repeated the work as well."""

    async def eager(self: Judge, contribution: Contribution, *, is_audit: bool = False) -> Sealed[Appraisal]:
        return seal(self._node.swarm.signer, replace((await measure(self, contribution)).document, repeated=SAME))

    measure = Judge.appraise
    async with audit_scene as on:
        sealed, judge = await on.work(await on.author(60), GOOD), on.world.leaders[1].peer
        await on.push(await on.author(61), GOOD)
        monkeypatch.setattr(Judge, "appraise", eager)
        ask, until_s = on.owner.trials._appraised, on.leader.node.clock.now_s() + 60.0
        assert await ask(judge, sealed, until_s) is None
        assert await ask(judge, sealed, until_s, is_audit=True) is not None


async def test_an_auditor_that_did_not_look_is_found_when_another_one_does(audit_scene: Play, monkeypatch: Any) -> None:
    """Attack: the first auditor says "the same" of everything. Now and then a second one repeats it, too."""
    monkeypatch.setattr(trials, "AGAIN", 1.0)
    async with audit_scene as on:
        author = await on.forger()
        on.auditors.lazy_calls = 1
        forged = await on.push(author, GOOD)
        await eventually(lambda: on.expired() == {forged: Reason.NOT_REPEATED})
        await on.push(await on.author(61), GOOD)
        await on.version(1)
        findings = on.findings(1)
        assert findings is not None and len(findings.contradicted) == 1
        judges = on.owner.trials._candidates((await on.work(author, GOOD)).document, "any draw")
        assert len(judges) == 2 and findings.contradicted[0] not in judges
        await on.verified()
