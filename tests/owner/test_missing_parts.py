"""Work of which judges and auditors cannot get a part: it does not count, and how long its round waits for it."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from audit_scene import AuditScene
from judging_scene import BAD, GOOD, Scene, scene
from virtual_time import eventually

from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.reasons import Reason


async def test_work_of_which_a_part_is_not_to_be_had_does_not_count(tmp_path: Path) -> None:
    """Attack: whoever had one work that counts gave judges no part of its later ones. Nobody could measure these, and
    they counted whatever they did."""
    async with scene(tmp_path) as on:
        author = await on.author(60)
        hidden = await on.push(author, GOOD, gives=False)
        await eventually(lambda: bool(on.expired()))
        assert on.expired() == {hidden: Reason.UNJUDGED}
        await asyncio.sleep(2 * on.run.config.rounds.deadline_s)
        good = await on.push(author, GOOD)
        await on.version(1)
        later = await on.push(author, 2 * BAD, gives=False)
        await eventually(lambda: later in on.expired())
        assert on.expired()[later] == Reason.UNJUDGED and on.counted() == {good}


async def test_a_newcomer_that_keeps_a_part_back_holds_its_path_up_for_half_as_long_as_a_known_author(
    tmp_path: Path,
) -> None:
    """Attack: a key without work pushed a part to one module of each path, and gave nobody the other parts. Each path
    waited for its judges as long as it may, and honest volunteers trained it only then."""

    async def waited_s(on: Scene, author: Member, size: float) -> float:
        began_s = on.leader.node.clock.now_s()
        hidden = await on.push(author, size, gives=False)
        await eventually(lambda: hidden in on.expired())
        assert on.expired()[hidden] == Reason.UNJUDGED
        return on.leader.node.clock.now_s() - began_s

    async with scene(tmp_path) as on:
        known, deadline_s = await on.author(60), on.run.config.rounds.deadline_s
        await on.push(known, GOOD)
        await on.version(1)
        assert await waited_s(on, await on.author(61), BAD) < 0.75 * deadline_s
        assert await waited_s(on, known, 2 * BAD) > 0.9 * deadline_s


async def test_no_round_waits_for_the_audit_of_a_newcomer_that_keeps_a_part_back_beyond_half_of_its_time(
    audit_scene: AbstractAsyncContextManager[AuditScene],
) -> None:
    """No auditor can repeat such work, and the round waited for one."""
    async with audit_scene as on:
        on.auditors.may_end.set()
        await on.push(await on.author(60), GOOD)
        await on.version(1)
        on.auditors.may_end.clear()
        began_s = on.leader.node.clock.now_s()
        hidden = await on.push(await on.author(61), BAD, gives=False)
        await eventually(lambda: hidden in on.expired())
        assert on.expired() == {hidden: Reason.UNJUDGED}
        assert on.leader.node.clock.now_s() - began_s < 0.75 * on.run.config.rounds.deadline_s
