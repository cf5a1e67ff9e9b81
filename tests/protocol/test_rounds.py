"""When a round closes: at once when all are in; with a quorum, a deadline and a grace otherwise; never empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dipaco_p2p.config import RoundsConfig
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.rounds import (
    NEWCOMERS_EVERY,
    PATIENCE,
    ROUND_TRANSITIONS,
    UPLOAD_SILENCE_S,
    Entry,
    IllegalTransition,
    OpenRound,
    PathClaims,
    Round,
    RoundState,
    Standing,
    read_open_round,
    standing,
    waits_for_newcomers,
)
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

CONFIG = RoundsConfig(quorum=0.5, deadline_s=120.0, grace_s=5.0)
A, B, C, D = (PathId((0, number)) for number in range(4))
ALL = frozenset({A, B, C, D})
ELSEWHERE = PathId((1, 0))
NUMBER = 3
START_S = 1000.0


def peer(path: PathId, number: int = 0) -> PeerId:
    return PeerId(f"{path} {number}")


def claims(*paths: PathId, grid: Iterable[PathId] = ALL, round_number: int = NUMBER) -> PathClaims:
    """Of a grid with these paths; each of `paths` has a claimant, one that is named twice has two."""
    found: dict[PathId, dict[PeerId, Claim]] = {path: {} for path in grid}
    for path in paths:
        claim = Claim(path=path, since_s=float(len(found[path])), round=round_number)
        found[path][peer(path, len(found[path]))] = claim
    return found


def collected(*paths: PathId, now_s: float = START_S, expected: frozenset[PathId] = ALL) -> Round:
    """A round in which these paths have contributed at one moment, each by its first claimant."""
    round_ = Round(number=NUMBER, expected=expected)
    for path in paths:
        round_ = round_.contributed(path, peer(path), now_s=now_s)
    return round_


def state_after(round_: Round, duration_s: float, found: PathClaims | None = None) -> RoundState:
    return round_.tick(claims(*ALL) if found is None else found, CONFIG, now_s=START_S + duration_s).state


# -- what it waits for


def test_it_closes_at_once_when_all_paths_and_claimants_are_in() -> None:
    assert state_after(collected(A, B, C, D), 0.0) is RoundState.CLOSED
    assert collected(A, B, C, D).tick(claims(*ALL), CONFIG, now_s=START_S).is_closed


def test_who_trained_a_path_may_have_gone_on_to_another() -> None:
    assert state_after(collected(A, B, C, D), 0.0, claims()) is RoundState.CLOSED
    assert state_after(collected(A, B, C, D), 0.0, claims(C, D)) is RoundState.CLOSED


def test_a_path_that_nobody_claims_is_waited_for_too() -> None:
    """Somebody who has trained another one may be on the way to it."""
    for found in (claims(A, B, C), claims(A), claims()):
        assert state_after(collected(A, B, C), 119.9, found) is RoundState.COLLECTING
        assert state_after(collected(A, B, C), 120.0, found) is RoundState.GRACE


def test_every_replica_of_a_path_is_waited_for() -> None:
    """Plain DiLoCo: one path, four volunteers."""
    diloco = claims(A, A, A, A, grid={A})
    round_ = Round(number=NUMBER, expected=frozenset({A}))
    for number in range(4):
        round_ = round_.contributed(A, peer(A, number), now_s=START_S)
        closed = round_.tick(diloco, CONFIG, now_s=START_S + 119.9).is_closed
        assert closed == (number == 3)


@pytest.mark.parametrize(("replicas_s", "due_s"), [(None, 120.0), (5.0, 5.0), (500.0, 120.0)])
def test_further_claimants_have_their_own_time_once_all_paths_are_in(replicas_s: float | None, due_s: float) -> None:
    """Attack: an idle claim beside others' cost each round a whole deadline."""
    beside = claims(A, A, grid={A})
    round_ = Round(number=NUMBER, expected=frozenset({A})).contributed(A, peer(A), now_s=START_S)
    for after_s, state in ((due_s - 0.1, RoundState.COLLECTING), (due_s, RoundState.GRACE)):
        assert round_.tick(beside, CONFIG, now_s=START_S + after_s, replicas_s=replicas_s).state is state
    left_s = round_.left_s(beside, CONFIG, now_s=START_S, deadline_s=120.0, replicas_s=replicas_s)
    assert left_s == due_s + CONFIG.grace_s


def test_of_claimants_beside_others_only_those_are_waited_for_that_are_to_be() -> None:
    beside = claims(*ALL, A)
    for is_awaited, state in ((False, RoundState.CLOSED), (True, RoundState.COLLECTING)):
        found = collected(*ALL).tick(beside, CONFIG, now_s=START_S, is_awaited=lambda *_, found=is_awaited: found)
        assert found.state is state
    missing = collected(A, B, C).tick(beside, CONFIG, now_s=START_S, is_awaited=lambda *_: False)
    assert missing.state is RoundState.COLLECTING, "a path that is missing is waited for, whoever claims it"


def test_a_newcomer_that_trains_in_every_nth_round_meets_one_that_waits() -> None:
    assert waits_for_newcomers(0)
    waiting = [number for number in range(1, 400) if waits_for_newcomers(number)]
    assert 400 / NEWCOMERS_EVERY / 1.5 < len(waiting) < 400 / NEWCOMERS_EVERY * 1.5
    for stride in range(1, 6):
        for first in range(stride):
            assert any(number % stride == first for number in waiting[:16]), (stride, first)


def test_a_path_that_is_missing_has_the_whole_deadline() -> None:
    waiting = collected(A, B, C).tick(claims(*ALL), CONFIG, now_s=START_S + 60.0, replicas_s=5.0)
    assert waiting.state is RoundState.COLLECTING


def test_a_claimant_that_begins_with_a_later_round_is_not_waited_for() -> None:
    newcomer = {**claims(*ALL), A: {**claims(A)[A], peer(A, 1): Claim(path=A, since_s=9.0, round=NUMBER + 1)}}
    assert state_after(collected(A, B, C, D), 0.0, newcomer) is RoundState.CLOSED
    assert state_after(collected(A, B, C), 0.0, newcomer) is RoundState.COLLECTING


def test_a_claimant_that_is_gone_is_not_waited_for_once_its_path_is_in() -> None:
    waiting = collected(A, B, C, D)
    assert state_after(waiting, 1.0, claims(*ALL, A)) is RoundState.COLLECTING
    assert state_after(waiting, 1.0, claims(*ALL)) is RoundState.CLOSED


def test_without_a_contribution_it_never_closes() -> None:
    for found in (claims(), claims(A), claims(*ALL)):
        empty = Round(number=0, expected=ALL)
        for hour in range(100):
            empty = empty.tick(found, RoundsConfig(quorum=0.0), now_s=hour * 3600.0)
        assert empty == Round(number=0, expected=ALL)


def test_a_late_contribution_stands_for_nobody() -> None:
    late = collected(A, B, C).contributed(D, peer(D), now_s=START_S, is_late=True)
    assert late.paths == {A, B, C}
    assert state_after(late, 0.0) is RoundState.COLLECTING
    assert late.contributed(D, peer(D), now_s=START_S).tick(claims(*ALL), CONFIG, now_s=START_S).is_closed
    assert state_after(collected(A, B).contributed(C, peer(C), now_s=START_S + 9_999.0, is_late=True), 120.0) is (
        RoundState.GRACE
    )


# -- how long it waits


def test_the_deadline_counts_from_the_last_path_that_came() -> None:
    late = collected(A, B).contributed(C, peer(C), now_s=START_S + 100.0)
    assert state_after(late, 219.9) is RoundState.COLLECTING
    assert state_after(late, 220.0) is RoundState.GRACE


def test_further_authors_of_a_path_do_not_prolong_the_deadline() -> None:
    round_ = collected(A, B)
    for number in range(1, 50):
        round_ = round_.contributed(A, peer(A, number), now_s=START_S + number)
    assert state_after(round_, 120.0) is RoundState.GRACE


def test_a_late_contribution_may_begin_a_round_and_does_not_prolong_it() -> None:
    late = Round(number=NUMBER, expected=ALL).contributed(A, peer(A), now_s=START_S, is_late=True)
    assert late.state is RoundState.COLLECTING
    later = late.contributed(B, peer(B), now_s=START_S + 50.0, is_late=True)
    assert state_after(later, PATIENCE * 120.0) is RoundState.GRACE
    assert state_after(later.contributed(B, peer(B), now_s=START_S + 60.0), 300.0) is RoundState.COLLECTING


def test_without_a_quorum_of_the_claimed_paths_the_deadline_is_three_times_as_long() -> None:
    assert state_after(collected(A), 359.9) is RoundState.COLLECTING
    assert state_after(collected(A), 360.0) is RoundState.GRACE


def test_claimants_of_one_path_count_once_for_the_quorum() -> None:
    assert state_after(collected(A), 120.0, claims(A, B, B, B, B, B)) is RoundState.GRACE


def test_fewer_claims_lower_the_quorum() -> None:
    assert state_after(collected(A), 120.0, claims(A, B, C)) is RoundState.COLLECTING
    assert state_after(collected(A), 120.0, claims(A, B)) is RoundState.GRACE


def test_while_somebody_trains_this_round_elsewhere_it_waits_for_as_many_waves_as_there_are() -> None:
    """One volunteer over eight paths: the two of this module may be its first and its last."""
    grid = [A, B, *(PathId((1, number)) for number in range(6))]
    round_ = collected(A, expected=frozenset({A, B}))
    alone = claims(ELSEWHERE, grid=grid)
    assert state_after(round_, 8 * 120.0 - 0.1, alone) is RoundState.COLLECTING
    assert state_after(round_, 8 * 120.0, alone) is RoundState.GRACE
    two = claims(ELSEWHERE, PathId((1, 1)), grid=grid)
    assert state_after(round_, 4 * 120.0, two) is RoundState.GRACE
    done = claims(ELSEWHERE, grid=grid, round_number=NUMBER + 1)
    assert state_after(round_, 120.0, done) is RoundState.GRACE, "nobody is left who could come"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=6))
def test_who_is_told_of_elsewhere_counts_like_whoever_was_read(told: list[tuple[int, int]]) -> None:
    grid = [A, B, *(PathId((1, number)) for number in range(6))]
    round_ = collected(A, expected=frozenset({A, B}))
    read, count = dict(claims(grid=grid)), Counter[int]()
    for number, (claimants, round_number) in enumerate(told):
        path, count[round_number] = PathId((1, number)), count[round_number] + claimants
        found = claims(*[path] * claimants, grid=[path], round_number=round_number + NUMBER - 1)
        read |= found
    elsewhere = {round_number + NUMBER - 1: claimants for round_number, claimants in count.items()}
    assert round_.patience(claims(grid=grid), CONFIG, elsewhere) == round_.patience(read, CONFIG)


def test_with_a_volunteer_for_every_path_nobody_waits_for_waves() -> None:
    grid = [A, B, ELSEWHERE, PathId((1, 1))]
    round_ = collected(A, expected=frozenset({A, B}))
    assert state_after(round_, 120.0, claims(*grid, grid=grid)) is RoundState.GRACE


@given(st.lists(st.sampled_from(sorted(ALL)), max_size=40), st.integers(0, 3))
def test_whatever_is_claimed_a_round_ends(fakes: list[PathId], round_number: int) -> None:
    """Claims cost nothing: with any of them, that never contribute, the patience is bounded by the size of the grid."""
    round_ = collected(A)
    found = claims(*fakes, round_number=round_number)
    end_s = START_S + max(PATIENCE, len(ALL)) * CONFIG.deadline_s
    grace = round_.tick(found, CONFIG, now_s=end_s)
    assert grace.tick(found, CONFIG, now_s=end_s + CONFIG.grace_s).is_closed


def test_the_grace_counts_from_its_own_begin() -> None:
    """A leader that looks late still waits the whole grace."""
    grace = collected(A, B).tick(claims(*ALL), CONFIG, now_s=START_S + 150.0)
    assert (grace.state, grace.grace_from_s) == (RoundState.GRACE, START_S + 150.0)
    assert state_after(grace, 154.9) is RoundState.GRACE
    assert state_after(grace, 155.0) is RoundState.CLOSED


def test_a_contribution_in_the_grace_counts_and_does_not_prolong_it() -> None:
    grace = collected(A, B).tick(claims(*ALL), CONFIG, now_s=START_S + 120.0)
    more = grace.contributed(C, peer(C), now_s=START_S + 124.0)
    assert more.paths == {A, B, C}
    assert state_after(more, 124.9) is RoundState.GRACE
    assert state_after(more, 125.0) is RoundState.CLOSED


def test_the_last_path_ends_the_grace() -> None:
    grace = collected(A, B, C).tick(claims(*ALL), CONFIG, now_s=START_S + 120.0)
    assert state_after(grace.contributed(D, peer(D), now_s=START_S + 121.0), 121.0) is RoundState.CLOSED


def test_without_grace_the_next_look_closes() -> None:
    hasty = RoundsConfig(quorum=0.5, deadline_s=10.0, grace_s=0.0)
    grace = collected(A, B).tick(claims(*ALL), hasty, now_s=START_S + 10.0)
    assert grace.state is RoundState.GRACE
    assert grace.tick(claims(*ALL), hasty, now_s=START_S + 10.0).is_closed


def test_a_second_contribution_of_a_path_counts_once_for_the_quorum() -> None:
    twice = collected(A, A).contributed(A, peer(A, 1), now_s=START_S)
    assert twice.paths == {A}
    assert not twice.has_quorum(claims(*ALL), CONFIG)


def test_a_closed_round_takes_nothing_and_stays() -> None:
    closed = collected(*ALL).tick(claims(*ALL), CONFIG, now_s=START_S)
    assert closed.tick(claims(*ALL, A), CONFIG, now_s=START_S + 10_000.0) == closed
    with pytest.raises(IllegalTransition):
        closed.contributed(B, peer(B), now_s=START_S)
    assert closed.paths == ALL


def test_what_is_left_of_a_round_is_its_deadline_and_the_grace_from_the_last_path_on() -> None:
    deadline_s, grace_s = CONFIG.deadline_s, CONFIG.grace_s

    def left_s(round_: Round, now_s: float) -> float:
        return round_.left_s(claims(*ALL), CONFIG, now_s=now_s, deadline_s=deadline_s)

    assert left_s(Round(number=NUMBER, expected=ALL), START_S + 1000.0) == deadline_s
    late = collected(A, B, C)
    assert left_s(late, START_S + 10.0) == late.patience(claims(*ALL), CONFIG) * deadline_s + grace_s - 10.0
    grace = late.tick(claims(*ALL), CONFIG, now_s=START_S + 2 * deadline_s)
    assert grace.state is RoundState.GRACE
    assert left_s(grace, START_S + 2 * deadline_s + 1.0) == grace_s - 1.0
    assert left_s(grace, START_S + 10 * deadline_s) == 0.0


def test_a_path_whose_work_was_refused_has_its_time_once_more() -> None:
    now_s = START_S + 200.0
    refused = collected(*ALL).without([Entry(path=D, peer=peer(D))], now_s=now_s)
    assert refused is not None and refused.paths == ALL - {D}
    deadline_s = CONFIG.deadline_s
    assert refused.tick(claims(*ALL), CONFIG, now_s=now_s + deadline_s - 0.1) == refused
    assert refused.contributed(D, peer(A), now_s=now_s).tick(claims(A, B, C), CONFIG, now_s=now_s).is_closed
    assert refused.without([Entry(path=C, peer=peer(C))], now_s=now_s) is None  # once


def test_refused_work_on_a_path_that_others_brought_as_well_keeps_nobody_waiting() -> None:
    replica = collected(*ALL).contributed(D, peer(D, 1), now_s=START_S)
    assert replica.without([Entry(path=D, peer=peer(D))], now_s=START_S) is None
    assert replica.without([], now_s=START_S) is None


# -- deadlines that were learnt, and uploads that go on


def test_a_deadline_that_was_learnt_holds_instead_of_the_run_files() -> None:
    short = collected(A, B, C)
    assert short.tick(claims(*ALL), CONFIG, now_s=START_S + 29.9, deadline_s=30.0).state is RoundState.COLLECTING
    assert short.tick(claims(*ALL), CONFIG, now_s=START_S + 30.0, deadline_s=30.0).state is RoundState.GRACE
    slow = collected(A)
    assert slow.tick(claims(*ALL), CONFIG, now_s=START_S + PATIENCE * 30.0 - 0.1, deadline_s=30.0) is slow


def test_no_deadline_is_longer_than_the_run_files() -> None:
    assert collected(A, B, C).tick(claims(*ALL), CONFIG, now_s=START_S + 120.0, deadline_s=9_999.0).state is (
        RoundState.GRACE
    )


def in_grace() -> Round:
    """A, B and C are in, D's deadline is over."""
    return collected(A, B, C).tick(claims(*ALL), CONFIG, now_s=START_S + 120.0)


def test_the_grace_goes_on_while_bytes_of_a_missing_path_arrive() -> None:
    uploading, now_s = in_grace(), START_S + 120.0
    while now_s < START_S + 200.0:
        now_s += UPLOAD_SILENCE_S - 1.0
        assert uploading.tick(claims(*ALL), CONFIG, now_s=now_s, uploads_s={peer(D): now_s - 5.0}) is uploading
    silent = {peer(D): now_s - UPLOAD_SILENCE_S}
    assert uploading.tick(claims(*ALL), CONFIG, now_s=now_s, uploads_s=silent).is_closed


def test_an_upload_that_never_ends_holds_a_round_for_one_deadline_at_most() -> None:
    end_s = START_S + 120.0 + 120.0
    assert in_grace().tick(claims(*ALL), CONFIG, now_s=end_s - 0.1, uploads_s={peer(D): end_s - 0.1}).state is (
        RoundState.GRACE
    )
    assert in_grace().tick(claims(*ALL), CONFIG, now_s=end_s, uploads_s={peer(D): end_s}).is_closed


def test_uploads_of_others_do_not_prolong_the_grace() -> None:
    """Of a path that is in, of one that claims nothing, of one that begins with a later round."""
    now_s = START_S + 125.0
    later = {**claims(*ALL), D: {peer(D): Claim(path=D, since_s=0.0, round=NUMBER + 1)}}
    assert in_grace().tick(claims(*ALL), CONFIG, now_s=now_s, uploads_s={peer(A): now_s}).is_closed
    assert in_grace().tick(claims(*ALL), CONFIG, now_s=now_s, uploads_s={peer(D, 7): now_s}).is_closed
    assert in_grace().tick(later, CONFIG, now_s=now_s, uploads_s={peer(D): now_s}).is_closed


@pytest.mark.parametrize(
    ("quorum", "claimed", "needed"),
    [(0.0, 4, 1), (0.5, 0, 1), (0.5, 1, 1), (0.5, 3, 2), (0.5, 4, 2), (1.0, 4, 4), (0.55, 20, 11), (0.07, 100, 7)],
)
def test_the_quorum_is_a_share_rounded_up_and_at_least_one(quorum: float, claimed: int, needed: int) -> None:
    paths = [PathId((0, number)) for number in range(claimed + 1)]
    config, expected = RoundsConfig(quorum=quorum), frozenset(paths)
    found = claims(*paths[:claimed], grid=paths)
    assert collected(*paths[:needed], expected=expected).has_quorum(found, config)
    assert not collected(*paths[: needed - 1], expected=expected).has_quorum(found, config)


def test_nothing_leaves_a_closed_round_and_all_else_leads_there() -> None:
    assert {state for state, _ in ROUND_TRANSITIONS} == set(RoundState) - {RoundState.CLOSED}
    assert set(ROUND_TRANSITIONS.values()) == set(RoundState) - {RoundState.OPEN}


paths = st.sampled_from(sorted(ALL))
steps = st.lists(st.tuples(st.floats(0.0, 60.0), st.none() | paths, st.lists(paths, max_size=6)), max_size=25)


@given(steps)
def test_it_closes_only_for_its_reasons(steps: list[tuple[float, PathId | None, list[PathId]]]) -> None:
    """Any story of contributions, claims and time: who closes has all, or had a quorum or patience."""
    round_, now_s, newest_s = Round(number=NUMBER, expected=ALL), START_S, START_S
    for passed_s, path, claimed in steps:
        now_s += passed_s
        if path is not None and not round_.is_closed:
            newest_s = now_s if path not in round_.paths else newest_s
            round_ = round_.contributed(path, peer(path), now_s=now_s)
        found = claims(*claimed)
        before, round_ = round_, round_.tick(found, CONFIG, now_s=now_s)
        assert round_.entries == before.entries
        if round_.is_closed and not before.is_closed:
            everybody = {Entry(path=path, peer=who) for path in ALL for who in found[path]}
            assert round_.paths
            assert (round_.paths == ALL and everybody <= round_.entries) or before.state is RoundState.GRACE
        if round_.state is RoundState.GRACE and before.state is not RoundState.GRACE:
            assert now_s - newest_s >= CONFIG.deadline_s
        assert (round_.state is RoundState.OPEN) == (not round_.paths)


# -- what a leader tells


def test_an_open_round_survives_its_bytes() -> None:
    told = OpenRound(version=7, entries=(Entry(path=A, peer=peer(A)), Entry(path=B, peer=peer(B))), deadline_s=32.5)
    assert read_open_round(told.to_bytes()) == told
    assert told.has(A) and not told.has(C)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"entries":[],"version":-1}',
        b'{"entries":[{}],"version":1}',
        b'{"deadline_s":-1.0,"entries":[],"version":1}',
    ],
)
def test_a_malformed_open_round_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_open_round(data)


# -- how far a path is


@pytest.mark.parametrize(
    ("versions", "done", "expected"),
    [
        ((4, 4, 4), (0, 0, 0), Standing(progress=4, is_due=True)),
        ((4, 4, 4), (1, 1, 1), Standing(progress=5, is_due=False)),
        ((5, 4, 5), (0, 1, 0), Standing(progress=5, is_due=False)),
        ((4, 4, 4), (1, 0, 1), Standing(progress=4, is_due=True)),
        ((6, 4, 6), (1, 0, 1), Standing(progress=4, is_due=True)),
        ((6, 4, 6), (1, 1, 1), Standing(progress=5, is_due=False)),
        ((9, 8, 9), (0, 1, 0), Standing(progress=9, is_due=False)),
    ],
    ids=["all ahead", "all in", "one still open", "lost in its push", "one behind", "waits for that", "the run's end"],
)
def test_a_path_is_as_far_as_its_least_module_and_due_when_that_one_is(
    versions: tuple[int, ...], done: tuple[int, ...], expected: Standing
) -> None:
    assert standing(versions, [bool(is_done) for is_done in done], rounds=9) == expected


@given(st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 3))), min_size=4, max_size=4))
@example([(0, set()), (0, set()), (0, set()), (0, set())])
def test_some_path_is_always_due_or_some_round_is_full(modules: list[tuple[int, set[int]]]) -> None:
    """No circle of paths that wait for each other, on a 2x2 grid in any state."""
    levels = ((0, 1), (2, 3))
    grid = [(first, second) for first in levels[0] for second in levels[1]]
    through = {module: {number for number, path in enumerate(grid) if module in path} for module in range(4)}
    inside = {module: modules[module][1] & through[module] for module in range(4)}
    due = [
        standing([modules[m][0] for m in path], [number in inside[m] for m in path], rounds=5).is_due
        for number, path in enumerate(grid)
    ]
    assert any(due) or any(inside[module] == through[module] for module in range(4))
