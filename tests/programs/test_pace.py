"""How long a volunteer trains before it must push."""

from __future__ import annotations

import pytest

from dipaco_p2p.config import LivenessConfig, RoundsConfig
from dipaco_p2p.protocol.pace import notice_s
from peers.pace import Pace

LIVENESS = LivenessConfig(heartbeat_ttl_s=10.0, settle_s=1.0)


def pace_of(deadline_s: float) -> Pace:
    return Pace(RoundsConfig(deadline_s=deadline_s), LIVENESS)


def test_before_a_push_was_seen_a_tenth_of_the_deadline_is_kept_for_it() -> None:
    assert pace_of(120.0).training_s() == pytest.approx(108.0)


def test_the_slowest_of_the_last_pushes_is_reckoned_with() -> None:
    pace = pace_of(120.0)
    for duration_s in (50.0, 7.0, 20.0, 3.0):
        pace.pushed(duration_s)
    assert pace.training_s() == pytest.approx(100.0), "the first is forgotten"


def test_one_endless_push_does_not_take_all_the_time() -> None:
    pace = pace_of(120.0)
    pace.pushed(10_000.0)
    assert pace.training_s() == pytest.approx(60.0)


def test_what_getting_ready_took_is_not_there_for_training() -> None:
    assert pace_of(120.0).training_s(spent_s=30.0) == pytest.approx(78.0)
    assert pace_of(120.0).training_s(spent_s=500.0) < 0


@pytest.mark.parametrize(("steps", "fits"), [(1, True), (8, True), (9, False), (10, False)])
def test_a_step_is_begun_only_if_it_can_be_finished(steps: int, fits: bool) -> None:
    """Each takes 10 s, and there are 95."""
    assert Pace.has_time(steps, elapsed_s=10.0 * steps, training_s=95.0) == fits


def test_the_time_is_the_shortest_that_a_leader_of_the_path_waits() -> None:
    pace = pace_of(120.0)
    pace.told([80.0, 60.0, 0.0])
    assert pace.training_s() == pytest.approx(54.0)
    pace.told([0.0, 0.0])
    assert pace.training_s() == pytest.approx(108.0), "nobody says: the run file's"
    pace.told([])
    assert pace.training_s() == pytest.approx(108.0)


def test_no_leader_can_stretch_the_time_or_take_it_away() -> None:
    pace = pace_of(120.0)
    pace.told([1e9])
    assert pace.training_s() == pytest.approx(108.0)
    pace.told([1e-9])
    assert pace.training_s() == pytest.approx(0.9 * notice_s(LIVENESS))
