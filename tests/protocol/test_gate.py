"""The loss gate: what follows from the appraisals of a round, and what an appraisal must be to be heard."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from tiny_run import signer

from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol import gate
from dipaco_p2p.protocol.audits import Work
from dipaco_p2p.protocol.documents import Contribution, Sealed, seal
from dipaco_p2p.protocol.gate import (
    DRAW,
    GIVEN_SLOWLY,
    MADE_UP,
    NOTHING_GIVEN,
    Appraisal,
    Judged,
    Repetition,
    is_split,
    is_undecided,
    refused,
    usual_rate,
)
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.standing import Findings, Standings
from dipaco_p2p.protocol.verdicts import Verdicts, auditors_against, encode_appraisals, in_order, read_appraisals

RUN, WORK = digest(b"run"), digest(b"a work")
AUTHOR, COORDINATOR = signer(1), signer(200)
JUDGES = [signer(number) for number in range(11, 18)]
ITS = cast(Contribution, SimpleNamespace(author=AUTHOR.peer, work=WORK))
GOOD, BAD, LITTLE = (1.0, 0.1), (-1.0, 0.1), (0.1, 0.01)
"""Gain and standard error."""


def appraisal(found: tuple[float, float], *, judge: Signer = JUDGES[0], tokens: int = 100) -> Appraisal:
    draw, (gain, error) = judge.sign(DRAW, WORK.encode()), found
    return Appraisal(
        run=RUN, work=WORK, of=AUTHOR.peer, tokens=tokens, gain=gain, error=error, draw=draw, author=judge.peer
    )


def judged(*found: tuple[float, float], is_known: bool = True, by_seed: tuple[float, float] | None = None) -> Judged:
    said = [appraisal(one, judge=judge) for one, judge in zip(found, JUDGES, strict=False)]
    if by_seed is not None:
        said.append(appraisal(by_seed, judge=COORDINATOR))
    return Judged(is_known=is_known, appraisals=said)


def by(author: Signer, work: Judged) -> Judged:
    return replace(work, appraisals=[replace(one, of=author.peer) for one in work.appraisals])


def verdict(work: Judged, *others: Judged) -> Reason | None:
    """Of the first, in a round with the others and three that are good."""
    usual = (by(signer(number), judged(GOOD, GOOD)) for number in (4, 5, 6))
    works = {f"{number:02}": one for number, one in enumerate((work, *others, *usual))}
    return refused(works, coordinator=COORDINATOR.peer).get("00")


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (judged(GOOD, GOOD), None),
        (judged(BAD, BAD), Reason.HARMFUL),
        (judged(LITTLE, LITTLE), Reason.LITTLE_GAIN),
        (judged((-0.2, 0.1), (-0.2, 0.1)), Reason.LITTLE_GAIN),  # two errors below zero do not show harm
        (judged((-0.31, 0.1), (-0.31, 0.1)), Reason.HARMFUL),
        (judged((0.1, 0.1), (0.1, 0.1)), None),  # it may be as much as a quarter of the usual
        (judged(BAD), None),
        (judged(BAD, GOOD), None),
        (judged(BAD, GOOD, BAD), Reason.HARMFUL),
        (judged(BAD, is_known=False), Reason.UNJUDGED),
        (judged(BAD, GOOD, is_known=False), Reason.UNJUDGED),
        (judged(BAD, GOOD, GOOD, is_known=False), None),
        (judged(GOOD, is_known=False), None),
        (judged(GOOD, GOOD, by_seed=BAD), Reason.HARMFUL),
        (judged(BAD, BAD, by_seed=GOOD), None),
        (judged(by_seed=BAD, is_known=False), Reason.HARMFUL),
        (judged(), None),
    ],
)
def test_two_judges_or_the_coordinator_refuse_work(work: Judged, expected: Reason | None) -> None:
    assert verdict(work) == expected


def test_when_most_of_the_known_would_fail_only_strangers_are_refused() -> None:
    strange, bad, good = judged(BAD, BAD, is_known=False), judged(BAD, BAD), judged(GOOD, GOOD)
    works = {"a": by(signer(2), bad), "b": by(signer(3), bad), "c": by(signer(4), good), "d": strange}
    assert refused(works, coordinator=COORDINATOR.peer) == {"d": Reason.HARMFUL}
    works |= {"e": by(signer(5), good)}  # now it is half of them
    assert refused(works, coordinator=COORDINATOR.peer).keys() == {"a", "b", "d"}


def test_an_author_with_many_works_is_not_most_of_the_known() -> None:
    """Attack: work on several paths by one author was most of the round's, as if the run had a problem."""
    works = {"a": judged(BAD, BAD), "b": judged(BAD, BAD), "c": by(signer(2), judged(GOOD, GOOD))}
    assert refused(works, coordinator=COORDINATOR.peer).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([judged(GOOD, GOOD, is_known=False)], {"known": Reason.HARMFUL}),
        ([judged((0.2, 0.1), (0.2, 0.1), is_known=False)], {}),  # it may be chance
        ([judged(GOOD, BAD, is_known=False)], {"0": Reason.UNJUDGED}),
        ([judged(is_known=False)], {}),
        ([], {}),
    ],
)
def test_the_only_known_author_is_refused_where_the_work_of_others_surely_gains(
    others: list[Judged], expected: dict[str, Reason]
) -> None:
    """Attack: in a grid's first round the only one who had worked before was most of those whom the chain knew, so
    neither judges nor the coordinator's seed node could refuse its work."""
    strange = {str(number): by(signer(number + 2), work) for number, work in enumerate(others)}
    assert refused({"known": judged(BAD, BAD), **strange}, coordinator=COORDINATOR.peer) == expected


def test_strangers_do_not_say_what_is_usual_while_the_chain_knows_others() -> None:
    crowd = [judged((100.0, 0.1), (100.0, 0.1), is_known=False)] * 5
    assert usual_rate([judged(GOOD, GOOD), *crowd]) == pytest.approx(0.01)
    assert usual_rate(crowd) == pytest.approx(1.0)
    assert usual_rate([]) == 0.0


def test_a_judge_that_praises_one_does_not_make_the_others_look_idle() -> None:
    praised = judged((1e6, 0.0), GOOD)
    works = {"a": praised, "b": praised, "c": judged(GOOD, GOOD)}
    assert refused(works, coordinator=COORDINATOR.peer) == {}


def test_an_author_of_many_works_that_gain_much_does_not_make_the_others_look_idle() -> None:
    """Attack, seed 301: one peer on two of three paths, whose work gained twelve times as much for what it said."""
    much = by(signer(2), judged((12.0, 0.1), (12.0, 0.1)))
    assert refused({"a": judged(GOOD, GOOD), "b": much, "c": much}, coordinator=COORDINATOR.peer) == {}
    assert usual_rate([judged(GOOD, GOOD), much, much]) == pytest.approx(0.01)


def test_the_only_author_whom_the_chain_knows_does_not_say_alone_what_is_usual() -> None:
    """Attack, seed 301 again: the chain knew only a stranger whose work had gained six times as much for its tokens."""
    much = by(signer(2), judged((6.0, 0.1), (6.0, 0.1)))
    works = {"much": much, "a": by(signer(3), judged(GOOD, GOOD, is_known=False))}
    assert refused(works, coordinator=COORDINATOR.peer) == {}
    second = by(signer(4), judged((6.0, 0.1), (6.0, 0.1)))
    assert refused(works | {"second": second}, coordinator=COORDINATOR.peer) == {"a": Reason.LITTLE_GAIN}


def test_work_has_to_gain_as_much_as_its_learning_rate_allows() -> None:
    """Seed 5: after a rollback one path was in the last round and another in an early one. Its honest work gained a
    tenth for as many tokens, and was refused beside the other's."""
    early, last = judged(GOOD, GOOD), judged(LITTLE, LITTLE)
    last = replace(last, appraisals=[replace(one, lr_percent=10) for one in last.appraisals])
    works = {"last": last, **{str(number): by(signer(number), early) for number in (2, 3, 4)}}
    assert refused(works, coordinator=COORDINATOR.peer) == {}
    works["last"] = judged(LITTLE, LITTLE)
    assert refused(works, coordinator=COORDINATOR.peer) == {"last": Reason.LITTLE_GAIN}
    works = {str(number): by(signer(number), last) for number in (2, 3, 4)}
    works |= {"early": judged(LITTLE, LITTLE)}  # no more than theirs, at ten times the rate
    assert refused(works, coordinator=COORDINATOR.peer) == {}, "gains do not grow with the rate for ever"
    idle = replace(last, appraisals=[replace(one, gain=0.001, error=0.001) for one in last.appraisals])
    works |= {"idle": by(signer(5), idle)}
    assert refused(works, coordinator=COORDINATOR.peer) == {"idle": Reason.LITTLE_GAIN}


NOTHING = (-0.01, 0.01)


def test_beside_a_single_other_author_a_stranger_has_to_gain_something() -> None:
    """Attack, `random` at the grid's start: random numbers beside one honest work of the module, which thereby were
    half of what was usual."""
    honest = by(signer(2), judged(GOOD, GOOD))
    for known in (True, False):  # who is known to nobody in a run's first round is no excuse either
        works = {"a": replace(honest, is_known=known), "b": judged(NOTHING, NOTHING, is_known=False)}
        assert refused(works, coordinator=COORDINATOR.peer) == {"b": Reason.LITTLE_GAIN}
    works |= {"b": judged(NOTHING, (0.01, 0.01), is_known=False)}
    assert refused(works, coordinator=COORDINATOR.peer).get("b") == Reason.UNJUDGED, "its judges do not agree"
    assert refused(works | {"b": judged(NOTHING, NOTHING)}, coordinator=COORDINATOR.peer) == {}, "but those who worked"
    two = {str(number): by(signer(number), judged(GOOD, GOOD)) for number in (2, 3)}
    noisy = judged((-0.01, 0.2), (-0.01, 0.2), is_known=False)
    assert refused(two | {"b": noisy}, coordinator=COORDINATOR.peer) == {}, "two known authors say what is usual"
    own = {"a": judged(GOOD, GOOD, is_known=False), "b": judged(NOTHING, NOTHING, is_known=False)}
    assert refused(own, coordinator=COORDINATOR.peer) == {}, "nobody's own work speaks against it"
    for none in ((0.2, 0.1), (-0.1, 0.1)):
        works = {"a": by(signer(2), judged(GOOD, none)), "b": judged(NOTHING, NOTHING, is_known=False)}
        assert refused(works, coordinator=COORDINATOR.peer) == {}, "where nothing gains for sure, nobody has to"


def test_who_worked_in_the_stage_before_is_known_until_the_chain_finds_a_forger() -> None:
    said, standings = [seal(judge, appraisal(BAD, judge=judge)) for judge in JUDGES], Standings()

    def found() -> Reason | None:
        return Verdicts(said, standings, audited=0, coordinator=COORDINATOR.peer, earlier=[AUTHOR.peer]).reason(ITS)

    assert found() is None, "it is all whom the chain knows"
    standings.add(1, authors=[signer(9).peer], findings=None)
    assert found() is None
    standings.add(2, authors=[signer(9).peer], findings=Findings.of(forged=[(AUTHOR.peer, digest(b"other"))]))
    for version in range(3, 30):
        standings.add(version, authors=[signer(9).peer], findings=None)
    assert found() == Reason.HARMFUL


def test_work_of_fewer_tokens_needs_to_gain_less() -> None:
    short = Judged(is_known=True, appraisals=[appraisal((0.1, 0.01), judge=judge, tokens=10) for judge in JUDGES])
    assert verdict(short) is None
    assert verdict(judged(LITTLE, LITTLE)) == Reason.LITTLE_GAIN


def test_where_nothing_gains_nobody_is_refused_for_gaining_little() -> None:
    works = {"a": judged((-0.1, 0.1), (-0.1, 0.1)), "b": judged((-0.2, 0.1), (-0.2, 0.1))}
    assert refused(works, coordinator=COORDINATOR.peer) == {}


@pytest.mark.parametrize(
    ("found", "expected"),
    [((GOOD, GOOD), False), ((GOOD, BAD), True), ((BAD,), True), ((BAD, BAD), False), ((GOOD,), False), ((), False)],
)
def test_the_coordinator_is_asked_where_judges_do_not_agree(
    found: tuple[tuple[float, float], ...], expected: bool
) -> None:
    assert is_split(judged(*found).appraisals, coordinator=COORDINATOR.peer) is expected
    assert not is_split(judged(*found, by_seed=GOOD).appraisals, coordinator=COORDINATOR.peer)


# -- the blob of a version


def sealed(judge: Signer, **changes: object) -> Sealed[Appraisal]:
    return seal(judge, replace(appraisal(GOOD, judge=judge), **changes))  # type: ignore[arg-type]


def test_appraisals_are_written_in_one_order_and_read_again() -> None:
    said = [sealed(judge) for judge in JUDGES]
    assert encode_appraisals(said) == encode_appraisals([*reversed(said), said[0]])
    assert {one.document.author for one in read_appraisals(encode_appraisals(said))} == {one.peer for one in JUDGES}
    assert (encode_appraisals([]), read_appraisals(b"")) == (b"", [])


def verdicts_of(said: list[Sealed[Appraisal]], *, known: bool = False, audited: int = 0) -> Verdicts:
    standings = Standings()
    if known:
        standings.add(1, authors=[AUTHOR.peer], findings=None)
    earlier = [judge.peer for judge in JUDGES]
    return Verdicts(said, standings, audited=audited, coordinator=COORDINATOR.peer, earlier=earlier)


def test_a_round_is_judged_again_from_its_blob() -> None:
    said = [seal(judge, appraisal(BAD, judge=judge)) for judge in JUDGES]
    strange, known = verdicts_of(read_appraisals(encode_appraisals(said))), verdicts_of(said, known=True)
    assert (strange.reason(ITS), known.reason(ITS)) == (Reason.HARMFUL, None)  # it is all whom the chain knows
    assert strange.findings({}) == Findings.of(failed=[(AUTHOR.peer, WORK)]) and known.findings({}) is None
    assert strange.blob == known.blob == encode_appraisals(said)


OTHER_DRAW = JUDGES[1].sign(DRAW, WORK.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[7]",
        b"no JSON",
        b"[" * 100_000,
        canonical_bytes([sealed(JUDGES[0], draw=OTHER_DRAW).to_dict()]),
        canonical_bytes([sealed(JUDGES[0], of=JUDGES[0].peer).to_dict()]),
        canonical_bytes([sealed(JUDGES[0], of="<b>a word of its own</b>").to_dict()]),
        canonical_bytes([sealed(JUDGES[0]).to_dict()] * 2),
        canonical_bytes([sealed(JUDGES[0]).to_dict() | {"signature": "ab" * 64}]),
        encode_appraisals([sealed(JUDGES[0])]).replace(b",", b", "),
    ],
)
def test_what_is_no_list_of_appraisals_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_appraisals(data)


def test_who_judges_depends_on_a_signature_that_the_author_cannot_foresee() -> None:
    peers = [signer(number).peer for number in range(1, 30)]
    first = in_order(peers, "one signature")
    assert in_order(reversed(peers), "one signature") == first
    assert in_order(peers, "another")[:2] != first[:2]


# -- audits

SAME = Repetition(cosine=1.0, ratio=1.0, moments=1.0)
OFF = Repetition(cosine=0.5, ratio=1.0, moments=1.0)


def audited(*found: Repetition | None, is_known: bool = True, by_seed: tuple[float, float] | None = None) -> Judged:
    """Work that gains as it should, and was repeated by some."""
    work = judged(*[GOOD] * len(found), is_known=is_known, by_seed=by_seed)
    said = [replace(one, repeated=each) for one, each in zip(work.appraisals, found, strict=False)]
    return replace(work, appraisals=[*said, *work.appraisals[len(found) :]])


@pytest.mark.parametrize(
    ("repetition", "is_same"),
    [
        (SAME, True),
        (replace(SAME, cosine=0.99), True),
        (replace(SAME, cosine=0.989), False),
        (replace(SAME, cosine=-1.0), False),
        (replace(SAME, ratio=1.05), True),
        (replace(SAME, ratio=1.06), False),
        (replace(SAME, ratio=0.94), False),
        (replace(SAME, moments=2.0), True),
        (replace(SAME, moments=2.1), False),
        (replace(SAME, moments=0.4), False),
        (NOTHING_GIVEN, False),
        (GIVEN_SLOWLY, False),
        (MADE_UP, False),
    ],
)
def test_how_near_a_repetition_has_to_come(repetition: Repetition, is_same: bool) -> None:
    assert repetition.is_same is is_same


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (audited(SAME), None),
        (audited(None, None), None),
        (audited(OFF), None),
        (audited(OFF, is_known=False), Reason.UNJUDGED),
        (audited(OFF, SAME, is_known=False), None),
        (audited(OFF, OFF), Reason.NOT_REPEATED),
        (audited(OFF, OFF, SAME), Reason.NOT_REPEATED),
        (audited(OFF, SAME, SAME), None),
        (audited(OFF, OFF, by_seed=GOOD), Reason.NOT_REPEATED),  # it has repeated nothing
        (audited(OFF, OFF, is_known=False), Reason.NOT_REPEATED),
        (audited(NOTHING_GIVEN, NOTHING_GIVEN), Reason.UNJUDGED),  # its line may have been cut
        (audited(GIVEN_SLOWLY, NOTHING_GIVEN), Reason.UNJUDGED),
        (audited(GIVEN_SLOWLY, OFF), Reason.UNJUDGED),
        (audited(NOTHING_GIVEN, OFF), Reason.UNJUDGED),  # or one auditor and a lost disk would make a forger
        (audited(MADE_UP, NOTHING_GIVEN, NOTHING_GIVEN), Reason.UNJUDGED),
        (audited(MADE_UP, NOTHING_GIVEN, OFF), Reason.NOT_REPEATED),
    ],
)
def test_two_auditors_refuse_work_whatever_it_gains(work: Judged, expected: Reason | None) -> None:
    others = (by(signer(number), audited(SAME)) for number in (2, 3))
    assert verdict(work, *others) == expected


def test_when_most_of_a_round_comes_out_different_machines_do_and_nobody_is_refused() -> None:
    forged, other = (by(signer(number), audited(OFF, OFF)) for number in (1, 2))
    good = by(signer(3), audited(SAME))
    cases = (([forged], 1), ([forged, other], 2), ([forged, other, good], 0), ([forged, forged, good], 2))
    for works, count in cases:
        found = refused({str(number): work for number, work in enumerate(works)}, coordinator=COORDINATOR.peer)
        assert list(found.values()) == [Reason.NOT_REPEATED] * count


FORGED, CUT, CAME_OUT = (OFF, OFF), (NOTHING_GIVEN, NOTHING_GIVEN), (SAME,)
NOT_REPEATED, UNJUDGED = Reason.NOT_REPEATED, Reason.UNJUDGED


@pytest.mark.parametrize(
    ("audits", "expected"),
    [
        ((FORGED, CUT, CAME_OUT), (NOT_REPEATED, UNJUDGED, None)),
        ((FORGED, (NOTHING_GIVEN, NOTHING_GIVEN, SAME), CAME_OUT), (NOT_REPEATED, UNJUDGED, None)),
        ((FORGED, (MADE_UP, NOTHING_GIVEN), CAME_OUT), (NOT_REPEATED, UNJUDGED, None)),
        ((FORGED, CUT, CUT), (NOT_REPEATED, None, None)),  # most lines are cut; the forgery is seen all the same
        ((FORGED, FORGED, CUT), (None, None, UNJUDGED)),
        ((FORGED, FORGED, CUT, CAME_OUT), (NOT_REPEATED, NOT_REPEATED, UNJUDGED, None)),
        ((FORGED, FORGED, CUT, CUT), (NOT_REPEATED, NOT_REPEATED, UNJUDGED, UNJUDGED)),
        ((CUT, CUT, CAME_OUT), (None, None, None)),
        ((FORGED, FORGED, CAME_OUT), (None, None, None)),
    ],
)
def test_who_gives_auditors_nothing_excuses_no_forger_and_no_forger_excuses_it(
    audits: tuple[tuple[Repetition, ...], ...], expected: tuple[Reason | None, ...]
) -> None:
    """Attack: work that two auditors had found forged counted, since a friend of its author gave its auditors nothing.
    So most of three authors had failed, as if machines differed."""
    works = {str(number): by(signer(number), audited(*found)) for number, found in enumerate(audits, start=1)}
    found = refused(works, coordinator=COORDINATOR.peer)
    assert tuple(found.get(id_) for id_ in works) == expected


@pytest.mark.parametrize(
    ("workers", "newcomers", "is_excused"),
    [
        ([CAME_OUT] * 3, [FORGED] * 9, False),
        ([CAME_OUT, CAME_OUT, FORGED], [FORGED] * 9, False),
        ([CAME_OUT], [FORGED] * 9, False),
        ([CAME_OUT, FORGED, FORGED], [], True),
        ([CAME_OUT, FORGED, FORGED], [CAME_OUT] * 9, False),
        ([CAME_OUT, FORGED, FORGED], [FORGED], True),
        ([], [CAME_OUT, FORGED, FORGED], True),
    ],
)
def test_a_crowd_of_forgers_does_not_excuse_itself(
    workers: list[tuple[Repetition, ...]], newcomers: list[tuple[Repetition, ...]], is_excused: bool
) -> None:
    """Attack: keys are free. Nine of them hand in forged work, so most of the audited work came out different, as if
    machines differed, and all of it counted."""
    works = {
        str(number): by(signer(number), audited(*found, is_known=number < len(workers)))
        for number, found in enumerate([*workers, *newcomers])
    }
    found = refused(works, coordinator=COORDINATOR.peer)
    forged = {id_ for id_, repetitions in zip(works, [*workers, *newcomers], strict=True) if repetitions == FORGED}
    assert {id_ for id_, reason in found.items() if reason == NOT_REPEATED} == (set() if is_excused else forged)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ((OFF, SAME, OFF), "forged"),
        ((NOTHING_GIVEN, NOTHING_GIVEN), "withheld"),
        ((GIVEN_SLOWLY, GIVEN_SLOWLY), "withheld"),
        ((GIVEN_SLOWLY,), None),
        ((GIVEN_SLOWLY, SAME, GIVEN_SLOWLY, SAME), None),
        ((NOTHING_GIVEN, OFF), "withheld"),
        ((NOTHING_GIVEN, OFF, OFF), "forged"),
        ((SAME,), "repeated"),
        ((OFF, SAME, SAME), "repeated"),
        ((OFF, SAME), None),
        ((None, None), None),
    ],
)
def test_a_version_notes_what_auditors_found(found: tuple[Repetition | None, ...], kind: str | None) -> None:
    works = zip(JUDGES, audited(*found).appraisals, strict=False)
    said = [seal(judge, appraisal) for judge, appraisal in works]
    findings = verdicts_of(said, known=True).findings({WORK: Work(author=AUTHOR.peer, tokens=100)})
    of_author = findings and replace(findings, contradicted=(), works=())
    assert of_author == (Findings(**{kind: (AUTHOR.peer,)}) if kind else None)
    failed = [judge.peer for judge, one in zip(JUDGES, found, strict=False) if one not in (SAME, None)]
    assert auditors_against(AUTHOR.peer, said) == sorted(failed)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ((SAME,), ()),
        ((OFF, SAME), ()),
        ((OFF, SAME, SAME), (0,)),
        ((SAME, OFF, OFF), (0,)),
        ((OFF, OFF), ()),
        ((NOTHING_GIVEN, SAME, SAME), ()),  # its author may have given it to the others alone
        ((SAME, NOTHING_GIVEN, NOTHING_GIVEN), ()),  # or to this one alone, so that nobody hears it any more
        ((GIVEN_SLOWLY, SAME, SAME), ()),
        ((SAME, GIVEN_SLOWLY, NOTHING_GIVEN), ()),
        ((SAME, NOTHING_GIVEN, OFF), ()),
        ((SAME, NOTHING_GIVEN, OFF, OFF), (0,)),
        ((None, SAME, None), ()),
    ],
)
def test_who_is_contradicted_by_most_auditors_is_not_heard_later(
    found: tuple[Repetition | None, ...], wrong: tuple[int, ...]
) -> None:
    works = zip(JUDGES, audited(*found).appraisals, strict=False)
    findings = verdicts_of([seal(judge, one) for judge, one in works], known=True).findings({})
    assert (findings.contradicted if findings else ()) == tuple(JUDGES[place].peer for place in wrong)


def test_the_word_of_who_was_contradicted_counts_for_nothing() -> None:
    said = [seal(judge, appraisal(BAD, judge=judge)) for judge in JUDGES[:2]]
    standings = Standings()
    standings.add(1, authors=[AUTHOR.peer], findings=Findings(contradicted=(JUDGES[0].peer,)))
    found = Verdicts(said, standings, audited=0, coordinator=COORDINATOR.peer)
    assert found.reason(ITS) is None and found.blob == encode_appraisals(said)
    by_seed = seal(COORDINATOR, appraisal(BAD, judge=COORDINATOR))
    standings.add(2, authors=[], findings=Findings(contradicted=(COORDINATOR.peer,)))
    assert (
        Verdicts([by_seed, *said], Standings(), audited=0, coordinator=COORDINATOR.peer).reason(ITS) == Reason.HARMFUL
    )


@pytest.mark.parametrize("friends", [2, 3])
def test_two_that_say_they_were_given_nothing_are_outvoted_in_whatever_order_they_are_asked(friends: int) -> None:
    """A leader that asks everybody in turn until nothing is open."""
    lost = 0
    for places in itertools.combinations(range(7), friends):
        said: list[Repetition | None] = []
        while gate.is_open(audited(*said).appraisals) and len(said) < 7:
            said.append(NOTHING_GIVEN if len(said) in places else SAME)
        lost += gate.is_forged(audited(*said).appraisals)
    assert lost == {2: 0, 3: 1}[friends], "of three only those that come before all others"


def test_one_more_auditor_is_asked_until_enough_agree() -> None:
    undecided = [(), (None,), (OFF,), (OFF, SAME)]
    assert all(is_undecided(audited(*found).appraisals) for found in undecided)
    assert not any(is_undecided(audited(*found).appraisals) for found in [(SAME,), (OFF, OFF), (OFF, SAME, SAME)])
