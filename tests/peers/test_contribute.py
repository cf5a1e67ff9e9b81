"""How long a round's steps may take, and how its outer gradient reaches a leader."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import Leader, World, claim, offer
from tiny_run import contribution_of, gradient_bytes, signer, tiny_config
from virtual_time import eventually

from dipaco_p2p.config import LivenessConfig, RoundsConfig
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import Contribution, Receipt, seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.rounds import OpenRound, notice_s
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId, PathId
from peers.path.contribute import BEHIND_TTLS, Contributor, push
from peers.path.kept import InnerStates, Outbox
from peers.path.training import Pace
from peers.status import Status

LIVENESS = LivenessConfig(heartbeat_ttl_s=10.0, settle_s=1.0)


def pace_of(deadline_s: float) -> Pace:
    return Pace(RoundsConfig(deadline_s=deadline_s), LIVENESS)


def rounds(*deadlines_s: float, left_s: tuple[float, ...] = ()) -> list[OpenRound]:
    """What leaders tell."""
    told = itertools.zip_longest(deadlines_s, left_s, fillvalue=0.0)
    return [OpenRound(version=1, deadline_s=deadline_s, left_s=left) for deadline_s, left in told]


def test_before_a_push_was_seen_a_tenth_of_the_deadline_is_kept_for_it() -> None:
    assert pace_of(120.0).training_s() == pytest.approx(108.0)


def test_the_slowest_of_the_last_pushes_is_reckoned_with() -> None:
    pace = pace_of(120.0)
    for duration_s in (50.0, 7.0, 20.0, 3.0):
        pace.pushed(duration_s)
    assert pace.training_s() == pytest.approx(100.0), "the first is forgotten"


def test_one_endless_push_does_not_take_all_the_time() -> None:
    pace = pace_of(120.0)
    pace.pushed(10_000.0)
    assert pace.training_s() == pytest.approx(60.0)


def test_what_getting_ready_took_is_not_there_for_training() -> None:
    assert pace_of(120.0).training_s(spent_s=30.0) == pytest.approx(78.0)
    assert pace_of(120.0).training_s(spent_s=500.0) < 0


def test_after_a_long_wait_what_is_left_of_the_leaders_rounds_counts() -> None:
    """Volunteers that had waited for judges took one step of twenty on the path of a forger that was refused."""
    pace = pace_of(120.0)
    pace.told(rounds(60.0, 60.0, 60.0, left_s=(55.0, 55.0, 0.0)))
    assert pace.training_s(spent_s=50.0) == pytest.approx(49.0)
    assert pace.training_s() == pytest.approx(54.0), "the first path of a round has it all"
    pace.told(rounds(60.0, 60.0, 60.0, left_s=(1e-9, 1e-9, 55.0)))
    assert pace.training_s(spent_s=10.0) == pytest.approx(44.0), "at least what is left since our own last push"
    pace.told(rounds(60.0, left_s=(1e9,)))
    assert pace.training_s(spent_s=10.0) == pytest.approx(54.0)


@pytest.mark.parametrize(("steps", "fits"), [(1, True), (8, True), (9, False), (10, False)])
def test_a_step_is_begun_only_if_it_can_be_finished(steps: int, fits: bool) -> None:
    """Each takes 10 s, and there are 95."""
    assert Pace.has_time(steps, elapsed_s=10.0 * steps, training_s=95.0) == fits


@pytest.mark.parametrize(("steps", "fits"), [(0, True), (1, True), (4, True), (5, False)])
def test_what_is_done_once_is_no_measure_of_the_steps_to_come(steps: int, fits: bool) -> None:
    """The first one compiled for 45 s; each after it takes 10 s, and there are 95."""
    elapsed_s = 45.0 + 10.0 * steps
    assert Pace.has_time(steps, elapsed_s=elapsed_s, training_s=95.0, once_s=45.0) == fits
    assert not Pace.has_time(0, elapsed_s=96.0, training_s=95.0, once_s=96.0)


def test_the_time_is_the_shortest_that_a_leader_of_the_path_waits() -> None:
    pace = pace_of(120.0)
    pace.told(rounds(80.0, 60.0, 0.0))
    assert pace.training_s() == pytest.approx(54.0)
    pace.told(rounds(0.0, 0.0))
    assert pace.training_s() == pytest.approx(108.0), "nobody says: the run file's"
    pace.told([])
    assert pace.training_s() == pytest.approx(108.0)


def test_no_leader_can_stretch_the_time_or_take_it_away() -> None:
    pace = pace_of(120.0)
    pace.told(rounds(1e9))
    assert pace.training_s() == pytest.approx(108.0)
    pace.told(rounds(1e-9))
    assert pace.training_s() == pytest.approx(0.9 * notice_s(LIVENESS))


MODULE = ModuleId(1, 0)


@asynccontextmanager
async def on_stage(folder: Path, **faults: Any) -> AsyncIterator[tuple[World, Leader, Member]]:
    async with World(folder, config=tiny_config(rounds=9), **faults) as world:
        node = world.peer(60)
        leader = world.leader(50)
        await leader.lead(MODULE)
        await claim(node, PathId((0, 0, 0)))
        await node.watch.refresh()
        yield world, leader, node


def document(world: World, node: Member, payload: bytes, **values: Any) -> Contribution:
    return contribution_of(world.run, node.swarm.signer, payload, module=MODULE, path=PathId((0, 0, 0)), **values)


async def test_a_push_ends_with_the_leaders_receipt(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, node):
        payload = gradient_bytes(world.run, MODULE)
        receipt = (await push(node, document(world, node, payload), payload)).document
        assert (receipt.author, receipt.round) == (leader.peer, 0)
        await eventually(lambda: receipt.contribution in world.seed.archive.ledgers[MODULE].counted)


async def test_a_push_survives_lost_and_doubled_messages(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, node):
        world.network.loss, world.network.duplication = 0.1, 0.5
        payload = gradient_bytes(world.run, MODULE)
        receipt = (await push(node, document(world, node, payload), payload)).document
        await eventually(lambda: receipt.contribution in leader.owner(MODULE)._ledger.counted)
        assert len(leader.owner(MODULE)._ledger.counted) == 1


async def test_a_push_waits_for_the_successor_of_a_dead_leader(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, node):
        other = world.leader(51)
        await other.node.watch.refresh()
        await leader.die(world)
        payload = gradient_bytes(world.run, MODULE)
        pushing = asyncio.create_task(push(node, document(world, node, payload), payload))
        await asyncio.sleep(world.run.config.liveness.heartbeat_ttl_s + 1.0)  # until then it counts as alive
        assert not pushing.done()
        await other.lead(MODULE)
        assert (await pushing).document.author == other.peer


async def test_a_leader_that_is_behind_what_we_trained_from_gets_time_to_find_it(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, node):
        payload, patience_s = gradient_bytes(world.run, MODULE), BEHIND_TTLS * world.run.config.liveness.heartbeat_ttl_s
        ahead = document(world, node, payload, base_version=1, base_digest="a" * 64)
        pushing = asyncio.create_task(push(node, ahead, payload))
        await asyncio.sleep(patience_s - 1.0)
        assert not pushing.done()
        await asyncio.sleep(3.0)
        assert pushing.done()
        with pytest.raises(Refused) as caught:
            await pushing
        assert caught.value.reason == Reason.UNKNOWN_BASE


@pytest.mark.parametrize("is_claimed", [True, False])
async def test_a_leader_that_still_waits_for_an_idle_claim_gets_time_to_see_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_claimed: bool
) -> None:
    """Attack: claims without work covered a path for its leaders a second longer than for the volunteer that took it
    over, and its work was refused for good by one of them."""
    async with on_stage(tmp_path) as (world, leader, node):
        payload, module = gradient_bytes(world.run, MODULE), leader.owner(MODULE)
        mine = document(world, node, payload)
        if is_claimed:
            await claim(world.peer(61), mine.path)
            await node.watch.refresh()
            assert len(node.watch.claims[mine.path]) == 2
        contribute, began_s = type(module).contribute, world.clock.now_s()

        async def covered(self: Any, *parts: Any, **named: Any) -> Any:
            if world.clock.now_s() < began_s + 3.0:
                raise Refused("trained by others", reason=Reason.COVERED)
            return await contribute(self, *parts, **named)

        monkeypatch.setattr(type(module), "contribute", covered)
        if is_claimed:
            with pytest.raises(Refused):
                await push(node, mine, payload)
            assert world.clock.now_s() < began_s + 3.0, "others do train it, as we see ourselves"
        else:
            assert (await push(node, mine, payload)).document.author == leader.peer


async def test_a_leader_that_is_busy_to_one_author_holds_it_no_longer_than_its_work_could_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: it took the bytes and answered `busy`, to this author alone. The push went on for nine of the longest
    deadlines, or eighteen minutes, in each round, though the leader's own head said that the work came too late."""
    async with on_stage(tmp_path) as (world, leader, node):
        module, payload = leader.owner(MODULE), gradient_bytes(world.run, MODULE)
        contribute = type(module).contribute

        async def busy(self: Any, sender: str, *parts: Any, **named: Any) -> Any:
            if sender == node.peer:
                raise Refused("come again", reason=Reason.BUSY)
            return await contribute(self, sender, *parts, **named)

        monkeypatch.setattr(type(module), "contribute", busy)
        pushing = asyncio.create_task(push(node, document(world, node, payload), payload))
        for number in range(2):
            assert not pushing.done(), "it could still count"
            other, head = world.peer(61 + number), module.head
            theirs = gradient_bytes(world.run, MODULE, seed=5 + number)
            work = contribution_of(world.run, other.swarm.signer, theirs, module=MODULE, path=PathId((0, 0, 1)))
            work = replace(work, base_version=head.version, base_digest=head.digest)
            await other.watch.refresh()
            await offer(other, leader.peer, work, theirs)
            await eventually(lambda made=number + 1: module.head.version == made, limit_s=120.0)
        await asyncio.sleep(world.run.config.liveness.heartbeat_ttl_s)
        assert pushing.done()
        with pytest.raises(Refused) as caught:
            await pushing
        assert caught.value.reason == Reason.STALE_BASE


async def test_a_push_that_nobody_wants_ends_with_the_reason(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, node):
        with pytest.raises(Refused) as caught:
            await push(node, document(world, node, b"no tensors"), b"no tensors")
        assert caught.value.reason == Reason.MALFORMED


async def test_what_an_earlier_process_sent_is_taken_by_a_leader_that_knows_no_claim(tmp_path: Path) -> None:
    """As after an outage of all: the claims of then are gone with the memory of everybody."""
    async with World(tmp_path, config=tiny_config(rounds=9)) as world:
        node, leader = world.peer(60), world.leader(50)
        await leader.lead(MODULE)
        await node.watch.refresh()
        payload, began_s = gradient_bytes(world.run, MODULE), world.clock.now_s()
        Outbox(node).add(document(world, node, payload), payload)
        await Contributor(node, InnerStates(node), Status()).resume(within_s=60.0)
        assert Outbox(node).waiting() == [] and world.clock.now_s() - began_s < 5.0
        assert not node.presence.has_claim


async def test_a_receipt_for_something_else_is_not_believed(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, leader, node):
        payload = gradient_bytes(world.run, MODULE)
        contribution = document(world, node, payload)
        handlers = leader.swarm._dispatcher._handlers
        honest, asked = handlers["module.contribute"], []

        async def lie(sender: Any, header: Any, body: Any) -> Reply:
            asked.append(sender)
            receipt = Receipt(
                run=world.run.id, contribution="0" * 64, module=MODULE, round=0, term=1, custody=(), author=leader.peer
            )
            if len(asked) == 1:
                return Reply({"receipt": seal(leader.swarm.signer, receipt).to_dict()})
            if len(asked) == 2:
                return Reply({"receipt": seal(signer(99), _by(signer(99).peer, receipt)).to_dict()})
            return await honest(sender, header, body)

        handlers["module.contribute"] = lie
        receipt = (await push(node, contribution, payload)).document
        assert len(asked) == 3
        assert receipt.contribution == seal(node.swarm.signer, contribution).id and receipt.author == leader.peer


def _by(author: Any, receipt: Receipt) -> Receipt:
    from dataclasses import replace

    return replace(receipt, author=author)
