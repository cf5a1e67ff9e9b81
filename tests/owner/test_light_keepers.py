"""Keepers of a run whose archive is light: they find what versions are made of with the owners, and prove that they
have it to a coordinator that never had it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from group_harness import MODULE, Group, GroupMember, lighten, make_versions, of_group
from keepers_harness import Keepers, TinyKeeper, on_keepers
from runtime_harness import World
from virtual_time import eventually

from bootstrap.archives.verify import verify_run
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.owner import challenges
from dipaco_p2p.owner.challenges import Answer, Challenges
from dipaco_p2p.owner.handover import LIVES
from dipaco_p2p.owner.ranges import refs_of_version
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.protocol.keeping import FAILURES_MAX, KEEPERS, RANGE_VERSIONS, Range

FIRST = Range(MODULE, 0)
NUMBERS = 61, 62, 63


class LightKeepers:
    """Keepers in a group's world, whose work its versions count."""

    def __init__(self, world: World, group: Group) -> None:
        self.world, self.group = world, group
        self.each = [TinyKeeper(world, number) for number in NUMBERS]
        self.challenges = Challenges(world.seed.node, world.seed.archive, wanted=0)

    async def work(self, versions: int) -> None:
        """The first versions count each one's work, later ones the last one's."""
        for _ in range(versions):
            version = self.group.leader.ledger.head.version + 1
            author = self.each[min(version, len(self.each)) - 1]
            await author.node.watch.refresh()
            await make_versions(self.world, self.group.leader, author.node, 1, seed=version)
            await eventually(lambda version=version: self.group.leader.ledger.final == version)  # type: ignore[misc]

    async def offer(self) -> None:
        for one in self.each:
            await one.offer()
        for node in [*(one.node for one in self.each), *(one.node for one in self.group.members)]:
            await node.watch.refresh()
        await self.world.seed.node.watch.refresh()

    async def look(self) -> None:
        for one in self.each:
            await one.node.watch.refresh()
            await one.keeper.look()

    async def challenged(self, times: int = 1) -> None:
        for _ in range(times):
            await self.world.seed.node.watch.refresh()
            await self.challenges.look()

    async def end(self) -> None:
        for one in self.each:
            await one.die(self.world)


@asynccontextmanager
async def on_light_keepers(folder: Path) -> AsyncIterator[LightKeepers]:
    async with of_group(folder, rounds=30) as (world, group, _):
        await lighten(world, group, Retention(remade=0.0))
        found = LightKeepers(world, group)
        try:
            yield found
        finally:
            await found.end()


def held(member: GroupMember) -> int:
    """How many contributions to final versions an owner has, with their payloads."""
    ledger = member.ledger
    return sum(ledger.counted[id_] <= ledger.final and member.chain.keeps(id_) for id_ in ledger.spent)


async def test_keepers_bring_what_a_light_archive_never_had_and_it_verifies(tmp_path: Path) -> None:
    async with on_light_keepers(tmp_path) as on:
        await on.offer()
        for _ in range(9):
            await on.work(1)
            await on.look()
        archive, store = on.world.seed.archive, on.world.seed.node.store
        assert refs_of_version(archive, MODULE, 5) is None, "the coordinator knows no contribution"
        for one in on.each:
            reports = verify_run(on.world.run, one.keeper.store, one.keeper.archive)
            [report] = [report for report in reports if report.module == MODULE]
            assert not report.problem and report.contributions == 2 * report.versions >= 2 * RANGE_VERSIONS
        [report] = [one for one in verify_run(on.world.run, store, archive) if one.module == MODULE]
        assert (report.signed, report.problem) == (9, "")


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "kept by nobody"])
async def test_owners_keep_what_a_few_versions_count_while_somebody_keeps(tmp_path: Path, is_kept: bool) -> None:
    async with on_light_keepers(tmp_path) as on:
        if is_kept:
            await on.offer()
        await on.work(6)
        liveness, kept = on.world.run.config.liveness, on.world.run.config.rounds.staleness + 2
        # Six rounds take less time than a keeper's next look: what they counted is there for it.
        await eventually(lambda: all(held(member) == 2 * 6 * is_kept for member in on.group.members))
        await on.world.clock.sleep((LIVES + 1) * liveness.heartbeat_ttl_s)
        for member in on.group.members:
            member.chain.settle()
        assert all(held(member) == 2 * kept * is_kept for member in on.group.members)
        mirror = on.group.mirrors[0]
        shown = await RemoteLedger(on.each[0].node, mirror.peer, MODULE).kept()
        assert not shown, "whoever takes the module over needs none of it"
        await lighten(on.world, on.group, Retention())
        for member in on.group.members:
            member.chain.settle()
        assert not any(map(held, on.group.members)), "a full archive has it"


def spoil(one: TinyKeeper, ref: BlobRef) -> None:
    """It has other bytes in place of a blob, and answers about those."""
    (one.keeper.store.folder / "blobs" / ref.digest[:2] / ref.digest).write_bytes(bytes(ref.size))


@asynccontextmanager
async def on_unknown(folder: Path) -> AsyncIterator[tuple[Keepers, list[TinyKeeper], BlobRef]]:
    """Four keepers, the three that have the first range, and a blob of it whose parts the coordinator does not know."""
    async with on_keepers(folder, count=4) as found:
        await found.looks(2)
        holders = [one for one in found.each if one.keeper.is_whole(FIRST)]
        refs = refs_of_version(found.world.seed.archive, MODULE, 2)
        assert refs is not None and len(holders) == KEEPERS
        await found.challenged()
        store = found.world.seed.node.store
        store.drop(refs[-1].digest)
        store.drop_document(f"parts-{refs[-1].digest}")
        yield found, holders, refs[-1]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(challenges, "PROOF_BYTES_MAX", 64)
    monkeypatch.setattr(challenges, "COMPARED_BYTES", 64)


@pytest.mark.usefixtures("small_parts")
async def test_what_the_coordinator_never_had_is_compared_with_another_holder(tmp_path: Path) -> None:
    async with on_unknown(tmp_path) as (found, (first, second, third), ref):
        ask = found.challenges.challenge
        assert [await ask(one.peer, FIRST, ref) for one in (first, second, third)] == 3 * [Answer.PROVED]
        spoil(second, ref)
        assert await ask(second.peer, FIRST, ref) is Answer.LIED
        third.keeper.store.drop(ref.digest)
        assert await ask(first.peer, FIRST, ref) is Answer.PROVED, "the digest decides, not the other's word"
        assert await ask(second.peer, FIRST, ref) is Answer.LIED
        second.keeper.store.drop(ref.digest)
        assert await ask(first.peer, FIRST, ref) is Answer.UNKNOWN, "nobody confirms it, and nobody says otherwise"


@pytest.mark.usefixtures("small_parts")
async def test_two_friends_that_make_up_the_same_are_found_beside_an_honest_keeper(tmp_path: Path) -> None:
    async with on_unknown(tmp_path) as (found, (first, second, third), ref):
        spoil(first, ref)
        spoil(second, ref)
        answers = [await found.challenges.challenge(first.peer, FIRST, ref) for _ in range(20)]
        assert Answer.LIED in answers
        assert {await found.challenges.challenge(third.peer, FIRST, ref) for _ in range(5)} == {Answer.PROVED}


async def test_a_light_coordinator_finds_a_keeper_that_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(challenges, "LATE_LIVES", 8)  # each takes a while of the processor
    async with on_light_keepers(tmp_path) as on:
        liar = on.each[0]

        async def nothing(*_: object) -> bool:
            return True

        on.each[0].keeper._keep = nothing  # type: ignore[method-assign]
        await on.work(3)
        await on.offer()
        for _ in range(3):
            await on.work(1)
            await on.look()
        await on.challenged(FAILURES_MAX)
        honest = [on.challenges.tested[one.peer] for one in on.each[1:]]
        assert [conduct.failures for conduct in honest] == [0, 0] and any(conduct.proofs for conduct in honest)
        assert liar.peer not in on.challenges.tested, "it says that it has nothing yet, which is no lie"
        await on.world.clock.sleep((challenges.LATE_LIVES + 1) * on.world.run.config.liveness.heartbeat_ttl_s)
        await on.offer()
        await on.challenged(2 * FAILURES_MAX)
        assert on.challenges.tested[liar.peer].is_barred(on.world.clock.now_s())


async def test_nobody_is_barred_for_what_was_lost_before_it_came(tmp_path: Path) -> None:
    """The archive had dropped the first range before anybody kept it; whoever offered to keep from then on was barred
    for four hours once it had lacked that for twenty minutes, again and again."""
    async with on_keepers(tmp_path, count=4) as found:
        store = found.world.seed.node.store
        await found.challenged()  # the parts are taken down
        for version in FIRST.versions(10):
            for ref in refs_of_version(found.world.seed.archive, MODULE, version) or ():
                store.drop(ref.digest)
        await found.looks(2)
        await found.challenged(2)
        await found.world.clock.sleep((challenges.LATE_LIVES + 1) * found.world.run.config.liveness.heartbeat_ttl_s)
        await found.looks()
        await found.challenged(2 * FAILURES_MAX)
        assert not any(one.failures or one.barred_until_s for one in found.challenges.tested.values())
