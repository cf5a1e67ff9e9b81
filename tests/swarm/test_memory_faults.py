"""The faults of the in-memory network: seeded, on a clock that only the test moves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dipaco_p2p.clock import ManualClock, settle
from dipaco_p2p.errors import Unreachable
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm

KEY = "dipaco/test"


def network(seed: int = 1, **faults: Any) -> tuple[MemoryNetwork, ManualClock, list[MemorySwarm], list[int]]:
    """Three peers; each serves "count", and the last result counts how often it ran."""
    clock, served = ManualClock(), []
    net = MemoryNetwork(seed, clock, **faults)
    swarms = [net.join(Signer(bytes([number]) * 32)) for number in (1, 2, 3)]

    async def count(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        served.append(header["n"])
        return Reply(header)

    for swarm in swarms:
        swarm.serve("count", count)
    return net, clock, swarms, served


async def test_a_call_takes_the_delay_of_both_ways_on_the_clock() -> None:
    _, clock, (a, b, _), served = network(delay_s=(2.0, 2.0))
    call = asyncio.ensure_future(a.call(b.peer, "count", {"n": 1}, timeout_s=10))
    await clock.advance(1.9)
    assert served == []
    await clock.advance(1.9)
    assert served == [1] and not call.done()
    await clock.advance(0.2)
    assert call.done() and call.result() == Reply({"n": 1})


async def test_a_partition_lasts_until_it_is_healed() -> None:
    net, clock, (a, b, c), served = network()
    await c.put(KEY, {"side": "c"}, ttl_s=100)
    net.partition([{a.peer, b.peer}])
    await c.put(KEY, {"side": "c, later"}, ttl_s=100)
    await a.put(KEY, {"side": "a"}, ttl_s=100)
    assert {r.body["side"] for r in (await b.get(KEY)).values()} == {"a", "c"}
    call = asyncio.ensure_future(a.call(c.peer, "count", {"n": 1}, timeout_s=5))
    await clock.advance(4.9)
    assert not call.done()
    await clock.advance(0.2)
    with pytest.raises(Unreachable):
        await call
    assert await a.call(b.peer, "count", {"n": 2}, timeout_s=5) and served == [2]
    net.heal()
    assert await a.call(c.peer, "count", {"n": 3}, timeout_s=5) and served == [2, 3]
    assert {r.body["side"] for r in (await b.get(KEY)).values()} == {"a", "c, later"}


async def test_a_killed_peer_stops_in_the_middle_and_may_come_back_empty() -> None:
    net, _, (a, b, c), _ = network()
    ended = []

    async def work(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(peer)
        return Reply()

    b.serve("work", work)
    to_it = asyncio.ensure_future(a.call(b.peer, "work", {}, timeout_s=5))
    c.serve("work", work)
    from_it = asyncio.ensure_future(b.call(c.peer, "work", {}, timeout_s=5))
    await settle()
    net.kill(b.peer)
    for call in (to_it, from_it):
        with pytest.raises(Unreachable):
            await call
    assert ended == [a.peer]
    for caller, target in ((a, b), (b, a)):
        with pytest.raises(Unreachable):
            await caller.call(target.peer, "count", {"n": 1}, timeout_s=5)
    assert not await b.put(KEY, {}, ttl_s=5)
    again = net.join(b.signer)
    assert again.statistics().calls_made == 0 and await a.connect(again.addresses[0], timeout_s=1) == b.peer
    await c.close()


async def outcomes(seed: int, calls: int, **faults: Any) -> tuple[list[bool], list[int]]:
    _, clock, (a, b, _), served = network(seed, **faults)
    tasks = [asyncio.ensure_future(a.call(b.peer, "count", {"n": n}, timeout_s=5)) for n in range(calls)]
    await clock.advance(6)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, (Reply, Unreachable)) for result in results)
    await b.close()
    return [isinstance(result, Reply) for result in results], served


def test_losses_hit_requests_and_replies_and_repeat_with_the_seed() -> None:
    answered, served = asyncio.run(outcomes(7, 16, loss=0.3))
    assert 0 < sum(answered) < len(served) < 16
    assert (answered, served) == asyncio.run(outcomes(7, 16, loss=0.3))
    assert (answered, served) != asyncio.run(outcomes(8, 16, loss=0.3))


def test_duplication_runs_the_handler_twice_for_one_reply() -> None:
    answered, served = asyncio.run(outcomes(1, 8, duplication=1.0))
    assert all(answered) and sorted(served) == sorted([*range(8), *range(8)])


async def test_records_expire_by_the_clock_and_counters_only_grow() -> None:
    _, clock, (a, b, _), _ = network()
    await a.put(KEY, {"n": 1}, ttl_s=10)
    first = (await b.get(KEY))[a.peer]
    await a.put(KEY, {"n": 2}, ttl_s=1)
    second = (await b.get(KEY))[a.peer]
    assert second.counter > first.counter and second.expires_s > first.expires_s
    await clock.advance(9.9)
    assert (await b.get(KEY))[a.peer].body == {"n": 2}
    await clock.advance(0.2)
    assert await b.get(KEY) == {}


async def test_a_reader_keeps_what_it_saw_when_the_network_lost_it() -> None:
    net, clock, (a, b, c), _ = network()
    await a.put(KEY, {}, ttl_s=10)
    assert len(await b.get(KEY)) == 1
    net.kill(a.peer)
    net.kill(c.peer)
    assert len(await b.get(KEY)) == 1
    await clock.advance(10.1)
    assert await b.get(KEY) == {}


async def test_a_cut_stops_one_direction_only() -> None:
    net, clock, (a, b, _), served = network()
    net.cut(a.peer, b.peer)
    call = asyncio.ensure_future(a.call(b.peer, "count", {"n": 1}, timeout_s=5))
    answered = asyncio.ensure_future(b.call(a.peer, "count", {"n": 2}, timeout_s=5))
    await clock.advance(6)
    with pytest.raises(Unreachable):
        await call
    with pytest.raises(Unreachable):
        await answered  # it was served, but the answer is cut
    assert served == [2]
    net.heal()
    assert await a.call(b.peer, "count", {"n": 3}, timeout_s=5) and served == [2, 3]


async def test_a_frozen_peer_keeps_silent_and_answers_when_it_is_thawed() -> None:
    net, clock, (a, b, c), served = network()
    await b.put(KEY, {"n": 1}, ttl_s=100)
    net.freeze(b.peer)
    late = asyncio.ensure_future(a.call(b.peer, "count", {"n": 1}, timeout_s=5))
    patient = asyncio.ensure_future(a.call(b.peer, "count", {"n": 2}, timeout_s=50))
    own = asyncio.ensure_future(b.call(c.peer, "count", {"n": 3}, timeout_s=50))
    await clock.advance(6)
    with pytest.raises(Unreachable):
        await late
    assert served == [] and not patient.done() and not own.done()
    net.thaw(b.peer)
    await clock.advance(0.1)
    assert patient.done() and own.done() and {2, 3} <= set(served)


async def test_a_slow_peer_costs_its_lag_on_every_way() -> None:
    net, clock, (a, b, _), served = network()
    net.slow(b.peer, 1.5)
    call = asyncio.ensure_future(a.call(b.peer, "count", {"n": 1}, timeout_s=10))
    await clock.advance(1.4)
    assert served == []
    await clock.advance(0.2)
    assert served == [1] and not call.done()
    await clock.advance(1.5)
    assert call.done()


def test_reordering_lets_later_messages_come_first() -> None:
    async def order(**faults: float) -> list[int]:
        _, clock, (a, b, _), served = network(3, delay_s=(0.1, 0.1), **faults)
        for n in range(12):
            asyncio.ensure_future(a.call(b.peer, "count", {"n": n}, timeout_s=60))
            await clock.advance(0.01)
        await clock.advance(5)
        return served

    assert asyncio.run(order()) == list(range(12))
    mixed = asyncio.run(order(reordering=0.5))
    assert mixed != list(range(12)) and sorted(mixed) == list(range(12))


async def test_each_node_may_have_a_clock_of_its_own() -> None:
    class Ahead:
        """Ten seconds ahead of the network's."""

        def __init__(self, clock: ManualClock) -> None:
            self.sleep = clock.sleep
            self._clock = clock

        def now_s(self) -> float:
            return self._clock.now_s() + 10.0

    net, clock, (a, _, _), _ = network()
    ahead = net.join(Signer(bytes([9]) * 32), clock=Ahead(clock))
    await a.put(KEY, {"n": 1}, ttl_s=8)
    assert a.peer in await a.get(KEY) and a.peer not in await ahead.get(KEY)


async def test_in_a_large_network_a_record_is_found_among_the_nodes_that_are_closest_to_its_key() -> None:
    net = MemoryNetwork(1, ManualClock())
    swarms = [net.join(Signer(number.to_bytes(2, "big") * 16)) for number in range(1, 101)]
    for writer, reader in zip(swarms[:10], swarms[50:60], strict=True):
        assert await writer.put(KEY, {"by": writer.peer}, ttl_s=100)
        assert (await reader.get(KEY))[writer.peer].body == {"by": writer.peer}
