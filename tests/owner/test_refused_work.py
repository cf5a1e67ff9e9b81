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
from mirror_harness import ONE, on_shelf
from runtime_harness import World, offer
from tiny_run import signer
from virtual_time import eventually

from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner import room
from dipaco_p2p.program import files
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


async def test_a_stranger_stops_no_module_while_the_coordinator_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: nothing is final then, so the mirrors keep what judges refused. Once it filled their disks they took no
    further work of anybody, and the module's training stood still."""
    monkeypatch.setattr(room, "STRANGE_MAX", 2)
    async with attacked(tmp_path) as (on, author):
        await on.versions(author, 1)  # the coordinator signs it: its author has worked
        await eventually(lambda: on.mirror.ledger.final == 1)
        await on.group.seed_away()

        def free(folder: Path, *, wanted: int) -> int:
            """Each disk has room for six pieces of the stranger's work."""
            [member] = [each for each in on.group.members if each.node.store.folder == folder]
            return 2**40 if len(on.strange.keys() & member.ledger.kept) <= 6 else wanted - 1

        monkeypatch.setattr(files.disk, "free_bytes", free)
        await on.versions(author, 7)
        for mirror in on.group.mirrors:
            assert mirror.ledger.final == 1
            last = room.STRANGE_MAX + on.run.config.rounds.staleness
            assert list(mirror.ledger.open) == list(on.strange)[-last:], "the newest that the chain left behind, too"


async def test_of_too_much_strange_work_the_oldest_goes_and_last_what_a_leader_has_to_answer_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        told = list[tuple[str, str]]()
        shelf.node.history.listen(lambda event: told.append((event["ev"], event.get("id", ""))))
        shelf.adopt(ONE, term=1)
        strange = list[Sealed[Contribution]]()
        for number in range(1, 5):
            if number < 4:
                strange.append(shelf.contribution(number, variant=number, author=signer(70 + number))[0])
                shelf.chain.add(strange[-1])
            await shelf.keep(shelf.version(number)[0])
        oldest, second, newest = [one.id for one in strange]
        assert list(shelf.ledger.open) == [oldest, second, newest], "there is room for all"
        shelf.chain.lost = {oldest}
        size = strange[0].document.payload.size
        with monkeypatch.context() as small:
            small.setattr(room, "path_bytes_max", lambda run: 2 * size)
            small.setattr(room, "RESERVE_PATHS", 1)
            shelf.chain.settle()
            assert set(shelf.ledger.open) == {oldest, newest}
            small.setattr(room, "RESERVE_PATHS", 0)
            shelf.chain.settle()
        assert not shelf.ledger.open and shelf.ledger.final == 0
        gone = [(ev, id_) for ev, id_ in told if ev in ("left_behind", "expired")]
        assert gone == [("left_behind", second), ("expired", oldest), ("left_behind", newest)]
