"""One module's chain on disk: what a crash between two writes leaves, and what a damaged file is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import contribution_of, gradient_bytes, make_run, signer, tiny_config, version_of

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.documents import Contribution, Sealed, seal
from dipaco_p2p.runtime.ledger import Ledger
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(1, 0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def run(store: Store) -> Run:
    return make_run(store, tiny_config())


def contribution(run: Run, number: int) -> tuple[Sealed[Contribution], bytes]:
    payload = gradient_bytes(run, MODULE, seed=number)
    path = run.topology.paths_through(MODULE)[0]
    document = contribution_of(run, signer(number), payload, module=MODULE, path=path)
    return seal(signer(number), document), payload


def test_a_new_chain_stands_at_the_genesis(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    assert ledger.head.version == 0 and not ledger.is_complete and ledger.after(0, limit=5) == []


def test_a_version_takes_its_contributions_with_it(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one, other = contribution(run, 1), contribution(run, 2)
    for sealed, _ in (one, other, one):
        ledger.add(sealed)
    version, _ = version_of(run, signer(9), [one], term=1)
    ledger.append(version)
    assert ledger.head == version.document
    assert ledger.counted == {one[0].id: 1}
    assert list(ledger.open) == [other[0].id] and list(ledger.spent) == [one[0].id]
    ledger.add(one[0])
    assert list(ledger.open) == [other[0].id], "what is counted is not open again"


def test_a_reader_of_the_same_folder_finds_the_same(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one, other = contribution(run, 1), contribution(run, 2)
    ledger.add(one[0])
    ledger.append(version_of(run, signer(9), [one], term=1)[0])
    ledger.add(other[0])
    again = Ledger(run, store, MODULE)
    assert (again.versions, again.open, again.spent, again.counted) == (
        ledger.versions,
        ledger.open,
        ledger.spent,
        ledger.counted,
    )


def test_settling_drops_what_the_archive_has(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one = contribution(run, 1)
    ledger.add(one[0])
    ledger.append(version_of(run, signer(9), [one], term=1)[0])
    ledger.settle(0)
    assert ledger.spent and store.documents("open-")
    ledger.settle(1)
    assert not ledger.spent and not store.documents("open-")


def test_a_crash_after_the_version_leaves_nothing_open(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one = contribution(run, 1)
    ledger.add(one[0])
    ledger.append(version_of(run, signer(9), [one], term=1)[0])
    again = Ledger(run, store, MODULE)  # the open document is still there
    assert not again.open and again.head.version == 1


def test_truncating_opens_again_what_the_lost_versions_counted(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one, other = contribution(run, 1), contribution(run, 2)
    first, made = version_of(run, signer(9), [one], term=1)
    second, _ = version_of(run, signer(9), [other], term=1, after=made)
    for sealed, version in ((one[0], first), (other[0], second)):
        ledger.add(sealed)
        ledger.append(version)
    ledger.truncate(1)
    again = Ledger(run, store, MODULE)
    for kept in (ledger, again):
        assert kept.versions == [first] and list(kept.open) == [other[0].id] and list(kept.spent) == [one[0].id]


def test_a_version_that_does_not_follow_is_refused(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one, other = contribution(run, 1), contribution(run, 2)
    first, made = version_of(run, signer(9), [one], term=1)
    second, _ = version_of(run, signer(9), [other], term=1, after=made)
    with pytest.raises(IntegrityError, match="does not follow"):
        ledger.append(second)
    ledger.append(first)
    with pytest.raises(IntegrityError, match="does not follow"):
        ledger.append(first)
    twice, _ = version_of(run, signer(9), [one], term=1, after=made)
    with pytest.raises(IntegrityError, match="counts twice"):
        ledger.append(twice)
    assert ledger.versions == [first] == Ledger(run, store, MODULE).versions


@pytest.mark.parametrize("prefix", ["version-", "open-"])
@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"document":{},"signature":""}'])
def test_a_damaged_file_is_named(run: Run, store: Store, tmp_path: Path, prefix: str, damage: bytes) -> None:
    ledger = Ledger(run, store, MODULE)
    one = contribution(run, 1)
    ledger.add(one[0])
    ledger.append(version_of(run, signer(9), [one], term=1)[0])
    [path] = (tmp_path / "documents").glob(f"{prefix}*")
    path.write_bytes(damage)
    with pytest.raises(IntegrityError, match=f"{prefix}.*damaged") as caught:
        Ledger(run, store, MODULE)
    assert caught.value.hint


def test_a_missing_version_in_the_middle_is_found(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    first, made = version_of(run, signer(9), [contribution(run, 1)], term=1)
    second, _ = version_of(run, signer(9), [contribution(run, 2)], term=1, after=made)
    ledger.append(first)
    ledger.append(second)
    store.drop_document(f"version-{MODULE}-00000001")
    with pytest.raises(IntegrityError, match="does not follow"):
        Ledger(run, store, MODULE)
