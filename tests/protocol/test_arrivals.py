"""How long a round waits is learnt from when contributions came: within bounds, whatever anybody sends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.config import LivenessConfig, RoundsConfig
from dipaco_p2p.protocol.rounds import MULTIPLE, ROUNDS_REMEMBERED, Arrivals, notice_s, within_bounds
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

ROUNDS = RoundsConfig(deadline_s=600.0)
LIVENESS = LivenessConfig(heartbeat_ttl_s=10.0, settle_s=1.0)
FLOOR_S = 16.0
PATHS = [PathId((0, number)) for number in range(4)]
START_S = 5000.0
ROUND_S = 1000.0


def peer(name: object) -> PeerId:
    return PeerId(f"peer {name}")


def after(rounds: int, durations_s: dict[PathId, float], *, before: Arrivals | None = None, first: int = 0) -> Arrivals:
    """So many rounds in which each path came so long after the round opened, each from a peer of its own."""
    found = before or Arrivals(paths=len(PATHS))
    for version in range(first, first + rounds):
        opened_s = START_S + version * ROUND_S
        found = found.opened(version, now_s=opened_s)
        for path, duration_s in durations_s.items():
            found = found.arrived(path, peer(path), base=version, now_s=opened_s + duration_s)
    return found


def deadline_s(found: Arrivals) -> float:
    return found.deadline_s(ROUNDS, LIVENESS)


def test_who_has_seen_nothing_waits_as_long_as_the_run_file_says() -> None:
    assert deadline_s(Arrivals(paths=4)) == 600.0
    assert deadline_s(after(3, dict.fromkeys(PATHS[:1], 5.0))) == 600.0, "a quarter of the paths is too little"


def test_it_waits_a_multiple_of_what_a_path_takes_and_for_a_path_to_be_taken_over() -> None:
    assert notice_s(LIVENESS) == FLOOR_S
    assert deadline_s(after(1, dict.fromkeys(PATHS, 50.0))) == MULTIPLE * 50.0 + FLOOR_S
    assert deadline_s(after(1, dict.fromkeys(PATHS[:2], 50.0))) == MULTIPLE * 50.0 + FLOOR_S


def test_for_further_claimants_of_a_path_nobody_need_notice_a_death() -> None:
    assert Arrivals(paths=4).replicas_s(LIVENESS) is None
    assert after(1, dict.fromkeys(PATHS, 50.0)).replicas_s(LIVENESS) == MULTIPLE * 50.0
    assert after(1, dict.fromkeys(PATHS, 1.0)).replicas_s(LIVENESS) == LIVENESS.heartbeat_ttl_s


def test_of_a_first_round_only_further_claimants_are_measured_from_their_claims_on() -> None:
    """No leader sees it open. Attack: idle claims beside others' cost it the run file's deadline, here 600 s."""
    found = Arrivals(paths=4).arrived(PATHS[0], peer("first"), base=0, now_s=START_S, claimed_s=START_S - 10.0)
    assert found.replicas_s(LIVENESS) is None, "a quarter of the paths is too little"
    for path, claimed_s in zip(PATHS[1:], (None, -math.inf, START_S - 70.0), strict=True):
        found = found.arrived(path, peer(path), base=0, now_s=START_S, claimed_s=claimed_s)
    assert found.replicas_s(LIVENESS) == MULTIPLE * 70.0
    assert deadline_s(found) == 600.0, "a missing path has the time of a machine that still prepares"
    late = found.arrived(PATHS[1], peer("late"), base=3, now_s=START_S, claimed_s=START_S - 900.0)
    assert late == found, "of later rounds it is known when they open"
    assert after(1, dict.fromkeys(PATHS, 50.0), before=found).replicas_s(LIVENESS) == MULTIPLE * 50.0


def test_it_follows_the_machines_and_forgets() -> None:
    fast = after(9, dict.fromkeys(PATHS, 20.0))
    slow = after(ROUNDS_REMEMBERED, dict.fromkeys(PATHS, 80.0), before=fast, first=9)
    assert deadline_s(slow) == MULTIPLE * 80.0 + FLOOR_S
    assert max(map(len, slow.durations_s.values())) <= ROUNDS_REMEMBERED + 1


def test_it_is_never_longer_than_the_run_file_says_nor_shorter_than_a_take_over() -> None:
    assert deadline_s(after(3, dict.fromkeys(PATHS, 999.0))) == 600.0
    assert deadline_s(after(3, dict.fromkeys(PATHS, 0.0))) == FLOOR_S
    hasty = RoundsConfig(deadline_s=3.0)
    assert after(3, dict.fromkeys(PATHS, 0.0)).deadline_s(hasty, LIVENESS) == 3.0, "the run file's word is the last"


def test_what_a_leader_tells_is_brought_within_the_bounds() -> None:
    assert [within_bounds(told_s, ROUNDS, LIVENESS) for told_s in (0.0, 100.0, 1e9)] == [FLOOR_S, 100.0, 600.0]


def test_one_slow_round_of_all_changes_little() -> None:
    found = after(3, dict.fromkeys(PATHS, 20.0))
    assert deadline_s(after(1, dict.fromkeys(PATHS, 500.0), before=found, first=3)) == MULTIPLE * 20.0 + FLOOR_S


def test_a_late_contribution_teaches_as_well() -> None:
    """Half of the paths are slow, and each time their round is closed before they come."""
    found = Arrivals(paths=4)
    for version in range(4):
        opened_s = START_S + version * 60.0
        found = found.opened(version, now_s=opened_s)
        for path in PATHS[:2]:
            found = found.arrived(path, peer(path), base=version, now_s=opened_s + 20.0)
        for path in PATHS[2:] if version else ():
            found = found.arrived(path, peer(path), base=version - 1, now_s=opened_s + 30.0)
    assert deadline_s(found) == MULTIPLE * 90.0 + FLOOR_S


def test_one_slow_path_of_many_does_not_hold_the_others_up() -> None:
    assert deadline_s(after(3, dict.fromkeys(PATHS[:3], 20.0) | {PATHS[3]: 500.0})) == MULTIPLE * 20.0 + FLOOR_S


def test_a_path_that_is_sent_at_once_does_not_cut_the_others_off() -> None:
    for liars in (1, 2):
        found = after(5, dict.fromkeys(PATHS[liars:], 50.0) | dict.fromkeys(PATHS[:liars], 0.0))
        assert deadline_s(found) == MULTIPLE * 50.0 + FLOOR_S


@pytest.mark.parametrize("keys", [1, 100])
def test_no_crowd_that_sends_at_once_shortens_what_honest_peers_need(keys: int) -> None:
    """Attack: one peer that sent at once for 9 of 16 paths took the deadline from 1,223 s to 24 s."""
    honest = dict.fromkeys(PATHS, 50.0)
    found = Arrivals(paths=len(PATHS))
    for version in range(5):
        opened_s = START_S + version * ROUND_S
        found = found.opened(version, now_s=opened_s)
        for path in PATHS:
            for number in range(keys):
                found = found.arrived(path, peer(f"{path} {number}"), base=version, now_s=opened_s + 0.1)
        for path in PATHS:
            found = found.arrived(path, peer(path), base=version, now_s=opened_s + honest[path])
    assert deadline_s(found) == MULTIPLE * 50.0 + FLOOR_S


def test_slow_authors_on_a_minority_of_paths_hold_nobody_up() -> None:
    found = after(2, dict.fromkeys(PATHS, 50.0))
    for number in range(100):
        found = found.arrived(PATHS[0], peer(number), base=1, now_s=START_S + ROUND_S + 500.0 + number)
    assert deadline_s(found) == MULTIPLE * 50.0 + FLOOR_S


def test_of_a_volunteer_with_several_paths_each_counts_for_itself() -> None:
    """One does all four, wave after wave: each takes it 20 s."""
    found = Arrivals(paths=4).opened(0, now_s=START_S)
    for wave, path in enumerate(PATHS):
        found = found.arrived(path, peer("the only one"), base=0, now_s=START_S + 20.0 * (wave + 1))
    assert found.typical_s() == 20.0


def test_rounds_that_it_did_not_open_teach_nothing() -> None:
    """Four volunteers that waited for a new leader come at once; that is not how long they trained."""
    found = Arrivals(paths=4)
    for path in PATHS:
        found = found.arrived(path, peer(path), base=6, now_s=START_S)
    assert found == Arrivals(paths=4)


def test_a_clock_that_was_set_back_makes_no_negative_duration() -> None:
    assert after(1, dict.fromkeys(PATHS, -30.0)).typical_s() == 0.0


stories = st.lists(
    st.tuples(st.floats(0.0, 100.0), st.booleans(), st.sampled_from(PATHS), st.integers(0, 3), st.integers(0, 3)),
    max_size=60,
)


@given(stories)
def test_any_story_keeps_the_bounds_and_little_memory(story: list[tuple[float, bool, PathId, int, int]]) -> None:
    found, now_s, version = Arrivals(paths=len(PATHS)), START_S, 0
    for passed_s, is_new, path, who, late in story:
        now_s += passed_s
        if is_new:
            version += 1
            found = found.opened(version, now_s=now_s)
        found = found.arrived(path, peer(who), base=version - late, now_s=now_s)
        assert FLOOR_S <= deadline_s(found) <= 600.0
    assert len(found.opened_s) <= ROUNDS_REMEMBERED
    assert all(len(known) <= ROUNDS_REMEMBERED + 1 for known in found.durations_s.values())


@given(
    st.lists(st.integers(1, 200), min_size=4, max_size=4),
    st.integers(0, 3),
    st.integers(0, 900),
)
def test_one_hostile_path_of_four_moves_it_no_further_than_the_honest_reach(
    honest_s: list[int], liar: int, lie_s: int
) -> None:
    durations = dict(zip(PATHS, honest_s, strict=True))
    found = deadline_s(after(3, durations | {PATHS[liar]: lie_s}))
    others = sorted(durations[path] for path in PATHS if path != PATHS[liar])
    assert MULTIPLE * others[1] + FLOOR_S <= found <= min(600.0, MULTIPLE * others[2] + FLOOR_S)
