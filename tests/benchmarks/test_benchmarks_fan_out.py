"""A new version among many trainers, by the programs' fetching in virtual time: who sends it, and what liars cost."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fan_out import HOSTILE, Case, Told, played
from benchmarks.report import MB
from dipaco_p2p.owner.sources import PATIENCE_S, THIN_BYTES_S

LINES: dict[str, Any] = {"size_mb": 25.0, "up_mbit": 20.0, "down_mbit": 100.0, "sharers": 4}
PATIENT_S = PATIENCE_S + LINES["size_mb"] * MB / THIN_BYTES_S
TRAINERS = 16


def once(count: int, **settings: Any) -> Told:
    return played(Case(trainers=count, **LINES, **settings))[0]


@pytest.mark.parametrize("count", [4, 8, 16])
def test_in_turn_no_owner_sends_more_than_two_copies_and_nobody_waits_longer(count: int) -> None:
    in_turn, before = once(count), once(count, is_in_turn=False)
    assert max(in_turn.leader, in_turn.mirror) < 2.05 and in_turn.trainer < 2.5
    assert in_turn.coordinator == 0.0 < before.coordinator
    assert in_turn.last_s <= before.last_s


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_trainers_at_the_front_cost_a_bounded_time_and_less_the_next_time(kind: str) -> None:
    twin = once(TRAINERS)
    first, second = played(Case(trainers=TRAINERS, hostile=4, kind=kind, versions=2, **LINES))
    assert first.last_s < twin.last_s + 2 * PATIENT_S
    assert second.last_s <= max(first.last_s, 1.5 * twin.last_s)
    assert first.coordinator == second.coordinator == 0.0
    assert first.leader < TRAINERS / 2 and second.leader < TRAINERS / 4
