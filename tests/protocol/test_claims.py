"""Claims: whatever the order of events, enough volunteers cover all paths, and they come to rest."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dipaco_p2p.protocol.claims import (
    CLAIM_TRANSITIONS,
    ClaimState,
    choose_path,
    drawn,
    ranking,
    replicas,
    should_rotate,
    should_yield,
    taking_part,
)
from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.rounds import Standing
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId, Topology

MOVES_MAX = 400
ROUNDS_MAX = 60


def path(number: int) -> PathId:
    return PathId((0, number))


def peer(number: int) -> PeerId:
    return PeerId(f"peer-{number}")


class Table:
    """The claims that all volunteers of a test see, and a time that only grows."""

    def __init__(self, paths: int) -> None:
        self.claims: dict[PathId, dict[PeerId, Claim]] = {path(number): {} for number in range(paths)}
        self.now_s = 0.0

    def claim(self, who: PeerId, where: PathId) -> None:
        self.claims[where][who] = Claim(path=where, since_s=self.now_s)
        self.now_s += 1.0

    def move(self, who: PeerId, seed: int, standings: Mapping[PathId, Standing] = MappingProxyType({})) -> PathId:
        """Release, choose again, claim."""
        for peers in self.claims.values():
            peers.pop(who, None)
        where = choose_path(self.claims, standings, seed=seed)
        self.claim(who, where)
        return where

    def restless(self) -> list[tuple[PeerId, PathId]]:
        return [
            (who, where)
            for where, peers in self.claims.items()
            for who in sorted(peers)
            if should_yield(who, where, self.claims)
        ]

    def settle(self, rng: random.Random) -> None:
        """One after the other moves, in any order, until all stay."""
        for _ in range(MOVES_MAX):
            restless = self.restless()
            if not restless:
                return
            self.move(rng.choice(restless)[0], rng.randrange(2**31))
        raise AssertionError(f"still moving after {MOVES_MAX} moves: {self.counts()}")

    def counts(self) -> list[int]:
        return [len(peers) for peers in self.claims.values()]


def crowd(paths: int, where: list[int]) -> Table:
    """Volunteer i has claimed the path of number `where[i]`, in that order."""
    table = Table(paths)
    for number, chosen in enumerate(where):
        table.claim(peer(number), path(chosen % paths))
    return table


starts = st.tuples(st.integers(1, 9), st.lists(st.integers(0, 8), min_size=1, max_size=24), st.randoms())


@given(starts)
@example((9, [0] * 24, random.Random(0)))
def test_they_come_to_rest_spread_evenly(start: tuple[int, list[int], random.Random]) -> None:
    paths, where, rng = start
    table = crowd(paths, where)
    table.settle(rng)
    assert max(table.counts()) - min(table.counts()) <= 1
    assert len(where) < paths or min(table.counts()) >= 1


@given(starts)
@example((9, [0] * 24, random.Random(0)))
def test_they_come_to_rest_even_if_all_move_at_once(start: tuple[int, list[int], random.Random]) -> None:
    """The worst network: in each round all read the same view, and who yields chooses without seeing the others."""
    paths, where, rng = start
    table = crowd(paths, where)
    for _ in range(ROUNDS_MAX):
        restless = table.restless()
        if not restless:
            break
        seen = {chosen: dict(peers) for chosen, peers in table.claims.items()}
        for who, left in restless:
            del table.claims[left][who]
            view = {chosen: {k: claim for k, claim in peers.items() if k != who} for chosen, peers in seen.items()}
            table.claim(who, choose_path(view, {}, seed=rng.randrange(2**31)))
    assert table.restless() == []
    assert len(where) < paths or min(table.counts()) >= 1


@given(starts)
def test_a_covered_path_stays_covered(start: tuple[int, list[int], random.Random]) -> None:
    paths, where, rng = start
    table = crowd(paths, where)
    for _ in range(MOVES_MAX):
        restless = table.restless()
        if not restless:
            break
        covered = {chosen for chosen, peers in table.claims.items() if peers}
        table.move(rng.choice(restless)[0], rng.randrange(2**31))
        assert covered <= {chosen for chosen, peers in table.claims.items() if peers}


@given(starts)
def test_the_first_of_a_path_never_yields(start: tuple[int, list[int], random.Random]) -> None:
    table = crowd(*start[:2])
    for where, peers in table.claims.items():
        if peers:
            assert not should_yield(ranking(where, peers)[0], where, table.claims)


def test_a_replica_takes_the_path_of_a_killed_claimant() -> None:
    table = crowd(3, [0, 1, 2, 0])
    assert table.restless() == []
    del table.claims[path(1)][peer(1)]
    assert table.restless() == [(peer(3), path(0))], "the later claimant of the doubled path, and only that one"
    assert table.move(peer(3), seed=0) == path(1)
    assert table.restless() == []


def test_without_replicas_a_lost_path_waits_for_a_newcomer() -> None:
    table = crowd(3, [0, 1, 2])
    table.claims[path(2)].clear()
    assert table.restless() == []
    assert table.move(peer(9), seed=0) == path(2)


def at(progress: int, *, due: bool = True) -> Standing:
    return Standing(progress=progress, is_due=due)


def test_a_newcomer_takes_the_uncovered_path_whatever_else_speaks_for_others() -> None:
    claims = crowd(3, [0, 2, 2]).claims
    for seed in range(20):
        assert choose_path(claims, {path(1): at(99, due=False)}, seed=seed, held={path(0)}) == path(1)


def test_what_can_be_trained_comes_before_what_waits() -> None:
    claims = Table(3).claims
    standings = {path(0): at(2, due=False), path(1): at(3), path(2): at(3, due=False)}
    assert choose_path(claims, standings, seed=0, held={path(0)}) == path(1)


def test_the_least_trained_comes_before_the_own_and_before_chance() -> None:
    claims = Table(4).claims
    standings = {path(0): at(3), path(1): at(2), path(2): at(2), path(3): at(3)}
    assert {choose_path(claims, standings, seed=seed, held={path(3)}) for seed in range(40)} == {path(1), path(2)}
    assert choose_path(claims, {path(n): at(1) for n in range(3)}, seed=0) == path(3), "unknown counts as untrained"


def test_the_own_path_wins_among_those_that_are_as_far() -> None:
    claims = crowd(3, [0]).claims
    standings = {path(1): at(5), path(2): at(5)}
    assert {choose_path(claims, standings, seed=seed, held={path(2)}) for seed in range(20)} == {path(2)}
    assert choose_path(claims, standings, seed=0, held={path(0), path(1)}) == path(1), "not one that is covered"


def test_two_volunteers_on_a_square_grid_train_every_module() -> None:
    paths = list(Topology((1, 2, 2)).paths())
    for seed in range(20):
        claims: dict[PathId, dict[PeerId, Claim]] = {path: {} for path in paths}
        for number in range(2):
            chosen = choose_path(claims, {}, seed=seed + 100 * number)
            claims[chosen] = {PeerId(str(number)): Claim(path=chosen, since_s=0.0)}
        covered = {module for path, peers in claims.items() if peers for module in path.modules()}
        assert len(covered) == 5, seed


def test_a_crowd_of_newcomers_spreads_out() -> None:
    claims = Table(4).claims
    chosen = [choose_path(claims, {}, seed=seed) for seed in range(200)]
    assert all(25 <= chosen.count(path(number)) <= 75 for number in range(4))
    assert chosen == [choose_path(dict(reversed(claims.items())), {}, seed=seed) for seed in range(200)]


def test_who_came_first_is_ranked_first_and_ties_favour_nobody() -> None:
    table = crowd(1, [0, 0, 0])
    assert ranking(path(0), table.claims[path(0)]) == [peer(0), peer(1), peer(2)]
    winners = {ranking(path(n), {peer(k): Claim(path=path(n), since_s=5.0) for k in range(3)})[0] for n in range(30)}
    assert winners == {peer(0), peer(1), peer(2)}


def test_the_parts_of_a_shard_go_to_those_that_stay() -> None:
    table = crowd(3, [0, 0, 1, 0])
    assert list(replicas(path(0), table.claims)) == [peer(0)], "path 2 is uncovered: the others are on their way"
    table.claim(peer(9), path(2))
    assert list(replicas(path(0), table.claims)) == [peer(0), peer(1)], "rank 2 is one too many"
    assert list(replicas(path(0), crowd(1, [0, 0, 0]).claims)) == [peer(0), peer(1), peer(2)]


@pytest.mark.parametrize(
    ("mine", "other", "moves"),
    [
        (at(4, due=False), at(3), True),
        (at(4, due=False), at(4), True),
        (at(4, due=False), at(5), False),
        (at(4), at(3), True),
        (at(4), at(4), False),
        (at(4, due=False), at(3, due=False), False),
    ],
    ids=["missing", "waiting, as far", "waiting, ahead", "due, behind", "due, as far", "nothing to do there"],
)
def test_who_is_done_goes_where_work_is_missing(mine: Standing, other: Standing, moves: bool) -> None:
    assert should_rotate(path(0), mine, crowd(2, [0]).claims, {path(0): mine, path(1): other}) == moves
    assert not should_rotate(path(0), mine, crowd(2, [0, 1]).claims, {path(1): other}), "it is claimed"
    assert not should_rotate(path(0), mine, crowd(2, [0]).claims, {}), "its leaders do not answer"


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=6), st.integers(0, 99))
def test_who_rotates_chooses_a_path_that_can_be_trained(found: list[tuple[int, bool]], seed: int) -> None:
    """What sends a volunteer away and what it then chooses agree; else it would move for ever, and train nothing."""
    standings = {path(number): at(progress, due=due) for number, (progress, due) in enumerate(found)}
    claims = crowd(len(found), [0]).claims
    if should_rotate(path(0), standings[path(0)], claims, standings):
        released = {where: {} for where in claims}
        chosen = choose_path(released, standings, seed=seed, held={path(0)})
        assert standings[chosen].is_due
        assert chosen != path(0) or standings[path(0)].is_due
        uncovered = [standings[path(number)] for number in range(1, len(found)) if standings[path(number)].is_due]
        assert standings[chosen].progress <= min(standing.progress for standing in uncovered)


@given(st.integers(1, 4), st.integers(1, 9), st.randoms())
def test_volunteers_that_rotate_train_every_path_of_every_round_once(
    volunteers: int, paths: int, rng: random.Random
) -> None:
    """Whoever is free next. A round ends when nobody finds anything to do."""
    table, trained = Table(paths), [0] * paths
    where: dict[PeerId, PathId] = {}
    for version in range(3):
        idle: set[PeerId] = set()
        while len(idle) < volunteers:
            who = peer(rng.randrange(volunteers))
            standings = {path(n): at(reached, due=reached == version) for n, reached in enumerate(trained)}
            mine = where.get(who)
            if mine is None or should_rotate(mine, standings[mine], table.claims, standings):
                mine = where[who] = table.move(who, rng.randrange(99), standings)
            if standings[mine].is_due:
                trained[mine.indices[1]] += 1
                idle.clear()
            else:
                idle.add(who)
        assert trained == [version + 1] * paths


def test_who_claims_nothing_need_not_yield() -> None:
    table = crowd(2, [0, 0, 0])
    assert not should_yield(peer(9), path(0), table.claims)
    assert not should_yield(peer(0), path(7), table.claims)


def test_on_a_grid_of_one_path_all_stay() -> None:
    assert crowd(1, [0] * 10).restless() == []


def test_every_state_is_reached_and_left() -> None:
    assert {state for state, _ in CLAIM_TRANSITIONS} == set(ClaimState) == set(CLAIM_TRANSITIONS.values())


def test_who_takes_part_is_who_claims_a_path() -> None:
    table = Table(3)
    assert taking_part(table.claims) == frozenset()
    for who, where in ((1, 0), (2, 0), (3, 2)):
        table.claim(peer(who), path(where))
    assert taking_part(table.claims) == {peer(1), peer(2), peer(3)}


def test_of_more_claimants_than_places_others_train_in_each_round_and_all_in_turn() -> None:
    crowd = [peer(number) for number in range(40)]
    turns = [drawn(path(0), crowd, round_number=number, places=18) for number in range(60)]
    assert all(len(found) == 18 and found <= set(crowd) for found in turns)
    assert turns[0] == drawn(path(0), crowd[::-1], round_number=0, places=18) != turns[1]
    had = [sum(one in found for found in turns) for one in crowd]
    assert min(had) >= 15 and max(had) <= 39  # of 60, 27 on average, with a deviation of 4
    assert drawn(path(0), crowd[:18], round_number=0, places=18) == set(crowd[:18])


def test_somebody_who_leaves_changes_the_draw_of_one_other_at_most() -> None:
    crowd = [peer(number) for number in range(40)]
    before = drawn(path(0), crowd, round_number=3, places=18)
    for gone in crowd:
        left = [one for one in crowd if one != gone]
        assert len(drawn(path(0), left, round_number=3, places=18) - before) == (gone in before)
