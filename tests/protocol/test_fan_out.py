"""The order in which trainers hand a version on: everybody gives it away twice, and nobody can take a place in it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dipaco_p2p.protocol.fan_out import order, place, tiers
from dipaco_p2p.protocol.signing import PeerId

OWNERS = [PeerId(f"owner-{number}") for number in range(3)]
VERSION = "ab" * 32


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"peer-{number}") for number in range(count)]


@pytest.mark.parametrize(("owners", "sizes"), [(3, [3, 6, 9, 15, 24, 3]), (1, [1, 2, 3, 5, 8, 13, 21, 7])])
def test_a_tier_is_as_large_as_the_two_before_it(owners: int, sizes: list[int]) -> None:
    assert [len(tier) for tier in tiers(peers(60), owners=owners)] == sizes


@pytest.mark.parametrize("count", [1, 3, 4, 9, 10, 33, 306])
def test_everybody_gives_a_version_away_twice_and_owners_too(count: int) -> None:
    members = order(VERSION, peers(count))
    sent: Counter[PeerId] = Counter()
    for peer in members:
        at = place(peer, members, owners=OWNERS, version=VERSION)
        asked = [*at.newer, *at.older]  # each brings the same share
        sent.update({other: 1 / len(asked) for other in asked})
    assert max(sent.values()) <= 2 + 1e-9
    assert sent.total() == pytest.approx(count)


def test_a_tier_fetches_from_the_one_before_it_and_the_first_from_the_owners() -> None:
    members = order(VERSION, peers(20))
    places = [place(peer, members, owners=OWNERS, version=VERSION) for peer in members]
    assert [each.tier for each in places] == [0] * 3 + [1] * 6 + [2] * 9 + [3] * 2
    assert all(set(each.newer) == set(OWNERS) and not each.older for each in places[:3])
    assert all(set(each.newer) == set(members[:3]) and set(each.older) == set(OWNERS) for each in places[3:9])
    assert all(set(each.newer) == set(members[3:9]) and set(each.older) == set(members[:3]) for each in places[9:18])


def test_those_of_one_tier_begin_with_different_ones() -> None:
    members = order(VERSION, peers(18))
    firsts = Counter(place(peer, members, owners=OWNERS, version=VERSION).newer[0] for peer in members[9:])
    assert set(firsts) == set(members[3:9]) and max(firsts.values()) == 2


def test_the_order_is_the_same_for_everybody_and_another_for_each_version() -> None:
    some = peers(30)
    shuffled = random.Random(1).sample(some, len(some))
    assert order(VERSION, some) == order(VERSION, shuffled)
    first = {order(f"{number:064x}", some)[0] for number in range(40)}
    assert len(first) > 15


def test_who_is_dialled_through_a_relay_stands_at_the_end() -> None:
    relayed = set(peers(10)[2:5])
    assert set(order(VERSION, peers(10), relayed=relayed)[-3:]) == relayed


def test_who_has_no_work_in_it_stands_behind_all_and_moves_nobody() -> None:
    members = order(VERSION, peers(20))
    stranger = place(PeerId("stranger"), members, owners=OWNERS, version=VERSION)
    assert set(stranger.newer) == set(members[18:]) and set(stranger.older) == set(members[9:18])
    alone = place(PeerId("stranger"), [], owners=OWNERS, version=VERSION)
    assert (alone.tier, set(alone.newer)) == (0, set(OWNERS))
