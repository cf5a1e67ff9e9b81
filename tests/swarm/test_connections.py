"""When a connection is taken for dead: the peer has dialled us again, or was silent to two calls."""

from __future__ import annotations

import contextlib

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.connections import MISSED_MAX, PEERS_MAX, PLACES_MAX, SILENT_S, Connections

PEERS = [Signer(number.to_bytes(32, "big")).peer for number in range(1, PEERS_MAX + 2)]
HOME = PEERS[0]
RELAYED = f"/ip4/45.0.0.9/tcp/4001/p2p/{PEERS[1]}/p2p-circuit"
BEFORE, AFTER = "/ip4/45.0.0.1/tcp/50000", "/ip4/45.0.0.1/tcp/50001"


async def waited(connections: Connections, clock: ManualClock, peer: PeerId = HOME, *, seconds: float = 5.0) -> None:
    """A call without an answer."""
    with connections.calling(peer, BEFORE):
        await clock.advance(seconds)


@pytest.mark.parametrize(
    ("waits", "speaks", "is_dead"),
    [
        (BEFORE, AFTER, True),
        (BEFORE, RELAYED, True),
        (RELAYED, BEFORE, False),  # a hole was punched
        (BEFORE, BEFORE, False),
    ],
)
async def test_a_connection_is_dead_once_its_peer_speaks_over_a_newer_one(
    waits: str, speaks: str, is_dead: bool
) -> None:
    clock = ManualClock()
    connections = Connections(clock)
    connections.hear(HOME, waits)
    await clock.advance(1.0)
    with connections.calling(HOME, waits):
        await clock.advance(SILENT_S)
        assert not connections.seem_dead(HOME), "it may be thinking"
        connections.hear(HOME, speaks)
        assert connections.seem_dead(HOME) == is_dead
        assert not connections.seem_dead(HOME), "it was said once"


async def test_a_call_that_begins_after_the_newer_one_was_heard_is_seen_to_wait_for_nothing_too() -> None:
    """The transport still prefers the dead connection, on which more calls wait."""
    clock = ManualClock()
    connections = Connections(clock)
    for place in (BEFORE, AFTER):
        connections.hear(HOME, place)
        await clock.advance(1.0)
    with connections.calling(HOME, BEFORE):
        await clock.advance(SILENT_S)
        assert not connections.seem_dead(HOME), "nothing came since"
        connections.hear(HOME, AFTER)
        assert connections.seem_dead(HOME)


async def test_of_two_connections_that_were_there_before_neither_is_dead() -> None:
    """Both ends dialled at once, and each calls over its own: an answer may take long."""
    clock = ManualClock()
    connections = Connections(clock)
    for place in (BEFORE, AFTER, BEFORE):
        connections.hear(HOME, place)
        await clock.advance(1.0)
    with connections.calling(HOME, BEFORE):
        await clock.advance(10 * SILENT_S)
        connections.hear(HOME, AFTER)
        assert not connections.seem_dead(HOME)


async def test_nothing_is_dead_over_which_something_came_or_whose_call_is_young() -> None:
    clock = ManualClock()
    connections = Connections(clock)
    with connections.calling(HOME, BEFORE):
        await clock.advance(SILENT_S)
        connections.hear(HOME, BEFORE)
        connections.hear(HOME, AFTER)
        assert not connections.seem_dead(HOME)
    await clock.advance(1.0)
    with connections.calling(HOME, AFTER):
        await clock.advance(SILENT_S - 0.1)
        connections.hear(HOME, "/ip4/45.0.0.1/tcp/50002")
        assert not connections.seem_dead(HOME)


async def test_who_is_silent_to_two_calls_in_a_row_is_hung_up_on() -> None:
    clock = ManualClock()
    connections = Connections(clock)
    for _ in range(MISSED_MAX - 1):
        await waited(connections, clock)
    assert not connections.seem_dead(HOME)
    connections.hear(HOME, BEFORE)
    for _ in range(MISSED_MAX):
        assert not connections.seem_dead(HOME), "an answer begins the count again"
        await clock.advance(1.0)
        await waited(connections, clock)
    assert connections.seem_dead(HOME)
    await waited(connections, clock)
    assert not connections.seem_dead(HOME), "the next connection has its own count"


@pytest.mark.parametrize("what", ["short", "answered", "heard", "refused"])
async def test_calls_that_say_nothing_of_a_connection_are_not_counted(what: str) -> None:
    clock = ManualClock()
    connections = Connections(clock)
    for _ in range(5 * MISSED_MAX):
        await clock.advance(1.0)
        with contextlib.suppress(ConnectionError), connections.calling(HOME, BEFORE):
            await clock.advance(SILENT_S - 0.1 if what in ("short", "refused") else SILENT_S)
            if what in ("answered", "heard"):
                connections.hear(HOME, BEFORE if what == "answered" else AFTER)
            if what == "refused":
                raise ConnectionError
    assert connections._peers[HOME].missed == 0
    assert not connections.seem_dead(HOME)


async def test_peers_and_places_beyond_a_limit_are_forgotten_the_oldest_first() -> None:
    clock = ManualClock()
    connections = Connections(clock)
    for port in range(50000, 50000 + 10 * PLACES_MAX):
        connections.hear(HOME, f"/ip4/45.0.0.1/tcp/{port}")
    assert len(connections._peers[HOME].last_s) == len(connections._peers[HOME].first_s) == PLACES_MAX
    for _ in range(MISSED_MAX):
        await clock.advance(1.0)
        await waited(connections, clock)
    for peer in PEERS[1:]:
        connections.hear(peer, BEFORE)
    assert len(connections._peers) == PEERS_MAX and not connections.seem_dead(HOME)
