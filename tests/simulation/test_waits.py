"""Waits that nothing would end: each is a state of a whole swarm in which somebody once waited for ever."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from scenes import Scene, scene
from virtual_time import eventually

from bootstrap.coordinator.terms import Terms
from dipaco_p2p.node.node import CALL_TIMEOUT_S
from dipaco_p2p.protocol import admission
from dipaco_p2p.protocol.admission import ADMITTED, Verdict
from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.norms import Norms
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.records import claims_key
from dipaco_p2p.protocol.rounds import PATIENCE
from dipaco_p2p.protocol.sightings import Sightings
from dipaco_p2p.topology import PathId
from peers.path.contribute import TRIES_MIN
from simulation.hostile import Stranger
from simulation.observe import longest_rest_s

FIRST, SECOND = PathId((0, 0)), PathId((0, 1))


async def claim_for_ever(world: Scene, path: PathId) -> None:
    """Somebody claims a path, was there first as it says, and never trains it."""
    stranger = Stranger(world, random.Random(0))
    while True:
        await stranger.put(claims_key(world.run.id, path), Claim(path=path, since_s=0.0))
        await asyncio.sleep(world.plan.ttl_s / 3)


async def leave_the_last_round_to_a_claim(world: Scene) -> None:
    """The volunteer of the first path dies before its last round, and a stranger claims the path from then on."""
    await eventually(lambda: all(world.said(each, "claimed") for each in world.volunteers), limit_s=60)
    leaver = next(each for each in world.volunteers if world.said(each, "claimed")[-1].facts["path"] == str(FIRST))
    world.stayers.append(asyncio.create_task(claim_for_ever(world, FIRST)))
    await eventually(lambda: min(world.seed.archived().values(), default=0) == 1, limit_s=60)
    leaver.crash()
    leaver.is_gone = True
    world.note("", "fault", fault="gone for good")
    world.note(leaver.name, "disk lost", peer=leaver.peer)


def test_a_last_round_that_is_only_claimed_is_trained_by_who_stands_by(tmp_path: Path) -> None:
    """Everybody is done but for the last round of one path, whose volunteer is gone, and which a stranger claims: its
    leader waits for a contribution, and those who could train it stood by until it was through."""

    async def script(world: Scene) -> None:
        await leave_the_last_round_to_a_claim(world)
        await world.is_over()

    assert scene(tmp_path, script, rounds=2, volunteers=2).is_complete


def test_a_swarm_that_stands_still_is_told_of_before_its_time_is_over_and_names_who_waits_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sightings, "_judge", lambda sightings, *told, **more: None)  # as it was: every claim weighs

    async def script(world: Scene) -> None:
        await leave_the_last_round_to_a_claim(world)
        watch = asyncio.create_task(world._watch())
        await world._finish()
        watch.cancel()

    world = scene(tmp_path, script, rounds=2, volunteers=2)
    assert not world.is_complete
    assert world.waits[0] == f"nothing moved for {longest_rest_s(world.plan.config):.0f} s"
    [stuck] = [line for line in world.waits if line.startswith("L1.M0")]
    assert stuck.endswith("at version 1, waits for work of P0-0, claimed by a stranger")
    assert any("is standing by, waits for the last rounds of other paths" in line for line in world.waits)


def test_a_leader_that_is_busy_for_ever_holds_neither_claim_nor_volunteer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no seed takes its modules back."""
    monkeypatch.setattr(Terms, "takes_back", lambda terms, module: False)

    async def script(world: Scene) -> None:
        await eventually(lambda: all(world.said(each, "receipt") for each in world.volunteers), limit_s=60)

        def leading() -> str:
            return [event.who for event in world.events if event.ev == "leads" and event.facts["module"] == "L0.M0"][-1]

        await eventually(lambda: leading() != world.seed.name, limit_s=60)  # those who have worked lead
        leader = world.machine(leading())
        others = [each for each in world.volunteers if each is not leader]
        world.network.overload(leader.peer)
        since_s = world.now_s
        patience_s = max(PATIENCE * world.plan.config.rounds.deadline_s, TRIES_MIN * CALL_TIMEOUT_S)

        def is_free(who: Any) -> bool:
            said = world.said(who, "unanswered", since_s=since_s)
            return bool(said) and bool(world.said(who, "released", since_s=since_s))

        await eventually(lambda: all(map(is_free, others)), limit_s=2 * patience_s)
        world.network.overload(leader.peer, is_over=True)
        await world.is_over()

    assert scene(tmp_path, script, rounds=6).is_complete


def test_a_round_that_has_refused_all_there_was_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was refused believed its part to be done, and waited for the next version; the leader waited for anything."""
    left = [3]

    def judge_norm(norm: float, norms: Norms, *, base: int) -> Verdict:
        if left[0] > 0:
            left[0] -= 1
            return Verdict(Reason.NORM, "a test says so")
        return ADMITTED

    async def script(world: Scene) -> None:
        await eventually(lambda: all(world.said(each, "round") for each in world.volunteers), limit_s=60)
        monkeypatch.setattr(admission, "judge_norm", judge_norm)
        await world.is_over()

    world = scene(tmp_path, script, rounds=4, volunteers=2)
    assert len([event for event in world.events if event.ev == "refused"]) >= 1
    assert world.is_complete
