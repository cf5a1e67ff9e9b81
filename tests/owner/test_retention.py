"""What an archive drops as its run file says, what it never drops, and that it goes on all the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mirror_harness import MODULE, ONE, Shelf, on_shelf
from tiny_run import contribution_of, signer

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.retention import Retention, Thinned, Thinning, read_thinned
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, seal

on_archive = partial(on_shelf, keeps_everything=True, rounds=12)
STALENESS = 1


def thinning(shelf: Shelf) -> Thinning:
    return shelf.world.seed.archive.thinning


def keeps(shelf: Shelf, retention: Retention, *, needed: Sequence[int] = ()) -> None:
    thinning(shelf).retention, thinning(shelf).needed = retention, lambda module: needed


async def grow(shelf: Shelf, *numbers: int) -> None:
    for number in numbers:
        await shelf.keep(shelf.version(number)[0])


def here(shelf: Shelf, *refs: BlobRef | None) -> bool:
    return all(ref is not None and shelf.node.store.size(ref.digest) is not None for ref in refs)


def payloads(shelf: Shelf, version: ModuleVersion) -> list[BlobRef]:
    archive = shelf.world.seed.archive
    return [archive.contribution(share.contribution).document.payload for share in version.shares]


def kept(shelf: Shelf) -> dict[str, list[int]]:
    """Of which versions each kind of blob is here."""
    versions = [sealed.document for sealed in shelf.ledger.versions]
    kinds: dict[str, Any] = {
        "parameters": lambda version: here(shelf, version.snapshot),
        "states": lambda version: here(shelf, version.update, version.state),
        "contributions": lambda version: here(shelf, *payloads(shelf, version)),
    }
    return {name: [one.version for one in versions if is_here(one)] for name, is_here in kinds.items()}


async def test_an_archive_keeps_the_last_rounds_whole_and_the_parameters_of_some_before_them(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        keeps(shelf, Retention(rounds=2, snapshots=4), needed=[3])
        await grow(shelf, *range(1, 11))
        assert kept(shelf) == {"parameters": [3, 4, 8, 9, 10], "states": [8, 9, 10], "contributions": [9, 10]}
        assert read_thinned(shelf.node.store, MODULE) == Thinned(contributions=8, versions=7, snapshots=(3, 4))
        assert here(shelf, shelf.ledger.genesis.snapshot), "version 0 routes"
        keeps(shelf, Retention(rounds=2, snapshots=4), needed=[9])
        await grow(shelf, 11)
        assert kept(shelf)["parameters"] == [4, 8, 9, 10, 11], "what is needed no more goes"
        again = SeedArchive(shelf.run, Store(shelf.node.store.folder))
        assert len(again.ledgers[MODULE].versions) == 11 and again.thinning.of(MODULE) == thinning(shelf).of(MODULE)


async def test_without_a_retention_nothing_goes_and_a_later_one_catches_up(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        await grow(shelf, *range(1, 7))
        assert set(map(tuple, kept(shelf).values())) == {(1, 2, 3, 4, 5, 6)}
        keeps(shelf, Retention(rounds=1))
        await grow(shelf, 7)
        # Work may still be based on the newest versions, however few rounds are to be kept.
        assert kept(shelf) == {"parameters": [5, 6, 7], "states": [5, 6, 7], "contributions": [7]}


async def test_what_is_not_final_is_never_thinned(tmp_path: Path) -> None:
    """A further seed node has versions that the coordinator did not sign yet, and may have to show what made them."""
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        await grow(shelf, *range(1, 7))
        keeps(shelf, Retention(rounds=1))
        shelf.ledger.final = 2
        thinning(shelf).thin(shelf.ledger)
        assert thinning(shelf).of(MODULE) == Thinned(contributions=2, versions=1)
        assert kept(shelf)["states"] == [2, 3, 4, 5, 6], "version 3 is made again from version 2"


async def test_a_payload_that_a_kept_version_counts_once_more_stays(tmp_path: Path) -> None:
    """Anybody may send another's bytes again, in the hope that the archive drops them too early."""
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        await grow(shelf, *range(1, 6))
        counted = payloads(shelf, shelf.ledger.at(1))
        kind = thinning(shelf)
        first = kind._payload(shelf.ledger.at(1).shares[0].contribution)
        second = shelf.ledger.at(5).shares[0].contribution
        keeps(shelf, Retention(rounds=1))
        original = kind._payload
        kind._payload = lambda id_: first if id_ == second else original(id_)
        shelf.chain.settle()
        assert here(shelf, *[ref for ref in counted if ref.digest == first])
        assert not any(here(shelf, ref) for ref in counted if ref.digest != first)


async def test_a_contribution_that_is_not_counted_takes_no_room_once_it_is_forgotten(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        keeps(shelf, Retention(rounds=1))
        await grow(shelf, 1, 2)
        payload = b"never counted" * 10
        shelf.node.store.put(payload)
        path = shelf.run.topology.paths_through(MODULE)[0]
        sealed = seal(signer(41), contribution_of(shelf.run, signer(41), payload, module=MODULE, path=path))
        counted = shelf.world.seed.archive.contribution(shelf.ledger.at(2).shares[0].contribution)
        copy = seal(signer(42), contribution_of(shelf.run, signer(42), payload, module=MODULE, path=path))
        for one in (sealed, copy):
            shelf.chain.add(one)
        shelf.chain.forget(sealed)
        assert here(shelf, sealed.document.payload), "another contribution that is open has the same bytes"
        shelf.chain.forget(copy)
        assert not here(shelf, sealed.document.payload)
        shelf.chain.forget(counted)
        assert here(shelf, counted.document.payload)


async def test_a_crash_before_the_blobs_went_leaves_an_archive_that_goes_on(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.adopt(ONE, term=1)
        await grow(shelf, *range(1, 6))
        store, dropped = shelf.node.store, list[str]()
        keep, store.drop = store.drop, dropped.append  # type: ignore[method-assign]
        keeps(shelf, Retention(rounds=1))
        await grow(shelf, 6)
        store.drop = keep  # type: ignore[method-assign]
        assert dropped and read_thinned(store, MODULE).versions == 3
        await shelf.world.kill_seed()
        seed = shelf.world.start_seed()
        shelf.node, shelf.chain = seed.node, seed.chains[MODULE]
        seed.ownership._may_take = lambda: False
        await shelf.node.watch.refresh()
        keeps(shelf, Retention(rounds=1))
        await grow(shelf, 7)
        assert kept(shelf)["parameters"][-3:] == [5, 6, 7]


async def test_a_damaged_note_of_what_was_dropped_is_named(tmp_path: Path) -> None:
    async with on_archive(tmp_path) as shelf:
        shelf.node.store.write_document(f"thinned-{MODULE}", b"{")
        with pytest.raises(IntegrityError, match="damaged"):
            read_thinned(shelf.node.store, MODULE)


def test_to_which_version_one_can_go_back() -> None:
    thinned = Thinned(contributions=9, versions=8, snapshots=(3, 6))
    assert [thinned.kept_before(version) for version in (0, 2, 3, 5, 8, 9)] == [0, 0, 3, 3, 6, 9]
    assert [version for version in range(11) if thinned.lacks(version)] == [1, 2, 4, 5, 7, 8]
