"""A schedule of faults: the same for the same seed, one fault at a time for a member, and never the last one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.swarm_faults.schedule import Fault, Kind, Plan, Verb, actions, draw, volunteers

EVERYTHING = Plan(duration_s=600, faults_per_minute=3, kinds=tuple(Kind), away_s=(5, 90), never_back=0.3)


def test_the_same_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert draw(7, EVERYTHING, peers=5) == draw(7, EVERYTHING, peers=5)
    assert draw(7, EVERYTHING, peers=5) != draw(8, EVERYTHING, peers=5)


def test_one_kill_a_minute_for_ten_minutes_is_ten_kills_each_in_its_minute() -> None:
    faults = draw(0, Plan(duration_s=600), peers=8)
    assert [int(fault.at_s // 60) for fault in faults] == list(range(10))
    assert {fault.kind for fault in faults} == {Kind.KILL}
    assert all(fault.victim in volunteers(8) for fault in faults)
    assert all(fault.away_s is not None and 10 <= fault.away_s <= 20 for fault in faults)


@given(seed=st.integers(0, 10_000), peers=st.integers(1, 6))
def test_nobody_has_a_fault_while_away_and_somebody_always_stays(seed: int, peers: int) -> None:
    faults = draw(seed, EVERYTHING, peers=peers)
    by_victim: dict[str, list[Fault]] = {}
    for fault in faults:
        by_victim.setdefault(fault.victim, []).append(fault)
    for own in by_victim.values():
        assert all(before.back_s is not None and before.back_s <= after.at_s for before, after in pairwise(own))
    members = set(volunteers(peers))
    for fault in faults:
        if fault.kind is Kind.JOIN:
            members.add(fault.victim)
        gone = {f.victim for f in faults if f.at_s <= fault.at_s and (f.back_s is None or fault.at_s < f.back_s)}
        assert members - gone, "nobody is left"


@given(seed=st.integers(0, 10_000))
def test_what_is_done_to_a_member_makes_sense(seed: int) -> None:
    """Only what runs is killed, only what ended is started, only what is frozen is thawed."""
    state = dict.fromkeys((*volunteers(4), "seed"), "up")
    before = {Verb.START: (None, "down"), Verb.THAW: ("frozen",)}
    after = {Verb.KILL: "down", Verb.TERM: "down", Verb.START: "up", Verb.FREEZE: "frozen", Verb.THAW: "up"}
    done = actions(draw(seed, EVERYTHING, peers=4))
    assert [action.at_s for action in done] == sorted(action.at_s for action in done)
    for action in done:
        assert state.get(action.name) in before.get(action.verb, ("up",)), action
        state[action.name] = after[action.verb]


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_can_be_asked_for_alone(kind: Kind) -> None:
    faults = draw(3, Plan(duration_s=240, kinds=(kind,)), peers=3)
    assert len(faults) == 4 and {fault.kind for fault in faults} == {kind}


@given(seed=st.integers(0, 10_000))
def test_who_is_spared_never_has_a_fault(seed: int) -> None:
    faults = draw(seed, replace(EVERYTHING, spared=2), peers=4)
    assert not {fault.victim for fault in faults} & {"volunteer-3", "volunteer-4"}
    assert {fault.victim for fault in faults} & {"volunteer-1", "volunteer-2"}
