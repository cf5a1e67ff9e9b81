"""Keepers: what the archive forgets is kept by others, proved at random, and copied again when a keeper is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from keepers_harness import TinyKeeper, on_keepers
from mirror_harness import MODULE
from runtime_harness import flip
from trickling import trickle
from virtual_time import end

from bootstrap.archives.verify import verify_run
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.calls import Prove
from dipaco_p2p.node.node import CONTROL_TIMEOUT_S, LEAST_BYTES_S, WAIT_S, ask
from dipaco_p2p.node.store import DIGEST
from dipaco_p2p.owner import challenges
from dipaco_p2p.owner import keeper as keeping
from dipaco_p2p.owner.challenges import Answer
from dipaco_p2p.owner.keeper import Keeper
from dipaco_p2p.owner.ranges import refs_of_version
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.files import folder_bytes
from dipaco_p2p.protocol.keeping import (
    FAILURES_MAX,
    GONE_LIVES,
    KEEPERS,
    LATE_LIVES,
    NONCE_CHARS,
    PROOF_BYTES_MAX,
    RANGE_VERSIONS,
    Range,
    keepers,
)
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.blobs.bandwidth import CUT_BYTES_MIN
from dipaco_p2p.swarm.calls import Range as Found
from dipaco_p2p.swarm.calls import ReadBlob

FIRST, SECOND = Range(MODULE, 0), Range(MODULE, 1)
NONCE = "0" * NONCE_CHARS


def here(one: TinyKeeper, wanted: Range) -> bool:
    return one.keeper.is_whole(wanted)


async def test_each_range_is_kept_by_as_many_as_should_and_what_is_kept_is_an_archive(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=4) as found:
        await found.looks(2)
        for wanted in (FIRST, SECOND):
            by = {one.peer for one in found.each if here(one, wanted)}
            assert by == set(keepers(found.world.run.id, wanted, {one.peer: 1000 for one in found.each}))
        holder = next(one for one in found.each if here(one, FIRST) and here(one, SECOND))
        reports = verify_run(found.world.run, holder.keeper.store, holder.keeper.archive)
        problems = {report.module: report.problem for report in reports}
        # Nothing but what the range needs is kept: of the module that has versions, all is made again.
        assert problems[MODULE] == "", problems


async def test_a_stranger_that_offers_is_no_keeper_and_displaces_nobody(tmp_path: Path) -> None:
    """Identities cost nothing: else whoever makes a hundred of them is every keeper there is."""
    async with on_keepers(tmp_path, count=4) as found:
        strangers = [TinyKeeper(found.world, number, room_bytes=10**9) for number in range(80, 92)]
        found.each += strangers
        await found.looks(2)
        assert not any(here(one, each) for one in strangers for each in (FIRST, SECOND))
        assert sum(here(one, FIRST) for one in found.each) == KEEPERS
        await found.challenged()
        assert not found.challenges.tested.keys() & {one.peer for one in strangers}


async def test_an_archive_forgets_what_enough_keepers_have_proved_and_no_more(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=4, wanted=KEEPERS) as found:
        archive = found.world.seed.archive
        assert archive.thinning.of(MODULE).contributions == 0, "with nobody to keep it, the archive keeps all"
        await found.looks(2)
        await found.challenged(2)
        assert found.challenges.kept(MODULE) == 10
        await found.grow(11)
        assert archive.thinning.of(MODULE).contributions == 9, "the last rounds are never forgotten"
        await found.grow(12, 13)
        assert archive.thinning.of(MODULE).contributions == 10, "nobody has proved the newer ones"


async def test_two_of_three_keepers_die_at_once_and_the_range_is_whole_again_in_time(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=6, versions=RANGE_VERSIONS, wanted=KEEPERS) as found:
        world = found.world
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        await found.looks(2)
        await found.challenged(2)
        await found.grow(9, 10, 11)
        assert world.seed.archive.thinning.of(MODULE).contributions >= RANGE_VERSIONS - 1
        holders = [one for one in found.each if here(one, FIRST)]
        assert len(holders) == KEEPERS
        for one in holders[: KEEPERS - 1]:
            await one.die(world)
        last = holders[-1]
        refs = refs_of_version(world.seed.archive, MODULE, 1)
        assert refs is not None
        await world.clock.sleep((GONE_LIVES - 4) * ttl_s)
        await found.looks()
        assert [one for one in found.alive if here(one, FIRST)] == [last], "who may come back soon is not replaced"
        await world.clock.sleep((5 + 2) * ttl_s)
        await found.looks(2)
        assert sum(here(one, FIRST) for one in found.alive) == KEEPERS
        again = next(one for one in found.alive if here(one, FIRST) and one is not last)
        assert all(again.keeper.store.size(ref.digest) == ref.size for ref in refs)


class Empty(Keeper):
    """Says that it keeps, follows the chain, and keeps nothing; asked to prove, it makes something up."""

    async def _keep(self, wanted: Range) -> bool:
        return True

    async def _on_prove(self, sender: object, request: Prove) -> keeping.Proven:
        return keeping.Proven(proof="00" * 32)


class Excusing(Empty):
    """The same, always about to fetch it."""

    async def _on_prove(self, sender: object, request: Prove) -> keeping.Proven:
        raise Refused("not yet", reason=keeping.Reason.MISSING)


async def test_a_keeper_that_keeps_nothing_is_found_and_loses_role_and_credit(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=4, wanted=KEEPERS) as found:
        liar = found.each[1]
        await liar.die(found.world)
        found.each[1] = liar = TinyKeeper(found.world, 61, room_bytes=10**9, make=Empty)
        await found.looks(2)
        await found.challenged(FAILURES_MAX)
        count = found.challenges._sealed
        assert count is not None and count.document.author == found.world.seed.node.peer
        barred = count.document.barred(found.world.clock.now_s())
        assert barred == {liar.peer} and found.challenges.tested[liar.peer].proofs == 0
        honest = [tested.proofs for peer, tested in found.challenges.tested.items() if peer != liar.peer]
        assert len(honest) >= KEEPERS - 1 and min(honest) >= FAILURES_MAX - 1, "of those who have a part of it"
        # Others hear of it, and keep what it should have kept; then the archive may forget.
        await found.looks(2)
        assert all(here(one, FIRST) and here(one, SECOND) for one in found.each if one is not liar)
        await found.challenged(2)
        assert found.challenges.kept(MODULE) == 10


async def test_while_a_liar_is_not_found_nothing_is_forgotten_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(challenges, "BARRED_LIVES", 10)
    async with on_keepers(tmp_path, count=3, wanted=KEEPERS) as found:
        await found.each[0].die(found.world)
        found.each[0] = TinyKeeper(found.world, 60, room_bytes=10**9, make=Excusing)
        await found.looks(2)
        await found.challenged(3)
        assert found.challenges.kept(MODULE) == 0 and found.challenges.tested.get(found.each[0].peer) is None
        ttl_s = found.world.run.config.liveness.heartbeat_ttl_s
        await found.world.clock.sleep((LATE_LIVES + 1) * ttl_s)
        await found.looks()
        await found.challenged(FAILURES_MAX)
        assert found.challenges.tested[found.each[0].peer].is_barred(found.world.clock.now_s())
        await found.world.clock.sleep(11 * ttl_s)
        await found.looks()
        await found.challenged()
        assert found.each[0].peer in found.challenges._offers.peers, "it may try again"


async def test_the_answer_of_another_keeper_is_no_proof(tmp_path: Path) -> None:
    """A liar that passes challenges on to an honest keeper would earn credit for a call."""
    async with on_keepers(tmp_path, count=4) as found:
        await found.looks(2)
        honest = next(one for one in found.each if here(one, FIRST))
        refs = refs_of_version(found.world.seed.archive, MODULE, 1)
        assert refs is not None

        class Passing(Empty):
            async def _on_prove(self, sender: object, request: Prove) -> keeping.Proven:
                return await ask(self._node, honest.peer, request)

        liar = TinyKeeper(found.world, 79, room_bytes=10**9, make=Passing)
        await liar.offer()
        await liar.node.watch.refresh()
        await found.world.seed.node.watch.refresh()
        found.each.append(liar)
        assert await found.challenges.challenge(honest.peer, FIRST, refs[0]) is Answer.PROVED
        assert await found.challenges.challenge(liar.peer, FIRST, refs[0]) is Answer.LIED


async def test_a_challenge_of_what_the_archive_has_forgotten_is_decided_by_the_digest(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=4) as found:
        await found.looks(2)
        honest = next(one for one in found.each if here(one, FIRST))
        other = next(one for one in found.each if one is not honest and here(one, FIRST))
        refs = refs_of_version(found.world.seed.archive, MODULE, 2)
        assert refs is not None
        payload = refs[-1]
        await found.challenged()
        found.world.seed.node.store.drop(payload.digest)
        assert await found.challenges.challenge(honest.peer, FIRST, payload) is Answer.PROVED
        flip(other.keeper.store.folder / "blobs" / payload.digest[:2] / payload.digest)
        assert await found.challenges.challenge(other.peer, FIRST, payload) is Answer.LIED


async def test_a_challenge_of_what_the_archive_has_forgotten_costs_its_line_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blobs of a large model, one for each keeper and minute, would fill the coordinator's line."""
    monkeypatch.setattr(challenges, "PROOF_BYTES_MAX", 64)
    came: list[int] = []

    async def counted(*args: Any, **settings: Any) -> Any:
        found = await ask(*args, **settings)
        came.append(len(getattr(found, "body", b"")))
        return found

    monkeypatch.setattr(challenges, "ask", counted)
    async with on_keepers(tmp_path, count=4) as found:
        await found.looks(2)
        await found.challenged()
        assert not any(came), "what is here is not asked for"
        refs = refs_of_version(found.world.seed.archive, MODULE, 2)
        assert refs is not None and refs[-1].size > 2 * 64
        found.world.seed.node.store.drop(refs[-1].digest)
        honest = next(one for one in found.each if here(one, FIRST))
        assert await found.challenges.challenge(honest.peer, FIRST, refs[-1]) is Answer.PROVED
        assert 0 < sum(came) <= 64


@pytest.mark.parametrize(
    ("piece", "answer"),
    [(1, Answer.LIED), (CUT_BYTES_MIN, Answer.SILENT)],
    ids=["a byte at a time", "as little as a fetch takes"],
)
async def test_a_keeper_that_trickles_a_part_is_waited_for_as_long_as_a_thin_line_takes(
    tmp_path: Path, piece: int, answer: Answer
) -> None:
    """Attack: one byte in 4.9 s, and all challenges stood still for days."""
    async with on_keepers(tmp_path, count=4) as found:
        await found.looks(2)
        bad, store = next(one for one in found.each if here(one, FIRST)), found.world.seed.node.store
        ref = bad.keeper.store.put(bytes(PROOF_BYTES_MAX))
        store.put(bytes(PROOF_BYTES_MAX))
        assert found.challenges._parts(ref)
        store.drop(ref.digest)

        async def trickle(sender: str, request: ReadBlob) -> Found:
            await found.world.clock.sleep(0.98 * CONTROL_TIMEOUT_S)
            return Found(size=ref.size, body=bytes(min(piece, request.length)))

        bad.swarm._dispatcher._handlers[ReadBlob.METHOD] = ReadBlob.door(trickle)
        async with asyncio.timeout(WAIT_S + PROOF_BYTES_MAX / LEAST_BYTES_S + 1):
            assert await found.challenges.challenge(bad.peer, FIRST, ref) is answer
        honest = next(one for one in found.each if one is not bad)
        honest.keeper.store.put(bytes(PROOF_BYTES_MAX))
        assert await found.challenges.challenge(honest.peer, FIRST, ref) is Answer.PROVED


async def test_an_archive_forgets_nothing_before_it_has_taken_the_parts_down(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=4) as found:
        archive = found.world.seed.archive
        archive.thinning.retention, archive.thinning.kept_elsewhere = Retention(rounds=2), found.challenges.kept
        await found.grow(11)
        assert archive.thinning.of(MODULE).contributions == 0
        taking = asyncio.create_task(found.challenges.take_down())
        await found.world.clock.sleep(1.0)
        await found.grow(12)
        assert archive.thinning.of(MODULE).contributions == 10
        found.challenges.on_version()
        await found.world.clock.sleep(1.0)
        await found.grow(13)
        assert archive.thinning.of(MODULE).contributions == 11
        await end(taking)


class Slow(Keeper):
    """Answers right, just before it is too late."""

    async def _on_prove(self, sender: PeerId, request: Prove) -> keeping.Proven:
        await self._node.clock.sleep(0.95 * CONTROL_TIMEOUT_S)
        return await super()._on_prove(sender, request)


async def test_a_keeper_that_is_always_nearly_late_holds_up_no_archive(tmp_path: Path) -> None:
    """Attack: with 4.75 s for each blob of each version of each module a look took days, in which no other keeper was
    challenged and the archive forgot nothing."""
    async with on_keepers(tmp_path, count=3, wanted=2) as found:
        likeliest = keepers(found.world.run.id, FIRST, {one.peer: 1000 for one in found.each})[0]
        place = next(place for place, one in enumerate(found.each) if one.peer == likeliest)
        number = found.each[place].number
        await found.each[place].die(found.world)
        found.each[place] = TinyKeeper(found.world, number, make=Slow)
        await found.looks(2)
        began_s = found.world.clock.now_s()
        await found.challenged()
        assert found.world.clock.now_s() - began_s < 40
        assert found.challenges.kept(MODULE) == RANGE_VERSIONS


async def test_a_holder_that_trickles_keeps_a_keeper_from_nothing_else(tmp_path: Path) -> None:
    """Attack: 4 KiB in 19 s, and the keeper followed no chain and brought no other range for days."""
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks()
        bad, keeper = found.world.peer(70), found.each[0].keeper
        ref = trickle(bad.swarm, bytes(2**20))
        async with asyncio.timeout(WAIT_S + ref.size / LEAST_BYTES_S + 1):
            assert not await keeper._gathering.bring(ref, [bad.peer])


async def test_the_parts_that_are_taken_down_name_no_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob that a document names is not swept after a crash."""
    monkeypatch.setattr(challenges, "PROOF_BYTES_MAX", 64)
    async with on_keepers(tmp_path, count=4) as found:
        await found.challenged()
        documents = list((found.world.seed.node.store.folder / "documents").glob("parts-*.json"))
        assert documents and not any(DIGEST.search(path.read_bytes()) for path in documents)


async def test_a_blob_of_one_part_has_that_parts_digest(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=4) as found:
        await found.challenged()
        assert found.challenges.kept(MODULE) and not list(found.world.seed.node.store.folder.glob("documents/parts-*"))


async def test_nobody_is_barred_for_what_an_earlier_release_forgot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its archive took no parts down: what keepers answer is compared, and those who have it prove it."""
    monkeypatch.setattr(challenges, "PROOF_BYTES_MAX", 64)
    async with on_keepers(tmp_path, count=4) as found:
        await found.looks(2)
        store = found.world.seed.node.store
        for version in range(1, 11):
            for ref in refs_of_version(found.world.seed.archive, MODULE, version) or ():
                store.drop(ref.digest)
        await found.challenged()
        await found.world.clock.sleep((LATE_LIVES + 1) * found.world.run.config.liveness.heartbeat_ttl_s)
        await found.looks()
        await found.challenged(FAILURES_MAX)
        tested = found.challenges.tested.values()
        assert tested and not any(one.failures or one.barred_until_s for one in tested)


async def test_what_a_disk_has_changed_is_found_by_its_keeper_and_fetched_again(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(2)
        one = found.each[0]
        for path in (one.keeper.store.folder / "blobs").glob("*/*"):
            flip(path)
        await found.looks(12)
        for version in range(1, 11):
            for ref in refs_of_version(found.world.seed.archive, MODULE, version) or ():
                assert one.keeper.store.get(ref.digest) is not None


async def test_never_more_than_was_offered_is_kept_and_the_least_lots_go_first(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=4, versions=4 * RANGE_VERSIONS) as found:
        await found.looks(2)
        one = found.each[0]
        before = [each for each in one.keeper.wanted() if here(one, each)]
        assert len(before) >= 2
        one.keeper._room_bytes = folder_bytes(one.keeper.store.folder) - 1000
        await found.looks(2)
        after = [each for each in before if here(one, each)]
        assert after == before[: len(after)] and 0 < len(after) < len(before), "in the order of its lots"
        assert folder_bytes(one.keeper.store.folder) <= one.keeper._room_bytes
        assert one.keeper.share < 1000 and found.each[1].node.watch.heartbeats[one.peer].keeps == one.keeper.share
        # What it gave up others keep by now.
        ranges = [Range(MODULE, number) for number in range(4)]
        assert all(sum(here(each, wanted) for each in found.each) >= KEEPERS for wanted in ranges)


async def test_a_full_disk_keeps_no_more_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        monkeypatch.setattr(keeping, "FREE_BYTES_MIN", 2**62)
        await found.looks(2)
        assert all(one.keeper.share < 1000 and not one.blobs() for one in found.each)
        await found.challenged(FAILURES_MAX)
        assert not any(one.is_barred(found.world.clock.now_s()) for one in found.challenges.tested.values())


async def test_a_keeper_goes_on_from_its_disk(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(2)
        one = found.each[0]
        blobs = one.blobs()
        await one.die(found.world)
        again = found.each[0] = TinyKeeper(found.world, 60, room_bytes=10**9)
        stray = again.keeper.store.put(b"left by a process that died")
        await again.node.watch.refresh()
        await found.looks()
        assert again.blobs() == blobs and again.keeper.store.size(stray.digest) is None
        assert here(again, FIRST) and here(again, SECOND)


async def test_a_count_that_the_coordinator_did_not_sign_bars_nobody(tmp_path: Path) -> None:
    async with on_keepers(tmp_path, count=3) as found:
        await found.looks(1)
        await found.challenged()
        one = found.each[0].keeper
        await one._offers.learn_count()
        count = one._offers.count
        assert count is not None and count.author == found.world.seed.node.peer and count.number == 1
        await found.looks(1)
        await found.challenged()
        await one._offers.learn_count()
        assert one._offers.count is not None and one._offers.count.number == 2
