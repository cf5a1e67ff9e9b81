"""Losses that others measured again, and what leaders say that they refused: marked, counted, and nobody's harm."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collector_harness import Swarm
from leaderboard_harness import (
    COORDINATOR,
    LEADER,
    MIRROR,
    MODULE,
    NOW_S,
    PATH,
    STRANGER,
    TERM,
    WORKER,
    Bench,
    dump,
    page,
    signed_by,
)
from tiny_run import granted, signer

from dipaco_p2p.owner.rejections import OF_ROUND_MAX
from dipaco_p2p.protocol.documents import Rejection, Sealed, seal
from dipaco_p2p.protocol.judgement import OF_PATH_MAX, TOLERANCE_NATS, Check, ModuleLoss, PathLoss
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId, PathId
from leaderboard import ledger
from leaderboard.chains import Reason, Refusals
from leaderboard.database import Database
from leaderboard.model import LossChecks, Mark

LOSS, TOKENS = 3.0, 40


class Judged:
    """A bench whose first version is judged, on one path of all its modules."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        [self.first], _ = self.bench.chain(1)
        self.bench.take(signed_by(self.first, COORDINATOR))
        modules = PATH.modules()
        self.digests = {module: self.bench.stage.chains[module].genesis.digest for module in modules}
        self.digests[MODULE] = self.first.document.digest
        losses = tuple(ModuleLoss(module=one, digest=self.digests[one], loss=LOSS, tokens=TOKENS) for one in modules)
        paths = (PathLoss(path=PATH, loss=LOSS, holdout_loss=None),)
        judgement = self.bench.judgement(1, "0" * 64, loss=LOSS, modules=losses, paths=paths, tokens=TOKENS)
        self.bench.stage.take_judgements([judgement])

    def check(self, author: Signer, *, loss: float = LOSS, **changes: Any) -> Sealed[Check]:
        document = Check(
            run=self.bench.run.id,
            version=1,
            path=PATH,
            modules=tuple(self.digests[module] for module in PATH.modules()),
            sharding=0,
            validation=self.bench.run.manifest.validation.digest,
            nats=loss * TOKENS,
            tokens=TOKENS,
            at_s=NOW_S,
            author=author.peer,
        )
        return seal(author, replace(document, **changes))

    def take(self, *checks: Sealed[Check]) -> LossChecks:
        self.bench.stage.take_checks(checks)
        found = self.bench.row(1).loss_checks
        assert found is not None
        return found


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    return Judged(tmp_path)


# -- losses


def test_a_loss_that_only_the_coordinator_signed_is_receipted(judged: Judged) -> None:
    assert judged.take() == LossChecks(mark=Mark.RECEIPTED)
    assert judged.bench.row(0).loss_checks is None, "no loss, nobody stands for it"


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        pytest.param({STRANGER: LOSS + TOLERANCE_NATS / 2}, LossChecks(mark=Mark.VERIFIED, agree=1), id="independent"),
        pytest.param({WORKER: LOSS}, LossChecks(mark=Mark.RECEIPTED, agree=1), id="trained the path"),
        pytest.param({STRANGER: LOSS - 0.5}, LossChecks(mark=Mark.RECEIPTED, differ=1), id="only disagreement"),
        pytest.param(
            {STRANGER: LOSS, MIRROR: LOSS, LEADER: LOSS + 0.1},
            LossChecks(mark=Mark.VERIFIED, agree=2, differ=1),
            id="disagreement beside the mark",
        ),
    ],
)
def test_an_independent_peer_that_measures_the_same_verifies_a_loss(
    judged: Judged, measured: dict[Signer, float], expected: LossChecks
) -> None:
    assert judged.take(*(judged.check(author, loss=loss) for author, loss in measured.items())) == expected
    rows = {row.peer: (row.agrees, row.is_independent, row.published) for row in judged.bench.snapshot().checks}
    assert rows == {
        author.peer: (abs(loss - LOSS) <= TOLERANCE_NATS, author is not WORKER, LOSS)
        for author, loss in measured.items()
    }


def test_the_coordinators_own_check_is_refused(judged: Judged) -> None:
    assert judged.take(judged.check(COORDINATOR)) == LossChecks(mark=Mark.RECEIPTED)
    assert judged.bench.refused == {Reason.AUTHOR: 1}


def test_a_mean_that_its_paths_do_not_give_is_not_verified(judged: Judged) -> None:
    losses = tuple(
        ModuleLoss(module=one, digest=judged.digests[one], loss=LOSS - (one == MODULE), tokens=TOKENS)
        for one in PATH.modules()
    )
    paths = (PathLoss(path=PATH, loss=LOSS, holdout_loss=None),)
    later = judged.bench.judgement(1, "0" * 64, modules=losses, paths=paths, tokens=TOKENS, at_s=NOW_S + 99)
    judged.bench.stage.take_judgements([later])
    assert judged.take(judged.check(STRANGER)) == LossChecks(mark=Mark.RECEIPTED, agree=1, differ=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"validation": "0" * 64},
        {"modules": ("0" * 64,) * 3},
        {"modules": ()},
        {"sharding": 1},
        {"version": 2},
        {"tokens": TOKENS + 1},
        {"path": PathId((0, 1, 0))},
    ],
)
def test_what_is_about_something_else_changes_no_mark(judged: Judged, changes: dict[str, Any]) -> None:
    assert judged.take(judged.check(STRANGER, **changes)) == LossChecks(mark=Mark.RECEIPTED)
    assert judged.bench.snapshot().checks == ()


async def test_forged_replayed_and_countless_checks_are_refused(judged: Judged) -> None:
    stage, refusals = judged.bench.stage, judged.bench.refusals
    honest = judged.check(STRANGER).to_dict()
    for change in ({"nats": 1.0}, {"nats": -1.0}, {"tokens": 2**41}, {"author": MIRROR.peer}, {"more": 1}):
        assert await refusals.read_page(Check, page({**honest, "document": {**honest["document"], **change}})) == []
    assert await refusals.read_page(Check, b'[{"document": {"nats": NaN}, "signature": ""}]') == []
    assert set(refusals.counts) == {Reason.SIGNATURE, Reason.MALFORMED}
    refusals.counts.clear()
    stage.take_checks([judged.check(STRANGER), judged.check(STRANGER, loss=9.0), judged.check(STRANGER)])
    stage.take_checks([judged.check(MIRROR, run="0" * 64), judged.check(MIRROR, path=PathId((0, 7, 7)))])
    assert judged.bench.refused == {Reason.AGAIN: 1, Reason.RUN: 1, Reason.MODULE: 1}
    stage.take_checks(judged.check(signer(number)) for number in range(20, 20 + OF_PATH_MAX + 5))
    assert len(stage.checks[1, PATH]) == OF_PATH_MAX and judged.bench.refused[Reason.TOO_MANY] == 6


def test_what_is_kept_in_all_is_bounded(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaderboard.ledger.IN_ALL_MAX", 1)
    monkeypatch.setattr("leaderboard.ledger.REJECTIONS_MAX", 1)
    judged.bench.stage.take_checks([judged.check(STRANGER), judged.check(MIRROR)])
    judged.bench.stage.take_rejections(MODULE, [rejection(judged.bench, seed=number) for number in (50, 51)])
    assert judged.bench.refused == {Reason.TOO_MANY: 1}
    assert len(judged.bench.stage.checks) == len(judged.bench.stage.rejections) == 1


def test_credit_does_not_look_at_checks(judged: Judged) -> None:
    before = judged.bench.snapshot()
    judged.take(judged.check(STRANGER, loss=9.0), judged.check(WORKER))
    after = judged.bench.snapshot()
    assert after.credit_total == before.credit_total > 0
    assert {row.peer: row.credit for row in after.contributors if row.credit} == {
        row.peer: row.credit for row in before.contributors if row.credit
    }


# -- rejections


def rejection(bench: Bench, *, seed: int = 50, author: Signer = LEADER, **changes: Any) -> Sealed[Rejection]:
    sealed, _ = bench.work(None, seed=seed)
    note = Rejection(
        contribution=sealed.document,
        signature=sealed.signature,
        reason="stale-base",
        round=0,
        term=TERM,
        author=author.peer,
    )
    return seal(author, replace(note, **changes))


def test_what_a_leader_refused_is_shown_as_its_claim_and_costs_nobody_anything(judged: Judged) -> None:
    bench = judged.bench
    before = bench.snapshot()
    bench.stage.take_rejections(MODULE, [rejection(bench), rejection(bench)])
    after = bench.snapshot()
    [row] = after.losses
    said = (row.kind, row.reason, row.claimed_by, row.peer, row.round)
    assert said == ("rejected", "stale-base", LEADER.peer, WORKER.peer, 0)
    [worker] = [one for one in after.contributors if one.peer == WORKER.peer]
    assert (worker.rejected, worker.lost, after.credit_total) == (1, 0, before.credit_total)


def test_a_note_on_what_a_version_counts_is_not_shown(judged: Judged) -> None:
    counted = judged.bench.contributions[0]
    note = rejection(judged.bench, contribution=counted.document, signature=counted.signature)
    judged.bench.stage.take_rejections(MODULE, [note])
    assert judged.bench.snapshot().losses == ()


def test_nobody_but_a_leader_can_leave_a_note_and_none_can_invent_a_contribution(judged: Judged) -> None:
    bench = judged.bench
    invented = replace(rejection(bench).document.contribution, loss=99.0)
    wrong = {
        Reason.LEADER: rejection(bench, author=STRANGER),
        Reason.SIGNATURE: rejection(bench, contribution=invented),
        Reason.RUN: rejection(bench, contribution=replace(invented, run="0" * 64)),
        Reason.MODULE: rejection(bench, round=10**6),
    }
    for reason, sealed in wrong.items():
        bench.refusals.counts.clear()
        bench.stage.take_rejections(MODULE, [sealed])
        assert bench.refused == {reason: 1}
    assert bench.snapshot().losses == ()


def test_a_leaders_notes_are_bounded(judged: Judged) -> None:
    bench = judged.bench
    made = bench.work(None, seed=1)[0].document
    for number in range(OF_ROUND_MAX + 2):
        sealed = seal(WORKER, replace(made, loss=float(number)))
        note = rejection(bench, contribution=sealed.document, signature=sealed.signature)
        bench.stage.take_rejections(MODULE, [note])
    assert len(bench.stage.rejections) == OF_ROUND_MAX and bench.refused == {Reason.TOO_MANY: 2}


def test_the_notes_that_one_leader_makes_up_push_out_its_own_alone(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: it says that it refused as much as is kept of a stage; no other leader's note was taken from then on."""
    monkeypatch.setattr(ledger, "REJECTIONS_MAX", 10)
    bench, other = judged.bench, next(module for module in PATH.modules() if module != MODULE)
    bench.stage.take_grants(other, [granted(bench.run, other, term=TERM, leader=STRANGER.peer)])
    made = bench.work(None, seed=1)[0].document

    def take(number: int, *, module: ModuleId = MODULE, leader: Signer = LEADER) -> str:
        sealed = seal(WORKER, replace(made, module=module, loss=float(number)))
        note = rejection(bench, author=leader, contribution=sealed.document, signature=sealed.signature)
        bench.stage.take_rejections(module, [note])
        return sealed.id

    honest = [take(100, module=other, leader=STRANGER)]
    for number in range(40):
        take(number)
    honest.append(take(101, module=other, leader=STRANGER))
    assert len(bench.stage.rejections) <= 10 and bench.stage.rejections.keys() >= set(honest)
    with closing(Database.open(None)) as database:
        database.write(bench.stage.drain())
        assert [kind for _, kind, *_ in dump(database, "witnessed")].count("rejection") == len(bench.stage.rejections)


# -- over the network, and kept


async def test_a_collector_asks_for_both_and_finds_them_again_in_its_database(swarm: Swarm, tmp_path: Path) -> None:
    judged = Judged(tmp_path / "judged")
    bench = judged.bench
    leader = await swarm.begin()
    judgement = bench.stage.judgements[1]
    check, note = judged.check(STRANGER), rejection(bench)

    def items(*found: Sealed[Any]) -> Any:
        return lambda header: Reply({"next": 1}, page(*found) if not header.get("from") else page())

    swarm.seed.answer("run.judgements", lambda h: Reply({}, page(judgement) if h["from"] <= 1 else page()))
    swarm.seed.answer("run.checks", items(check))
    leader.answer("module.rejections", lambda h: Reply({}, page(note) if not h["after"] else page()))
    await leader.lead_with(signed_by(judged.first, COORDINATOR))
    for _ in range(11):
        snapshot = await swarm.look()
    [row] = [row for row in snapshot.versions if (row.module, row.version) == (MODULE, 1)]
    assert row.loss_checks == LossChecks(mark=Mark.VERIFIED, agree=1)
    assert [loss.kind for loss in snapshot.losses] == ["rejected"]
    await swarm.collector.poll()
    [stage] = swarm.database.load(Refusals())
    assert stage.checks == swarm.collector.stages[0].checks
    assert stage.rejections == swarm.collector.stages[0].rejections != {}
