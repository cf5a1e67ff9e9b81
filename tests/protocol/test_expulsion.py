"""A ban from a module by its owners: attacks by those who may not vote, and by votes on what is not shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from tiny_run import signer
from version_harness import MODULE

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.protocol.decrees import ADMIT, BAN, Decree, ShownDecree
from dipaco_p2p.protocol.documents import Contribution, Sealed, is_signed, seal
from dipaco_p2p.protocol.expulsion import (
    OWNERS_MIN,
    Charge,
    Expulsion,
    Vote,
    check_expulsion,
    check_readmission,
    needed,
)
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.standing import FORGERS_WAIT, OWNERS_OF, Findings, Standings
from dipaco_p2p.protocol.verdicts import Verdicts

RUN, ORIGIN = digest(b"stage"), digest(b"run")
COORDINATOR, FORGER = signer(200), signer(1)
OWNERS = [signer(number) for number in range(11, 11 + OWNERS_MIN)]
AUDITED = 1
FOUND = OWNERS_MIN + 1
"""The version that finds the forger."""
CHARGE = Charge(run=RUN, module=MODULE, peer=FORGER.peer, found=FOUND, decrees=2)


def chain(*leaders: Signer, finds: Findings | None = None) -> Standings:
    """Each of these has led once, worked, and had it repeated; then a version finds what is to be found."""
    standings = Standings()
    for number, one in enumerate(leaders, 1):
        repeated = Findings(repeated=(one.peer,))
        standings.add(number, authors=[one.peer, FORGER.peer], findings=repeated, leader=one.peer)
    found = Findings(forged=(FORGER.peer,)) if finds is None else finds
    standings.add(len(leaders) + 1, authors=[leaders[0].peer], findings=found, leader=leaders[0].peer)
    return standings


def expulsion(*voters: Signer, charge: Charge = CHARGE) -> Expulsion:
    votes = tuple(sorted((Vote.sign(one, charge) for one in voters), key=lambda vote: vote.owner))
    return Expulsion(peer=charge.peer, found=charge.found, decrees=charge.decrees, votes=votes)


def check(shown: Expulsion, standings: Standings, *, charge: Charge = CHARGE) -> None:
    check_expulsion(shown, charge, standings, audited=AUDITED, coordinator=COORDINATOR.peer)


def expelled(standings: Standings, *, decrees: int = 2) -> Standings:
    standings.add(standings.next_version, authors=[], findings=None, expels=(FORGER.peer, decrees))
    return standings


def test_two_thirds_of_five_owners_expel_a_forger() -> None:
    check(expulsion(*OWNERS[:4]), chain(*OWNERS))
    check(expulsion(*OWNERS), chain(*OWNERS))
    assert [needed(count) for count in (0, 4, 5, 6, 7, 32)] == [0, 0, 4, 4, 5, 22]


def test_an_expelled_peer_counts_no_more_until_it_is_admitted() -> None:
    standings = expelled(chain(*OWNERS))
    for _ in range(2 * FORGERS_WAIT):
        standings.add(standings.next_version, authors=[], findings=None)
    standing = standings.of(FORGER.peer)
    assert standing.is_out and not standing.waits and standings.waiting == [FORGER.peer]
    its = cast(Contribution, SimpleNamespace(author=FORGER.peer, work=digest(b"a work")))
    verdicts = Verdicts([], standings, audited=AUDITED, coordinator=COORDINATOR.peer)
    assert verdicts.reason(its) == Reason.NOT_REPEATED
    assert standing.describe(AUDITED) == "expelled: nothing counts until the coordinator admits it"
    standings.add(standings.next_version, authors=[], findings=None, readmits=FORGER.peer)
    assert not standings.of(FORGER.peer).is_out and standings.waiting == []


# -- attacks


def test_three_of_five_are_too_few() -> None:
    with pytest.raises(IntegrityError, match="3 votes of 5 owners expel nobody"):
        check(expulsion(*OWNERS[:3]), chain(*OWNERS))


def test_four_owners_expel_nobody() -> None:
    charge = dataclasses.replace(CHARGE, found=5)
    with pytest.raises(IntegrityError, match="4 votes of 4 owners expel nobody"):
        check(expulsion(*OWNERS[:4], charge=charge), chain(*OWNERS[:4]), charge=charge)


def without_leading(standings: Standings) -> None:
    """It has only worked."""
    standings._led.pop(OWNERS[3].peer)
    standings._led[signer(90).peer].append(2)


def doubted(standings: Standings) -> None:
    standings.add(standings.next_version, authors=[], findings=Findings(failed=(OWNERS[3].peer,)))


def unheard(standings: Standings) -> None:
    standings.add(standings.next_version, authors=[], findings=Findings(contradicted=(OWNERS[3].peer,)))


def on_probation(standings: Standings) -> None:
    standings.add(standings.next_version, authors=[], findings=Findings(withheld=(OWNERS[3].peer,)))


@pytest.mark.parametrize("loses", [without_leading, doubted, unheard, on_probation])
def test_whoever_is_not_an_owner_in_full_standing_has_no_vote(loses: Callable[[Standings], None]) -> None:
    standings = chain(*OWNERS, signer(80), signer(81))
    charge = dataclasses.replace(CHARGE, found=8)
    check(expulsion(*OWNERS, charge=charge), standings, charge=charge)
    loses(standings)
    with pytest.raises(IntegrityError, match="no owner in full standing"):
        check(expulsion(*OWNERS, charge=charge), standings, charge=charge)


@pytest.mark.parametrize("stranger", [signer(99), COORDINATOR, FORGER])
def test_strangers_the_coordinator_and_the_forger_itself_have_no_vote(stranger: Signer) -> None:
    standings = chain(*OWNERS, COORDINATOR, FORGER)
    charge = dataclasses.replace(CHARGE, found=8)
    with pytest.raises(IntegrityError, match="no owner in full standing"):
        check(expulsion(*OWNERS[:4], stranger, charge=charge), standings, charge=charge)


def test_whoever_led_long_ago_has_no_vote() -> None:
    standings = chain(*OWNERS)
    for _ in range(OWNERS_OF):
        standings.add(standings.next_version, authors=[], findings=None)
    assert standings.owners(AUDITED, coordinator=COORDINATOR.peer) == frozenset()


def test_the_same_owner_votes_once() -> None:
    one = Vote.sign(OWNERS[0], CHARGE)
    with pytest.raises(ConfigError, match="one of each owner"):
        Expulsion(peer=FORGER.peer, found=FOUND, decrees=2, votes=(one, one))


@pytest.mark.parametrize(
    "changes",
    [{"run": ORIGIN}, {"peer": signer(7).peer}, {"found": FOUND - 1}, {"decrees": 1}],
    ids=["another stage", "another peer", "another version", "other decrees"],
)
def test_a_vote_for_something_else_is_none(changes: dict[str, object]) -> None:
    """Attack: votes that were given once are shown for what nobody voted on."""
    other = dataclasses.replace(CHARGE, **changes)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="has not signed"):
        check(expulsion(*OWNERS[:4], charge=other), chain(*OWNERS))


def test_a_signature_of_another_is_no_vote() -> None:
    shown = expulsion(*OWNERS[:4])
    stolen = dataclasses.replace(shown.votes[0], signature=shown.votes[1].signature)
    with pytest.raises(IntegrityError, match="has not signed"):
        check(dataclasses.replace(shown, votes=(stolen, *shown.votes[1:])), chain(*OWNERS))


@pytest.mark.parametrize(
    "finds",
    [Findings(failed=(FORGER.peer,)), Findings(withheld=(FORGER.peer,)), Findings(forged=(signer(7).peer,))],
    ids=["harm", "withheld", "another forger"],
)
def test_owners_expel_nobody_whom_their_chain_finds_no_forger(finds: Findings) -> None:
    with pytest.raises(IntegrityError, match="does not wait"):
        check(expulsion(*OWNERS), chain(*OWNERS, finds=finds))


def test_a_finding_of_another_version_is_no_evidence() -> None:
    charge = dataclasses.replace(CHARGE, found=FOUND - 1)
    with pytest.raises(IntegrityError, match="finds no forger"):
        check(expulsion(*OWNERS, charge=charge), chain(*OWNERS), charge=charge)


def test_nobody_is_expelled_for_what_is_long_over_nor_twice() -> None:
    standings = chain(*OWNERS)
    with pytest.raises(IntegrityError, match="expelled already"):
        check(expulsion(*OWNERS), expelled(standings.copy()))
    for _ in range(FORGERS_WAIT):
        standings.add(standings.next_version, authors=[], findings=None)
    with pytest.raises(IntegrityError, match="does not wait"):
        check(expulsion(*OWNERS), standings)


# -- the coordinator's word


def decree(number: int = 3, act: str = ADMIT, *, run: str = ORIGIN, author: Signer = COORDINATOR) -> ShownDecree:
    document = Decree(
        run=run,
        number=number,
        previous=digest(b"before") if number > 1 else "",
        at_s=0.0,
        act=act,
        reason="why",
        peer=FORGER.peer,
        author=author.peer,
    )
    return ShownDecree(decree=document, signature=seal(author, document).signature)


def admit(shown: ShownDecree, standings: Standings) -> None:
    is_decreed = is_signed(Sealed(shown.decree, shown.signature))
    check_readmission(shown, standings, run=ORIGIN, coordinator=COORDINATOR.peer, is_signed=is_decreed)


def test_a_later_decree_of_the_coordinator_admits_again() -> None:
    admit(decree(), expelled(chain(*OWNERS)))


@pytest.mark.parametrize(
    "shown",
    [
        decree(2),  # the owners knew it
        decree(act=BAN),
        decree(run=RUN),
        decree(author=OWNERS[0]),
        dataclasses.replace(decree(), signature=decree(4).signature),
    ],
    ids=["an older one", "a ban", "of another run", "of an owner", "not signed"],
)
def test_nothing_else_admits_again(shown: ShownDecree) -> None:
    with pytest.raises(IntegrityError, match="readmission"):
        admit(shown, expelled(chain(*OWNERS)))


def test_nobody_is_admitted_who_was_not_expelled() -> None:
    with pytest.raises(IntegrityError, match="not expelled"):
        admit(decree(), chain(*OWNERS))
    standings = expelled(chain(*OWNERS))
    standings.add(standings.next_version, authors=[], findings=None, readmits=FORGER.peer)
    with pytest.raises(IntegrityError, match="not expelled"):
        admit(decree(), standings)


def test_versions_that_are_given_up_have_expelled_nobody() -> None:
    standings = expelled(chain(*OWNERS))
    other = standings.copy()
    standings.drop_after(FOUND)
    assert not standings.of(FORGER.peer).is_expelled and other.of(FORGER.peer).is_expelled
    standings.drop_after(0)
    assert standings.owners(AUDITED, coordinator=COORDINATOR.peer) == frozenset()
