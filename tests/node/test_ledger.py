"""One module's chain on disk: what a crash between two writes leaves, and what a damaged file is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import SEED_NUMBER, contribution_of, gradient_bytes, make_run, signer, tiny_config, version_of

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Sealed, cosign, seal
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import Branch
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(1, 0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def run(store: Store) -> Run:
    return make_run(store, tiny_config(rounds=3))


def contribution(run: Run, number: int, *, base: int = 0) -> tuple[Sealed[Contribution], bytes]:
    payload = gradient_bytes(run, MODULE, seed=number)
    path = run.topology.paths_through(MODULE)[0]
    document = contribution_of(run, signer(number), payload, module=MODULE, path=path, base_version=base)
    return seal(signer(number), document), payload


def cosigned(version: Sealed[ModuleVersion], by: Signer) -> dict[PeerId, str]:
    return {by.peer: cosign(by, version)}


def test_a_new_chain_stands_at_the_genesis(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    assert ledger.head.version == 0 and not ledger.is_complete and ledger.versions == []
    genesis = ledger.genesis.digest
    assert ledger.branch == Branch(final=0, version=0, weight=0, digest=genesis)


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


def three_versions(run: Run) -> list[Sealed[ModuleVersion]]:
    found: list[Sealed[ModuleVersion]] = []
    made = None
    for number in range(3):
        payload, path = gradient_bytes(run, MODULE, seed=number), run.topology.paths_through(MODULE)[0]
        document = contribution_of(run, signer(1), payload, module=MODULE, path=path, base_version=number)
        document = replace(document, base_digest=found[-1].document.digest) if found else document
        work = seal(signer(1), document), payload
        history = [sealed.document for sealed in found]
        sealed, made = version_of(run, signer(9), [work], term=1, after=made, history=history)
        found.append(sealed)
    return found


def grow(run: Run, store: Store, *, to: int) -> None:
    """Decree that its stage ends with version `to`, since the grid grows."""
    what = {"stage": run.id, "to": to, "after": 0, "levels": (1, 2, 4)}
    Decrees(run, store).issue(signer(SEED_NUMBER), "grow", at_s=1.0, reason="", **what)


def test_a_stage_that_grows_ends_with_the_version_that_is_decreed_whoever_made_one_more(run: Run, store: Store) -> None:
    ledger, versions = Ledger(run, store, MODULE), three_versions(run)
    ledger.append(versions[0])
    grow(run, store, to=2)
    assert (run.rounds, run.rounds_after, run.is_last_stage, ledger.is_complete) == (2, 1, False, False)
    ledger.append(versions[1])
    assert ledger.is_complete
    with pytest.raises(IntegrityError, match="version 3, but L1.M0 ends with 2"):
        ledger.append(versions[2])
    again = Run(run.sealed)
    Decrees(again, store)
    assert again.rounds == 2, "the decree is on the disk"


def test_what_went_on_beyond_a_growth_before_it_was_heard_of_is_not_read_again(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    for sealed in three_versions(run):
        ledger.append(sealed)
    grow(run, store, to=2)
    assert ledger.is_complete and Ledger(run, store, MODULE).head.version == 2


def test_settling_drops_what_the_coordinator_has_signed_and_nothing_else(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one = contribution(run, 1)
    ledger.add(one[0])
    version, _ = version_of(run, signer(9), [one], term=1)
    ledger.append(version)
    ledger.cosign(1, cosigned(version, signer(8)))
    assert ledger.settle(ledger.final) == [] and ledger.final == 0, "a mirror's word is not the coordinator's"
    assert ledger.spent and store.documents("open-")
    ledger.cosign(1, cosigned(version, signer(SEED_NUMBER)))
    assert ledger.final == 1 and ledger.branch.final == 1
    assert ledger.settle(ledger.final) == [one[0].document.payload.digest]
    assert not ledger.spent and not store.documents("open-")
    ledger.add(one[0])
    assert not ledger.kept, "it is not needed any more"


def test_a_version_of_the_coordinator_is_final_at_once(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    ledger.append(version_of(run, signer(SEED_NUMBER), [contribution(run, 1)], term=1)[0])
    assert ledger.final == 1


def test_cosignatures_are_on_disk_and_the_first_ones_stay(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    version, _ = version_of(run, signer(9), [contribution(run, 1)], term=1)
    ledger.append(version)
    for number in (8, SEED_NUMBER, 8):
        ledger.cosign(1, cosigned(version, signer(number)))
    again = Ledger(run, store, MODULE)
    assert set(again.versions[0].cosignatures) == {signer(8).peer, signer(SEED_NUMBER).peer}
    assert (again.versions, again.final) == (ledger.versions, 1)


def test_what_is_final_is_never_given_up(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    version, _ = version_of(run, signer(9), [contribution(run, 1)], term=1)
    ledger.append(version)
    ledger.cosign(1, cosigned(version, signer(SEED_NUMBER)))
    with pytest.raises(AssertionError):
        ledger.truncate(0)
    assert Ledger(run, store, MODULE).head.version == 1


def test_a_crash_after_the_version_leaves_nothing_open(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one = contribution(run, 1)
    ledger.add(one[0])
    version, _ = version_of(run, signer(9), [one], term=1)
    ledger.append(version)
    again = Ledger(run, store, MODULE)  # the open document is still there
    assert not again.open and list(again.spent) == [one[0].id] and again.head.version == 1
    again.cosign(1, cosigned(version, signer(SEED_NUMBER)))
    last = Ledger(run, store, MODULE)  # and now it is not needed any more
    last.settle(last.final)
    assert not last.kept and not store.documents("open-")


def test_truncating_opens_again_what_the_lost_versions_counted(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one, other = contribution(run, 1), contribution(run, 2)
    first, made = version_of(run, signer(9), [one], term=1)
    second, _ = version_of(run, signer(9), [other], term=1, after=made)
    for sealed, version in ((one[0], first), (other[0], second)):
        ledger.add(sealed)
        ledger.append(version)
    assert ledger.truncate(1) == [other[0].id]
    assert ledger.truncate(1) == []
    again = Ledger(run, store, MODULE)
    for kept in (ledger, again):
        assert kept.versions == [first] and list(kept.open) == [other[0].id] and list(kept.spent) == [one[0].id]


def test_the_same_step_of_other_contributions_opens_again_what_it_does_not_count(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one = contribution(run, 1)
    author = signer(2)
    other = seal(author, contribution_of(run, author, one[1], module=MODULE, path=one[0].document.path)), one[1]
    for sealed in (one[0], other[0]):
        ledger.add(sealed)
    version, _ = version_of(run, signer(9), [one], term=1)
    theirs, _ = version_of(run, signer(8), [other], term=1)
    assert version.document.digest == theirs.document.digest
    ledger.append(version)
    assert ledger.adopt(theirs.cosigned(cosigned(theirs, signer(SEED_NUMBER))))
    assert list(ledger.open) == [one[0].id] and ledger.final == 1
    assert ledger.settle(ledger.final) == [other[0].document.payload.digest]
    assert list(Ledger(run, store, MODULE).kept) == [one[0].id]


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


DAMAGES = [b"", b"{", b"\xff\xfe", b"[]", b'{"document":{},"signature":""}']


@pytest.mark.parametrize("prefix", ["version-", "open-"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_archive_names_a_damaged_file(run: Run, store: Store, tmp_path: Path, prefix: str, damage: bytes) -> None:
    ledger = Ledger(run, store, MODULE, must_be_whole=True)
    one = contribution(run, 1)
    ledger.add(one[0])
    ledger.append(version_of(run, signer(9), [one], term=1)[0])
    [path] = (tmp_path / "documents").glob(f"{prefix}*")
    path.write_bytes(damage)
    with pytest.raises(IntegrityError, match=f"{prefix}.*damaged") as caught:
        Ledger(run, store, MODULE, must_be_whole=True)
    assert caught.value.hint and path.read_bytes() == damage, "nothing is lost by looking"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_volunteer_goes_on_with_what_comes_before_a_damaged_version(
    run: Run, store: Store, tmp_path: Path, damage: bytes
) -> None:
    ledger = Ledger(run, store, MODULE)
    made, items = None, [contribution(run, number, base=number - 1) for number in (1, 2, 3)]
    for item in items:
        ledger.add(item[0])
        version, made = version_of(run, signer(9), [item], term=1, after=made)
        ledger.append(version)
    first = ledger.versions[0]
    [_, path, _] = sorted((tmp_path / "documents").glob("version-*"))
    path.write_bytes(damage)
    again = Ledger(run, store, MODULE)
    assert again.versions == [first] and store.documents("version-") == [f"version-{MODULE}-00000001"]
    assert set(again.open) == {sealed.id for sealed, _ in items[1:]} and set(again.spent) == {items[0][0].id}
    again.append(ledger.versions[1])
    again.append(ledger.versions[2])
    assert Ledger(run, store, MODULE).versions == ledger.versions


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_volunteer_goes_on_without_a_damaged_contribution(
    run: Run, store: Store, tmp_path: Path, damage: bytes
) -> None:
    ledger = Ledger(run, store, MODULE)
    for number in (1, 2):
        ledger.add(contribution(run, number)[0])
    path = sorted((tmp_path / "documents").glob("open-*"))[0]
    path.write_bytes(damage)
    again = Ledger(run, store, MODULE)
    assert len(again.open) == 1 and not path.exists()


class Meanwhile(Store):
    """What a reader lists while the owner of the folder goes on."""

    def __init__(self, folder: Path, *, late: Sequence[str] = (), gone: Sequence[str] = ()) -> None:
        """The listing misses the documents `late`, and has those of `gone`, which are dropped before they are read."""
        super().__init__(folder, is_read_only=True)
        self._late, self._gone = late, gone

    def documents(self, prefix: str) -> list[str]:
        found = {*super().documents(prefix), *(name for name in self._gone if name.startswith(prefix))}
        return sorted(found - {*self._late})


def test_a_reader_sees_a_whole_chain_while_its_owner_goes_on(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    one, other = contribution(run, 1), contribution(run, 2)
    first, made = version_of(run, signer(9), [one], term=1)
    second, _ = version_of(run, signer(9), [other], term=1, after=made)
    for sealed in (first, second):
        ledger.append(sealed)
    late, settled = f"version-{MODULE}-00000001", f"open-{MODULE}-{one[0].id}"
    seen = Ledger(run, Meanwhile(store.folder, late=[late], gone=[settled]), MODULE, must_be_whole=True)
    assert (seen.versions, seen.kept) == ([first, second], {})


def test_a_missing_version_in_the_middle_is_found_and_a_reader_leaves_those_after_it(run: Run, store: Store) -> None:
    ledger = Ledger(run, store, MODULE)
    first, made = version_of(run, signer(9), [contribution(run, 1)], term=1)
    second, _ = version_of(run, signer(9), [contribution(run, 2)], term=1, after=made)
    for sealed in (first, second):
        ledger.append(sealed)
    store.drop_document(f"version-{MODULE}-00000001")
    reader = Store(store.folder, is_read_only=True)
    with pytest.raises(IntegrityError, match=f"version-{MODULE}-00000001.json is missing"):
        Ledger(run, reader, MODULE, must_be_whole=True)
    assert Ledger(run, reader, MODULE).versions == []
    assert store.documents("version-") == [f"version-{MODULE}-00000002"]
    assert Ledger(run, store, MODULE).versions == [] and store.documents("version-") == []
