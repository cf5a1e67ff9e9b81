"""A new version among many trainers, by the programs' fetching in virtual time: who sends it, and what liars cost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.fan_out import HOSTILE, Case, Stage, Told, played
from benchmarks.report import MB
from dipaco_p2p.owner import sources
from dipaco_p2p.owner.sources import PATIENCE_S, THIN_BYTES_S
from simulation.virtual_time import VirtualLoop

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


def test_behind_a_relay_nobody_is_asked_to_hand_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Case(trainers=10, **LINES))
    monkeypatch.setattr(sources, "THIN_BYTES_S", THIN_BYTES_S / stage.case.scale)
    beats, relayed = stage.nodes[stage.seed].watch.heartbeats, stage.trainers[:4]
    for peer in relayed:
        beats[peer] = replace(beats[peer], addresses=(f"/ip4/192.0.2.1/tcp/1/p2p/relay/p2p-circuit/p2p/{peer}",))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(stage.play())
    sent = {peer: stage.nodes[peer].store.sent_bytes for peer in stage.trainers}
    assert all(stage.nodes[peer].store.held for peer in stage.trainers)
    assert {sent[peer] for peer in relayed} == {0} < set(sent.values())
