"""The benchmark of collusion: what it says where the answer is known."""

from __future__ import annotations

from benchmarks.collusion import ROUNDS_MAX, Swarm, play


def test_a_single_forger_on_probation_is_found_in_its_first_round() -> None:
    course = play(Swarm(peers=8, friends=1, audited=10, honest=0), seed=1)
    assert (course.first, course.all, course.forged, course.refused) == (1, 1, 0, 0.0)


def test_a_forger_in_full_standing_is_found_after_some_works_that_counted() -> None:
    course = play(Swarm(peers=8, friends=1, audited=3, honest=60), seed=1)
    assert 1 < course.all < ROUNDS_MAX and course.forged == course.all - 1
    assert course.refused == 0.0


def test_friends_that_are_most_of_all_are_never_all_found() -> None:
    course = play(Swarm(peers=6, friends=5, audited=3, honest=0), seed=1)
    assert course.all == ROUNDS_MAX and course.refused > 0
