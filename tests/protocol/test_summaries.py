"""What leaders tell of paths: what is written is read, junk tells nothing, and those who draw by it spread out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.protocol.records import RECORD_BYTES_MAX
from dipaco_p2p.protocol.summaries import (
    AGE_MAX_S,
    CLAIMANTS_MAX,
    MOVERS,
    PATHS_TOLD_MAX,
    PathSummary,
    draw_path,
    merged,
    read_summaries,
    share_moving,
    write_summaries,
)
from dipaco_p2p.topology import PathId

PATHS = [PathId((0, number)) for number in range(4)]


def told(claimants: int, *, round_: int = 0, age_s: float = 0.0) -> PathSummary:
    return PathSummary(claimants=claimants, round=round_, age_s=age_s)


summaries = st.builds(
    PathSummary,
    claimants=st.integers(0, CLAIMANTS_MAX),
    round=st.integers(0, 2**31),
    age_s=st.integers(0, AGE_MAX_S).map(float),
)


@given(st.lists(summaries, min_size=4, max_size=4))
def test_what_is_written_is_read(found: list[PathSummary]) -> None:
    assert read_summaries(write_summaries(found), PATHS) == dict(zip(PATHS, found, strict=True))


def test_the_longest_fits_into_a_record_and_a_longer_one_is_not_written() -> None:
    one = told(CLAIMANTS_MAX, round_=10**6, age_s=10**9)
    assert len(write_summaries([one] * PATHS_TOLD_MAX)) < RECORD_BYTES_MAX + 1024
    assert len(write_summaries([told(39, round_=999, age_s=30.0)] * PATHS_TOLD_MAX)) < RECORD_BYTES_MAX - 2048
    assert write_summaries([one] * (PATHS_TOLD_MAX + 1)) == ""


@pytest.mark.parametrize(
    "text", ["", "1.2.3", "1.2.3 1.2.3 1.2.3 1.2", "1.2.3 1.2.3 1.2.3 x.2.3", "1.2.3 1.2.3 1.2.3 -1.2.3", "٣.2.3 " * 4]
)
def test_junk_tells_nothing(text: str) -> None:
    assert read_summaries(text, PATHS) == {}
    assert read_summaries(f"{10**15}.0.0 0.0.0 0.0.0 0.0.0", PATHS) == {}, "more claimants than there may be"


def test_of_two_leaders_the_one_that_tells_of_more_need_is_checked_first() -> None:
    assert merged(None, told(3)) == told(3)
    assert merged(told(3, round_=7), told(1, round_=9)) == told(1, round_=7)


def test_a_thousand_that_draw_at_once_spread_out() -> None:
    needs = {PathId((a, b)): (0, True, 0) for a in range(16) for b in range(16)}
    drawn = Counter(draw_path(needs, seed=seed) for seed in range(1000))
    assert len(drawn) > 240 and max(drawn.values()) <= 14


def test_need_comes_first_but_no_path_is_never_drawn() -> None:
    needs = {PATHS[0]: (0, True, 5), PATHS[1]: (1, True, 5), PATHS[2]: (3, True, 5), PATHS[3]: (0, True, 7)}
    drawn = Counter(draw_path(needs, seed=seed) for seed in range(4000))
    assert drawn[PATHS[0]] > drawn[PATHS[3]] > drawn[PATHS[1]] > drawn[PATHS[2]] > 0
    held = Counter(draw_path(needs, seed=seed, held=frozenset([PATHS[3]])) for seed in range(4000))
    assert held[PATHS[3]] > 2 * drawn[PATHS[3]]


def test_a_few_move_for_each_that_is_missing() -> None:
    counts = {PathId((0, number)): 2 for number in range(100)} | {PathId((1, 0)): 0}
    assert share_moving(1, counts) == MOVERS / 100
    assert share_moving(1, {PATHS[0]: 2, PATHS[1]: 2, PATHS[2]: 0}) == 1.0, "of a few, everybody"
    assert share_moving(1, {PATHS[0]: 2, PATHS[1]: 1}) == 0.0, "nothing is missing"
