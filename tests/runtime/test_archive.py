"""The archive: one leader per term, nothing that does not follow, and a restart that goes on where it stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest
from runtime_harness import World
from tiny_run import SEED_NUMBER, contribution_of, gradient_bytes, make_run, signer, tiny_config, version_of
from virtual_time import play

from bootstrap.archive import OwnArchive, SeedArchive
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.protocol.admission import Reason
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Grant, ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.grants import may_lead
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.runtime import items
from dipaco_p2p.runtime.archive import RemoteArchive
from dipaco_p2p.runtime.recompute import Made
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(1, 0)
ONE, OTHER = signer(1), signer(2)


class Shelf:
    """An archive on disk, and leaders that speak to it directly."""

    def __init__(self, folder: Path, *, rounds: int = 5) -> None:
        self.store = Store(folder)
        self.run = make_run(self.store, tiny_config(rounds=rounds))
        self.archive = SeedArchive(self.run, self.store, signer(SEED_NUMBER))
        self.deposed: list[str] = []

    def contribution(self, number: int) -> tuple[Sealed[Contribution], bytes]:
        payload = gradient_bytes(self.run, MODULE, seed=number)
        self.store.put(payload)
        path = self.run.topology.paths_through(MODULE)[0]
        document = contribution_of(self.run, signer(30), payload, module=MODULE, path=path, base_version=number - 1)
        return seal(signer(30), document), payload

    def version(
        self, number: int, *, leader: int = 1, term: int = 1, after: Made | None = None
    ) -> tuple[Sealed[ModuleVersion], Made]:
        contribution, payload = self.contribution(number)
        self.archive.ledgers[MODULE].add(contribution)
        sealed, made = version_of(self.run, signer(leader), [(contribution, payload)], term=term, after=after)
        self.store.put(made.update)
        self.store.put(made.state_blob)
        return sealed, made

    def reopen(self) -> SeedArchive:
        self.archive = SeedArchive(self.run, Store(self.store.folder), signer(SEED_NUMBER))
        return self.archive


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def refusal(work: Awaitable[object]) -> str:
    async def wait() -> None:
        await work

    with pytest.raises(Refused) as caught:
        asyncio.run(wait())
    return caught.value.reason


def adopt(shelf: Shelf, peer: str, term: int) -> None:
    asyncio.run(shelf.archive.adopt(peer, MODULE, term=term))  # type: ignore[arg-type]


def test_the_coordinator_leads_before_anybody_else(shelf: Shelf) -> None:
    assert shelf.archive.granted(MODULE) == (0, signer(SEED_NUMBER).peer)


def test_a_term_is_granted_to_one_peer_only(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    adopt(shelf, ONE.peer, 1)  # the answer was lost: the same question again
    assert refusal(shelf.archive.adopt(OTHER.peer, MODULE, term=1)) == Reason.NOT_LEADER
    adopt(shelf, OTHER.peer, 2)
    assert refusal(shelf.archive.adopt(ONE.peer, MODULE, term=1)) == Reason.NOT_LEADER
    assert shelf.archive.granted(MODULE) == (2, OTHER.peer)


def test_terms_follow_each_other_one_by_one(shelf: Shelf) -> None:
    for term in (0, 2, 2**41):  # a term that no document can carry would end the module for ever
        assert refusal(shelf.archive.adopt(ONE.peer, MODULE, term=term)) == Reason.NOT_LEADER
    assert shelf.archive.granted(MODULE) == (0, signer(SEED_NUMBER).peer)


def test_a_grant_is_the_coordinators_signature_for_one_term_and_leader(shelf: Shelf) -> None:
    signature = asyncio.run(shelf.archive.adopt(ONE.peer, MODULE, term=1))
    grant = Grant(run=shelf.run.id, module=MODULE, term=1, leader=ONE.peer, author=signer(SEED_NUMBER).peer)
    assert may_lead(grant, signature)
    for change in ({"term": 2}, {"leader": OTHER.peer}, {"module": ModuleId(2, 0)}, {"author": ONE.peer}):
        assert not may_lead(replace(grant, **change), signature)  # type: ignore[arg-type]


def test_a_leader_that_is_alive_is_not_displaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            leading = True

            async def is_leading(module: ModuleId, holder: PeerId, term: int) -> bool:
                return leading and holder == ONE.peer

            archive = world.seed.archive
            archive._is_leading = is_leading
            term = archive.granted(MODULE)[0] + 1
            await archive.adopt(ONE.peer, MODULE, term=term)
            with pytest.raises(Refused, match="which is alive"):
                await archive.adopt(OTHER.peer, MODULE, term=term + 1)
            await archive.adopt(ONE.peer, MODULE, term=term + 1)  # itself, after a restart
            leading = False
            await archive.adopt(OTHER.peer, MODULE, term=term + 2)
            assert archive.granted(MODULE) == (term + 2, OTHER.peer)

    play(scenario)


def test_a_version_that_counts_what_the_archive_lacks_is_refused(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    version, _ = shelf.version(1)
    contribution = shelf.archive.ledgers[MODULE].open.popitem()[1]
    assert refusal(shelf.archive.keep_version(ONE.peer, version)) == "contribution-missing"
    shelf.archive.keep_contribution(ONE.peer, contribution, term=1)
    asyncio.run(shelf.archive.keep_version(ONE.peer, version))


def test_of_many_that_ask_for_a_term_at_once_one_gets_it(shelf: Shelf) -> None:
    async def race() -> list[object]:
        asks = [shelf.archive.adopt(signer(number).peer, MODULE, term=1) for number in range(1, 9)]
        return await asyncio.gather(*asks, return_exceptions=True)

    assert sum(not isinstance(answer, Refused) for answer in asyncio.run(race())) == 1


def test_only_the_leader_of_the_newest_term_hands_in(shelf: Shelf) -> None:
    version, made = shelf.version(1)
    contribution, _ = shelf.contribution(2)
    assert refusal(shelf.archive.keep_version(ONE.peer, version)) == Reason.NOT_LEADER
    adopt(shelf, ONE.peer, 1)
    asyncio.run(shelf.archive.keep_version(ONE.peer, version))
    adopt(shelf, OTHER.peer, 2)
    second, _ = shelf.version(2, after=made)
    assert refusal(shelf.archive.keep_version(ONE.peer, second)) == Reason.NOT_LEADER
    assert refusal(shelf.archive.keep_version(OTHER.peer, second)) == Reason.NOT_LEADER, "it is not its own"
    for peer, term in ((ONE.peer, 1), (ONE.peer, 2), (OTHER.peer, 1)):
        with pytest.raises(Refused) as caught:
            shelf.archive.keep_contribution(peer, contribution, term=term)
        assert caught.value.reason == Reason.NOT_LEADER
    shelf.archive.keep_contribution(OTHER.peer, contribution, term=2)
    assert list(shelf.archive.ledgers[MODULE].open) == [contribution.id]


def test_what_a_leader_made_before_its_restart_is_still_taken(shelf: Shelf) -> None:
    first, made = shelf.version(1, term=1)
    second, _ = shelf.version(2, term=2, after=made)
    adopt(shelf, ONE.peer, 1)
    adopt(shelf, ONE.peer, 2)
    for version in (first, second, first):
        asyncio.run(shelf.archive.keep_version(ONE.peer, version))
    assert [sealed.document.term for sealed in shelf.archive.ledgers[MODULE].versions] == [1, 2]


def test_a_version_whose_update_does_not_give_its_digest_is_refused(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    version, _ = shelf.version(1)
    lie = BlobRef.of(shelf.store.get(version.document.parent) or b"")
    wrong = seal(ONE, replace(version.document, snapshot=lie))
    assert refusal(shelf.archive.keep_version(ONE.peer, wrong)) == Reason.MALFORMED
    other = seal(ONE, replace(version.document, update=shelf.store.put(gradient_bytes(shelf.run, MODULE, seed=9))))
    assert refusal(shelf.archive.keep_version(ONE.peer, other)) == Reason.MALFORMED
    assert shelf.archive.ledgers[MODULE].head.version == 0
    asyncio.run(shelf.archive.keep_version(ONE.peer, version))
    assert shelf.store.get(version.document.digest) is not None, "the archive makes the snapshot itself"


def test_a_version_that_does_not_follow_the_chain_is_refused(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    first, made = shelf.version(1)
    second, _ = shelf.version(2, after=made)
    with pytest.raises(IntegrityError, match="does not follow"):
        asyncio.run(shelf.archive.keep_version(ONE.peer, second))
    asyncio.run(shelf.archive.keep_version(ONE.peer, first))
    other, _ = shelf.version(3)
    assert refusal(shelf.archive.keep_version(ONE.peer, other)) == Reason.STALE_BASE
    assert shelf.archive.ledgers[MODULE].versions == [first]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"update": None}, Reason.MALFORMED),
        ({"state": None}, Reason.MALFORMED),
        ({"state": BlobRef(digest="1" * 64, size=5)}, "payload-missing"),
        ({"module": ModuleId(9, 9)}, Reason.WRONG_MODULE),
        ({"version": 0, "parent": "", "grant": ""}, Reason.STALE_BASE),
    ],
)
def test_a_version_without_its_parts_is_refused(shelf: Shelf, changes: dict[str, object], reason: str) -> None:
    adopt(shelf, ONE.peer, 1)
    version, _ = shelf.version(1)
    wrong = seal(ONE, replace(version.document, **changes))  # type: ignore[arg-type]
    assert refusal(shelf.archive.keep_version(ONE.peer, wrong)) == reason


def test_a_contribution_needs_its_run_module_and_payload(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    contribution, _ = shelf.contribution(1)
    for changes, reason in (
        ({"run": "0" * 64}, Reason.WRONG_RUN),
        ({"module": ModuleId(9, 9)}, Reason.WRONG_MODULE),
        ({"payload": BlobRef(digest="1" * 64, size=5)}, "payload-missing"),
    ):
        wrong = seal(signer(30), replace(contribution.document, **changes))  # type: ignore[arg-type]
        with pytest.raises(Refused) as caught:
            shelf.archive.keep_contribution(ONE.peer, wrong, term=1)
        assert caught.value.reason == reason


def test_a_restart_goes_on_from_the_disk(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    counted, waiting = shelf.contribution(1)[0], shelf.contribution(2)[0]
    for contribution in (counted, waiting):
        shelf.archive.keep_contribution(ONE.peer, contribution, term=1)
    version, made = shelf.version(1)
    asyncio.run(shelf.archive.keep_version(ONE.peer, version))
    archive = shelf.reopen()
    assert archive.granted(MODULE) == (1, ONE.peer)
    assert archive.ledgers[MODULE].versions == [version]
    assert list(archive.ledgers[MODULE].open) == [waiting.id]
    assert archive.contribution(counted.id) == counted, "what was counted is kept for who verifies"
    asyncio.run(archive.keep_version(ONE.peer, shelf.version(2, after=made)[0]))


def test_a_crash_between_a_version_and_its_contributions_leaves_nothing_twice(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    contribution, _ = shelf.contribution(1)
    shelf.archive.keep_contribution(ONE.peer, contribution, term=1)
    shelf.archive.ledgers[MODULE].append(shelf.version(1)[0])  # and not what `keep_version` does after it
    ledger = shelf.reopen().ledgers[MODULE]
    assert not ledger.open and not ledger.spent and not shelf.store.documents("open-")


def test_damaged_terms_are_named(shelf: Shelf) -> None:
    adopt(shelf, ONE.peer, 1)
    for damage in (b"{", b"[]", b'{"L1.M0": 3}', b'{"X": [1, "p"]}'):
        shelf.store.write_document("terms", damage)
        with pytest.raises(IntegrityError, match="terms.json was damaged"):
            shelf.reopen()


def test_an_unknown_contribution_is_told(shelf: Shelf) -> None:
    with pytest.raises(IntegrityError, match="not in the archive"):
        shelf.archive.contribution("0" * 64)


def test_a_long_chain_comes_over_the_network_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        count = 9
        monkeypatch.setattr(items, "ITEMS_BYTES_MAX", 5000)  # two or three versions
        async with World(tmp_path, config=tiny_config(rounds=count)) as world:
            node = world.peer(40)
            await node.watch.refresh()
            remote = RemoteArchive(node.swarm, node.watch)
            own = OwnArchive(world.seed.archive, world.seed.node.peer)
            term = await own.term(MODULE) + 1
            await own.adopt(MODULE, term=term)
            after: Made | None = None
            path = world.run.topology.paths_through(MODULE)[0]
            for number in range(count):
                payload = gradient_bytes(world.run, MODULE, seed=number)
                base = {"base_version": number}
                document = contribution_of(world.run, signer(30), payload, module=MODULE, path=path, **base)
                sealed = seal(signer(30), document)
                version, after = version_of(world.run, signer(SEED_NUMBER), [(sealed, payload)], term=term, after=after)
                for blob in (payload, after.update, after.state_blob):
                    world.seed.node.store.put(blob)
                await own.keep_contribution(sealed, payload, term=term)
                await own.keep_version(version, [])
            assert await remote.chain(MODULE, after=0) == await own.chain(MODULE, after=0)
            assert len(await remote.chain(MODULE, after=2)) == count - 2
            assert await remote.term(MODULE) == term
            assert await remote.open_contributions(MODULE) == await own.open_contributions(MODULE) == []

    play(scenario)
