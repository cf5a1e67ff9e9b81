"""Admission: every reason for a refusal, the order of the checks, and what counts once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from version_harness import MODULE, PATH, child

from dipaco_p2p.canonical import digest
from dipaco_p2p.protocol.admission import (
    AdmissionRules,
    Hold,
    Verdict,
    judge,
    judge_claim,
    judge_decreed,
    judge_norm,
)
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.documents import BlobRef, Contribution, document_id
from dipaco_p2p.protocol.norms import Norms
from dipaco_p2p.protocol.reasons import ADMISSION, PASSING, Reason
from dipaco_p2p.protocol.references import Recipe
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.topology import ModuleId, PathId, Topology

ALICE, BOB = Signer(bytes([1]) * 32).peer, Signer(bytes([2]) * 32).peer
RUN = digest(b"run")
HEAD_VERSION = 5
DIGESTS = {version: digest(b"version %d" % version) for version in range(10)}

HEAD = dataclasses.replace(
    child(),
    run=RUN,
    version=HEAD_VERSION,
    parent=DIGESTS[4],
    snapshot=BlobRef(digest=DIGESTS[HEAD_VERSION], size=100),
)
NORMS = Norms(history=[], paths=2, size=10_000, lr_sum=lambda base: 0.1)
RULES = AdmissionRules(
    shardings={0: 0, 1: 5, 2: 6},
    run=RUN,
    head=HEAD,
    bases={version: DIGESTS[version] for version in (4, 5)},  # staleness 1
    paths=Topology((1, 2, 2)).paths_through(MODULE),
    rounds=16,
    payload_bytes_max=1000,
    tokens_max=5000,
    contributed={},
    norms=NORMS,
    places=4,
)
GOOD = Contribution(
    run=RUN,
    module=MODULE,
    path=PATH,
    base_version=HEAD_VERSION,
    base_digest=DIGESTS[HEAD_VERSION],
    payload=BlobRef(digest=digest(b"payload"), size=1000),
    steps=30,
    tokens=5000,
    loss=2.0,
    author=ALICE,
)


def verdict(
    contribution: Contribution = GOOD, *, sender: PeerId = ALICE, norm: float | None = None, **rules: Any
) -> Verdict:
    id_, facts = document_id(contribution), dataclasses.replace(RULES, **rules)
    return judge(contribution, sender=sender, contribution_id=id_, rules=facts, norm=norm)


def reason(sender: PeerId = ALICE, rules: dict[str, Any] | None = None, **changes: Any) -> Reason | None:
    return verdict(dataclasses.replace(GOOD, **changes), sender=sender, **rules or {}).reason


def on(version: int) -> dict[str, Any]:
    """The base of a contribution, by its right digest."""
    return {"base_version": version, "base_digest": DIGESTS[version]}


TOO_BIG = BlobRef(digest=digest(b"payload"), size=1001)

# In the order in which they are checked.
FAULTS: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.WRONG_RUN, {"run": digest(b"another run")}),
    (Reason.WRONG_MODULE, {"module": ModuleId(1, 0)}),
    (Reason.WRONG_PATH, {"path": PathId((0, 0, 0))}),
    (Reason.NOT_AUTHOR, {"sender": BOB}),
    (Reason.OVERSIZED, {"payload": TOO_BIG}),
    (Reason.MALFORMED, {"tokens": 5001}),
    (Reason.ALREADY_CONTRIBUTED, {"rules": {"contributed": {(ALICE, PATH, 5): digest(b"another")}}}),
    (Reason.COMPLETE, {"rules": {"rounds": HEAD_VERSION}}),
    (Reason.STALE_BASE, on(3)),
    (Reason.MALFORMED, {"recipe": Recipe(round=6, place=0, replicas=1)}),
]


def test_the_good_one_is_admitted_at_its_limits() -> None:
    assert verdict() == Verdict(None)
    assert verdict().is_admitted


@pytest.mark.parametrize(("expected", "fault"), FAULTS)
def test_each_fault_has_its_reason(expected: Reason, fault: dict[str, Any]) -> None:
    assert reason(**fault) is expected


@pytest.mark.parametrize("place", range(len(FAULTS) - 4))
def test_the_earlier_fault_is_told(place: int) -> None:
    """Down to the payload's size: run, module, path and author are right before anything else is looked at."""
    for _, later in FAULTS[place + 1 :]:
        expected, fault = FAULTS[place]
        assert reason(**{**later, **fault}) is expected


def test_a_refusal_says_why() -> None:
    for _, fault in FAULTS:
        changes = {key: value for key, value in fault.items() if key not in ("sender", "rules")}
        told = verdict(
            dataclasses.replace(GOOD, **changes), sender=fault.get("sender", ALICE), **fault.get("rules", {})
        )
        assert told.detail and not told.is_admitted


def test_bases_within_the_staleness_limit_count() -> None:
    assert {version: reason(**on(version)) for version in range(8)} == {
        0: Reason.STALE_BASE,
        1: Reason.STALE_BASE,
        2: Reason.STALE_BASE,
        3: Reason.STALE_BASE,
        4: None,
        5: None,
        6: Reason.UNKNOWN_BASE,
        7: Reason.UNKNOWN_BASE,
    }


def test_a_base_of_another_branch_is_unknown() -> None:
    assert reason(base_version=5, base_digest=DIGESTS[4]) is Reason.UNKNOWN_BASE
    assert reason(base_version=4, base_digest=digest(b"a fork")) is Reason.UNKNOWN_BASE


def test_only_a_known_sharding_that_held_in_its_round_counts() -> None:
    """Its size weighs in the average."""
    assert {number: reason(sharding=number) for number in range(4)} == {
        0: None,
        1: None,
        2: Reason.UNKNOWN_SHARDING,
        3: Reason.UNKNOWN_SHARDING,
    }
    assert reason(sharding=1, **on(4)) is Reason.UNKNOWN_SHARDING


def test_the_same_contribution_may_come_again() -> None:
    """Its sender lost our answer; that nothing counts twice is the round's business."""
    contributed = {(ALICE, PATH, HEAD_VERSION): document_id(GOOD)}
    assert verdict(contributed=contributed).is_admitted
    assert verdict(contributed=contributed, rounds=HEAD_VERSION).is_admitted, "even after the last round"


def test_another_contribution_from_the_same_base_is_refused() -> None:
    contributed = {(ALICE, PATH, HEAD_VERSION): document_id(GOOD)}
    assert reason(loss=1.5, rules={"contributed": contributed}) is Reason.ALREADY_CONTRIBUTED


def test_other_paths_peers_and_bases_are_not_held_against_it() -> None:
    other_path = PathId((0, 1, 1))
    contributed = {(ALICE, other_path, 5): "x", (BOB, PATH, 5): "x", (ALICE, PATH, 4): "x"}
    assert verdict(contributed=contributed).is_admitted, "a replica of BOB, and ALICE one version ago"


def test_before_the_last_version_the_run_is_not_complete() -> None:
    assert reason(rules={"rounds": HEAD_VERSION + 1}) is None
    assert reason(rules={"rounds": HEAD_VERSION}) is Reason.COMPLETE


def test_a_version_has_so_many_places_for_a_path() -> None:
    others = [Signer(bytes([number]) * 32).peer for number in range(60, 64)]
    assert reason(rules={"taken": {PATH: others[:3]}}) is None
    assert reason(rules={"taken": {PATH: others}}) is Reason.FULL
    elsewhere = PathId((0, 1, 1))
    assert reason(rules={"taken": {elsewhere: others}}) is None
    assert (
        reason(rules={"taken": {PATH: others}, "contributed": {(ALICE, PATH, HEAD_VERSION): document_id(GOOD)}}) is None
    )


def test_half_of_the_places_are_for_those_who_have_worked() -> None:
    """Attack: keys are free, and a crowd of new ones is there first."""
    crowd = [Signer(bytes([number]) * 32).peer for number in range(60, 64)]
    worker = Signer(bytes([70]) * 32).peer
    assert reason(rules={"taken": {PATH: crowd[:2]}, "workers": {worker}}) is Reason.FULL
    assert reason(rules={"taken": {PATH: crowd[:1]}, "workers": {worker}}) is None
    assert reason(rules={"taken": {PATH: [worker, *crowd[:1]]}, "workers": {worker}}) is None
    assert reason(rules={"taken": {PATH: crowd[:2]}, "workers": {ALICE, worker}}) is None
    assert reason(rules={"taken": {PATH: crowd[:3]}, "workers": frozenset()}) is None, "nobody has worked yet"
    one = {"places": 1, "workers": {worker}}
    assert reason(rules=one) is None, "a path never waits for somebody who is gone"


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_a_norm_that_means_nothing_is_refused_without_any_history(norm: float) -> None:
    assert judge_norm(norm, NORMS, base=HEAD_VERSION).reason is Reason.NORM


def test_one_function_judges_by_decrees_document_and_norm_in_this_order() -> None:
    banned, stale = Decreed(banned={ALICE: "spam"}), dataclasses.replace(GOOD, **on(3))
    assert verdict(stale, decreed=banned, norm=1e9).reason is Reason.BANNED
    assert verdict(stale, norm=1e9).reason is Reason.STALE_BASE
    assert verdict(norm=1e9).reason is Reason.NORM
    assert verdict(norm=1.0).is_admitted
    assert verdict().is_admitted, "without the payload"


def test_what_began_before_a_rollback_is_refused_as_that_and_what_began_from_it_counts() -> None:
    def on_base(base: int) -> Reason | None:
        return reason(**on(base), rules={"base_min": HEAD_VERSION})

    assert on_base(HEAD_VERSION) is None
    assert on_base(HEAD_VERSION - 1) is Reason.ROLLED_BACK


def test_the_banned_are_refused_with_the_reason_and_while_frozen_everybody_is() -> None:
    decreed = Decreed(banned={BOB: "spam"})
    assert judge_decreed(ALICE, decreed).is_admitted
    verdict = judge_decreed(BOB, decreed)
    assert (verdict.reason, verdict.detail) == (Reason.BANNED, "banned by the coordinator: spam")
    frozen = Decreed(banned={BOB: "spam"}, frozen="a bad shard")
    assert judge_decreed(ALICE, frozen).reason is Reason.FROZEN
    assert judge_decreed(BOB, frozen).reason is Reason.BANNED, "to try again would not help"
    assert Reason.FROZEN in PASSING and not PASSING & {Reason.BANNED, Reason.ROLLED_BACK}


# Claimed at 100 s, the base published at 90 s, others there before: the author has just come to a path of others.
NEW, DEADLINE_S = Hold(since_s=100.0, opened_s=90.0, is_covered=True, others=0, next_s=None), 20.0
FREE = {"is_covered": False, "others": 1}


@pytest.mark.parametrize(
    ("expected", "now_s", "base", "facts"),
    [
        (Reason.UNCLAIMED, 101.0, 5, {"since_s": None}),
        (Reason.COVERED, 119.9, 5, {}),
        (None, 120.0, 5, {}),  # those who were there did nothing for a deadline
        (None, 101.0, 5, {"is_covered": False}),  # nobody else trains it
        (None, 101.0, 5, {"since_s": 90.0}),  # it was there when the round began
        (None, 101.0, 5, {"opened_s": None}),  # the leader was not
        (None, 101.0, 0, {}),  # nobody was: the run begins
        (Reason.COVERED, 101.0, 0, {"others": 1}),  # and it has come to its second path
        (None, 101.0, 0, FREE),  # which nobody trains
        (Reason.TOO_SOON, 101.0, 5, FREE | {"next_s": 102.0}),
        (None, 102.0, 5, FREE | {"next_s": 102.0}),
        (None, 101.0, 5, {"is_covered": False, "next_s": 102.0}),  # its first path from this version
    ],
)
def test_a_contribution_needs_a_claim_from_before_its_round(
    expected: Reason | None, now_s: float, base: int, facts: dict[str, Any]
) -> None:
    contribution, hold = dataclasses.replace(GOOD, base_version=base), dataclasses.replace(NEW, **facts)
    assert judge_claim(contribution, hold, now_s=now_s, deadline_s=DEADLINE_S).reason is expected


def test_every_reason_is_met_here_or_given_by_the_leader_itself() -> None:
    met = {expected for expected, _ in FAULTS} | {Reason.UNKNOWN_BASE, Reason.UNKNOWN_SHARDING, Reason.NORM}
    met |= {
        Reason.BANNED,
        Reason.FROZEN,
        Reason.ROLLED_BACK,
        Reason.FULL,
        Reason.UNCLAIMED,
        Reason.COVERED,
        Reason.TOO_SOON,
    }
    by_judges = {Reason.HARMFUL, Reason.LITTLE_GAIN, Reason.NOT_REPEATED, Reason.UNJUDGED}
    by_leaders = {Reason.NOT_LEADER, Reason.NO_MIRROR, Reason.UNINVITED, Reason.COPIED}
    assert set(ADMISSION) - met == by_leaders | by_judges
