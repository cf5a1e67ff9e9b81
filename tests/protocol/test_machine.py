"""A state machine is its table: the machinery, and the tables that docs/protocol.md draws."""

from __future__ import annotations

from enum import StrEnum

import pytest

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.protocol.claims import CLAIM_TRANSITIONS, ClaimState
from dipaco_p2p.protocol.machine import IllegalTransition, follow
from dipaco_p2p.protocol.rounds import ROUND_TRANSITIONS, RoundState


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"


class Act(StrEnum):
    PUSH = "push"
    PULL = "pull"


TABLE = {(Door.OPEN, Act.PUSH): Door.SHUT, (Door.SHUT, Act.PULL): Door.OPEN}


def test_what_is_listed_is_followed() -> None:
    assert follow(TABLE, Door.OPEN, Act.PUSH) is Door.SHUT
    assert follow(TABLE, Door.SHUT, Act.PULL) is Door.OPEN


def test_what_is_not_listed_is_a_bug_of_ours_with_both_names() -> None:
    with pytest.raises(IllegalTransition, match="`pull` cannot happen while `open`"):
        follow(TABLE, Door.OPEN, Act.PULL)
    assert issubclass(IllegalTransition, AssertionError)
    assert not issubclass(IllegalTransition, DipacoError), "nothing that a peer sends may be answered with it"


def test_following_changes_no_table() -> None:
    before = dict(TABLE)
    with pytest.raises(IllegalTransition):
        follow(TABLE, Door.SHUT, Act.PUSH)
    assert before == TABLE


@pytest.mark.parametrize(
    ("table", "start", "states"),
    [(CLAIM_TRANSITIONS, ClaimState.IDLE, ClaimState), (ROUND_TRANSITIONS, RoundState.OPEN, RoundState)],
    ids=["claims", "rounds"],
)
def test_every_state_is_reached_from_the_first(
    table: dict[tuple[StrEnum, StrEnum], StrEnum], start: StrEnum, states: type[StrEnum]
) -> None:
    reached = {start}
    for _ in states:
        reached |= {after for (before, _), after in table.items() if before in reached}
    assert reached == set(states)
