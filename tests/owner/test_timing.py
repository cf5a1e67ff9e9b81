"""Whom a round waits for beside others: those who have worked, and of the others none without an end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_run import tiny_config

from dipaco_p2p.owner.timing import Timing
from dipaco_p2p.protocol.rounds import waits_for_newcomers
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId

WORKER, NEWCOMER = PeerId("worker"), PeerId("newcomer")
MODULE = ModuleId(0, 0)
START_S = 1000.0
TAKES_S = 50.0
WAITING = next(number for number in range(1, 100) if waits_for_newcomers(number))


class Scene:
    """What the leader of a module sees; the newcomer claims the first path, since when says `claimed_s`."""

    def __init__(self, claimed_s: float | None = None) -> None:
        self.now_s = START_S
        self.run = SimpleNamespace(config=tiny_config(), topology=tiny_config().topology)
        self.clock = SimpleNamespace(now_s=lambda: self.now_s)
        self.watch = SimpleNamespace(sightings=SimpleNamespace(claimed_s=lambda peer, path: claimed_s))
        self.timing = Timing(cast(Any, self), MODULE, is_proven=lambda peer: peer == WORKER)

    def is_awaited(self, number: int, peer: PeerId = NEWCOMER) -> bool:
        return self.timing.is_awaited(peer, self.run.topology.paths_through(MODULE)[0], number=number)

    def learn(self, number: int) -> None:
        """All paths come TAKES_S after this version; then it opens again, as at the start of a round."""
        self.timing.opened(number - 1)
        for path in self.run.topology.paths_through(MODULE):
            at_s = self.now_s + TAKES_S
            self.timing.arrivals = self.timing.arrivals.arrived(path, WORKER, base=number - 1, now_s=at_s)
            self.now_s = at_s
        self.timing.opened(number)


def test_who_has_worked_is_waited_for_in_every_round() -> None:
    assert all(Scene().is_awaited(number, WORKER) for number in range(50))


def test_a_newcomer_is_waited_for_in_the_first_round_and_now_and_then() -> None:
    """Attack: a new key for each round, whose claim stands beside others', made every round wait."""
    awaited = [number for number in range(50) if Scene().is_awaited(number)]
    assert awaited == [number for number in range(50) if waits_for_newcomers(number)] and awaited[0] == 0


@pytest.mark.parametrize("claimed_s", [None, START_S + 7.0, START_S + 5000.0])
def test_a_newcomer_has_the_time_of_further_claimants_since_it_claimed(claimed_s: float | None) -> None:
    scene = Scene(claimed_s)
    scene.learn(WAITING)
    limit_s, opened_s = scene.timing.replicas_s(), scene.now_s
    assert limit_s is not None and limit_s >= 2 * TAKES_S
    ends_s = max(opened_s, claimed_s or opened_s) + limit_s
    for scene.now_s, is_awaited in ((ends_s - 0.1, True), (ends_s, False)):
        assert scene.is_awaited(WAITING) is is_awaited
    assert scene.is_awaited(WAITING, WORKER)
