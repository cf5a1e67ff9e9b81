"""Members of a group that grant themselves a module, though its leader and the coordinator's seed node live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from group_harness import MODULE, document, expired, make_versions
from leaders_harness import on_stage
from runtime_harness import TinyLeader, World, offer
from tiny_run import gradient_bytes
from virtual_time import eventually

from bootstrap.coordinator.coups import HEARD_HEARTBEATS
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.authority import Mandates
from dipaco_p2p.node.calls import Adopt
from dipaco_p2p.node.ledger import head_record
from dipaco_p2p.node.node import ask
from dipaco_p2p.protocol.grants import Mandate
from dipaco_p2p.protocol.reasons import Reason


class Coup:
    """A leader that lives, with two mirrors, of which the last grants itself the next term."""

    def __init__(self, world: World, leader: TinyLeader, mirror: TinyLeader, usurper: TinyLeader) -> None:
        self.world, self.leader, self.mirror, self.usurper = world, leader, mirror, usurper
        self.seed, self.ttl_s = world.seed, world.run.config.liveness.heartbeat_ttl_s

    def granted(self, terms: int = 1) -> Mandate:
        """What the usurper grants itself."""
        own = Mandates(self.world.run)
        own.learn(MODULE, self.leader.node.mandates.newest(MODULE))
        for _ in range(terms):
            own.grant_next(self.usurper.swarm.signer, MODULE, leader=self.usurper.peer, mirrors=())
        return own.newest(MODULE)

    async def seize(self, terms: int = 1) -> None:
        """It grants itself so many terms, and tells everybody."""
        mandate = self.granted(terms)
        for node in (self.leader.node, self.mirror.node, self.usurper.node, self.seed.node):
            node.mandates.learn(MODULE, mandate)
        await self.usurper.node.presence.lead(MODULE, head_record(self.leader.chain.ledger, mandate))
        assert self.seed.node.mandates.leader(MODULE) == self.usurper.peer


@asynccontextmanager
async def coup(folder: Path, *, has_worked: bool) -> AsyncIterator[Coup]:
    async with on_stage(folder, owners=3) as (world, leader, mirror, _):
        usurper = world.leader(70, has_worked=has_worked)
        owner = await leader.lead(MODULE)
        await make_versions(world, leader, mirror.node)
        await leader.ownership._granting.obtain(MODULE, mirrors=(mirror.peer, usurper.peer))
        await owner.renew()
        await asyncio.sleep(1.5 * HEARD_HEARTBEATS * world.run.config.liveness.heartbeat_ttl_s)
        yield Coup(world, leader, mirror, usurper)


@pytest.mark.parametrize("has_worked", [True, False])
@pytest.mark.parametrize("terms", [1, 3])
async def test_the_coordinator_grants_nothing_to_a_member_that_deposed_a_leader_that_lives(
    tmp_path: Path, has_worked: bool, terms: int
) -> None:
    """Attack: as the leader of the newest term it asked for the next one, and had it from the coordinator, whose grant
    ends what speaks against those of a group: so even a peer that never worked led a module for good."""
    async with coup(tmp_path, has_worked=has_worked) as on:
        mandate = on.granted(terms)
        on.usurper.node.mandates.learn(MODULE, mandate)
        await on.usurper.node.presence.lead(MODULE, head_record(on.leader.chain.ledger, mandate))
        request = Adopt(module=MODULE, term=mandate[-1].document.term + 1, mirrors=(), mandate=mandate[-1:])
        with pytest.raises(Refused) as refused:
            await ask(on.usurper.node, on.seed.node.peer, request, timeout_s=5.0)
        assert refused.value.reason == Reason.NOT_LEADER
        await eventually(lambda: MODULE in on.seed.ownership.modules, limit_s=on.ttl_s)


@pytest.mark.parametrize("terms", [1, 3])
async def test_a_member_that_deposes_a_leader_that_lives_loses_the_module_at_once(tmp_path: Path, terms: int) -> None:
    """Attack: a mirror that has worked granted itself the next term, again and again. It led until it had made no
    version for longer than any round takes, more than a minute each time."""
    async with coup(tmp_path, has_worked=True) as on:
        await on.seize(terms)
        await eventually(lambda: MODULE in on.seed.ownership.modules, limit_s=on.ttl_s)
        assert on.usurper.peer not in on.seed.node.mandates.newest(MODULE)[-1].document.group


async def test_a_member_deposes_leaders_of_a_module_once(tmp_path: Path) -> None:
    """Attack: it was a mirror of the next leader as well, and deposed that one, and so on."""
    async with coup(tmp_path, has_worked=True) as on:
        await on.seize()
        await on.leader.ownership._check(MODULE)  # it notices
        await eventually(lambda: MODULE in on.seed.ownership.modules, limit_s=on.ttl_s)
        author, ledger = on.world.peer(62), on.seed.archive.ledgers[MODULE]
        await author.watch.refresh()
        payload = gradient_bytes(on.world.run, MODULE, seed=9)
        await offer(author, on.seed.node.peer, document(on.world, ledger, author, payload), payload)
        await eventually(lambda: ledger.head.version == 2)
        await on.leader.lead(MODULE)
        seed, grants = on.seed.node, len(on.seed.node.mandates.grants(MODULE))
        for _ in range(4):
            assert seed.mandates.leader(MODULE) == on.leader.peer
            assert on.usurper.peer not in seed.mandates.newest(MODULE)[-1].document.group
            await on.leader.ownership._check(MODULE)
        assert len(seed.mandates.grants(MODULE)) == grants, "the leader asks for no other group again and again"


async def test_whoever_led_beyond_a_partition_goes_on(tmp_path: Path) -> None:
    """It heard of nobody else there, and deposes nobody: the leader on the other side was as right as it."""
    async with coup(tmp_path, has_worked=True) as on:
        near = {on.seed.node.peer, on.leader.peer, on.mirror.peer}
        on.world.network.partition([near, {on.usurper.peer}])
        await expired(on.world)
        await on.usurper.lead(MODULE)
        on.world.network.heal()
        await eventually(lambda: on.seed.node.watch.leader(MODULE) == on.usurper.peer)
        await expired(on.world)
        assert on.seed.node.mandates.leader(MODULE) == on.usurper.peer
