"""What versions find of works is in the rows: of whom, how often, and how that peer stands now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from leaderboard_harness import LEADER, MIRROR, MODULE, NOW_S, STRANGER, WORKER, Bench

from dipaco_p2p.canonical import digest
from dipaco_p2p.config import JudgingConfig
from dipaco_p2p.protocol.audits import Audit
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.standing import Findings
from leaderboard.model import ContributorRow, Snapshot
from leaderboard.snapshot import take_snapshot

AUDITED = JudgingConfig(audited=2)
AUDITORS = sorted((STRANGER.peer, MIRROR.peer))
FIRST, SECOND = digest(b"a work"), digest(b"another work")
FORGED = Findings.of(forged=[(STRANGER.peer, FIRST)], failed=[(WORKER.peer, SECOND)])
REPEATED = Findings.of(repeated=[(WORKER.peer, FIRST)])


def told(folder: Path, *found: Findings | None, **how: Any) -> Bench:
    """A chain of work by WORKER, whose versions find this."""
    bench = Bench(folder, **how)
    versions, _ = bench.chain(len(found))
    noted = (replace(sealed.document, findings=findings) for sealed, findings in zip(versions, found, strict=True))
    bench.take(*(seal(LEADER, document) for document in noted))
    assert bench.refused == {}
    return bench


def of(snapshot: Snapshot, peer: str) -> ContributorRow:
    [row] = [row for row in snapshot.contributors if row.peer == peer]
    return row


def test_versions_and_contributors_say_what_was_found(tmp_path: Path) -> None:
    bench = told(tmp_path, REPEATED, FORGED, None, judging=AUDITED)
    assert [bench.row(number).findings for number in range(4)] == [Findings(), REPEATED, FORGED, Findings()]
    worker, forger = (of(bench.snapshot(), peer) for peer in (WORKER.peer, STRANGER.peer))
    assert (worker.repeated, worker.forged) == (1, 0)
    assert worker.standings == ((MODULE, "doubted: weighs half; on probation: 1 of 2 repeated"),)
    assert (forger.repeated, forger.forged, forger.contributions, forger.credit) == (0, 1, 0, 0)
    assert forger.standing == "waits: nothing counts for 7 versions"


def test_works_of_all_stages_are_counted_and_only_the_open_one_says_how_a_peer_stands(tmp_path: Path) -> None:
    before = told(tmp_path / "before", REPEATED, FORGED, judging=AUDITED)
    now = told(tmp_path / "now", REPEATED, None, rounds=5, judging=JudgingConfig(audited=1))
    snapshot = take_snapshot((before.stage, now.stage), refused={}, now_s=NOW_S)
    worker, forger = (of(snapshot, peer) for peer in (WORKER.peer, STRANGER.peer))
    assert (worker.repeated, worker.standing) == (2, "full")
    assert (forger.forged, forger.standings, forger.standing) == (1, (), "")


def test_audits_are_part_of_the_credit_and_those_that_are_contradicted_are_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path, judging=AUDITED)
    versions, _ = bench.chain(3)
    works = [sealed.document.shares[0] for sealed in versions]
    audits = [tuple(Audit(work=share.work, by=peer, tokens=share.tokens) for share in works[:1]) for peer in AUDITORS]
    named = (
        replace(versions[0].document, audits=audits[0]),
        replace(versions[1].document, audits=audits[1]),
        replace(versions[2].document, findings=Findings.of(contradicted=[(AUDITORS[0], FIRST)])),
    )
    bench.take(*(seal(LEADER, document) for document in named[:2]))
    assert bench.refused == {}
    credit = bench.row(1).shares[0].credit
    for peer in AUDITORS:
        row = of(bench.snapshot(), peer)
        assert (row.credit, row.audit_credit, row.audits, row.contributions) == (credit, credit, 1, 0)
    assert bench.snapshot().credit_total == pytest.approx(4 * credit)
    bench.take(*(seal(LEADER, document) for document in named))
    assert [audit.credit for number in (1, 2) for audit in bench.row(number).audits] == [0.0, credit]
    assert [row.peer for row in bench.snapshot().contributors if row.audits] == [AUDITORS[1]]
    assert bench.snapshot().credit_total == pytest.approx(4 * credit)


def test_a_leader_that_names_an_audit_again_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, judging=AUDITED)
    versions, _ = bench.chain(2)
    [share] = versions[0].document.shares
    audits = (Audit(work=share.work, by=AUDITORS[0], tokens=share.tokens),)
    bench.take(*(seal(LEADER, replace(sealed.document, audits=audits)) for sealed in versions))
    assert bench.stage.chains[MODULE].head.version == 1 and sum(bench.refused.values()) == 1
    assert of(bench.snapshot(), AUDITORS[0]).audits == 1


def test_where_nobody_audits_everybody_stands_in_full(tmp_path: Path) -> None:
    bench = told(tmp_path, None, None)
    assert of(bench.snapshot(), WORKER.peer).standings == ((MODULE, "full"),)


def test_a_version_that_is_given_up_leaves_no_finding_behind(tmp_path: Path) -> None:
    bench = told(tmp_path, FORGED, judging=AUDITED)
    better, _ = bench.chain(2, seed=7)
    bench.take(*better)
    assert bench.row(1).findings == Findings() and bench.stage.chains[MODULE].head.version == 2
    assert [row.peer for row in bench.snapshot().contributors] == [WORKER.peer]
    assert of(bench.snapshot(), WORKER.peer).standing == "on probation: 0 of 2 repeated"
