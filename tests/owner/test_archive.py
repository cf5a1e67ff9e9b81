"""The archive: one leader per term, one version of a number, nothing lost, and restarts that go on."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mirror_harness import MODULE, ONE, OTHER, Shelf, on_shelf, refusal
from runtime_harness import World
from tiny_run import SEED_NUMBER, granted, signer
from virtual_time import eventually

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.node import items
from dipaco_p2p.node.calls import IDS_MAX
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner import archive as archive_module
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.documents import MIRRORS_MAX, Grant, seal, unseal
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.records import peers_key
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.strict import plain
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId

SEED = signer(SEED_NUMBER)


on_archive = partial(on_shelf, keeps_everything=True)


def newest(shelf: Shelf) -> tuple[int, PeerId, tuple[PeerId, ...]]:
    grant = shelf.world.seed.node.mandates.grant(MODULE)
    assert grant is not None
    return grant.term, grant.leader, grant.mirrors


async def grant(world: World, peer: PeerId, term: int, mirrors: tuple[PeerId, ...] = ()) -> None:
    await world.seed.terms.grant(peer, MODULE, term=term, mirrors=mirrors)


async def adopt(world: World, number: int, **header: Any) -> Reply:
    """Ask as a peer would, over the network."""
    swarm = world.network._nodes.get(signer(number).peer) or world.network.join(signer(number))
    await swarm.put(peers_key(world.run.id), plain(Heartbeat(owns=True)), ttl_s=60.0)
    asked = {"module": str(MODULE), "term": 1, "mirrors": [], "mandate": []} | header
    return await swarm.call(SEED.peer, "archive.adopt", asked, timeout_s=5.0)


async def test_to_ask_for_contributions_that_nobody_knows_costs_a_look_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: the archive looked for each id in the name of every module: in a grid of 4096 modules a million files
    for a request of 17 kB, in which the coordinator did nothing else."""
    async with on_archive(tmp_path) as shelf:
        archive, looked, read = shelf.world.seed.archive, list[str](), Store.read_document

        def noted(self: Store, name: str) -> bytes | None:
            looked.append(name)
            return read(self, name)

        monkeypatch.setattr(Store, "read_document", noted)
        ids = [digest(str(number).encode()) for number in range(IDS_MAX)]
        assert not any(map(archive.find, ids)) and len(looked) <= IDS_MAX


# -- terms


async def test_a_term_is_granted_to_one_group_only(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        await grant(shelf.world, ONE.peer, 1)
        await grant(shelf.world, ONE.peer, 1)  # the answer was lost: the same question again
        assert await refusal(grant(shelf.world, OTHER.peer, 1)) == Reason.NOT_LEADER
        assert await refusal(grant(shelf.world, ONE.peer, 1, (OTHER.peer,))) == Reason.NOT_LEADER
        await grant(shelf.world, OTHER.peer, 2, (ONE.peer,))
        assert await refusal(grant(shelf.world, ONE.peer, 1)) == Reason.NOT_LEADER
        assert newest(shelf) == (2, OTHER.peer, (ONE.peer,))


async def test_terms_follow_each_other_one_by_one(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        for term in (0, 2, 2**41):  # a term that no document can carry would end the module for ever
            assert await refusal(grant(shelf.world, ONE.peer, term)) == Reason.NOT_LEADER
        assert shelf.world.seed.term(MODULE) == 0


async def test_of_many_that_ask_for_a_term_at_once_one_gets_it(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        asks = [grant(shelf.world, signer(number).peer, 1) for number in range(1, 9)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert sum(not isinstance(answer, Refused) for answer in answers) == 1


async def test_a_grant_that_was_given_survives_a_restart(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        await grant(shelf.world, ONE.peer, 1, (OTHER.peer,))
        await shelf.world.kill_seed()
        seed = shelf.world.start_seed()
        assert newest(shelf) == (1, ONE.peer, (OTHER.peer,))
        assert await refusal(grant(shelf.world, OTHER.peer, 1)) == Reason.NOT_LEADER
        assert seed.term(MODULE) == 1


async def test_a_term_that_a_group_granted_itself_counts_as_any_other(tmp_path: Path) -> None:
    """While the seed node was away: whoever asks shows it, and has worked."""
    async with on_archive(tmp_path) as shelf:
        world = shelf.world
        world.known.add(signer(3).peer)
        first = granted(world.run, MODULE, term=1, leader=ONE.peer, mirrors=(signer(3).peer,))
        second = seal(
            signer(3),
            Grant(run=world.run.id, module=MODULE, term=2, leader=signer(3).peer, after=1, author=signer(3).peer),
        )
        assert world.seed.node.mandates.believes(MODULE, first)
        reply = await adopt(world, 3, term=3, mandate=[second.to_dict()], mirrors=[ONE.peer])
        sealed = unseal(Grant, reply.header["grant"])
        assert (sealed.document.term, sealed.document.leader, sealed.document.author) == (3, signer(3).peer, SEED.peer)
        assert newest(shelf) == (3, signer(3).peer, (ONE.peer,))


async def test_a_stranger_cannot_lift_the_term(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        world = shelf.world
        await grant(world, ONE.peer, 1)
        stranger = signer(3)
        own = seal(
            stranger,
            Grant(run=world.run.id, module=MODULE, term=2, leader=stranger.peer, after=1, author=stranger.peer),
        )
        with pytest.raises(Exception):  # noqa: B017, PT011 - refused, or it cannot show more than that
            await adopt(world, 3, term=3, mandate=[own.to_dict()])
        assert newest(shelf) == (1, ONE.peer, ())


@pytest.mark.parametrize(
    "odd",
    [
        {"module": "L9"},
        {"module": "L9.M9"},
        {"term": "1"},
        {"term": -1},
        {"term": 1.0},
        {"mirrors": None},
        {"mirrors": "peer"},
        {"mirrors": [7]},
        {"mirrors": [f"peer {number}" for number in range(MIRRORS_MAX + 1)]},
        {"mirrors": [OTHER.peer, OTHER.peer]},
        {"mirrors": [signer(3).peer]},
        {"mandate": [{"document": {}, "signature": ""}]},
        {"mandate": [7]},
    ],
    ids=str,
)
async def test_a_malformed_question_is_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.world.known.add(signer(3).peer)
        with pytest.raises(Refused):
            await adopt(shelf.world, 3, **odd)
        assert shelf.world.seed.term(MODULE) == 0
        await adopt(shelf.world, 3)
        assert newest(shelf)[:2] == (1, signer(3).peer)


async def test_a_leader_whose_head_lives_is_not_displaced(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        world = shelf.world
        leader = world.leader(50)
        await leader.lead(MODULE)
        await world.seed.node.watch.refresh()
        term = world.seed.term(MODULE)
        assert await refusal(grant(world, OTHER.peer, term + 1)) == Reason.NOT_LEADER
        await grant(world, leader.peer, term + 1, (OTHER.peer,))  # its own group may change
        await leader.die(world)
        with_head = grant(world, OTHER.peer, term + 2)
        assert await refusal(with_head) == Reason.NOT_LEADER, "not before its head has expired"
        await eventually(lambda: not world.seed.node.watch.heads[MODULE])
        await asyncio.sleep(3 * world.run.config.liveness.heartbeat_ttl_s)
        await grant(world, OTHER.peer, term + 2)
        assert newest(shelf)[:2] == (term + 2, OTHER.peer)


# -- versions


async def test_what_it_has_signed_is_never_given_up(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        first, _ = shelf.version(1)
        second, _ = shelf.version(2)
        for version in (first, second):
            await shelf.keep(version)
        member = shelf.world.leader(50)  # with a longer chain that it cannot have from us
        shelf.adopt(member.swarm.signer, term=2)
        shelf.made.clear()
        chain = [shelf.version(n, leader=member.swarm.signer, term=2, variant=1) for n in (1, 2, 3)]
        for sealed, made in chain:
            member.chain.append(sealed, made)
        assert await refusal(shelf.keep(chain[2][0], sender=member.swarm.signer)) == Reason.STALE_BASE
        assert [sealed.document for sealed in shelf.ledger.versions] == [first.document, second.document]
        for sealed, _ in chain[:2]:
            with pytest.raises((Refused, IntegrityError)):
                await shelf.keep(sealed, sender=member.swarm.signer)
        assert shelf.ledger.branch.final == 2


async def test_it_makes_all_versions_again_that_it_has_missed(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        member = shelf.world.leader(50)
        leader: Signer = member.swarm.signer
        shelf.adopt(leader, term=1)
        for number in (1, 2, 3):
            for path in (0, 1):
                sealed, payload = shelf.contribution(number, path=path)
                member.node.store.put(payload)
                member.chain.add(sealed)
                shelf.node.store.drop(sealed.document.payload.digest)
            version, made = shelf.version(number, leader=leader, is_handed_in=False)
            for path in (0, 1):
                shelf.node.store.drop(shelf.contribution(number, path=path)[0].document.payload.digest)
            member.chain.append(version, made)
        await member.node.watch.refresh()
        await shelf.keep(version, sender=leader)
        assert [sealed.document.version for sealed in shelf.ledger.versions] == [1, 2, 3]
        assert all(SEED.peer in sealed.cosignatures for sealed in shelf.ledger.versions)
        archive = SeedArchive(shelf.run, shelf.node.store)
        for share in version.document.shares:
            assert shelf.node.store.get(archive.contribution(share.contribution).document.payload.digest) is not None


async def test_a_restart_goes_on_from_the_disk(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        version, _ = shelf.version(1)
        waiting = shelf.contribution(2, base=0)[0]
        shelf.chain.keep_contribution(ONE.peer, waiting)
        counted = shelf.contribution(1)[0]
        await shelf.keep(version)
        archive = SeedArchive(shelf.run, Store(shelf.node.store.folder))
        ledger = archive.ledgers[MODULE]
        assert [sealed.document for sealed in ledger.versions] == [version.document] and ledger.final == 1
        assert list(ledger.open) == [waiting.id] and not ledger.spent
        assert archive.contribution(counted.id) == counted, "what was counted is kept for who verifies"
        assert archive.contribution(waiting.id) == waiting


async def test_a_crash_between_a_version_and_its_signature_leaves_nothing_twice(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        member = shelf.world.leader(50)
        shelf.adopt(member.swarm.signer, term=1)
        version, made = shelf.version(1, leader=member.swarm.signer)
        for sealed in shelf.ledger.open.values():
            member.node.store.put(shelf.node.store.get(sealed.document.payload.digest) or b"")
            member.chain.add(sealed)
        member.chain.append(version, made)
        shelf.chain.append(version, made)  # and not what `keep_version` does after it
        await shelf.world.kill_seed()
        shelf.node, shelf.chain = (seed := shelf.world.start_seed()).node, seed.chains[MODULE]
        seed.ownership._may_take = lambda: False
        await shelf.node.watch.refresh()
        assert shelf.ledger.head.version == 1
        assert shelf.ledger.final == 1, "who has the next signature takes this one for granted, and never asks"
        await shelf.keep(version, sender=member.swarm.signer)
        assert shelf.ledger.final == 1 and not shelf.ledger.kept
        assert len(shelf.ledger.versions) == 1 and not shelf.node.store.documents("open-")


async def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        await shelf.keep(shelf.version(1)[0])
        shelf.node.store.write_document(f"version-{MODULE}-00000001", b"{")
        with pytest.raises(IntegrityError, match="damaged"):
            SeedArchive(shelf.run, shelf.node.store)


async def test_an_unknown_contribution_is_told(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        with pytest.raises(IntegrityError, match="not in the archive"):
            shelf.world.seed.archive.contribution("0" * 64)


async def test_contributions_are_given_as_they_lie_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a stranger asks for one, 256 times in each request, and the seed checked its signature as often."""
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        sealed = shelf.contribution(1)[0]
        shelf.chain.keep_contribution(ONE.peer, sealed)
        monkeypatch.setattr(archive_module, "unseal", None)
        found = [shelf.world.seed.archive.find_stored(id_) for id_ in (sealed.id, "0" * 64, "../x")]
        assert found == [sealed.to_bytes(), None, None]


async def test_a_long_chain_comes_over_the_network_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_archive(tmp_path, rounds=9) as shelf:
        monkeypatch.setattr(items, "ITEMS_BYTES_MAX", 5000)  # two or three items
        shelf.adopt(ONE, term=1)
        for number in range(1, 7):
            await shelf.keep(shelf.version(number)[0])
        opened = [shelf.contribution(7, path=path)[0] for path in (0, 1)]
        opened += [shelf.contribution(7, base=5, path=path, variant=1)[0] for path in (0, 1)]
        opened += [shelf.contribution(7, path=path, variant=2)[0] for path in (0, 1)]
        for sealed in opened:
            shelf.chain.add(sealed)
        node = shelf.world.peer(40)
        await node.watch.refresh()
        remote = RemoteLedger(node, SEED.peer, MODULE)
        assert await remote.chain(after=0) == shelf.ledger.versions
        assert [sealed.document.version for sealed in await remote.chain(after=2, until=5)] == [3, 4, 5]
        assert len(await remote.page(after=0)) < 6
        assert {sealed.id for sealed in await remote.kept()} == {sealed.id for sealed in opened}
        assert await remote.branch() == shelf.ledger.branch
        assert await RemoteLedger(node, SEED.peer, ModuleId(2, 1)).chain(after=0) == []
