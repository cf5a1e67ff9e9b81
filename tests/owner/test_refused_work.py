"""What judges refuse lies with the mirrors, which nobody tells of a refusal: it must not fill their disks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from group_harness import Group
from judging_scene import BAD, GOOD, MODULE, OTHER_PATH, Scene, judged_config
from runtime_harness import World, offer
from virtual_time import eventually

from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Sealed, seal
from simulation.training import toy_gains

pytestmark = pytest.mark.slow
HONEST = 60


class Attack(Scene):
    """One honest author, and a stranger that makes a key for each piece of work that judges refuse."""

    def __init__(self, world: World, group: Group) -> None:
        super().__init__(world, group.leader, group.leader.owner(MODULE))
        self.group = group
        self.mirror = group.mirrors[0]
        self.strange: dict[str, Sealed[Contribution]] = {}
        """The stranger's work, by id."""
        self._keys = itertools.count(HONEST + 1)

    async def push_strange(self) -> None:
        """One more piece of it, which gets its receipt."""
        number = next(self._keys)
        author, module = await self.author(number), self.run.layout(MODULE)
        noise = np.random.default_rng(number).normal(BAD, abs(BAD), module.size)  # else they were copies of each other
        payload = encode_compressed(compress(noise.astype(np.float32), codec=self.run.config.compression.uplink)[0])
        like = (await self.work(author, BAD, path=OTHER_PATH, to=self.leader.peer)).document
        sealed = seal(author.swarm.signer, replace(like, payload=BlobRef.of(payload)))
        await offer(author, self.leader.peer, sealed, payload)
        self.strange[sealed.id] = sealed

    async def push_honest(self, author: Member) -> str:
        return await self.push(author, GOOD * (1 + self.owner.head.version / 100), to=self.leader.peer)

    async def versions(self, author: Member, count: int) -> None:
        """So many of the honest author's work, each without a piece of the stranger's."""
        for _ in range(count):
            before = self.owner.head.version
            await self.push_honest(author)
            await self.push_strange()
            await self.version(before + 1)
            await eventually(lambda: self.mirror.ledger.head.version == self.owner.head.version)
        assert not self.counted() & self.strange.keys(), "judges refuse it"


@asynccontextmanager
async def attacked(folder: Path) -> AsyncIterator[tuple[Attack, Member]]:
    """A leader and two mirrors, who judge its work."""
    async with World(folder, config=judged_config(rounds=30), measure=toy_gains) as world:
        group = await Group(world, (50, 51, 52)).formed()
        author, judges = world.peer(HONEST), {member.peer for member in group.members}
        for chains in [member.chains for member in group.members]:
            has_worked = chains.is_proven
            chains.is_proven = lambda peer, before=has_worked: peer in judges or before(peer)  # type: ignore[misc]
        await author.watch.refresh()
        yield Attack(world, group), author


async def test_mirrors_keep_no_work_that_final_versions_left_behind(tmp_path: Path) -> None:
    """Attack: only the leader of a module knew what was refused, so that its mirrors kept it until the run ended: up to
    half of a version's places in each round."""
    async with attacked(tmp_path) as (on, author):
        await on.versions(author, 5)
        await eventually(lambda: on.mirror.ledger.final == 5)
        last = on.run.config.rounds.staleness
        gone, stays = list(on.strange)[:-last], list(on.strange)[-last:]
        for ledger in (on.mirror.ledger, on.world.seed.archive.ledgers[MODULE]):
            assert list(ledger.open) == stays, "what may still count, on any chain"
        told = {event["id"]: event["found"] for event in on.mirror.said("left_behind")}
        assert list(told) == gone
        assert set(told.values()) == {"failed"}, "by the chain's own word"
        assert not on.mirror.said("expired"), "its leader has told of it"
        payloads = [on.strange[id_].document.payload.digest for id_ in gone]
        assert not any(on.mirror.node.store.size(name) for name in payloads)
