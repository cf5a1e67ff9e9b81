"""Whom a round waits for beside others: those who have worked, and of the others none without an end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_run import tiny_config

from dipaco_p2p.owner.timing import Timing
from dipaco_p2p.protocol.rounds import Round, waits_for_newcomers
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

WORKER, NEWCOMER = PeerId("worker"), PeerId("newcomer")
MODULE = ModuleId(0, 0)
START_S = 1000.0
TAKES_S = 50.0
WAITING = next(number for number in range(1, 100) if waits_for_newcomers(number))


class Scene:
    """What the leader of a module sees; the newcomer claims the first path, since when says `claimed_s`, and the leader
    before was first heard to have a path `heard_s`."""

    def __init__(self, claimed_s: float | None = None, *, heard_s: float | None = None) -> None:
        self.now_s = START_S
        self.run = SimpleNamespace(config=tiny_config(), topology=tiny_config().topology)
        self.clock = SimpleNamespace(now_s=lambda: self.now_s)
        self.watch = SimpleNamespace(
            sightings=SimpleNamespace(claimed_s=lambda peer, path: claimed_s),
            paths=SimpleNamespace(came_s=lambda module, path, *, number: None if number else heard_s),
        )
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


@pytest.mark.parametrize("claimed_s", [None, START_S + 7.0])
def test_a_leader_that_has_seen_no_path_come_waits_a_life_of_a_heartbeat(claimed_s: float | None) -> None:
    """Attack: it knew nothing of the first round that it took over, and so waited a whole deadline for new keys."""
    scene = Scene(claimed_s)
    assert scene.timing.replicas_s() is None
    ends_s = (claimed_s or START_S) + scene.run.config.liveness.heartbeat_ttl_s
    for scene.now_s, is_awaited in ((ends_s - 0.1, True), (ends_s, False)):
        assert scene.is_awaited(0) is is_awaited
    assert scene.is_awaited(0, WORKER)


@pytest.mark.parametrize(("claimed_s", "is_awaited"), [(START_S - 1, True), (START_S + 1, False)])
def test_what_is_in_when_a_leader_takes_over_is_in_since_then_at_the_latest(claimed_s: float, is_awaited: bool) -> None:
    scene = Scene(claimed_s)
    first, *others = scene.run.topology.paths_through(MODULE)
    opened = Round(number=0, expected=frozenset([first, *others])).contributed(first, WORKER, now_s=START_S)
    scene.timing.taken_over(opened)
    scene.now_s = START_S + 2
    assert scene.is_awaited(0) is is_awaited


@pytest.mark.parametrize(("heard_s", "is_awaited"), [(START_S - 2, False), (None, True)])
def test_a_new_leader_goes_by_what_it_heard_of_the_round_before_it_led(heard_s: float | None, is_awaited: bool) -> None:
    """Attack: new keys that came after a path was in, and before its module changed hands, held the first round for a
    life of a heartbeat."""
    scene = Scene(START_S - 1, heard_s=heard_s)
    paths = scene.run.topology.paths_through(MODULE)
    opened = Round(number=0, expected=frozenset(paths))
    for path in paths:
        opened = opened.contributed(path, WORKER, now_s=START_S)
    assert scene.timing.taken_over(opened).last_s == (START_S if heard_s is None else heard_s)
    assert scene.is_awaited(0) is is_awaited


def came(scene: Scene, path: PathId, *, at_s: float) -> None:
    """Work on the path from version 0 was admitted, as this peer sees it."""
    scene.now_s = at_s
    scene.timing.arrived(cast(Any, SimpleNamespace(path=path, author=WORKER, base_version=0)))


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize(("claimed_s", "is_awaited"), [(START_S - 1, True), (START_S + 1, False)])
def test_a_newcomer_that_comes_when_a_path_is_in_begins_with_the_next_round(
    claimed_s: float, is_awaited: bool, other: int
) -> None:
    """Attack: a new key with every life of a heartbeat held the first round for all of the time that it waits, also
    while another path was missing."""
    scene = Scene(claimed_s)
    path = scene.run.topology.paths_through(MODULE)[other]
    assert scene.is_awaited(0)
    came(scene, path, at_s=START_S)
    came(scene, path, at_s=START_S + 2)  # another author's: the path is in since the first
    assert scene.is_awaited(0) is is_awaited
    assert scene.is_awaited(0, WORKER)


def test_a_new_leader_gives_further_claimants_no_second_time() -> None:
    """The seed hands its modules to those who have worked, in the middle of the first round of some: each began to
    wait again."""
    scene = Scene()
    paths = scene.run.topology.paths_through(MODULE)
    opened = Round(number=0, expected=frozenset(paths))
    for number, path in enumerate(paths):
        came(scene, path, at_s=START_S + number)
    scene.now_s = START_S + TAKES_S
    for path in paths[:-1]:
        opened = opened.contributed(path, WORKER, now_s=scene.now_s)
    assert scene.timing.taken_over(opened).last_s == scene.now_s, "a path is missing: others need time to take it"
    opened = opened.contributed(paths[-1], WORKER, now_s=scene.now_s)
    assert scene.timing.taken_over(opened).last_s == START_S + len(paths) - 1
    assert Scene().timing.taken_over(opened).last_s == scene.now_s, "who was no mirror has seen nothing come"
