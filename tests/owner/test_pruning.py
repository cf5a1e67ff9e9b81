"""What a peer drops of its chains' blobs: bounded, whatever was missing in between, and nothing that is still named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_run import SEED_NUMBER, contribution_of, gradient_bytes, make_run, signer, tiny_config, version_of

from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.chain import Chains, ModuleChain
from dipaco_p2p.owner.version import Made
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Sealed, seal
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(1, 0)
KEEP = 1
NEXT_FINAL = 2
"""Of the version after the final ones parameters and outer state stay: it may be final, and an archive without them may
ask for them."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def run(store: Store) -> Run:
    return make_run(store, tiny_config(rounds=9))


@pytest.fixture
def chain(run: Run, store: Store) -> ModuleChain:
    history, clock = SimpleNamespace(add=lambda *parts, **named: None), SimpleNamespace(now_s=lambda: 0.0)
    parts = {"history": history, "clock": clock, "uploads": SimpleNamespace(), "watch": SimpleNamespace()}
    return Chains(cast(Any, SimpleNamespace(run=run, store=store, **parts)))[MODULE]


def contribution(run: Run, number: int, *, base: int) -> tuple[Sealed[Contribution], bytes]:
    payload, path = gradient_bytes(run, MODULE, seed=number), run.topology.paths_through(MODULE)[0]
    author = signer(number)
    document = contribution_of(run, author, payload, module=MODULE, path=path, base_version=base)
    return seal(author, document), payload


def grow(run: Run, store: Store, chain: ModuleChain, numbers: range, *, after: Made | None = None) -> list[Made]:
    """A version for each number, each of another contribution, with all its blobs in the store."""
    made = []
    for number in numbers:
        sealed, after = version_of(
            run, signer(9), [contribution(run, number, base=chain.ledger.head.version)], term=1, after=after
        )
        for blob in (after.snapshot, after.update, after.state_blob):
            store.put(b"".join(blob))
        chain.ledger.append(sealed)
        made.append(after)
    return made


def here(store: Store, sealed: Sealed[ModuleVersion]) -> int:
    version = sealed.document
    return sum(store.size(ref.digest) is not None for ref in (version.snapshot, version.update, version.state) if ref)


def test_a_gap_does_not_save_what_is_older(chain: ModuleChain, run: Run, store: Store) -> None:
    grow(run, store, chain, range(1, 7))
    for name in (chain.ledger.versions[3].document.snapshot, chain.ledger.versions[3].document.update):
        assert name is not None
        store.drop(name.digest)
    chain._prune(keep=KEEP)
    assert [here(store, sealed) for sealed in chain.ledger.versions] == [NEXT_FINAL, 0, 0, 0, 0, 3]


def test_what_was_given_up_goes_unless_the_other_branch_names_it_too(
    chain: ModuleChain, run: Run, store: Store
) -> None:
    made = grow(run, store, chain, range(1, 6))
    chain._prune(keep=KEEP)
    lost = chain.ledger.versions[2:]
    chain._leave(2)
    grow(run, store, chain, range(3, 4), after=made[1])  # the same step again
    grow(run, store, chain, range(14, 15), after=made[2])
    chain._prune(keep=2)
    assert [here(store, sealed) for sealed in lost] == [3, 0, 0], "the first is on both"
    assert [here(store, sealed) for sealed in chain.ledger.versions] == [NEXT_FINAL, 0, 3, 3]


def test_a_payload_that_another_contribution_has_too_stays(chain: ModuleChain, run: Run, store: Store) -> None:
    sealed, payload = contribution(run, 1, base=0)
    name = store.put(payload).digest
    chain.ledger.add(sealed)
    chain._drop_payloads([name])
    assert store.size(name) is not None
    chain.ledger.drop(sealed.id)
    chain._drop_payloads([name])
    assert store.size(name) is None


@pytest.mark.parametrize("is_read_only", [True, False])
def test_an_archive_finds_a_contribution_that_was_not_put_away_yet(run: Run, store: Store, is_read_only: bool) -> None:
    """Its version is final, and then the program ended. Whoever reads the folder changes nothing, and finds it."""
    archive, (sealed, payload) = SeedArchive(run, store), contribution(run, 1, base=0)
    store.put(payload)
    archive.ledgers[MODULE].add(sealed)
    version, _ = version_of(run, signer(SEED_NUMBER), [(sealed, payload)], term=1)
    archive.ledgers[MODULE].append(version)
    Ledger(run, store, MODULE)  # as somebody opens it who knows nothing of archives
    again = SeedArchive(run, Store(store.folder, is_read_only=is_read_only))
    assert again.ledgers[MODULE].final == 1 and store.documents("contribution-") == []
    assert again.contribution(sealed.id) == sealed
    again.ledgers[MODULE].settle(again.ledgers[MODULE].final)
    assert (store.documents("contribution-") == []) == is_read_only
    assert SeedArchive(run, store).contribution(sealed.id) == sealed
