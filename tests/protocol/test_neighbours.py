"""Buckets: they split and join, no key outgrows its limit, and a flood harms nobody outside the bucket it fills."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dipaco_p2p.protocol.neighbours import (
    BUCKET_MAX,
    BUCKET_MIN,
    DEPTH_MAX,
    LOOKS_MAX,
    PLACE_BITS,
    WHOLE_MAX,
    Estimate,
    bits,
    estimate,
    is_whole,
    looks_between,
    next_depth,
    place,
    sibling,
)


class Crowd:
    """Peers that see each other's buckets at once, and look one after the other."""

    def __init__(self, count: int) -> None:
        self.places = [place(f"peer-{number}") for number in range(count)]
        self.depths = dict.fromkeys(self.places, 0)
        self.fakes: dict[str, int] = {}
        self._members = Counter[str]()

    def members(self, bucket: str) -> int:
        return self._members[bucket] + self.fakes.get(bucket, 0)

    def look(self, one: int) -> None:
        depth = self.depths[one]
        below, bucket = bits(one, depth + 1), bits(one, depth)
        beside = None
        if depth:
            other = sibling(bucket)
            beside = sum(map(self.members, (other, other + "0", other + "1")))
        under = self.members(below) + self.members(sibling(below))
        self.depths[one] = next_depth(depth, here=self.members(bucket), below=under, beside=beside)
        self._members[bucket] -= 1
        self._members[bits(one, self.depths[one])] += 1

    def settle(self, rng: random.Random, looks: int) -> None:
        self._members = Counter(bits(one, depth) for one, depth in self.depths.items())
        for _ in range(looks):
            order = list(self.depths)
            rng.shuffle(order)
            for one in order:
                self.look(one)

    def fullest(self) -> int:
        return max(self.members(bits(one, depth)) for one, depth in self.depths.items())


def test_a_place_is_the_same_for_everybody_and_a_bucket_its_first_bits() -> None:
    assert bits(0b1011 << (PLACE_BITS - 4), 3) == "101" and bits(place("x"), 0) == ""
    assert sibling("10") == "11" and sibling("1") == "0"


@pytest.mark.parametrize("count", [BUCKET_MAX, 200, 700])
def test_no_bucket_keeps_more_than_it_may(count: int) -> None:
    crowd = Crowd(count)
    crowd.settle(random.Random(1), 12)
    assert crowd.fullest() <= BUCKET_MAX
    if count == BUCKET_MAX:
        assert set(crowd.depths.values()) == {0}, "one bucket is enough"


def test_halves_join_when_they_are_few_again() -> None:
    crowd = Crowd(300)
    crowd.settle(random.Random(1), 12)
    assert min(crowd.depths.values()) >= 2
    crowd.depths = dict(list(crowd.depths.items())[:10])
    crowd.settle(random.Random(2), 12)
    assert set(crowd.depths.values()) == {0}


def test_a_flooded_bucket_moves_its_own_members_only() -> None:
    crowd = Crowd(200)
    crowd.settle(random.Random(1), 12)
    before = dict(crowd.depths)
    victim = crowd.places[0]
    flooded = bits(victim, crowd.depths[victim])
    crowd.fakes[flooded] = 300
    crowd.settle(random.Random(2), 6)
    moved = {one for one, depth in crowd.depths.items() if depth != before[one]}
    assert moved and all(bits(one, PLACE_BITS).startswith(flooded) for one in moved)
    assert crowd.depths[victim] > before[victim], "where there is room"


def test_a_bucket_that_is_as_deep_as_any_stays() -> None:
    assert next_depth(DEPTH_MAX, here=10_000, below=0, beside=None) == DEPTH_MAX
    assert next_depth(3, here=1, below=0, beside=None) == 3, "the other half was not read"
    assert next_depth(3, here=BUCKET_MIN, below=0, beside=1) == 3


def test_a_fuller_key_is_read_less_often_but_twice_in_the_life_of_a_record() -> None:
    assert [looks_between(records) for records in (0, 1, 8, 9, 16, 17, 300)] == [1, 1, 1, 2, 2, 3, 3]
    assert LOOKS_MAX <= 3, "a record lives for six looks and is repeated every second one"


def test_only_a_swarm_of_one_bucket_and_few_keys_is_read_whole() -> None:
    assert is_whole(depth=0, modules=5, paths=4, peers=WHOLE_MAX - 9)
    assert not is_whole(depth=0, modules=5, paths=4, peers=WHOLE_MAX - 8)
    assert not is_whole(depth=1, modules=1, paths=1, peers=1)


def test_how_many_there_are_is_estimated_within_its_error() -> None:
    assert estimate([]) == Estimate(peers=0)
    assert estimate([(40, 0), (38, 0)]) == Estimate(peers=40), "one bucket is counted"
    places = [place(f"one of many {number}") for number in range(10_000)]
    rng, depth = random.Random(3), 8
    inside = 0
    for _ in range(40):
        drawn = {bits(rng.getrandbits(PLACE_BITS), depth) for _ in range(8)}
        found = estimate([(sum(bits(one, depth) == bucket for one in places), depth) for bucket in drawn])
        inside += abs(found.peers - len(places)) <= 2 * found.error
    assert inside >= 36, "two standard errors hold 95 of 100"
    assert str(Estimate(peers=9, error=2)) == "about 9 (±2)" and str(Estimate(peers=9)) == "9"


def test_one_flooded_bucket_does_not_move_the_estimate() -> None:
    samples = [(40, 5)] * 6
    assert estimate([*samples, (300, 5)]).peers == estimate(samples).peers
