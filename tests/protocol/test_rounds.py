"""When a round closes: at once when all are in; with a quorum, a deadline and a grace otherwise; never empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.config import RoundsConfig
from dipaco_p2p.protocol.machine import IllegalTransition, follow
from dipaco_p2p.protocol.rounds import ROUND_TRANSITIONS, Round, RoundEvent, RoundState
from dipaco_p2p.topology import PathId

CONFIG = RoundsConfig(quorum=0.5, deadline_s=120.0, grace_s=5.0)
A, B, C, D = (PathId((0, number)) for number in range(4))
ALL = frozenset({A, B, C, D})
START_S = 1000.0


def collected(*paths: PathId, now_s: float = START_S) -> Round:
    """A round in which these paths have contributed at one moment."""
    round_ = Round(number=3)
    for path in paths:
        round_ = round_.contributed(path, now_s=now_s)
    return round_


def state_after(round_: Round, duration_s: float, *, claimed: frozenset[PathId] = ALL) -> RoundState:
    return round_.tick(claimed, CONFIG, now_s=START_S + duration_s).state


def test_it_closes_at_once_when_all_claimed_paths_are_in() -> None:
    assert state_after(collected(A, B, C, D), 0.0) is RoundState.CLOSED
    assert collected(A, B, C, D).tick(ALL, CONFIG, now_s=START_S).is_closed


def test_a_path_that_nobody_claims_is_not_waited_for() -> None:
    assert state_after(collected(A, B), 0.0, claimed=frozenset({A, B})) is RoundState.CLOSED
    assert state_after(collected(A, B), 0.0, claimed=frozenset({B})) is RoundState.CLOSED


def test_a_path_that_loses_its_claim_is_no_longer_waited_for() -> None:
    waiting = collected(A, B, C)
    assert state_after(waiting, 1.0) is RoundState.COLLECTING
    assert state_after(waiting, 1.0, claimed=ALL - {D}) is RoundState.CLOSED


def test_without_a_contribution_it_never_closes() -> None:
    for claimed in (frozenset[PathId](), frozenset({A}), ALL):
        empty = Round(number=0)
        for hour in range(100):
            empty = empty.tick(claimed, RoundsConfig(quorum=0.0), now_s=hour * 3600.0)
        assert empty == Round(number=0)


def test_the_deadline_counts_from_the_first_contribution() -> None:
    late = collected(A).contributed(B, now_s=START_S + 100.0)
    assert state_after(late, 119.9) is RoundState.COLLECTING
    assert state_after(late, 120.0) is RoundState.GRACE


def test_without_a_quorum_the_deadline_is_three_times_as_long() -> None:
    assert state_after(collected(A), 359.9) is RoundState.COLLECTING
    assert state_after(collected(A), 360.0) is RoundState.GRACE


def test_a_late_contribution_does_not_stand_for_its_path() -> None:
    late = collected(A).contributed(B, now_s=START_S, is_late=True)
    assert late.paths == {A}
    assert state_after(late, 0.0, claimed=frozenset({A, B})) is RoundState.COLLECTING
    assert late.contributed(B, now_s=START_S).tick(frozenset({A, B}), CONFIG, now_s=START_S).is_closed
    assert state_after(collected(A).contributed(B, now_s=START_S + 9_999.0), 10_000.0) is RoundState.GRACE


def test_fewer_claims_lower_the_quorum() -> None:
    assert state_after(collected(A), 120.0, claimed=frozenset({A, B, C})) is RoundState.COLLECTING
    assert state_after(collected(A), 120.0, claimed=frozenset({A, B})) is RoundState.GRACE


def test_the_grace_counts_from_its_own_begin() -> None:
    """A leader that looks late still waits the whole grace."""
    grace = collected(A, B).tick(ALL, CONFIG, now_s=START_S + 150.0)
    assert (grace.state, grace.grace_from_s) == (RoundState.GRACE, START_S + 150.0)
    assert state_after(grace, 154.9) is RoundState.GRACE
    assert state_after(grace, 155.0) is RoundState.CLOSED


def test_a_contribution_in_the_grace_counts_and_does_not_prolong_it() -> None:
    grace = collected(A, B).tick(ALL, CONFIG, now_s=START_S + 120.0)
    more = grace.contributed(C, now_s=START_S + 124.0)
    assert more.paths == {A, B, C}
    assert state_after(more, 124.9) is RoundState.GRACE
    assert state_after(more, 125.0) is RoundState.CLOSED


def test_the_last_path_ends_the_grace() -> None:
    grace = collected(A, B, C).tick(ALL, CONFIG, now_s=START_S + 120.0)
    assert state_after(grace.contributed(D, now_s=START_S + 121.0), 121.0) is RoundState.CLOSED


def test_without_grace_the_next_look_closes() -> None:
    hasty = RoundsConfig(quorum=0.5, deadline_s=10.0, grace_s=0.0)
    grace = collected(A, B).tick(ALL, hasty, now_s=START_S + 10.0)
    assert grace.state is RoundState.GRACE
    assert grace.tick(ALL, hasty, now_s=START_S + 10.0).is_closed


def test_a_second_contribution_of_a_path_counts_once() -> None:
    twice = collected(A, A)
    assert twice.paths == {A}
    assert not twice.has_quorum(ALL, CONFIG)


def test_a_closed_round_takes_nothing_and_stays() -> None:
    closed = collected(A).tick(frozenset({A}), CONFIG, now_s=START_S)
    assert closed.tick(ALL, CONFIG, now_s=START_S + 10_000.0) == closed
    with pytest.raises(IllegalTransition):
        closed.contributed(B, now_s=START_S)
    assert closed.paths == {A}


@pytest.mark.parametrize(
    ("quorum", "claimed", "needed"),
    [(0.0, 4, 1), (0.5, 0, 1), (0.5, 1, 1), (0.5, 3, 2), (0.5, 4, 2), (1.0, 4, 4), (0.55, 20, 11), (0.07, 100, 7)],
)
def test_the_quorum_is_a_share_rounded_up_and_at_least_one(quorum: float, claimed: int, needed: int) -> None:
    paths = [PathId((0, number)) for number in range(claimed + 1)]
    config = RoundsConfig(quorum=quorum)
    enough = Round(number=0, paths=frozenset(paths[:needed]))
    too_few = Round(number=0, paths=frozenset(paths[: needed - 1]))
    assert enough.has_quorum(set(paths[:claimed]), config)
    assert not too_few.has_quorum(set(paths[:claimed]), config)


@pytest.mark.parametrize("state", RoundState)
@pytest.mark.parametrize("event", RoundEvent)
def test_what_the_table_does_not_list_is_refused(state: RoundState, event: RoundEvent) -> None:
    if (state, event) in ROUND_TRANSITIONS:
        assert follow(ROUND_TRANSITIONS, state, event) is ROUND_TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"cannot happen while `{state}`"):
            follow(ROUND_TRANSITIONS, state, event)


def test_nothing_leaves_a_closed_round_and_all_else_leads_there() -> None:
    assert {state for state, _ in ROUND_TRANSITIONS} == set(RoundState) - {RoundState.CLOSED}
    assert set(ROUND_TRANSITIONS.values()) == set(RoundState) - {RoundState.OPEN}


steps = st.lists(
    st.tuples(st.floats(0.0, 60.0), st.none() | st.sampled_from(sorted(ALL)), st.sets(st.sampled_from(sorted(ALL)))),
    max_size=25,
)


@given(steps)
def test_it_closes_only_for_its_reasons(steps: list[tuple[float, PathId | None, set[PathId]]]) -> None:
    """Any story of contributions, claims and time: who closes has all claimed paths, or had quorum and patience."""
    round_, now_s = Round(number=0), START_S
    for passed_s, path, claimed in steps:
        now_s += passed_s
        if path is not None and not round_.is_closed:
            round_ = round_.contributed(path, now_s=now_s)
        before, round_ = round_, round_.tick(claimed, CONFIG, now_s=now_s)
        assert round_.paths == before.paths
        if round_.is_closed and not before.is_closed:
            waited_s = now_s - round_.first_s
            assert round_.paths
            assert claimed <= round_.paths or (
                before.state is RoundState.GRACE and waited_s >= CONFIG.deadline_s + CONFIG.grace_s
            )
        assert (round_.state is RoundState.OPEN) == (not round_.paths)
