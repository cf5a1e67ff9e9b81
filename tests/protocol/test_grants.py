"""Who may lead: the coordinator's word, or a member's of the last group, and nobody else's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.documents import Grant, Sealed, seal
from dipaco_p2p.protocol.grants import LINKS_MAX, Mandate, check_mandate, extended, follows, seniority
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import ModuleId

COORDINATOR, LEADER, MIRROR, OTHER, STRANGER = (Signer(bytes([number]) * 32) for number in range(1, 6))
RUN, MODULE = digest(b"run"), ModuleId(1, 1)


def granted(author: Signer = COORDINATOR, *, term: int = 1, leader: Signer = LEADER, **changes: Any) -> Sealed[Grant]:
    """A grant of `term`, after the one before unless it is the coordinator's."""
    values = {
        "run": RUN,
        "module": MODULE,
        "term": term,
        "leader": leader.peer,
        "mirrors": (MIRROR.peer,),
        "after": 0 if author is COORDINATOR else term - 1,
        "author": author.peer,
    }
    return seal(author, Grant(**(values | changes)))


FIRST = granted()


def check(*grants: Sealed[Grant]) -> Mandate:
    return check_mandate(grants, run=RUN, module=MODULE, coordinator=COORDINATOR.peer)


def test_the_coordinators_grant_is_a_mandate_by_itself() -> None:
    for term in (1, 2, 99):
        assert check(granted(term=term)) == (granted(term=term),)


@pytest.mark.parametrize("author", [LEADER, MIRROR])
def test_a_member_of_the_last_group_may_grant_the_next_term(author: Signer) -> None:
    second = granted(author, term=2, leader=MIRROR, mirrors=(OTHER.peer,))
    third = granted(OTHER, term=3, leader=OTHER, mirrors=())
    assert check(FIRST, second, third) == (FIRST, second, third)


def test_a_stranger_grants_nothing() -> None:
    for mandate in ((), (FIRST,)):
        with pytest.raises(IntegrityError, match="nobody who may"):
            extended(mandate, granted(STRANGER, term=2, leader=STRANGER), coordinator=COORDINATOR.peer)


def test_who_is_in_the_new_group_only_had_no_say_in_it() -> None:
    with pytest.raises(IntegrityError, match="nobody who may"):
        check(FIRST, granted(OTHER, term=2, leader=LEADER, mirrors=(OTHER.peer,)))


def test_who_was_in_the_group_once_has_no_say_later() -> None:
    second = granted(LEADER, term=2, leader=LEADER, mirrors=(OTHER.peer,))
    with pytest.raises(IntegrityError, match="nobody who may"):
        check(FIRST, second, granted(MIRROR, term=3, leader=MIRROR, mirrors=()))


@pytest.mark.parametrize(
    "changes",
    [{"term": 1, "after": 0}, {"term": 1}, {"term": 3}, {"term": 3, "after": 1}, {"after": 0}, {"after": 2}],
    ids=str,
)
def test_a_member_may_neither_skip_nor_repeat_a_term(changes: dict[str, int]) -> None:
    sealed = granted(LEADER, **{"term": 2, "after": 1} | changes)  # type: ignore[arg-type]
    assert not follows(sealed.document, FIRST.document)
    with pytest.raises(IntegrityError, match="nobody who may"):
        check(FIRST, sealed)


@pytest.mark.parametrize("changes", [{"run": digest(b"another")}, {"module": ModuleId(1, 0)}], ids=str)
def test_a_grant_is_for_one_run_and_module(changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="or of another run"):
        check(granted(**changes))
    with pytest.raises(IntegrityError, match="or of another run"):
        check(FIRST, granted(LEADER, term=2, **changes))
    assert not follows(granted(LEADER, term=2, **changes).document, FIRST.document)


def test_a_mandate_that_begins_in_the_middle_is_none() -> None:
    second = granted(LEADER, term=2)
    for grants in ((), (second,), (second, FIRST, second)):
        with pytest.raises(IntegrityError, match="nobody who may|empty"):
            check(*grants)


def test_a_word_of_the_coordinator_makes_what_was_before_unneeded() -> None:
    second, third = granted(LEADER, term=2), granted(term=3)
    assert check(FIRST, second, third) == (third,)


def test_a_mandate_does_not_grow_without_bound() -> None:
    mandate = (FIRST, *(granted(LEADER, term=term) for term in range(2, 4)))
    longest = (FIRST,) * (LINKS_MAX - 1) + mandate[-1:]
    with pytest.raises(IntegrityError, match="more than"):
        extended(longest, granted(LEADER, term=4), coordinator=COORDINATOR.peer)
    assert len(extended(longest[1:], granted(LEADER, term=4), coordinator=COORDINATOR.peer)) == LINKS_MAX
    assert extended(longest, granted(term=4), coordinator=COORDINATOR.peer) == (granted(term=4),)


def test_the_coordinators_later_grant_is_senior_then_the_later_term_then_a_peer_all_agree_on() -> None:
    small, great = sorted((LEADER, MIRROR), key=lambda signer: signer.peer)
    fifth = granted(term=5, leader=small, mirrors=())
    ordered: list[Mandate] = [
        (FIRST,),
        (FIRST, granted(MIRROR, term=2, leader=small, mirrors=())),
        (FIRST, granted(LEADER, term=2, leader=great, mirrors=())),
        (FIRST, *(granted(LEADER, term=term) for term in range(2, 9))),
        (fifth,),
        (fifth, granted(small, term=6, leader=small, mirrors=())),
    ]
    for one, other in itertools.pairwise(ordered):
        assert seniority(one) < seniority(other)


def test_a_grant_says_nothing_of_another_leader_or_group() -> None:
    """Its signature does not fit any other words: see `unseal`; here, that its id differs."""
    changes: list[dict[str, Any]] = [
        {"leader": OTHER.peer},
        {"mirrors": ()},
        {"term": 2},
        {"after": 1},
        {"author": STRANGER.peer},
    ]
    ids = {Sealed(dataclasses.replace(FIRST.document, **change), FIRST.signature).id for change in changes}
    assert len(ids | {FIRST.id}) == len(changes) + 1
