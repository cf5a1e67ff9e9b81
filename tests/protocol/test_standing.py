"""How peers stand: what a chain's versions found of their work, and what their next work weighs for that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import signer

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.protocol.standing import (
    AUDITED_MIN,
    DOUBTED_FOR,
    FINDINGS_MAX,
    FORGERS_WAIT,
    PROBATION_WEIGHT,
    UNHEARD_FOR,
    Findings,
    Standing,
    Standings,
)

PEER, OTHER = sorted(signer(number).peer for number in (1, 2))

WORKS = sorted(digest(name.encode()) for name in "abc")


def standings(*versions: Findings | None) -> Standings:
    """Of a chain whose every version counts a work of PEER."""
    chain = Standings()
    for number, findings in enumerate(versions, 1):
        chain.add(number, authors=[PEER], findings=findings)
    return chain


def found(**kinds: int) -> Findings | None:
    return Findings(**{kind: (PEER,) * count for kind, count in kinds.items()})


def test_a_newcomer_is_on_probation_until_its_first_works_were_repeated() -> None:
    one, two = standings(found(repeated=1)).of(PEER), standings(found(repeated=1), found(repeated=1)).of(PEER)
    assert [peer.is_on_probation(2) for peer in (Standing(), one, two)] == [True, True, False]
    assert [peer.weight(2) for peer in (Standing(), one, two)] == [PROBATION_WEIGHT, PROBATION_WEIGHT, 1.0]
    assert Standing().weight(2, is_repeated=True) == 1.0
    assert Standing().weight(0) == 1.0


def test_first_works_are_audited_and_later_ones_now_and_then() -> None:
    chances = [Standing(works=works, repeated=3).audit_chance(3) for works in (3, 10, 24, 49, 1000)]
    assert chances == [1 / 4, 1 / 11, 0.04, 0.02, 0.02]
    assert Standing(works=1000, repeated=2).audit_chance(3) == 1.0


def test_whoever_forges_waits_and_then_begins_anew() -> None:
    versions = [found(repeated=1), None, found(forged=1, repeated=1)]
    for passed in range(FORGERS_WAIT + 1):
        standing = standings(*versions, *[None] * passed).of(PEER)
        assert standing.waits == FORGERS_WAIT - passed
        assert (standing.repeated, standing.works) == (0, passed)
        assert standings(*versions, *[None] * passed).waiting == [PEER] * (passed < FORGERS_WAIT)
    assert standings(*versions).of(OTHER) == Standing()


def test_whoever_withholds_what_an_audit_needs_is_on_probation_again_and_does_not_wait() -> None:
    """But it is audited more often from then on. Else whoever has worked for long could forge, withhold each work that
    is audited, and would be audited as seldom as before."""
    standing = standings(found(repeated=5), found(withheld=1), found(repeated=1)).of(PEER)
    assert (standing.repeated, standing.works, standing.waits, standing.is_known) == (1, 1, 0, True)
    earlier, withheld = [*[None] * 99, found(repeated=1)], [found(withheld=1), found(repeated=1)]
    chains = [standings(*earlier, *withheld * times, *[None] * 98) for times in range(4)]
    assert [chain.of(PEER).audit_chance(1) for chain in chains] == [times * AUDITED_MIN for times in (1, 2, 3, 4)]
    assert standings(*earlier, *withheld * 3).of(PEER).audit_chance(1) == 1.0
    assert standings(*withheld, found(forged=1)).of(PEER).withheld == 0


def test_work_that_failed_halves_what_the_next_weighs_for_a_while() -> None:
    versions = [found(repeated=1), found(failed=1)]
    assert standings(*versions).of(PEER).weight(1) == 0.5
    assert standings(*versions, *[None] * (DOUBTED_FOR - 1)).of(PEER).weight(1) == 0.5
    assert standings(*versions, *[None] * DOUBTED_FOR).of(PEER).weight(1) == 1.0
    assert standings(found(failed=1)).of(PEER).weight(1) == 0.5 * PROBATION_WEIGHT


def test_who_is_contradicted_is_not_heard_for_a_while_and_works_on() -> None:
    versions = [found(repeated=1), found(contradicted=1)]
    standing = standings(*versions).of(PEER)
    assert not standing.is_heard and standing.weight(1) == 1.0
    assert not standings(*versions, *[None] * (UNHEARD_FOR - 1)).of(PEER).is_heard
    assert standings(*versions, *[None] * UNHEARD_FOR).of(PEER).is_heard and Standing().is_heard


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (Standing(works=3, repeated=3), "full"),
        (Standing(works=5, repeated=2), "on probation: 2 of 3 repeated"),
        (Standing(works=5, repeated=3, is_doubted=True), "doubted: weighs half"),
        (Standing(works=5, repeated=2, is_doubted=True), "doubted: weighs half; on probation: 2 of 3 repeated"),
        (Standing(waits=5, is_doubted=True), "waits: nothing counts for 5 versions"),
        (Standing(works=3, repeated=3, is_heard=False), "not heard: its word on others' work does not count"),
        (Standing(waits=1), "waits: nothing counts for 1 version"),
    ],
)
def test_a_standing_is_said_in_words_the_gravest_first(standing: Standing, words: str) -> None:
    assert standing.describe(3) == words


def test_without_audits_nobody_is_on_probation() -> None:
    said = [one.describe(0) for one in (Standing(), Standing(is_doubted=True), Standing(waits=2))]
    assert said == ["full", "doubted: weighs half", "waits: nothing counts for 2 versions"]


def test_of_several_standings_the_gravest_is_the_first() -> None:
    gravest_first = [
        Standing(waits=5),
        Standing(waits=2, is_doubted=True),
        Standing(repeated=1, is_doubted=True),
        Standing(repeated=3, is_doubted=True),
        Standing(),
        Standing(repeated=1),
        Standing(repeated=3),
    ]
    assert sorted(gravest_first[::-1], key=lambda one: one.rank(3)) == gravest_first


def test_a_chain_names_all_whose_work_it_counts_or_judges() -> None:
    chain = standings(Findings(forged=(OTHER,)))
    assert chain.peers == {PEER, OTHER} and chain.of(OTHER).waits == FORGERS_WAIT
    chain.drop_after(0)
    chain.of(PEER)
    assert chain.peers == set()


@given(
    st.lists(st.sampled_from(["forged", "withheld", "failed", "contradicted", "repeated", ""]), max_size=20),
    st.integers(0, 20),
)
def test_versions_that_are_given_up_leave_nothing_behind(kinds: list[str], kept: int) -> None:
    versions = [found(**{kind: 1}) if kind else None for kind in kinds]
    chain = standings(*versions)
    tried = chain.copy()
    tried.drop_after(kept)
    assert tried.of(PEER) == standings(*versions[:kept]).of(PEER)
    assert tried.has_worked(PEER) == bool(versions[:kept]) and not tried.has_worked(OTHER)
    assert chain.of(PEER) == standings(*versions).of(PEER)  # the copy is another one


def test_findings_have_an_order_and_a_limit_and_the_gravest_are_never_left_out() -> None:
    assert Findings.of(repeated=[]) is None
    both = Findings.of(repeated=[(OTHER, WORKS[1]), (PEER, WORKS[0]), (OTHER, WORKS[0])])
    assert both is not None and both.repeated == (PEER, OTHER, OTHER)
    assert both.works == (WORKS[0], *sorted(WORKS[:2]))
    crowd = Findings.of(repeated=[(PEER, WORKS[0])] * FINDINGS_MAX, forged=[(OTHER, WORKS[1])])
    assert crowd is not None and crowd.forged == (OTHER,) and len(crowd.repeated) == FINDINGS_MAX - 1
    for wrong in ({"failed": (OTHER, PEER)}, {"failed": (PEER,) * (FINDINGS_MAX + 1)}):
        with pytest.raises(ConfigError, match="in order"):
            Findings(**wrong)
    with pytest.raises(ConfigError, match="a work for each"):
        Findings(failed=(PEER,), works=tuple(WORKS[:2]))
