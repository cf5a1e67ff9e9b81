"""A state machine is its table: the machinery, and the tables that docs/protocol.md draws."""

from __future__ import annotations

from enum import StrEnum

import pytest

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.protocol.claims import CLAIM_TRANSITIONS, ClaimEvent, ClaimState
from dipaco_p2p.protocol.rounds import ROUND_TRANSITIONS, IllegalTransition, RoundEvent, RoundState, follow

TABLES = pytest.mark.parametrize(
    ("table", "start", "events"),
    [(CLAIM_TRANSITIONS, ClaimState.IDLE, ClaimEvent), (ROUND_TRANSITIONS, RoundState.OPEN, RoundEvent)],
    ids=["claims", "rounds"],
)
Table = dict[tuple[StrEnum, StrEnum], StrEnum]


@TABLES
def test_what_the_table_does_not_list_is_a_bug_of_ours_with_both_names(
    table: Table, start: StrEnum, events: type[StrEnum]
) -> None:
    before = dict(table)
    for state in type(start):
        for event in events:
            if (state, event) in before:
                assert follow(table, state, event) is before[state, event]
            else:
                with pytest.raises(IllegalTransition, match=f"`{event}` cannot happen while `{state}`"):
                    follow(table, state, event)
    assert before == table
    assert issubclass(IllegalTransition, AssertionError)
    assert not issubclass(IllegalTransition, DipacoError), "nothing that a peer sends may be answered with it"


@TABLES
def test_every_state_is_reached_from_the_first(table: Table, start: StrEnum, events: type[StrEnum]) -> None:
    states = set(type(start))
    reached = {start}
    for _ in states:
        reached |= {after for (before, _), after in table.items() if before in reached}
    assert reached == states
