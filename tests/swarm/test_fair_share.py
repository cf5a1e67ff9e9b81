"""Shares and turns: nobody keeps others out, and who waits is served in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.errors import Refused
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.addresses import host_of
from dipaco_p2p.swarm.api import (
    BULK_CALLS_MAX,
    BULK_CALLS_PER_PEER_MAX,
    INBOUND_CALLS_MAX,
    INBOUND_CALLS_PER_PEER_MAX,
    OPEN_CALLS_MAX,
    OPEN_CALLS_PER_PEER_MAX,
)
from dipaco_p2p.swarm.frames import Caller, Dispatcher, Share, Turns

PEERS = [Caller(Signer(bytes([number]) * 32).peer) for number in range(1, 60)]


def filled(share: Share, peers: list[Caller]) -> list[int]:
    """What each of `peers` has, after all of them took what they could get, one by one."""
    held = [0] * len(peers)
    while True:
        took = [share.take(peer) for peer in peers]
        held = [count + more for count, more in zip(held, took, strict=True)]
        if not any(took):
            return held


def test_one_caller_gets_all_that_one_may_have() -> None:
    assert filled(Share(256, per_peer=16), PEERS[:1]) == [16]


@pytest.mark.parametrize("crowd", [1, 8, 16, 40])
def test_whatever_a_crowd_holds_the_next_caller_still_gets_in(crowd: int) -> None:
    share = Share(INBOUND_CALLS_MAX, per_peer=INBOUND_CALLS_PER_PEER_MAX)
    held = filled(share, PEERS[:crowd])
    assert sum(held) < INBOUND_CALLS_MAX
    assert share.take(PEERS[-1]), held


def test_who_is_known_is_not_counted_with_strangers_at_its_address() -> None:
    """Attack: a few keys call a leader behind a router through its relay, and hold what one address may have. All
    others come through that relay, too."""
    dispatcher, relay = Dispatcher(Counter()), "203.0.113.7"
    dispatcher.known = {PEERS[0].peer}
    with contextlib.ExitStack() as stack:
        with pytest.raises(Refused):
            for number in range(OPEN_CALLS_MAX):
                stranger = dispatcher.caller(PeerId(f"key {number // 50}"), relay)
                stack.enter_context(dispatcher.entered(stranger))
        with pytest.raises(Refused):
            stack.enter_context(dispatcher.entered(dispatcher.caller(PEERS[1].peer, relay)))
        for _ in range(OPEN_CALLS_PER_PEER_MAX // 2):
            stack.enter_context(dispatcher.entered(dispatcher.caller(PEERS[0].peer, relay)))


def test_a_crowd_of_one_address_leaves_half_to_others() -> None:
    share = Share(INBOUND_CALLS_MAX, per_peer=INBOUND_CALLS_PER_PEER_MAX)
    crowd = [Caller(PeerId(f"key {number}"), "203.0.113.7") for number in range(4 * INBOUND_CALLS_MAX)]
    held = filled(share, crowd)
    assert sum(held) == INBOUND_CALLS_MAX // 2
    assert filled(share, PEERS[:1]) == [14], "a fraction of the half that is left"
    unlimited = [Caller(PeerId(f"other {number}")) for number in range(INBOUND_CALLS_MAX)]
    assert sum(filled(share, unlimited)) == INBOUND_CALLS_MAX // 2 - 14, "of where these come from nothing is known"
    share.give_back(unlimited[0])
    for caller, count in zip(crowd, held, strict=True):
        for _ in range(count):
            share.give_back(caller)
    assert share.take(crowd[0])


@pytest.mark.parametrize(
    ("in_all", "per_peer"),
    [
        (OPEN_CALLS_MAX, OPEN_CALLS_PER_PEER_MAX),
        (INBOUND_CALLS_MAX, INBOUND_CALLS_PER_PEER_MAX),
        (BULK_CALLS_MAX, BULK_CALLS_PER_PEER_MAX),
    ],
)
def test_beside_twenty_crowded_addresses_another_one_gets_in(in_all: int, per_peer: int) -> None:
    share = Share(in_all, per_peer=per_peer)
    for number in range(20):
        assert filled(share, [Caller(PeerId(f"key {number}, {key}"), f"203.0.113.{number}") for key in range(in_all)])
    assert share.take(Caller(PEERS[0].peer, "198.51.100.7"))


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("/ip4/203.0.113.7/tcp/40000", "203.0.113.7"),
        ("/ip4/127.0.0.1/tcp/40000", ""),
        ("/ip6/::1/tcp/40000", ""),
        ("/ip6/2001:db8:1:2:3:4:5:6/tcp/40000", "2001:db8:1::/48"),
        ("/ip6/2001:db8:1:2::9/tcp/1", "2001:db8:1::/48"),
        ("/ip6/::ffff:203.0.113.7/tcp/1", "203.0.113.7"),
        ("/ip6/fe80::1%eth0/tcp/1", "fe80::/48"),
        ("/ip4/198.51.100.2/tcp/4001/p2p/12D3KooWx/p2p-circuit", "198.51.100.2"),
        ("/dns4/example.org/tcp/1", ""),
        ("/ip4/nonsense/tcp/1", ""),
        ("", ""),
    ],
)
def test_where_a_caller_comes_from(place: str, host: str) -> None:
    assert host_of(place) == host


@given(st.lists(st.tuples(st.sampled_from(PEERS[:20]), st.booleans()), max_size=300))
def test_what_is_given_back_can_be_taken_again_and_the_bounds_hold(steps: list[tuple[Caller, bool]]) -> None:
    share, held = Share(32, per_peer=4), dict.fromkeys(PEERS, 0)
    for peer, is_taking in steps:
        if is_taking:
            held[peer] += share.take(peer)
        elif held[peer]:
            share.give_back(peer)
            held[peer] -= 1
        assert max(held.values()) <= 4 and sum(held.values()) <= 32
    for peer, count in held.items():
        for _ in range(count):
            share.give_back(peer)
    assert filled(share, PEERS[:1]) == [4]


async def test_who_comes_late_waits_for_one_turn_of_the_others_not_for_all_their_work() -> None:
    turns, order = Turns(2, per_peer=1), list[str]()

    async def work(peer: Caller, name: str) -> None:
        async with turns.turn(peer):
            order.append(name)
            await asyncio.sleep(0)

    greedy = [asyncio.create_task(work(PEERS[0], f"greedy {number}")) for number in range(20)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(work(PEERS[1], "late")), asyncio.create_task(work(PEERS[2], "later"))]
    await asyncio.gather(*greedy, *late)
    assert len(order) == 22 and order.index("late") < 4 and order.index("later") < 6


async def test_of_those_who_wait_the_address_that_has_fewest_turns_comes_first() -> None:
    turns, order, leave = Turns(4, per_peer=1), list[str](), asyncio.Event()

    async def work(number: int, host: str) -> None:
        async with turns.turn(Caller(PEERS[number].peer, host)):
            order.append(host)
            await leave.wait()

    hosts = ["a", "a", "b", "c", *"abc", "d"]
    works = [asyncio.create_task(work(number, host)) for number, host in enumerate(hosts)]
    await asyncio.sleep(0)
    works[0].cancel()
    await asyncio.wait(works[:1])
    await asyncio.sleep(0)
    assert order == ["a", "a", "b", "c", "d"]
    leave.set()
    await asyncio.gather(*works[1:])


async def test_a_turn_that_nobody_wants_any_more_goes_to_the_next() -> None:
    turns, entered = Turns(2, per_peer=1), asyncio.Event()
    leave = asyncio.Event()

    async def hold(peer: Caller) -> None:
        async with turns.turn(peer):
            entered.set()
            await leave.wait()

    first = asyncio.create_task(hold(PEERS[0]))
    await entered.wait()
    waiting = [asyncio.create_task(hold(PEERS[0])) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # while it waits
    leave.set()
    await first
    waiting[1].cancel()  # at the very moment that its turn comes
    await asyncio.wait_for(waiting[2], 5)
    await asyncio.gather(*waiting, return_exceptions=True)
    for _ in range(3):  # nothing is held for ever
        await hold(PEERS[0])
