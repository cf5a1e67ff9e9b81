"""What is forged, replayed, oversized or says what it must not, is counted, and neither kept nor shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from leaderboard_harness import (
    COORDINATOR,
    LEADER,
    MIRROR,
    MODULE,
    NOW_S,
    STRANGER,
    WORKER,
    Bench,
    changed,
    dump,
    page,
    signed_by,
)

from dipaco_p2p.protocol.documents import DOCUMENT_BYTES_MAX, ModuleVersion, seal
from dipaco_p2p.protocol.judgement import Judgement
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId
from leaderboard import ledger
from leaderboard.chains import REMEMBERED_MAX, Reason, Refusals
from leaderboard.database import Database
from leaderboard.ledger import Stage
from leaderboard.model import Mark

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def stored(bench: Bench) -> str:
    """Everything that would be written down."""
    return json.dumps([values for _, values in bench.stage.drain()])


# -- one document


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        pytest.param(lambda sealed: changed(sealed, term=7), Reason.SIGNATURE, id="changed after it was signed"),
        pytest.param(
            lambda sealed: sealed.cosigned({COORDINATOR.peer: sealed.signature}),
            Reason.SIGNATURE,
            id="a cosignature that is none",
        ),
        pytest.param(
            lambda sealed: changed(sealed, norm_rule="x" * DOCUMENT_BYTES_MAX), Reason.OVERSIZED, id="oversized"
        ),
    ],
)
async def test_a_forged_version_is_refused_and_those_beside_it_are_read(
    bench: Bench, forge: Callable[[Any], Any], reason: Reason
) -> None:
    [sealed], _ = bench.chain(1)
    for _ in range(3):
        assert await bench.refusals.read_page(ModuleVersion, page(forge(sealed), sealed)) == [sealed]
    assert bench.refused == {reason: 1}, "the same forgery again is not counted again"


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[" * 100_000, b"[1, null, []]", b'[{"document": "\\ud800", "signature": 3}]', b"\xff"]
)
async def test_what_is_no_page_is_refused(bench: Bench, body: bytes) -> None:
    assert await bench.refusals.read_page(ModuleVersion, body) == []
    assert set(bench.refused) == {Reason.MALFORMED}


def test_what_is_remembered_of_refusals_is_bounded() -> None:
    refusals = Refusals()
    for number in range(REMEMBERED_MAX + 10):
        refusals.note(Reason.MALFORMED, number)
    assert len(refusals._seen) == REMEMBERED_MAX and refusals.counts[Reason.MALFORMED] == REMEMBERED_MAX + 10


# -- chains


def test_a_chain_is_taken_and_marked_by_who_has_signed(bench: Bench) -> None:
    [first, second, third], _ = bench.chain(3)
    bench.take(signed_by(first, MIRROR, COORDINATOR), signed_by(second, MIRROR), third)
    assert [bench.row(number).mark for number in range(4)] == [
        Mark.VERIFIED,
        Mark.VERIFIED,
        Mark.RECEIPTED,
        Mark.CLAIMED,
    ]
    assert bench.row(2).cosigners == (MIRROR.peer,) and bench.refused == {}


def test_who_is_not_of_the_group_makes_nothing_receipted(bench: Bench) -> None:
    [sealed], _ = bench.chain(1)
    bench.take(signed_by(sealed, STRANGER))
    assert bench.row(1).mark is Mark.CLAIMED and bench.row(1).cosigners == ()
    assert STRANGER.peer not in stored(bench)


def test_signatures_that_come_later_change_the_mark_and_the_authors_own_does_not(bench: Bench) -> None:
    [sealed], _ = bench.chain(1)
    marks = {None: Mark.CLAIMED, LEADER: Mark.CLAIMED, MIRROR: Mark.RECEIPTED, COORDINATOR: Mark.VERIFIED}
    for signer, mark in marks.items():
        bench.take(signed_by(sealed, *filter(None, [signer])))
        assert bench.row(1).mark is mark
    assert {MIRROR.peer, COORDINATOR.peer} <= set(bench.row(1).cosigners) <= {one.peer for one in marks if one}


def test_a_version_that_does_not_name_its_parents_digest_is_not_shown_whoever_signed(bench: Bench) -> None:
    [first, second], _ = bench.chain(2)
    wrong = seal(LEADER, replace(second.document, parent="0" * 64))
    bench.take(signed_by(first, COORDINATOR), signed_by(wrong, COORDINATOR))
    assert bench.digests == [first.document.digest] and bench.refused == {Reason.SUCCESSOR: 1}


async def test_a_coordinators_signature_under_another_digest_verifies_nothing(bench: Bench) -> None:
    [first], _ = bench.chain(1)
    other = seal(LEADER, replace(first.document, snapshot=replace(first.document.snapshot, digest="1" * 64)))
    moved = other.cosigned(signed_by(first, COORDINATOR).cosignatures)
    bench.take(*await bench.refusals.read_page(ModuleVersion, page(moved)))
    assert bench.digests == [] and bench.refused == {Reason.SIGNATURE: 1}
    bench.take(other)
    assert bench.row(1).mark is Mark.CLAIMED


def test_a_gap_another_order_and_a_repetition_are_cut_where_they_begin(bench: Bench) -> None:
    versions, _ = bench.chain(3)
    bench.take(versions[1])
    assert bench.digests == []
    bench.take(versions[0], versions[2], versions[1])
    assert bench.digests == [versions[0].document.digest]
    bench.take(versions[0], versions[0])
    assert bench.digests == [versions[0].document.digest]
    bench.take(*versions)
    assert len(bench.digests) == 3


def test_a_leader_that_no_mandate_names_is_not_shown(bench: Bench) -> None:
    sealed, _ = bench.make(leader=STRANGER)
    bench.take(sealed)
    assert bench.digests == [] and bench.refused == {Reason.LEADER: 1}
    assert STRANGER.peer not in stored(bench)
    bench.take(signed_by(sealed, COORDINATOR))
    assert bench.row(1).mark is Mark.VERIFIED


def test_an_older_chain_that_is_told_again_changes_nothing(bench: Bench) -> None:
    versions, _ = bench.chain(3)
    bench.take(*[signed_by(sealed, MIRROR) for sealed in versions])
    bench.stage.drain()
    bench.take(versions[0])
    bench.take(*versions[:2])
    assert len(bench.digests) == 3 and bench.stage.drain() == [] and bench.refused == {}
    assert {bench.row(number).mark for number in (1, 2, 3)} == {Mark.RECEIPTED}


def test_what_is_final_is_never_replaced(bench: Bench) -> None:
    ours, _ = bench.chain(1)
    longer, _ = bench.chain(4, seed=50)
    bench.take(signed_by(ours[0], COORDINATOR))
    bench.take(*longer)
    assert bench.digests == [ours[0].document.digest] and bench.refused == {Reason.FINAL: 1}


def test_a_better_branch_takes_the_place_of_what_is_not_final_with_its_credit(bench: Bench) -> None:
    [first], made = bench.chain(1)
    worse, _ = bench.make(made, seed=10)
    better, after = bench.make(made, seed=20)
    last, _ = bench.make(after, seed=30)
    bench.take(signed_by(first, COORDINATOR), worse)
    bench.stage.take_contributions(bench.contributions)
    lost = worse.document.shares[0].contribution
    assert lost in bench.stage.contributions
    before = bench.snapshot().credit_total
    bench.take(better, last)
    assert bench.digests == [sealed.document.digest for sealed in (first, better, last)]
    assert bench.snapshot().credit_total == pytest.approx(before * 3 / 2)
    assert lost not in bench.stage.contributions
    bench.take(worse)  # replayed
    assert bench.digests == [sealed.document.digest for sealed in (first, better, last)]


def test_a_branch_that_was_given_up_leaves_nothing_in_the_tables(bench: Bench, database: Database) -> None:
    [first], made = bench.chain(1)
    worse, _ = bench.make(made, seed=10)
    better, after = bench.make(made, seed=20)
    last, _ = bench.make(after, seed=30)
    for found in ([first, worse], [first, better, last]):
        bench.take(*found)
        bench.stage.take_contributions(one for one in bench.contributions if bench.stage.missing().count(one.id))
        database.write(bench.stage.drain())
    other = Stage(bench.run, Refusals())
    other.take_grants(MODULE, [bench.grant])
    other.take_versions(MODULE, [first, better, last], now_s=NOW_S)
    other.take_contributions(one for one in bench.contributions if one.id in other.missing())
    with closing(Database.open(None)) as straight:
        straight.write(other.drain())
        assert dump(database, "records") == dump(straight, "records")
    assert bench.stage.recorded == other.recorded and bench.stage.contributions == other.contributions


def test_what_a_chain_counts_once_it_does_not_count_again(bench: Bench) -> None:
    [first, second], _ = bench.chain(2)
    share = replace(first.document.shares[0], base_version=0)
    twice = seal(LEADER, replace(second.document, shares=(share,)))
    bench.take(signed_by(first, COORDINATOR), signed_by(twice, COORDINATOR))
    assert bench.digests == [first.document.digest] and bench.refused == {Reason.SUCCESSOR: 1}


def test_a_branch_that_the_coordinator_signed_beats_a_longer_one(bench: Bench) -> None:
    longer, _ = bench.chain(3)
    final, _ = bench.chain(1, seed=70)
    bench.take(*longer)
    bench.take(signed_by(final[0], COORDINATOR))
    assert bench.digests == [final[0].document.digest]
    assert not set(bench.digests) & {sealed.document.digest for sealed in longer}


@pytest.mark.parametrize("change", [{"peer": PeerId(SCRIPT)}, {"path": PathId((0, 1, 0))}, {"path": PathId((0, 0, 7))}])
def test_a_leader_cannot_credit_scripts_nor_paths_that_are_not_the_modules(bench: Bench, change: Any) -> None:
    [sealed], _ = bench.chain(1)
    share = replace(sealed.document.shares[0], **change)
    bench.take(seal(LEADER, replace(sealed.document, shares=(share,))))
    assert bench.digests == [] and bench.refused == {Reason.SUCCESSOR: 1}
    assert SCRIPT not in stored(bench) and SCRIPT not in repr(bench.snapshot())


def test_versions_of_another_module_or_run_are_refused(bench: Bench) -> None:
    [sealed], _ = bench.chain(1)
    bench.stage.take_versions(ModuleId(1, 1), [sealed], now_s=NOW_S)
    bench.take(seal(LEADER, replace(sealed.document, run="0" * 64)))
    assert bench.refused == {Reason.MODULE: 1, Reason.RUN: 1} and bench.digests == []


# -- judgements


def test_only_the_coordinator_judges(bench: Bench) -> None:
    [sealed], _ = bench.chain(1)
    bench.take(signed_by(sealed, COORDINATOR))
    bench.stage.take_judgements([bench.judgement(1, sealed.document.digest, author=LEADER)])
    assert bench.row(1).loss_after is None and bench.refused == {Reason.AUTHOR: 1}


def test_a_judgement_counts_only_for_the_parameters_that_it_names(bench: Bench) -> None:
    [first, second], _ = bench.chain(2)
    bench.take(signed_by(first, COORDINATOR), second)
    bench.stage.take_judgements([bench.judgement(1, first.document.digest), bench.judgement(2, "0" * 64, loss=1.0)])
    assert (bench.row(1).loss_after, bench.row(1).made_s) == (3.0, NOW_S + 1)
    assert (bench.row(2).loss_before, bench.row(2).loss_after, bench.row(2).made_s) == (3.0, None, NOW_S)
    assert [row.version for row in bench.rows().rounds] == [1]


def test_of_two_judgements_of_a_round_the_later_one_counts_in_either_order(bench: Bench) -> None:
    [first], _ = bench.chain(1)
    bench.take(first)
    early = bench.judgement(1, first.document.digest, loss=3.0)
    late = bench.judgement(1, first.document.digest, loss=2.0, at_s=NOW_S + 100)
    for order in ([early, late], [late, early]):
        bench.stage.judgements.clear()
        bench.stage.take_judgements(order)
        assert bench.row(1).loss_after == 2.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "0" * 64}, Reason.RUN),
        ({"version": 1000}, Reason.MODULE),
        ({"paths": "twice"}, Reason.MODULE),
        ({"loss": 1e308}, Reason.MALFORMED),
        ({"loss": -1.0}, Reason.MALFORMED),
    ],
)
def test_a_judgement_of_something_else_or_of_no_loss_is_refused(
    bench: Bench, change: dict[str, Any], reason: Reason
) -> None:
    sealed: Any = bench.judgement(1, "0" * 64)
    if "paths" in change:
        change = {"paths": sealed.document.paths * 2}
    bench.stage.take_judgements([seal(COORDINATOR, replace(sealed.document, **change))])
    assert bench.stage.judgements == {} and bench.refused == {reason: 1}


# -- contributions and receipts


def test_a_contribution_must_be_the_one_that_a_version_names(bench: Bench) -> None:
    [sealed], _ = bench.chain(1)
    bench.take(sealed)
    [named] = bench.contributions
    for change in ({"loss": 1.0}, {"run": "0" * 64}):
        bench.stage.take_contributions([seal(WORKER, replace(named.document, **change))])
    assert bench.refused == {Reason.IDENTITY: 1, Reason.RUN: 1} and bench.stage.contributions == {}
    assert bench.row(1).shares[0].bytes is None
    bench.stage.take_contributions([named])
    assert bench.row(1).shares[0].bytes == named.document.payload.size
    assert bench.row(1).shares[0].steps == named.document.steps


def test_a_leader_that_credits_another_peer_is_caught_by_the_contribution(bench: Bench) -> None:
    [sealed], _ = bench.chain(1)
    share = replace(sealed.document.shares[0], peer=STRANGER.peer)
    bench.take(seal(LEADER, replace(sealed.document, shares=(share,))))
    bench.stage.take_contributions(bench.contributions)
    assert bench.refused == {Reason.IDENTITY: 1}


@pytest.mark.parametrize(("more", "is_believed"), [(-1, True), (0, True), (1, False)])
def test_of_work_that_several_handed_in_a_part_counts_and_of_none_more_than_was_done(
    bench: Bench, more: int, is_believed: bool
) -> None:
    [sealed], _ = bench.chain(1)
    [share] = sealed.document.shares
    share = replace(share, tokens=share.tokens + more)
    bench.take(seal(LEADER, replace(sealed.document, shares=(share,), weight=share.tokens)))
    bench.stage.take_contributions(bench.contributions)
    assert bench.refused == ({} if is_believed else {Reason.IDENTITY: 1})
    assert bench.row(1).tokens == share.tokens


def test_a_receipt_shows_only_if_its_author_led_in_that_term(bench: Bench) -> None:
    [sealed], _ = bench.chain(1)
    bench.take(sealed)
    id_ = sealed.document.shares[0].contribution
    for author, changes, is_shown in ((STRANGER, {}, False), (LEADER, {"term": 9}, False), (LEADER, {}, True)):
        bench.stage.receipts.clear()
        bench.stage.take_receipts(MODULE, [bench.receipt(id_, author=author, **changes)])
        assert bench.row(1).shares[0].has_receipt is is_shown


def test_a_receipt_that_no_version_honours_is_a_loss_of_its_author(bench: Bench) -> None:
    lost, _ = bench.work(None, author=WORKER, seed=99)
    versions, _ = bench.chain(4)
    bench.stage.take_receipts(MODULE, [bench.receipt(lost.id)])
    bench.take(*versions[:2])
    assert bench.rows().losses == ()  # it may still come
    bench.take(*versions)
    assert bench.stage.missing()[-1] == lost.id
    bench.stage.take_contributions([lost])
    [row] = bench.rows().losses
    assert (row.contribution, row.peer, row.kind, row.round) == (lost.id, WORKER.peer, "lost", 0)
    [contributor] = [row for row in bench.snapshot().contributors if row.peer == WORKER.peer]
    assert contributor.lost == 1


def test_a_strangers_receipt_is_no_loss(bench: Bench) -> None:
    versions, _ = bench.chain(4)
    bench.take(*versions)
    bench.stage.take_receipts(MODULE, [bench.receipt("5" * 64, author=STRANGER)])
    assert bench.rows().losses == ()


def test_the_receipts_that_one_leader_makes_up_push_out_its_own_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of other modules, nor, in the file, the grants that were seen before."""
    monkeypatch.setattr(ledger, "RECEIPTS_MAX", 10)
    other, stage = ModuleId(2, 0), bench.stage
    stage.take_receipts(other, [bench.receipt("a" * 64, module=other)])
    for number in range(40):
        stage.take_receipts(MODULE, [bench.receipt(f"{number:064x}", round_=number % 5)])
        stage.take_receipts(MODULE, [bench.receipt("b" * 64, term=number)])
    assert "a" * 64 in stage.receipts and len(stage.receipts) <= 10
    with closing(Database.open(None)) as database:
        database.write(stage.drain())
        kinds = [kind for _, kind, *_ in dump(database, "witnessed")]
    assert kinds.count("receipt") == len(stage.receipts) and "grant" in kinds


# -- what is kept


def test_a_database_that_somebody_changed_shows_nothing_that_was_not_signed(bench: Bench, database: Database) -> None:
    versions, _ = bench.chain(2)
    bench.take(*[signed_by(sealed, COORDINATOR) for sealed in versions])
    database.write(bench.stage.drain())
    database._connection.execute(
        "UPDATE records SET sealed = replace(sealed, ?, ?) WHERE kind = 'version' AND number = 2",
        (WORKER.peer, STRANGER.peer),
    )
    refusals = Refusals()
    [stage] = database.load(refusals)
    assert [published.version.version for published in stage.chains[MODULE].versions] == [1]
    assert refusals.counts == {Reason.SIGNATURE: 1}


def test_what_was_stored_comes_back_as_it_was(bench: Bench, database: Database) -> None:
    [first, second], _ = bench.chain(2)
    bench.take(signed_by(first, MIRROR, COORDINATOR), signed_by(second, MIRROR))
    bench.stage.take_contributions(bench.contributions)
    bench.stage.take_judgements([bench.judgement(1, first.document.digest)])
    bench.stage.take_receipts(MODULE, [bench.receipt(second.document.shares[0].contribution, round_=1)])
    database.write(bench.stage.drain())
    before = bench.rows()
    [bench.stage] = database.load(bench.refusals)
    assert bench.rows() == before and bench.refused == {} and bench.row(2).mark is Mark.RECEIPTED


async def test_a_judgement_is_not_read_as_anything_else(bench: Bench) -> None:
    sealed = bench.judgement(1, "0" * 64)
    assert await bench.refusals.read_page(ModuleVersion, page(sealed)) == []
    assert await bench.refusals.read_page(Judgement, page(sealed)) == [sealed]
    assert bench.refused == {Reason.MALFORMED: 1}
