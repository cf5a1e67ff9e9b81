"""Alive and taking part are two things: who claims, who has lapsed, who hangs, and who is only slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World, claim
from tiny_run import contribution_of, gradient_bytes, signer, tiny_config
from virtual_time import end, eventually

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.uploads import Uploads
from dipaco_p2p.protocol.claims import ClaimEvent, ranking, taking_part
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.rounds import Standing
from dipaco_p2p.topology import ModuleId, PathId
from peers.path.claiming import Claiming
from peers.path.contribute import Contributor, push
from peers.path.kept import InnerStates
from peers.path.trainer import Engines, PathTrainer
from peers.path.training import ROUNDS_SILENT_MAX, Watchdog

MODULE = ModuleId(1, 0)


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        raise NotImplementedError


# -- the watchdog


def test_who_does_nothing_for_several_rounds_has_stalled() -> None:
    clock = Hands()
    dog = Watchdog(clock, deadline_s=20.0)
    for _ in range(3):
        dog.begin()
        clock.time_s += 50.0
        dog.progress()
        dog.end()
    dog.begin()
    clock.time_s += ROUNDS_SILENT_MAX * 50.0
    assert not dog.is_stalled
    clock.time_s += 0.1
    assert dog.is_stalled
    dog.progress()
    assert not dog.is_stalled


def test_a_quick_round_is_given_a_deadline_all_the_same() -> None:
    clock = Hands()
    dog = Watchdog(clock, deadline_s=20.0)
    assert dog.limit_s == ROUNDS_SILENT_MAX * 20.0, "nothing was seen yet"
    dog.begin()
    clock.time_s += 0.1
    dog.end()
    assert dog.limit_s == 20.0


def test_one_round_that_took_for_ever_changes_little() -> None:
    clock = Hands()
    dog = Watchdog(clock, deadline_s=20.0)
    for duration_s in (50.0, 50.0, 9_999.0):
        dog.begin()
        clock.time_s += duration_s
        dog.end()
    assert dog.limit_s == ROUNDS_SILENT_MAX * 50.0


def test_a_silence_that_was_announced_is_no_stall_and_one_beyond_it_is() -> None:
    clock = Hands()
    dog = Watchdog(clock, deadline_s=20.0)
    dog.begin()
    dog.expect_silence(120.0)
    clock.time_s += 120.0 + dog.limit_s
    assert not dog.is_stalled
    clock.time_s += 0.1
    assert dog.is_stalled
    dog.progress()
    clock.time_s += dog.limit_s + 0.1
    assert dog.is_stalled, "it was announced once"


def test_waiting_between_rounds_is_no_fault() -> None:
    clock = Hands()
    dog = Watchdog(clock, deadline_s=20.0)
    dog.begin()
    dog.end()
    clock.time_s += 9_999.0
    assert not dog.is_stalled


def test_an_upload_that_gets_on_however_slowly_is_progress() -> None:
    clock = Hands()
    dog = Watchdog(clock, deadline_s=20.0)
    dog.begin()
    for _ in range(1000):
        clock.time_s += ROUNDS_SILENT_MAX * 20.0
        assert not dog.is_stalled
        dog.progress()


# -- the claim


@asynccontextmanager
async def on_stage(folder: Path) -> AsyncIterator[tuple[World, Member, Claiming, list[dict[str, Any]]]]:
    async with World(folder) as world:
        node = world.peer(60)
        events: list[dict[str, Any]] = []
        node.history.listen(events.append)
        await node.watch.refresh()
        claiming = Claiming(node, InnerStates(node), is_ready=lambda path: True)
        await claiming.claim()
        yield world, node, claiming, events


async def claimants(world: World) -> frozenset[str]:
    await world.seed.node.watch.read_claims()
    return taking_part(world.seed.node.watch.claims)


def released(events: list[dict[str, Any]]) -> list[str]:
    return [event["why"] for event in events if event["ev"] == "released"]


async def test_a_claim_whose_release_was_cut_off_is_released_on_leaving_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM comes while the claim is being given up for another reason."""
    async with on_stage(tmp_path) as (world, node, claiming, events):
        saying = asyncio.Event()

        async def stuck(key: str, body: object) -> None:
            saying.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(node.presence, "_put", stuck)
            yielding = asyncio.create_task(claiming.release(ClaimEvent.YIELDED))
            await saying.wait()
            await end(yielding)
        assert released(events) == [] and await claimants(world) == {node.peer}
        assert not node.presence.has_claim, "nobody may take it for one that is kept"
        await claiming.release(ClaimEvent.RELEASED)
        assert released(events) == ["released"] and not await claimants(world)
        await claiming.release(ClaimEvent.RELEASED)
        assert released(events) == ["released"], "once is enough"


async def test_a_claim_that_two_give_up_at_once_is_released_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog and the trainer did, on a slow line: the second found no claim, and the watch began anew."""
    async with on_stage(tmp_path) as (world, node, claiming, events):
        put = node.presence._put

        async def slowly(key: str, body: object) -> None:
            await asyncio.sleep(1.0)
            await put(key, body)  # type: ignore[arg-type]

        monkeypatch.setattr(node.presence, "_put", slowly)
        await asyncio.gather(claiming.release(ClaimEvent.EXPIRED), claiming.release(ClaimEvent.YIELDED))
        assert released(events) == ["expired"] and not await claimants(world)


async def test_the_heartbeat_says_a_half_released_claim_only_as_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_stage(tmp_path) as (world, node, claiming, events):

        async def lost(key: str, body: object) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(node.presence, "_put", lost)
            with pytest.raises(asyncio.CancelledError):
                await node.presence.release()
        claiming.note_round(7)
        await node.presence.beat()
        assert not await claimants(world)


async def test_who_was_stopped_comes_after_who_took_its_path(tmp_path: Path) -> None:
    """A process that is stopped and wakes up must not drive out who went on with its path meanwhile."""
    async with on_stage(tmp_path) as (world, node, claiming, events):
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        path = next(path for path, peers in node.watch.claims.items() if node.peer in peers)
        before_s = node.watch.claims[path][node.peer].since_s
        await asyncio.sleep(ttl_s / 2)
        await node.presence.beat()
        await node.watch.read_claims()
        assert node.watch.claims[path][node.peer].since_s == before_s, "said in time: still the same claim"
        await asyncio.sleep(ttl_s / 2)
        taker = world.peer(61)
        await taker.presence.claim(path, since_s=world.clock.now_s())
        await asyncio.sleep(ttl_s / 2)
        await taker.presence.beat()
        await node.presence.beat()
        await node.watch.refresh()
        assert list(ranking(path, node.watch.claims[path])) == [taker.peer, node.peer]
        assert await claiming.should_move(path, Standing()) is ClaimEvent.YIELDED


async def test_who_was_stopped_keeps_a_path_that_nobody_took(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, node, claiming, events):
        path = next(path for path, peers in node.watch.claims.items() if node.peer in peers)
        await asyncio.sleep(1.5 * world.run.config.liveness.heartbeat_ttl_s)
        assert not await claimants(world)
        await node.presence.beat()
        assert await claimants(world) == {node.peer} and node.presence.has_claim
        await node.watch.refresh()
        assert await claiming.should_move(path, Standing(is_due=True)) is None and not released(events)


async def test_a_claim_that_the_watchdog_gave_up_is_noticed(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, node, claiming, events):
        path = next(path for path, peers in node.watch.claims.items() if node.peer in peers)
        await claiming.release(ClaimEvent.EXPIRED)
        assert released(events) == ["expired"] and not await claimants(world)
        await node.presence.beat()
        assert not await claimants(world)
        assert await claiming.should_move(path, Standing()) is ClaimEvent.EXPIRED
        assert await claiming.claim() is not None and node.presence.has_claim


async def test_a_claim_that_was_given_up_is_said_again_and_comes_last(tmp_path: Path) -> None:
    async with on_stage(tmp_path) as (world, node, claiming, events):
        path = next(path for path, peers in node.watch.claims.items() if node.peer in peers)
        claiming.note_round(3)
        await claiming.again()
        assert [event["ev"] for event in events] == ["claimed"], "it is still there"
        await claiming.release(ClaimEvent.EXPIRED)
        taker = world.peer(61)
        await taker.presence.claim(path, since_s=world.clock.now_s())
        await asyncio.sleep(1.0)
        await asyncio.gather(*(claiming.again() for _ in range(3)))  # the leader of each module asks
        await node.watch.refresh()
        assert list(ranking(path, node.watch.claims[path])) == [taker.peer, node.peer]
        assert (node.watch.claims[path][node.peer].round, node.presence.heartbeat.path) == (3, path)
        assert [event["ev"] for event in events] == ["claimed", "released", "claimed"]
        await claiming.release(ClaimEvent.RELEASED)
        assert released(events) == ["expired", "released"] and await claimants(world) == {taker.peer}


# -- whole volunteers


async def test_work_whose_claim_was_given_up_while_nobody_led_is_taken_by_who_leads_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new leader never saw the claim, and took no work without; the volunteer claimed only when it had pushed."""
    honest, is_over = PathTrainer.train, asyncio.Event()

    async def train(self: PathTrainer, *args: Any, **changes: Any) -> Any:
        if not is_over.is_set():
            is_over.set()
            await world.kill_seed()
        return await honest(self, *args, **changes)

    monkeypatch.setattr(PathTrainer, "train", train)
    async with World(tmp_path, config=tiny_config(rounds=1, min_paths=1, owners=1)) as world:
        victim = world.join(1)
        await eventually(lambda: bool(victim.said("stalled")))
        assert victim.status.doing == "pushing" and not victim.node.presence.has_claim
        world.start_seed()
        await eventually(lambda: len(victim.said("receipt")) == len(world.run.topology.widths), limit_s=60.0)
        before, again = victim.said("claimed")[:2]
        assert before["path"] == again["path"] and victim.said("released")[0]["why"] == "expired"
        await world.done()


async def test_a_leader_that_always_wants_a_claim_keeps_nobody_on_a_path_for_longer_than_a_push_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever leads may say so of anybody: the claim is given up as often as nothing gets on, and at last the push."""

    async def demanding(*work: Any) -> None:
        raise Refused("the newest claim of its author is another", reason=Reason.UNCLAIMED)

    monkeypatch.setattr("dipaco_p2p.owner.leader.require_claim", demanding)
    monkeypatch.setattr("peers.path.contribute.GIVEN_UP", 2)
    async with World(tmp_path, config=tiny_config(rounds=1, min_paths=1, owners=1)) as world:
        victim = world.join(1)
        began_s, limit_s = world.clock.now_s(), victim.volunteer._watchdog.limit_s
        await eventually(lambda: bool(victim.said("unanswered")), limit_s=300.0)
        stalls = len(victim.said("stalled"))
        assert 1 < stalls <= (world.clock.now_s() - began_s) / limit_s
        assert len(victim.said("claimed")) == stalls + 1, "it is said again after each"


async def test_a_volunteer_that_compiles_for_longer_than_a_stall_keeps_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, compiling_s = PathTrainer.train, 0.0
    compiles: list[Engines] = []

    async def train(self: PathTrainer, *args: Any, **changes: Any) -> Any:
        if not compiles:
            assert self._engines is not None
            compiles.append(self._engines)
            self._engines._on_compiling(compiling_s)
            await asyncio.sleep(compiling_s)
            self._engines.compiled()
        return await honest(self, *args, **changes)

    monkeypatch.setattr(PathTrainer, "train", train)
    async with World(tmp_path, config=tiny_config(min_paths=1)) as world:
        compiling_s = ROUNDS_SILENT_MAX * world.run.config.rounds.deadline_s + 10.0
        victim = world.join(1)
        await eventually(lambda: bool(compiles))
        words = victim.status.doing
        assert words.startswith("compiling: about ") and victim.node.presence.heartbeat.doing == "compiling"
        await eventually(lambda: victim.status.doing != words, limit_s=compiling_s + 1.0)
        await world.done()
        assert not victim.said("stalled") and victim.said("receipt")


async def test_a_volunteer_that_hangs_is_alive_and_takes_no_part_until_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = PathTrainer.train
    frozen: list[PathId] = []
    waking: list[asyncio.Event] = []

    async def train(self: PathTrainer, *args: Any, **changes: Any) -> Any:
        if frozen and self.path == frozen[0] and not waking:
            waking.append(asyncio.Event())
            await waking[0].wait()
        return await honest(self, *args, **changes)

    monkeypatch.setattr(PathTrainer, "train", train)
    async with World(tmp_path, config=tiny_config(rounds=40)) as world:
        world.join_all()
        await eventually(lambda: all(len(volunteer.said("round")) > 1 for volunteer in world.volunteers))
        victim, others = world.volunteers[0], world.volunteers[1:]
        assert victim.status.path is not None
        frozen.append(victim.status.path)
        await eventually(lambda: bool(waking))
        began_s, limit_s = world.clock.now_s(), victim.volunteer._watchdog.limit_s
        await eventually(lambda: bool(victim.said("stalled")), limit_s=limit_s + 5.0)
        assert world.clock.now_s() - began_s > limit_s - 1.0
        await eventually(lambda: frozen[0] in {other.status.path for other in others}, limit_s=60.0)
        watch = world.seed.node.watch
        await watch.refresh()
        assert victim.peer in watch.heartbeats and victim.peer not in taking_part(watch.claims)
        await eventually(lambda: others[0].status.peers_training == 3)
        assert others[0].status.peers_alive == 5, "the seed node, too"
        rounds = len(victim.said("round"))
        waking[0].set()
        await eventually(lambda: len(victim.said("round")) > rounds + 1)
        assert [event["why"] for event in victim.said("released")] == ["expired"]
        await watch.refresh()
        assert victim.peer in taking_part(watch.claims)


async def test_a_slow_uplink_keeps_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its push takes four times as long as it may be silent, part by part."""
    honest = Contributor._push
    slow: list[str] = []

    async def crawling(self: Contributor, contribution: Any, payload: bytes) -> str | None:
        if self._node.peer in slow:
            for _ in range(20):
                await self._node.clock.sleep(6.0)
                self._on_progress()
                for node in (world.seed.node, *(volunteer.node for volunteer in world.volunteers)):
                    node.uploads._progressed(self._node.peer)  # whoever leads sees the part arrive
        return await honest(self, contribution, payload)

    monkeypatch.setattr(Contributor, "_push", crawling)
    async with World(tmp_path, config=tiny_config(rounds=400)) as world:
        world.join_all()
        await eventually(lambda: all(len(volunteer.said("round")) > 1 for volunteer in world.volunteers))
        victim = world.volunteers[0]
        slow.append(victim.peer)
        await eventually(lambda: victim.status.doing == "pushing")
        for _ in range(10):
            await asyncio.sleep(10.0)
            await world.seed.node.watch.read_claims()
            assert victim.peer in taking_part(world.seed.node.watch.claims)
        assert not victim.said("stalled") and not victim.said("released")


async def test_a_push_tells_of_every_part_that_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dipaco_p2p.swarm.blobs.blobs.RANGE_BYTES", 64)
    async with World(tmp_path, config=tiny_config(rounds=9)) as world:
        node, leader = world.peer(60), world.leader(50)
        await leader.lead(MODULE)
        await claim(node, PathId((0, 0, 0)))
        await node.watch.refresh()
        payload, told = gradient_bytes(world.run, MODULE), []
        document = contribution_of(world.run, node.swarm.signer, payload, module=MODULE, path=PathId((0, 0, 0)))
        await push(node, document, payload, on_progress=lambda: told.append(world.clock.now_s()))
        assert len(told) > len(payload) / 64


async def test_a_receiver_knows_who_is_sending_and_forgets_who_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dipaco_p2p.node.uploads.SENDERS_MAX", 2)
    async with World(tmp_path) as world:
        node = world.peer(60)
        uploads = Uploads(node.swarm, node.store, world.clock, size_max=100)
        senders = [signer(number).peer for number in (1, 2, 3)]
        for number, sender in enumerate(senders):
            sink = await uploads._accept(sender, f"{number}" * 64, 10)
            sink.write(0, b"12345")
            await asyncio.sleep(1.0)
        now_s = world.clock.now_s()
        assert uploads.progress_s == {senders[1]: now_s - 2.0, senders[2]: now_s - 1.0}
        data = b"0123456789"
        sink = await uploads._accept(senders[1], digest(data), len(data))
        sink.write(0, data)
        sink.finish()
        assert list(uploads.progress_s) == [senders[2]]
