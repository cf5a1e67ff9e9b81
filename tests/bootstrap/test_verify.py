"""Verifying a finished run: an honest one passes, and whatever was changed in it is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import SEED_NUMBER, make_run, signer, tiny_config

from bootstrap.archives.verify import ChainReport, print_chains, recompute, verify_run
from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.protocol.documents import ModuleVersion, seal, unseal
from dipaco_p2p.protocol.standing import Standings
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(0, 0)
UNEARNED = "does not follow from its contributions"
SIGNERS = {signer(number).peer: signer(number) for number in (1, 2, 3, 4, SEED_NUMBER)}


@pytest.fixture
def run(finished: tuple[Run, Path]) -> Run:
    return finished[0]


@pytest.fixture
def store(finished: tuple[Run, Path], tmp_path: Path) -> Store:
    """A copy of the archive, to do harm to."""
    shutil.copytree(finished[1], tmp_path / "copy")
    return Store(tmp_path / "copy")


def verify(run: Run, store: Store) -> dict[ModuleId, ChainReport]:
    return {report.module: report for report in verify_run(run, store, SeedArchive(run, store))}


def first_version(run: Run, store: Store) -> ModuleVersion:
    return SeedArchive(run, store).ledgers[MODULE].versions[0].document


def flip(store: Store, name: str) -> None:
    [path] = (store.folder / "blobs").rglob(name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def forge(run: Run, store: Store, change: Callable[[ModuleVersion], ModuleVersion]) -> None:
    """Let the leader itself sign another first version in place of the honest one."""
    version = change(first_version(run, store))
    sealed = seal(SIGNERS[version.author], version)
    store.write_document(f"version-{MODULE}-00000001", canonical_bytes(sealed.to_dict()))


def test_an_honest_run_verifies_with_every_contribution(run: Run, store: Store) -> None:
    done: list[int] = []
    reports = verify_run(run, store, SeedArchive(run, store), on_progress=done.append)
    assert [report.problem for report in reports] == [""] * 5
    assert [report.versions for report in reports] == [2] * 5
    # Two rounds of four paths, of which each module below the trunk has two.
    assert [report.contributions for report in reports] == [8, 4, 4, 4, 4]
    assert done == list(range(1, 11))


def payload_of(run: Run, store: Store) -> str:
    share = first_version(run, store).shares[0]
    return SeedArchive(run, store).contribution(share.contribution).document.payload.digest


def name_of(run: Run, store: Store) -> str:
    """The document of the first contribution that counted."""
    return f"contribution-{first_version(run, store).shares[0].contribution}"


def change_contribution(run: Run, store: Store) -> None:
    name = name_of(run, store)
    value = json.loads(store.read_document(name) or b"")
    value["document"]["tokens"] -= 1
    store.write_document(name, canonical_bytes(value))


def shift(version: ModuleVersion) -> ModuleVersion:
    first, second, *rest = version.shares
    moved = (replace(first, weight=first.weight + 0.01), replace(second, weight=second.weight - 0.01))
    return replace(version, shares=(*moved, *rest))


def leave_out(version: ModuleVersion) -> ModuleVersion:
    gone, *rest = version.shares
    rest[0] = replace(rest[0], tokens=rest[0].tokens + gone.tokens)  # the chain weighs what it did
    total = sum(share.weight for share in rest)
    return replace(version, shares=tuple(replace(share, weight=share.weight / total) for share in rest))


HARM: dict[str, tuple[Callable[[Run, Store], None], str]] = {
    "a flipped byte": (lambda run, store: flip(store, payload_of(run, store)), "damaged"),
    "a missing payload": (lambda run, store: store.drop(payload_of(run, store)), "missing"),
    "a missing contribution": (lambda run, store: store.drop_document(name_of(run, store)), "not in the archive"),
    "a changed contribution": (change_contribution, "signature"),
    "a changed weight": (lambda run, store: forge(run, store, shift), UNEARNED),
    "a contribution left out": (lambda run, store: forge(run, store, leave_out), UNEARNED),
    "another clip norm": (lambda run, store: forge(run, store, lambda v: replace(v, clip_norm=1e-6)), UNEARNED),
    "a damaged genesis": (lambda run, store: flip(store, run.manifest.genesis[0].blob.digest), "damaged"),
}


@pytest.mark.parametrize("harm", HARM)
def test_harm_to_a_module_is_found_in_it_and_only_there(run: Run, store: Store, harm: str) -> None:
    do, words = HARM[harm]
    do(run, store)
    reports = verify(run, store)
    assert words in reports[MODULE].problem
    assert all(not report.problem for module, report in reports.items() if module != MODULE)


def test_a_chain_that_says_it_weighs_more_is_found(run: Run, store: Store) -> None:
    forge(run, store, lambda version: replace(version, weight=version.weight + 1))
    with pytest.raises(IntegrityError, match="its chain weighs"):
        verify(run, store)


def test_versions_can_be_read_by_anybody(run: Run, store: Store) -> None:
    for name in store.documents("version-"):
        unseal(ModuleVersion, json.loads(store.read_document(name) or b""))


def test_a_sharding_that_the_archive_lacks_is_named(tmp_path: Path) -> None:
    """As one published in the seconds before a disk was lost may be lacking."""
    run: Any = make_run(Store(tmp_path), tiny_config())
    counted = SimpleNamespace(document=SimpleNamespace(sharding=1))
    archive: Any = SimpleNamespace(contribution=lambda id_: counted)
    version: Any = SimpleNamespace(shares=[SimpleNamespace(contribution="0" * 64)], rollback=None)
    with pytest.raises(IntegrityError, match="sharding 1 is not in the archive"):
        recompute(
            run, Store(tmp_path), archive, version, version, version, norms=run.norms(MODULE, []), standings=Standings()
        )


# -- of an archive that keeps the last rounds alone


def thin(run: Run, store: Store, *, rounds: int = 1, **more: Any) -> None:
    archive = SeedArchive(run, store)
    archive.thinning.retention = Retention(rounds=rounds, **more)
    for ledger in archive.ledgers.values():
        for name in archive.thinning.thin(ledger):
            store.drop(name)


def test_of_a_thinned_archive_the_last_rounds_are_made_again_and_the_others_are_signed(run: Run, store: Store) -> None:
    thin(run, store)
    reports = verify(run, store)
    assert {report.words for report in reports.values()} == {
        "to the bit from version 2 on; up to 1 as the coordinator signed them"
    }
    assert [report.contributions for report in reports.values()] == [4, 2, 2, 2, 2]


def unsign(run: Run, store: Store) -> None:
    """Whoever leads alone signs what it likes: without the coordinator's signature that is worth nothing."""
    forge(run, store, lambda version: replace(version, author=signer(1).peer))


def drop_base(run: Run, store: Store) -> None:
    ref = first_version(run, store).state
    assert ref is not None
    store.drop(ref.digest)


THINNED_HARM: dict[str, tuple[Callable[[Run, Store], None], str]] = {
    "a version that nobody made again": (unsign, "the coordinator did not sign it"),
    "parameters that were changed": (lambda run, store: flip(store, first_version(run, store).digest), "damaged"),
    "an outer state that is lost": (drop_base, "missing"),
}


@pytest.mark.parametrize("harm", THINNED_HARM)
def test_harm_to_what_a_thinned_archive_keeps_is_found(run: Run, store: Store, harm: str) -> None:
    do, words = THINNED_HARM[harm]
    thin(run, store)
    do(run, store)
    reports = verify(run, store)
    assert words in reports[MODULE].problem
    assert all(not report.problem for module, report in reports.items() if module != MODULE)


def test_a_coordinator_at_work_may_drop_what_is_about_to_be_read(run: Run, store: Store) -> None:
    archive = SeedArchive(run, store)
    for module in archive.ledgers:
        archive.thinning.of(module)  # read before
    thin(run, store)
    assert [report.problem for report in verify_run(run, store, archive)] == [""] * 5


def test_a_problem_is_shown_as_text_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    report = ChainReport(stage="grid", module=MODULE, versions=1, contributions=2, problem="it says `[/red]`")
    with pytest.raises(IntegrityError, match="1 of 1 chains"):
        print_chains([report])
    assert "[/red]" in capsys.readouterr().out
