"""Ranges of a blob are as long as the link carries in about a second."""

from __future__ import annotations

import pytest

from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.blobs.blobs import PEERS_MAX, RANGE_BYTES, RANGE_BYTES_MIN, SLOW_S, Pace

PEER = Signer(bytes([1]) * 32).peer


def settled(rate_bytes_per_s: float) -> tuple[int, float]:
    """The length of the ranges that a link of this rate comes to, and how long one takes."""
    pace = Pace()
    for _ in range(40):
        length = pace.range_bytes(PEER)
        pace.took(PEER, length, length / rate_bytes_per_s)
    return length, length / rate_bytes_per_s


def test_on_a_fast_link_all_ranges_are_whole() -> None:
    assert settled(10e6)[0] == RANGE_BYTES


def test_a_slow_link_gets_ranges_of_about_a_second() -> None:
    for rate in (20e3, 50e3, 125e3, 300e3):
        length, took_s = settled(rate)
        assert RANGE_BYTES_MIN <= length < RANGE_BYTES and took_s <= SLOW_S


def test_it_recovers_when_the_link_does_and_never_leaves_the_bounds() -> None:
    pace = Pace()
    for _ in range(20):
        pace.failed(PEER, pace.range_bytes(PEER), 20.0)
    assert pace.range_bytes(PEER) == RANGE_BYTES_MIN
    for _ in range(20):
        pace.took(PEER, pace.range_bytes(PEER), 0.01)
    assert pace.range_bytes(PEER) == RANGE_BYTES


def test_a_quick_refusal_and_a_short_last_range_say_nothing() -> None:
    pace = Pace()
    pace.took(PEER, RANGE_BYTES, 5.0)
    half = pace.range_bytes(PEER)
    pace.failed(PEER, half, 0.01)
    pace.took(PEER, 100, 0.01)
    assert pace.range_bytes(PEER) == half < RANGE_BYTES


def test_of_many_peers_the_last_are_remembered() -> None:
    pace, peers = Pace(), [Signer(number.to_bytes(32, "big")).peer for number in range(1, PEERS_MAX + 2)]
    for peer in peers:
        pace.took(peer, RANGE_BYTES, 5.0)
    assert pace.range_bytes(peers[0]) == RANGE_BYTES
    assert pace.range_bytes(peers[1]) == pace.range_bytes(peers[-1]) == RANGE_BYTES // 2


def test_a_peer_that_sends_less_is_asked_for_less_and_now_and_then_for_more() -> None:
    pace = Pace()
    pace.brought(PEER, RANGE_BYTES, 100_000, 0.1)
    assert pace.range_bytes(PEER) == 100_000
    pace.brought(PEER, 100_000, 100_000, 0.1)
    assert pace.range_bytes(PEER) == 200_000


def test_speed_is_that_of_the_last_ranges_and_halves_with_one_that_never_came() -> None:
    pace = Pace()
    assert pace.speed(PEER) is None
    pace.failed(PEER, RANGE_BYTES, 20.0)
    assert pace.speed(PEER) is None
    for elapsed_s in (9.0, *[1.0] * 20):
        pace.brought(PEER, 500_000, 500_000, elapsed_s)
    assert pace.speed(PEER) == pytest.approx(500_000, rel=0.01)
    pace.failed(PEER, 500_000, 20.0)
    assert pace.speed(PEER) == pytest.approx(250_000, rel=0.01)
