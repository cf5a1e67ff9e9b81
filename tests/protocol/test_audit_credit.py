"""Audits earn credit, each once: attacks by auditors who repeated nothing, and by leaders who name their friends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tiny_run import appraisal_of, signer
from version_harness import GENESIS, PATH, child

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.protocol.audits import AUDITORS_MAX, AUDITS_MAX, LATE_VERSIONS, Audit, Work
from dipaco_p2p.protocol.documents import ModuleVersion, Sealed, Share, seal
from dipaco_p2p.protocol.gate import MADE_UP, NOTHING_GIVEN, Appraisal, Repetition
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.standing import UNHEARD_FOR, WORKS_PER_AUDIT, Findings, Standings
from dipaco_p2p.protocol.verdicts import Verdicts, encode_appraisals, read_appraisals
from dipaco_p2p.protocol.versions import Tally, works_of

AUTHOR, OTHER, COORDINATOR = signer(1), signer(2), signer(200)
AUDITORS = [signer(number) for number in (11, 12, 13, 14)]
SAME = Repetition(cosine=1.0, ratio=1.0, moments=1.0)
OFF = Repetition(cosine=0.5, ratio=1.0, moments=1.0)
TOKENS = 100
AUDITED = 2
EARLIER = [auditor.peer for auditor in AUDITORS]
"""They have worked in the stage before: strangers make nobody a forger."""


def work(name: str) -> str:
    return digest(f"work {name}".encode())


def said(id_: str, auditor: Signer, found: Repetition | None, *, of: Signer = AUTHOR) -> Sealed[Appraisal]:
    appraisal = appraisal_of(auditor, run=GENESIS.run, work=id_, of=of.peer, tokens=TOKENS, repeated=found)
    return seal(auditor, appraisal)


def by_all(id_: str, *found: Repetition | None, of: Signer = AUTHOR) -> list[Sealed[Appraisal]]:
    return [said(id_, auditor, one, of=of) for auditor, one in zip(AUDITORS, found, strict=False)]


def share(name: str, *, of: Signer = AUTHOR, base: int = 0, tokens: int = TOKENS) -> Share:
    return Share(
        contribution=digest(name.encode()),
        path=PATH,
        peer=of.peer,
        base_version=base,
        weight=1.0,
        tokens=tokens,
        norm=1.0,
        loss=2.0,
        work=work(name),
    )


class Chain:
    """Of versions that count one work each, and name what follows from what auditors said."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.head = GENESIS

    @property
    def standings(self) -> Standings:
        return self.tally.standings

    def version(self, counts: Share, appraisals: list[Sealed[Appraisal]], **changes: Any) -> ModuleVersion:
        """The next one as a leader of good will makes it, but for the changes."""
        verdicts = Verdicts(appraisals, self.standings, audited=AUDITED, coordinator=COORDINATOR.peer, earlier=EARLIER)
        works = works_of([counts])
        values = {"shares": (counts,), "findings": verdicts.findings(works), "audits": verdicts.audits(works)}
        return child(self.head, **(values | changes))

    def add(self, counts: str | Share, appraisals: list[Sealed[Appraisal]] | None = None, **changes: Any) -> None:
        base = self.head.version
        counted = counts if isinstance(counts, Share) else share(counts, base=base)
        version = self.version(counted, appraisals or [], **changes)
        self.tally.check(version)
        self.tally.add(version)
        self.head = version

    def earned(self) -> dict[PeerId, int]:
        found: dict[PeerId, int] = {}
        for _, audit in self.standings.earned(AUDITED):
            found[audit.by] = found.get(audit.by, 0) + audit.tokens
        return found


def test_an_audit_of_work_that_counts_earns_its_tokens() -> None:
    chain = Chain()
    chain.add("a", by_all(work("a"), SAME))
    assert chain.head.audits == (Audit(work=work("a"), by=AUDITORS[0].peer, tokens=TOKENS),)
    assert chain.earned() == {AUDITORS[0].peer: TOKENS}


@pytest.mark.parametrize(
    ("found", "earn"),
    [
        ((SAME, SAME), (0, 1)),
        ((None, SAME), (1,)),  # it has measured, and repeated nothing
        ((OFF, SAME, SAME), (1, 2)),
        ((OFF, SAME), ()),
        ((OFF,), ()),
        ((NOTHING_GIVEN, SAME), ()),
        ((NOTHING_GIVEN, SAME, SAME), (1, 2)),
    ],
)
def test_only_auditors_whom_most_others_do_not_contradict_earn(
    found: tuple[Repetition | None, ...], earn: tuple[int, ...]
) -> None:
    chain = Chain()
    chain.add("a", by_all(work("a"), *found))
    assert chain.earned() == {AUDITORS[place].peer: TOKENS for place in earn}


# -- attacks


def test_an_audit_earns_once_whatever_later_versions_name() -> None:
    """Attack: a leader names the same appraisals again and again; its author would leave probation by them, too."""
    chain, again = Chain(), by_all(work("a"), SAME)
    chain.add("a", again)
    for name in ("b", "c", "d"):
        chain.add(name, again)
        assert chain.head.audits == () and chain.head.findings is None
    assert chain.earned() == {AUDITORS[0].peer: TOKENS}
    assert chain.standings.of(AUTHOR.peer).repeated == 1
    with pytest.raises(IntegrityError, match="an earlier version names"):
        chain.add("e", audits=(Audit(work=work("a"), by=AUDITORS[0].peer, tokens=TOKENS),))


def test_an_audit_that_ends_later_earns_in_the_version_that_names_it() -> None:
    chain = Chain()
    chain.add("a", by_all(work("a"), SAME))
    chain.add("b", by_all(work("a"), SAME, SAME))
    assert [audit.by for audit in chain.head.audits] == [AUDITORS[1].peer]
    assert chain.earned() == {AUDITORS[0].peer: TOKENS, AUDITORS[1].peer: TOKENS}
    assert chain.standings.of(AUTHOR.peer).repeated == 1


def test_audits_of_works_that_do_not_exist_earn_nothing() -> None:
    """Attack: friends sign what they like of works that nobody has done; keys cost nothing."""
    chain, made_up = Chain(), [*by_all(work("x"), SAME, SAME), *by_all(work("y"), OFF, OFF, of=OTHER)]
    chain.add("a", made_up)
    assert chain.head.audits == () and chain.earned() == {}
    assert chain.standings.of(AUTHOR.peer).repeated == 0
    for id_ in (work("x"), work("y")):
        with pytest.raises(IntegrityError, match="does not count"):
            audits = (Audit(work=id_, by=AUDITORS[0].peer, tokens=TOKENS),)
            chain.add("b", audits=audits, findings=None)


def test_audits_of_work_that_counts_long_since_earn_nothing() -> None:
    chain = Chain()
    for number in range(LATE_VERSIONS + 1):
        chain.add(f"{number}")
    late = by_all(work("0"), SAME), by_all(work("1"), SAME)
    assert chain.version(share("new"), late[0]).audits == ()
    assert len(chain.version(share("new"), late[1]).audits) == 1


def test_not_more_auditors_of_a_work_earn_than_are_asked() -> None:
    """Attack: a leader lets all its friends say the same of one work, at once or one after the other."""
    chain, friends = Chain(), by_all(work("a"), SAME, SAME, SAME, SAME)
    chain.add("a", friends[:1])
    chain.add("b", friends)
    assert len(chain.earned()) == AUDITORS_MAX
    three = tuple(sorted(Audit(work=work("c"), by=one.peer, tokens=TOKENS) for one in AUDITORS[:3]))
    with pytest.raises(IntegrityError, match="more than 2"):
        chain.add("c", audits=three)


def test_nobody_earns_by_auditing_its_own_work() -> None:
    """Attack: the appraisal says that the work is somebody else's."""
    with pytest.raises(IntegrityError, match="own work"):
        read_appraisals(encode_appraisals([said(work("a"), AUTHOR, SAME)]))
    chain = Chain()
    chain.add("a", [said(work("a"), AUTHOR, SAME, of=OTHER)])
    assert chain.head.audits == () and chain.standings.of(OTHER.peer).repeated == 0
    with pytest.raises(IntegrityError, match="by its author"):
        chain.add("b", audits=(Audit(work=work("b"), by=AUTHOR.peer, tokens=TOKENS),))


def test_an_audit_earns_the_tokens_that_its_work_earned_and_not_what_is_said() -> None:
    """Attack: copies of one work, each audited by a friend, share its tokens; so do their audits."""
    chain = Chain()
    chain.add(share("a", tokens=TOKENS // 4), by_all(work("a"), SAME))
    assert chain.earned() == {AUDITORS[0].peer: TOKENS // 4}
    with pytest.raises(IntegrityError, match="other tokens"):
        chain.add("b", audits=(Audit(work=work("b"), by=AUDITORS[0].peer, tokens=TOKENS + 1),))


@pytest.mark.parametrize("is_twice", [True, False])
def test_audits_that_are_named_twice_or_out_of_order_are_refused(is_twice: bool) -> None:
    one, other = sorted(Audit(work=work("a"), by=auditor.peer, tokens=TOKENS) for auditor in AUDITORS[:2])
    with pytest.raises(IntegrityError, match="twice, or not in order"):
        Chain().add("a", audits=(one, one) if is_twice else (other, one))


def test_a_forger_that_the_chain_knows_pays_its_auditors_once() -> None:
    """Who finds a forgery has worked as well. Attack: a friend lets many works be found forged, all made up."""
    chain = Chain()
    chain.add("a")
    forged = [one for name in ("x", "y", "z") for one in by_all(work(name), OFF, OFF)]
    chain.add(share("b", of=OTHER, base=1), forged)
    assert chain.earned() == {auditor.peer: TOKENS for auditor in AUDITORS[:2]}
    chain.add(share("c", of=OTHER, base=2), forged)  # it has no other work yet
    assert chain.head.audits == ()


def test_who_says_that_steps_are_made_up_has_taken_none() -> None:
    chain = Chain()
    chain.add("a")
    chain.add(share("b", of=OTHER, base=1), by_all(work("x"), MADE_UP, OFF))
    assert chain.earned() == {AUDITORS[1].peer: TOKENS}


def test_audits_that_no_draw_can_have_asked_for_earn_nothing() -> None:
    """Attack: a leader has its friend say the same of all works, also of those whose author is trusted long since."""
    chain, count = Chain(), 80
    for number in range(count):
        chain.add(f"{number}", by_all(work(f"{number}"), SAME))
    assert chain.earned() == {AUDITORS[0].peer: (AUDITED + (count - 1) // WORKS_PER_AUDIT) * TOKENS}
    chain = Chain()
    for number in range(count):  # as the draw asks for them
        due = number < AUDITED or number % 50 == 49
        chain.add(f"{number}", by_all(work(f"{number}"), SAME) if due else [])
    assert chain.earned() == {AUDITORS[0].peer: (AUDITED + 1) * TOKENS}


def test_the_first_works_after_a_forgery_pay_their_auditors_again() -> None:
    """Its author is a newcomer again. How many works of one version were forged changes nothing."""
    chain = Chain()
    for name in ("a", "b", "c"):
        chain.add(name, by_all(work(name), SAME))
    assert chain.earned() == {AUDITORS[0].peer: AUDITED * TOKENS}
    chain.add(share("d", of=OTHER, base=3), findings=Findings.of(forged=[(AUTHOR.peer, work(name)) for name in "xyz"]))
    for name in ("e", "f", "g"):
        chain.add(name, by_all(work(name), SAME))
    assert chain.earned() == {AUDITORS[0].peer: 2 * AUDITED * TOKENS}


def test_who_did_not_look_loses_what_it_earned_since_nobody_could_tell() -> None:
    """Attack: an auditor says "the same" of everything, until it is wrong and others look."""
    lazy, honest = AUDITORS[2], AUDITORS[:2]
    chain = Chain()
    chain.add("a", [said(work("a"), lazy, SAME)])
    assert chain.earned() == {lazy.peer: TOKENS}
    for number in range(UNHEARD_FOR - 2):
        chain.add(share(f"{number}", of=OTHER, base=chain.head.version))
    found = [said(work("b"), lazy, SAME), *(said(work("b"), auditor, OFF) for auditor in honest)]
    chain.add(share("c", of=OTHER, base=chain.head.version), found)
    assert chain.head.findings == Findings.of(forged=[(AUTHOR.peer, work("b"))], contradicted=[(lazy.peer, work("b"))])
    assert chain.earned() == {auditor.peer: TOKENS for auditor in honest}


def test_what_it_earned_long_before_it_keeps() -> None:
    chain = Chain()
    chain.add("a", by_all(work("a"), SAME))
    for number in range(UNHEARD_FOR - 1):
        chain.add(share(f"{number}", of=OTHER, base=chain.head.version))
    chain.add("z", findings=Findings.of(contradicted=[(AUDITORS[0].peer, work("a"))]))
    assert chain.earned() == {AUDITORS[0].peer: TOKENS}


# -- what is kept of a chain


def test_versions_that_are_given_up_have_named_nothing() -> None:
    chain = Chain()
    chain.add("a", by_all(work("a"), SAME))
    before = chain.tally.copy()
    chain.add("b", by_all(work("b"), SAME))
    assert len(before.standings.earned(AUDITED)) == 1
    chain.tally.drop_after(1)
    assert chain.standings.earned(AUDITED) == before.standings.earned(AUDITED)
    assert chain.standings.audited.recent(2) == {work("a"): Work(author=AUTHOR.peer, tokens=TOKENS)}
    chain.tally.drop_after(0)
    assert chain.earned() == {} and chain.standings.audited.recent(1) == {}


def test_a_version_names_so_many_audits_that_it_fits() -> None:
    audits = tuple(Audit(work=work(f"{number}"), by=AUTHOR.peer, tokens=1) for number in range(AUDITS_MAX + 1))
    with pytest.raises(ConfigError, match="limit"):
        child(audits=tuple(sorted(audits)))
    counted = {one.work: Work(author=AUTHOR.peer, tokens=TOKENS) for one in audits}
    appraisals = [said(one.work, AUDITORS[0], SAME) for one in audits]
    verdicts = Verdicts(appraisals, Standings(), audited=AUDITED, coordinator=COORDINATOR.peer, earlier=EARLIER)
    assert len(verdicts.audits(counted)) == AUDITS_MAX


def test_nobody_is_found_a_forger_or_paid_on_the_word_of_strangers() -> None:
    """Attack: a leader makes two keys that never worked, and they say that works which do not exist were forged."""
    strangers, standings = [signer(number) for number in (31, 32)], Standings()
    standings.add(1, authors=[AUTHOR.peer], findings=None)
    lies = [said(work("none"), stranger, OFF) for stranger in strangers]

    def found(earlier: list[PeerId]) -> Verdicts:
        return Verdicts(lies, standings, audited=AUDITED, coordinator=COORDINATOR.peer, earlier=earlier, tokens_max=7)

    assert not found(EARLIER).forgers and not found(EARLIER).audits({}) and found(EARLIER).findings({}) is None
    known = found([each.peer for each in strangers])
    assert known.forgers == {AUTHOR.peer}
    assert [audit.tokens for audit in known.audits({})] == [7, 7], "no more than a work can have, whatever they say"


@pytest.mark.parametrize("changes", [{"work": "x"}, {"by": PeerId("<b>a word of its own</b>")}])
def test_an_audit_names_a_work_and_a_peer(changes: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, IntegrityError)):
        dataclasses.replace(Audit(work=work("a"), by=AUTHOR.peer, tokens=1), **changes)
