"""What versions find of works is in the rows: of whom, how often, and how that peer stands now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from leaderboard_harness import LEADER, MODULE, NOW_S, STRANGER, WORKER, Bench

from dipaco_p2p.config import JudgingConfig
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.standing import Findings
from leaderboard.model import ContributorRow, Snapshot
from leaderboard.snapshot import Inputs, take_snapshot

AUDITED = JudgingConfig(audited=2)
FORGED = Findings(forged=(STRANGER.peer,), failed=(WORKER.peer,))
REPEATED = Findings(repeated=(WORKER.peer,))


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
    snapshot = take_snapshot(Inputs(stages=(before.stage, now.stage), refused={}), now_s=NOW_S)
    worker, forger = (of(snapshot, peer) for peer in (WORKER.peer, STRANGER.peer))
    assert (worker.repeated, worker.standing) == (2, "full")
    assert (forger.forged, forger.standings, forger.standing) == (1, (), "")


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
