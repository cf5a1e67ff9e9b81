"""Shares and turns: nobody keeps others out, and who waits is served in turn."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import INBOUND_CALLS_MAX, INBOUND_CALLS_PER_PEER_MAX
from dipaco_p2p.swarm.frames import Share, Turns

PEERS = [Signer(bytes([number]) * 32).peer for number in range(1, 60)]


def filled(share: Share, peers: list[PeerId]) -> list[int]:
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


@given(st.lists(st.tuples(st.sampled_from(PEERS[:20]), st.booleans()), max_size=300))
def test_what_is_given_back_can_be_taken_again_and_the_bounds_hold(steps: list[tuple[PeerId, bool]]) -> None:
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

    async def work(peer: PeerId, name: str) -> None:
        async with turns.turn(peer):
            order.append(name)
            await asyncio.sleep(0)

    greedy = [asyncio.create_task(work(PEERS[0], f"greedy {number}")) for number in range(20)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(work(PEERS[1], "late")), asyncio.create_task(work(PEERS[2], "later"))]
    await asyncio.gather(*greedy, *late)
    assert len(order) == 22 and order.index("late") < 4 and order.index("later") < 6


async def test_a_turn_that_nobody_wants_any_more_goes_to_the_next() -> None:
    turns, entered = Turns(2, per_peer=1), asyncio.Event()
    leave = asyncio.Event()

    async def hold(peer: PeerId) -> None:
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
