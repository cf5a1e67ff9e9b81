"""Decrees as a peer keeps them and hears of them: on disk, in order, from anybody, and signed by the coordinator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World
from tiny_run import SEED_NUMBER, make_run, signer, tiny_config
from virtual_time import eventually

from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol import decrees as rules
from dipaco_p2p.protocol.decrees import Decree
from dipaco_p2p.protocol.documents import Sealed, seal
from dipaco_p2p.protocol.liveness import Claim, Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

COORDINATOR, BOB = signer(SEED_NUMBER), signer(77).peer


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(Store(tmp_path / "blobs"), tiny_config())


def issue(decrees: Decrees, act: str = "freeze", **values: object) -> Sealed[Decree]:
    return decrees.issue(COORDINATOR, act, at_s=1.0, reason="a test", **values)


def test_decrees_are_on_disk_before_they_hold_and_are_there_after_a_restart(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "a")
    decrees = Decrees(run, store)
    issue(decrees, "ban", peer=BOB)
    issue(decrees)
    again = Decrees(run, store)
    assert again.log == decrees.log and again.state == decrees.state
    assert (again.reason(BOB), again.is_frozen, again.count) == ("a test", True, 2)


def test_a_peer_takes_them_in_order_and_the_same_again_changes_nothing(run: Run) -> None:
    decrees, ours = Decrees(run), Decrees(run)
    first, second = issue(decrees), issue(decrees, "unfreeze")
    with pytest.raises(IntegrityError, match="does not follow decree 0"):
        ours.learn(second)
    assert (ours.count, ours.is_frozen) == (0, False), "a gap is not filled with a guess"
    ours.learn_all([first, second, first])
    assert (ours.count, ours.is_frozen) == (2, False)


def test_two_decrees_with_one_number_are_not_both_believed(run: Run) -> None:
    decrees, restored = Decrees(run), Decrees(run)
    issue(decrees)
    other = issue(restored, "ban", peer=BOB)
    with pytest.raises(IntegrityError, match="two decrees with the number 1"):
        decrees.learn(other)
    assert decrees.state.banned == {}


def test_there_is_a_most(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dipaco_p2p.node.authority.DECREES_MAX", 2)
    decrees = Decrees(run)
    issue(decrees), issue(decrees, "unfreeze")
    with pytest.raises(ConfigError, match="there can be no more"):
        issue(decrees)
    assert decrees.count == 2 < rules.DECREES_MAX


def test_a_damaged_decree_is_asked_for_again_but_the_coordinator_stops(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "a")
    decrees = Decrees(run, store)
    issue(decrees), issue(decrees, "unfreeze")
    (tmp_path / "a" / "documents" / "decree-00000002.json").write_text("{")
    again = Decrees(run, store)
    assert again.count == 1
    again.learn(decrees.log[1])
    assert Decrees(run, store).count == 2
    (tmp_path / "a" / "documents" / "decree-00000001.json").write_text(json.dumps({}))
    with pytest.raises(IntegrityError, match="decree-00000001.json was damaged"):
        Decrees(run, store, must_be_whole=True)


async def test_peers_learn_from_each_other_while_the_coordinator_is_away(tmp_path: Path) -> None:
    """One has heard of it before the coordinator went; a newcomer learns it from that one, and keeps it."""
    async with World(tmp_path) as world:
        first = world.leader(1)
        issue(world.seed.node.decrees, "ban", peer=BOB)
        await eventually(lambda: first.node.decrees.count == 1)
        await world.kill_seed()
        second = world.leader(2)
        await eventually(lambda: second.node.decrees.count == 1)
        assert second.node.decrees.reason(BOB) == "a test"
        assert Decrees(world.run, second.node.store).count == 1


async def test_a_liar_with_more_decrees_than_there_are_keeps_nobody_from_the_true_ones(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        liars = [world.peer(number) for number in range(60, 66)]
        for liar in liars:
            own = Decree(
                run=world.run.id, number=1, previous="", at_s=0.0, act="freeze", reason="lie", author=liar.peer
            )
            liar.decrees.log.append(seal(liar.swarm.signer, own))
            await liar.presence.say(decrees=900)
        honest = world.leader(1)
        await eventually(lambda: len(honest.node.watch.heartbeats) > len(liars))
        issue(world.seed.node.decrees, "ban", peer=BOB)
        await eventually(lambda: honest.node.decrees.count == 1)
        assert not honest.node.decrees.is_frozen


async def test_a_crowd_of_liars_does_not_hide_the_one_that_has_them(tmp_path: Path) -> None:
    """While the coordinator is away; they say that they are seed nodes, have more, and have nothing."""
    async with World(tmp_path) as world:
        honest = world.leader(1)
        issue(world.seed.node.decrees, "ban", peer=BOB)
        await eventually(lambda: honest.node.decrees.count == 1)
        await world.kill_seed()
        liars = [world.peer(number) for number in range(60, 84)]

        async def lie() -> None:
            for liar in liars:
                await liar.presence.say(role="seed", decrees=900)

        await lie()
        newcomer = world.leader(2)
        for _ in range(20):
            await lie()
            await asyncio.sleep(1.0)
        assert newcomer.node.decrees.count == 1


async def test_new_keys_at_every_look_keep_no_one_that_has_worked_from_being_asked(tmp_path: Path) -> None:
    """Whoever was not asked yet came first, and keys cost nothing."""
    async with World(tmp_path) as world:
        honest, newcomer = world.peer(1), world.peer(90)
        asked: list[PeerId] = []
        newcomer.watch.workers = lambda: [honest.peer]
        news = newcomer.watch.decree_news
        liars = [signer(number).peer for number in range(100, 140)]

        async def ask(peer: PeerId) -> None:
            asked.append(peer)

        news.try_learn = ask  # type: ignore[method-assign]
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        for look in range(20):
            beats = {peer: Heartbeat(decrees=900) for peer in [*liars[2 * look : 2 * look + 2], honest.peer]}
            works: list[Any] = []
            news.heard(beats, newcomer.watch.known(), begin=works.append)
            assert len(works) == 2
            await asyncio.gather(*works)
            await asyncio.sleep(ttl_s)
        assert asked.count(honest.peer) == 20


async def test_what_the_banned_say_counts_for_nothing_until_they_are_admitted(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        banned, watch, path = world.peer(60), world.seed.node.watch, PathId((0, 0, 0))
        await banned.presence.say()
        await banned.presence.claim(path, since_s=0.0)
        await eventually(lambda: isinstance(watch.claims[path].get(banned.peer), Claim))
        await eventually(lambda: banned.peer in watch.heartbeats)
        issue(world.seed.node.decrees, "ban", peer=banned.peer)
        assert banned.peer not in watch.heartbeats and banned.peer not in watch.claims[path], "at once"
        await banned.presence.beat()
        await watch.refresh()
        assert banned.peer not in watch.heartbeats and banned.peer not in watch.claims[path]
        issue(world.seed.node.decrees, "admit", peer=banned.peer)
        await banned.presence.beat()
        await watch.refresh()
        assert banned.peer in watch.heartbeats and banned.peer in watch.claims[path]
