"""What was said against work stays on the disk until a version tells of it, and not longer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from audit_scene import OFF, SAME
from tiny_run import appraisal_of, signer

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner import evidence
from dipaco_p2p.owner.evidence import EVIDENCE_VERSIONS, Evidence
from dipaco_p2p.protocol.documents import Sealed, seal
from dipaco_p2p.protocol.gate import NOTHING_GIVEN, Appraisal, Repetition
from dipaco_p2p.protocol.standing import Findings, Standings
from dipaco_p2p.topology import ModuleId

RUN, AUTHOR = digest(b"a run"), signer(1).peer


@dataclass
class Head:
    version: int = 3
    run: str = RUN


@dataclass
class Place:
    """In place of a node and of a ledger: what evidence looks at of them."""

    store: Store
    told: list[dict[str, Any]] = field(default_factory=list)
    module: ModuleId = field(default_factory=lambda: ModuleId(1, 0))
    head: Head = field(default_factory=Head)
    final: int = 3
    standings: Standings = field(default_factory=Standings)

    @property
    def history(self) -> Place:
        return self

    def add(self, event: str, **facts: Any) -> None:
        self.told.append({"ev": event, **facts})

    def evidence(self) -> Evidence:
        """As after a restart."""
        here: Any = self
        return Evidence(here, here)

    def tell(self, *, kind: str, work: str) -> None:
        """The next version finds this of the work, and is not final yet."""
        self.head = Head(self.head.version + 1)
        self.standings.add(self.head.version, authors=(), findings=Findings.of(**{kind: [(AUTHOR, work)]}))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(Store(tmp_path))


def said(name: str, auditor: int = 11, *, run: str = RUN, found: Repetition = OFF) -> Sealed[Appraisal]:
    work, author = digest(name.encode()), signer(auditor)
    appraisal = appraisal_of(author, run=run, work=work, of=AUTHOR, tokens=10, repeated=found)
    return seal(author, appraisal)


def test_it_is_there_after_a_restart_each_once(place: Place) -> None:
    kept = place.evidence()
    kept.keep([said("a"), said("a"), said("b")])
    kept.keep([said("a", 12)])
    assert len(kept.said()) == 3
    assert {one.id for one in place.evidence().said()} == {said("a").id, said("a", 12).id, said("b").id}
    assert [(event["work"], event["is_forged"]) for event in place.told][-1] == (digest(b"a"), True)


def test_the_history_tells_what_was_withheld_from_what_came_out_different(place: Place) -> None:
    kept = place.evidence()
    kept.keep([said("a", 11, found=NOTHING_GIVEN), said("a", 12)])
    kept.keep([said("a", 13)])
    assert [event["is_withheld"] for event in place.told] == [True, False]


def test_a_version_that_tells_of_it_ends_it_once_it_is_final(place: Place) -> None:
    kept = place.evidence()
    kept.keep([said("a"), said("b")])
    place.tell(kind="forged", work=digest(b"a"))
    assert [one.id for one in kept.said()] == [said("b").id]
    kept.settle()
    place.standings.drop_after(3)  # the branch with this version is given up
    assert len(kept.said()) == 2
    place.tell(kind="forged", work=digest(b"a"))
    place.final = place.head.version
    kept.settle()
    place.standings.drop_after(3)
    assert [one.id for one in kept.said()] == [one.id for one in place.evidence().said()] == [said("b").id]


def test_that_work_came_out_the_same_tells_nothing_of_what_was_found_since(place: Place) -> None:
    kept = place.evidence()
    place.tell(kind="repeated", work=digest(b"a"))
    kept.keep([said("a")])
    assert len(kept.said()) == 1


def test_what_no_version_tells_of_is_dropped_in_the_end(place: Place) -> None:
    kept = place.evidence()
    kept.keep([said("a")])
    place.head = Head(3 + EVIDENCE_VERSIONS)
    kept.settle()
    assert kept.said()
    place.head = Head(4 + EVIDENCE_VERSIONS)
    kept.settle()
    assert not kept.said() and not place.evidence().said()


def test_of_too_much_the_oldest_is_dropped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "EVIDENCE_MAX", 2)
    kept = place.evidence()
    kept.keep([said("a")])
    kept.keep([said("b"), said("c")])
    assert {one.id for one in place.evidence().said()} == {said("b").id, said("c").id}


def test_what_is_of_another_run_or_names_sequences_of_its_own_is_not_kept(place: Place) -> None:
    kept, chosen = place.evidence(), said("a")
    kept.keep([said("a", run=digest(b"another run"))])
    assert not kept.said()
    with pytest.raises(IntegrityError, match="draw"):
        kept.keep([seal(signer(11), replace(chosen.document, repeated=SAME, draw="ab" * 64))])


def test_what_was_damaged_on_disk_is_left_out(place: Place, tmp_path: Path) -> None:
    place.evidence().keep([said("a"), said("b")])
    [path] = (tmp_path / "documents").glob(f"*{digest(b'a')}.json")
    path.write_bytes(path.read_bytes()[:-9])
    assert [one.id for one in place.evidence().said()] == [said("b").id]
    assert not path.exists()
