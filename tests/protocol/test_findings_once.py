"""Each finding belongs to one work, and counts once in a chain: attacks by leaders that name again what was said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_audit_credit import AUDITED, AUDITORS, AUTHOR, OFF, OTHER, SAME, TOKENS, Chain, by_all, said, share, work
from tiny_run import signer

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.documents import Sealed, seal
from dipaco_p2p.protocol.gate import GIVEN_SLOWLY, NOTHING_GIVEN, Appraisal
from dipaco_p2p.protocol.standing import DOUBTED_FOR, FORGERS_WAIT, UNHEARD_FOR, Findings

HARM = -5.0


def measured(name: str, gain: float, *, of: object = AUTHOR) -> list[Sealed[Appraisal]]:
    """Two judges found this gain, and repeated nothing."""
    plain = [said(work(name), judge, None, of=of) for judge in AUDITORS[:2]]  # type: ignore[arg-type]
    return [seal(judge, replace(one.document, gain=gain)) for judge, one in zip(AUDITORS, plain, strict=False)]


def others(chain: Chain, count: int, again: list[Sealed[Appraisal]]) -> None:
    """So many versions that count others' work, by a leader that names `again` each time."""
    for _ in range(count):
        number = chain.head.version
        chain.add(share(f"other {number}", of=OTHER, base=number), again)


def test_nobody_is_doubted_for_longer_because_a_leader_says_it_again() -> None:
    chain, harmful = Chain(), measured("bad", HARM)
    others(chain, 1, harmful)
    assert chain.standings.of(AUTHOR.peer).is_doubted
    others(chain, DOUBTED_FOR, harmful)
    assert not chain.standings.of(AUTHOR.peer).is_doubted


def test_nobody_waits_for_longer_because_a_leader_says_it_again() -> None:
    chain, forged = Chain(), by_all(work("bad"), OFF, OFF)
    others(chain, 1, forged)
    assert chain.standings.of(AUTHOR.peer).waits == FORGERS_WAIT
    others(chain, FORGERS_WAIT, forged)
    assert not chain.standings.of(AUTHOR.peer).is_out
    chain.add(share("good", base=chain.head.version), forged)  # nor is its next work refused for it
    assert chain.version(share("x"), forged).findings is None


def test_an_auditor_is_unheard_once_for_what_it_said_once_and_keeps_what_it_earns_later() -> None:
    """Attack: one contradiction, named again for ever, silenced an auditor and took what it earned meanwhile."""
    chain, wrong = Chain(), by_all(work("a"), OFF, SAME, SAME)
    chain.add("a", wrong)
    others(chain, UNHEARD_FOR, wrong)
    assert chain.standings.of(AUDITORS[0].peer).is_heard
    good = [said(work("late"), AUDITORS[0], SAME, of=OTHER)]
    chain.add(share("late", of=OTHER, base=chain.head.version), good)
    others(chain, 1, wrong)
    assert chain.earned()[AUDITORS[0].peer] == TOKENS


def test_work_that_came_out_the_same_may_be_found_forged_later_but_not_the_other_way_round() -> None:
    chain = Chain()
    chain.add("a", by_all(work("a"), SAME))
    others(chain, 1, by_all(work("a"), SAME, OFF, OFF))
    assert chain.head.findings is not None and chain.head.findings.forged == (AUTHOR.peer,)
    others(chain, 1, by_all(work("a"), SAME, SAME, SAME))
    assert chain.head.findings is None
    assert chain.standings.of(AUTHOR.peer).repeated == 0


def test_withheld_is_found_once() -> None:
    chain, cut = Chain(), by_all(work("a"), NOTHING_GIVEN, NOTHING_GIVEN)
    others(chain, 1, cut)
    assert chain.head.findings is not None and chain.head.findings.withheld == (AUTHOR.peer,)
    others(chain, 1, cut)
    assert chain.head.findings is None


@pytest.mark.parametrize("repeated", [0, AUDITED - 1, AUDITED])
def test_that_a_state_came_slowly_says_something_of_authors_in_full_standing_alone(repeated: int) -> None:
    """A newcomer's line may be too slow for audits, and nothing is to follow from that."""
    chain, is_full = Chain(), repeated == AUDITED
    for number in range(repeated):
        chain.add(str(number), by_all(work(str(number)), SAME))
    chain.add("slow")
    others(chain, 1, by_all(work("slow"), GIVEN_SLOWLY, GIVEN_SLOWLY))
    findings, standing = chain.head.findings, chain.standings.of(AUTHOR.peer)
    assert (findings.withheld if findings is not None else ()) == ((AUTHOR.peer,) if is_full else ())
    assert standing.is_on_probation(AUDITED) and standing.withheld == is_full


def test_old_work_that_gained_much_does_not_make_new_work_look_idle() -> None:
    """Attack: early steps gain most. A leader that names what was said of them refused all later work as idle."""
    chain, early, third = Chain(), [*measured("a", 100.0), *measured("b", 100.0, of=OTHER)], signer(3)
    chain.add("a", early[:2])
    chain.add(share("b", of=OTHER, base=1), early[2:])
    chain.add(share("c", of=third, base=2))
    chain.add(share("d", of=third, base=3), [*early, *measured("d", 1.0, of=third)])
    assert chain.head.findings is None


@pytest.mark.parametrize("kind", ["failed", "withheld", "repeated"])
def test_whoever_reads_the_chain_refuses_a_finding_that_is_named_twice(kind: str) -> None:
    chain, id_ = Chain(), work("a")
    chain.add("a", findings=Findings.of(**{kind: [(AUTHOR.peer, id_)]}))
    with pytest.raises(IntegrityError, match="an earlier version"):
        chain.add("b", findings=Findings.of(**{kind: [(AUTHOR.peer, id_)]}))
    with pytest.raises(IntegrityError, match="twice"):
        chain.add("b", findings=Findings.of(**{kind: [(AUTHOR.peer, work("b"))] * 2}))
    with pytest.raises(IntegrityError, match="no work"):
        chain.add("b", findings=Findings(**{kind: (AUTHOR.peer,)}))
