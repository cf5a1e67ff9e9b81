"""What is final: a document, by the coordinator's signature; and what that does to a chain that has another one."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import mirror_harness
import pytest
from group_harness import Group, deaf, make_versions, of_group
from mirror_harness import MODULE, ONE, OTHER, Shelf, on_shelf
from tiny_run import SEED_NUMBER, granted, signer
from virtual_time import eventually

from dipaco_p2p.owner.replication import LOST_TTLS
from dipaco_p2p.protocol.documents import cosign
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Handler, Reply


async def test_what_the_leader_says_is_final_is_looked_at(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        shelf.adopt(ONE, term=1)
        version, _ = shelf.version(1)
        await shelf.keep(version)
        forged: tuple[tuple[int, str], ...] = (
            (1, ""),
            (1, version.signature),
            (1, cosign(ONE, version)),
            (2, cosign(signer(SEED_NUMBER), version)),
            (0, cosign(signer(SEED_NUMBER), version)),
        )
        for number, signature in forged:
            shelf.chain.note_final(number, signature)
            assert shelf.ledger.final == 0 and shelf.ledger.spent
        shelf.chain.note_final(1, cosign(signer(SEED_NUMBER), version))
        assert shelf.ledger.final == 1 and not shelf.ledger.kept
        payload = shelf.contribution(1)[0].document.payload
        shelf.node.store.drop(payload.digest)  # the harness has put it there once more


@pytest.mark.parametrize("is_same", [True, False])
async def test_who_is_no_owner_any_more_looks_at_what_became_final(tmp_path: Path, is_same: bool) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        archive = Shelf(shelf.world, keeps_everything=True)
        for each, variant in ((shelf, 0), (archive, 0 if is_same else 1)):
            each.adopt(ONE, term=1)
            await each.keep(each.version(1, variant=variant)[0])
        await shelf.chain.look_back(archive.node.peer)
        assert shelf.ledger.spent and shelf.ledger.head.version == 1, "who is in the group follows its leader"
        assert shelf.node.mandates.believes(MODULE, granted(shelf.run, MODULE, term=2, leader=OTHER.peer))
        counted = set(shelf.ledger.spent)
        await shelf.chain.look_back(archive.node.peer)
        if is_same:
            assert shelf.ledger.final == 1 and not shelf.ledger.kept and not shelf.chain.lost
        else:
            assert shelf.ledger.head.version == 0 and shelf.chain.lost == counted == set(shelf.ledger.open)


async def test_a_mirror_that_follows_has_final_versions_as_they_were_signed(tmp_path: Path) -> None:
    """Two leaders made the same step; the coordinator signed the document of the other. Else the leader would tell us
    for ever that it is final."""
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        archive = Shelf(shelf.world, keeps_everything=True)
        shelf.adopt(ONE, term=1)
        await shelf.keep(shelf.version(1)[0])
        archive.adopt(OTHER, term=2)
        theirs, _ = archive.version(1, leader=OTHER, term=2)
        await archive.keep(theirs, sender=OTHER)
        assert shelf.ledger.head.digest == theirs.document.digest and shelf.ledger.head != theirs.document
        await shelf.chain.follow(archive.node.peer)
        assert shelf.ledger.final == 1 and shelf.ledger.head == theirs.document and not shelf.ledger.kept


async def test_that_a_version_is_final_says_nothing_of_those_before_it(tmp_path: Path) -> None:
    """The coordinator may have signed other documents of the same parameters, that count other contributions."""
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        shelf.adopt(ONE, term=1)
        first, second = [shelf.version(number)[0] for number in (1, 2)]
        for each in (first, second):
            await shelf.keep(each)
        shelf.chain.note_final(2, cosign(signer(SEED_NUMBER), second))
        assert shelf.ledger.final == 0 and len(shelf.ledger.kept) == 4
        for number, each in enumerate((first, second), start=1):
            shelf.chain.note_final(number, cosign(signer(SEED_NUMBER), each))
            assert shelf.ledger.final == number


async def test_what_a_final_document_of_the_same_parameters_does_not_count_is_open_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves of a partition trained the path: the same bytes, by other authors."""
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        archive = Shelf(shelf.world, keeps_everything=True)
        shelf.adopt(ONE, term=1)
        await shelf.keep(shelf.version(1)[0])
        counted = set(shelf.ledger.spent)
        monkeypatch.setattr(mirror_harness, "AUTHOR", mirror_harness.AUTHOR + 10)
        archive.adopt(OTHER, term=2)
        theirs, _ = archive.version(1, leader=OTHER, term=2)
        await archive.keep(theirs, sender=OTHER)
        assert theirs.document.digest == shelf.ledger.head.digest
        assert not counted & {share.contribution for share in theirs.document.shares}
        await shelf.chain.follow(archive.node.peer)
        assert shelf.ledger.head == theirs.document and shelf.ledger.final == 1
        assert set(shelf.ledger.open) == shelf.chain.lost == counted


# -- a mirror that is told nothing more


def is_done(group: Group) -> bool:
    """Whether no member waits for anything of MODULE."""
    return all(member.ownership._is_settled(MODULE) for member in group.members)


async def test_a_mirror_that_lost_its_disk_after_the_last_version_asks_for_it(tmp_path: Path) -> None:
    """Its leader had told it that all is final, and never did so again: a volunteer stood by for ever."""
    async with of_group(tmp_path, rounds=1) as (world, group, author):
        await make_versions(world, group.leader, author)
        await eventually(lambda: is_done(group))
        mirror = group.mirrors[-1]
        await group.kill(mirror)
        shutil.rmtree(mirror.node.store.folder)
        again = group.join(mirror.number)
        await eventually(lambda: again.chain.is_owner)
        assert not again.ownership._is_settled(MODULE)
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        await eventually(lambda: is_done(group), limit_s=(LOST_TTLS + 1) * ttl_s)
        assert again in group.mirrors and again.ledger.final == 1


async def test_a_mirror_that_its_leader_gave_up_telling_asks_what_is_final(tmp_path: Path) -> None:
    async with of_group(tmp_path, rounds=1) as (world, group, author):
        mirror = group.mirrors[-1]
        deaf(mirror, "mirror.final")
        await make_versions(world, group.leader, author)
        await eventually(lambda: mirror.ledger.head.version == 1 == group.leader.ledger.final)
        ttl_s = world.run.config.liveness.heartbeat_ttl_s
        await eventually(lambda: is_done(group), limit_s=(LOST_TTLS + 1) * ttl_s)
        assert mirror.ledger.final == 1 and not mirror.ledger.kept


async def test_what_nobody_has_signed_is_asked_for_in_one_small_call_now_and_then(tmp_path: Path) -> None:
    """While the coordinator is away nothing becomes final, for hours perhaps."""
    async with of_group(tmp_path) as (world, group, author):
        await group.seed_away()
        await make_versions(world, group.leader, author)
        mirror, handlers = group.mirrors[-1], group.leader.swarm._dispatcher._handlers
        asked: Counter[str] = Counter()

        def noting(method: str, honest: Handler) -> Handler:
            async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
                asked[method] += sender == mirror.peer
                return await honest(sender, header, body)

            return answer

        handlers.update({method: noting(method, honest) for method, honest in handlers.items()})
        await asyncio.sleep(10 * LOST_TTLS * world.run.config.liveness.heartbeat_ttl_s)
        assert mirror.ledger.final == 0 < mirror.ledger.head.version
        assert 5 < asked["mirror.state"] <= 10 and not asked["mirror.chain"] + asked["mirror.open"]
