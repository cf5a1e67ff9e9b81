"""Who leads is learnt from those who lead, whatever others write and however they are silent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World
from tiny_run import signer, tiny_config
from virtual_time import end

from dipaco_p2p import strict
from dipaco_p2p.node.calls import GetMandate
from dipaco_p2p.node.items import Page, items_reply
from dipaco_p2p.node.mandate_news import ANSWER_TIMEOUT_S, STRANGERS_AT_ONCE
from dipaco_p2p.node.node import Observer, open_observer
from dipaco_p2p.protocol.documents import Grant
from dipaco_p2p.protocol.liveness import Head
from dipaco_p2p.protocol.records import heads_key
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(1, 0)


class Crowd:
    """Keys of one stranger with heads that nobody granted, in a greater term at each look."""

    def __init__(self, world: World, keys: int, modules: list[ModuleId], *, is_silent: bool) -> None:
        self._world, self._modules, self._is_silent = world, modules, is_silent
        self._swarms = [world.network.join(signer(100 + number)) for number in range(keys)]
        self._term = 2**30
        self.asked: Counter[PeerId] = Counter()
        """By whom."""
        for swarm in self._swarms:
            GetMandate.serve(swarm, self._answer)

    async def _answer(self, sender: PeerId, request: GetMandate) -> Page[Grant]:
        self.asked[sender] += 1
        if self._is_silent:
            await asyncio.Event().wait()
        return items_reply(())

    async def write(self) -> None:
        for swarm in self._swarms:
            for module in self._modules:
                self._term += 1
                head = Head(version=1, digest="0" * 64, term=self._term, granted_by=swarm.peer, grant="0" * 128)
                key, ttl_s = heads_key(self._world.run.id, module), self._world.run.config.liveness.heartbeat_ttl_s
                await swarm.put(key, strict.plain(head), ttl_s=ttl_s)


@asynccontextmanager
async def without_a_seed(folder: Path) -> AsyncIterator[tuple[World, Any]]:
    """A module whose group has gone on by itself, twice: a newcomer has to ask its leader for the mandate."""
    async with World(folder, config=tiny_config(rounds=9)) as world:
        one = world.leader(51)
        await one.node.presence.say()
        await one.lead(MODULE)
        await one.node.watch.refresh()
        await world.kill_seed()
        for _ in range(2):
            one.node.mandates.grant_next(one.swarm.signer, MODULE, leader=one.peer, mirrors=())
            await one.owner(MODULE).renew()
        beating = asyncio.create_task(one.node.presence.run())
        yield world, one
        await end(beating)


def newcomer(world: World) -> Observer:
    return open_observer(world.run, world.network.join(signer(90)), world.clock)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("keys", [4, 12])
async def test_a_crowd_that_writes_heads_does_not_hide_the_leader(tmp_path: Path, keys: int, is_silent: bool) -> None:
    async with without_a_seed(tmp_path) as (world, one):
        crowd = Crowd(world, keys, world.run.topology.modules(), is_silent=is_silent)
        looker = newcomer(world)
        looks = 0
        while looker.watch.leader(MODULE) != one.peer:
            looks += 1
            assert looks <= 8 * keys, "each key is as likely to be asked next as the leader, and three have places"
            await crowd.write()
            await looker.watch.refresh()
            await asyncio.sleep(1.0)
        looker.watch.close()


async def test_few_strangers_are_asked_in_a_time_whatever_they_write(tmp_path: Path) -> None:
    async with without_a_seed(tmp_path) as (world, _):
        crowd = Crowd(world, 12, world.run.topology.modules(), is_silent=False)
        looker, began_s = newcomer(world), world.clock.now_s()
        for _ in range(20):
            await crowd.write()
            await looker.watch.refresh()
            await asyncio.sleep(1.0)
        spans = (world.clock.now_s() - began_s) / ANSWER_TIMEOUT_S
        assert crowd.asked[looker.peer] <= STRANGERS_AT_ONCE * (1 + spans)
        looker.watch.close()


async def test_a_place_is_kept_for_those_who_have_worked(tmp_path: Path) -> None:
    async with without_a_seed(tmp_path) as (world, one):
        crowd = Crowd(world, 12, world.run.topology.modules(), is_silent=True)
        looker = newcomer(world)
        looker.watch.workers = lambda: [one.peer]
        await crowd.write()
        await looker.watch.read_level(0)
        await asyncio.sleep(0.1)
        assert crowd.asked[looker.peer] == STRANGERS_AT_ONCE
        await looker.watch.read_heads(MODULE)
        await asyncio.sleep(0.1)
        await looker.watch.read_heads(MODULE)
        assert looker.watch.leader(MODULE) == one.peer
        looker.watch.close()


async def test_silent_strangers_that_are_asked_keep_nobody_else_from_being_asked(tmp_path: Path) -> None:
    """Attack: keys whose calls show a made-up grant, and that are silent when asked for its mandate. A leader that was
    not met before waited for its turn behind them."""
    async with without_a_seed(tmp_path) as (world, one):
        crowd, looker = Crowd(world, 12, [MODULE], is_silent=True), newcomer(world)
        assert one.peer not in looker.watch.known()
        asking = [asyncio.ensure_future(looker.watch.mandate_news.learn(MODULE, swarm.peer)) for swarm in crowd._swarms]
        await asyncio.sleep(0.1)
        began_s = world.clock.now_s()
        await looker.watch.mandate_news.learn(MODULE, one.peer)
        assert world.clock.now_s() - began_s < 1.0 and looker.mandates.grants(MODULE)
        await asyncio.gather(*asking, return_exceptions=True)
        looker.watch.close()


async def test_who_asks_for_a_leader_waits_for_the_mandates_that_it_asked_for(tmp_path: Path) -> None:
    """As a program that looks once and ends: at the first look it can believe nobody."""
    async with without_a_seed(tmp_path) as (world, one):
        looker = newcomer(world)
        await looker.watch.find_leader(MODULE)
        assert looker.watch.leader(MODULE) == one.peer
        crowd = Crowd(world, 8, [ModuleId(0, 0)], is_silent=True)
        await crowd.write()
        began_s = world.clock.now_s()
        await looker.watch.find_leader(ModuleId(0, 0))
        assert looker.watch.leader(ModuleId(0, 0)) is None
        assert world.clock.now_s() - began_s <= 3 * ANSWER_TIMEOUT_S + 1.0
