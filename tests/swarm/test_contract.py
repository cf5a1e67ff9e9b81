"""What every swarm promises; each test runs in memory and over libp2p."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from swarm_harness import TTL_MAX_S, eventually

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import ConfigError, Refused, Unreachable
from dipaco_p2p.protocol.records import sign_record
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import BULK_AT_ONCE_PER_PEER, INBOUND_CALLS_PER_PEER_MAX, Reply

KEY = "dipaco/test/claims"


async def echo(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
    return Reply({"caller": peer, **header}, body)


async def test_records_of_all_owners_are_found_the_newest_of_each(net: Any) -> None:
    a, b, c = [await net.join() for _ in range(3)]
    assert await a.put(KEY, {"path": 1}, ttl_s=30) and await b.put(KEY, {"path": 2}, ttl_s=30)
    assert await a.put(KEY, {"path": 3}, ttl_s=20)
    found = await c.get(KEY)
    assert {peer: record.body["path"] for peer, record in found.items()} == {a.peer: 3, b.peer: 2}
    assert await c.get("dipaco/test/other") == {}


async def test_reads_and_the_records_that_they_find_are_counted(net: Any) -> None:
    a, b = await net.join(), await net.join()
    await a.put(KEY, {}, ttl_s=30)
    before = b.statistics()
    found = [await b.get(KEY), await b.get(KEY), await b.get("dipaco/test/other")]
    after = b.statistics()
    assert after.keys_read - before.keys_read == 3
    assert after.records_read - before.records_read == sum(map(len, found)) == 2


async def test_a_record_ends_with_its_time_to_live(net: Any) -> None:
    a, b = await net.join(), await net.join()
    await a.put(KEY, {}, ttl_s=0.8)
    assert a.peer in await b.get(KEY)

    async def gone() -> bool:
        return await b.get(KEY) == {} and await a.get(KEY) == {}

    await eventually(gone)


async def test_forged_foreign_and_eternal_records_are_refused(net: Any) -> None:
    a, b, mallory = [await net.join() for _ in range(3)]
    await a.put(KEY, {"path": 1}, ttl_s=30)
    assert len(await b.get(KEY)) == 1
    now_s = SystemClock().now_s()
    mine = sign_record(mallory.signer, key=KEY, counter=1, expires_s=now_s + 40, body={})
    forged = mine.to_bytes().replace(mallory.peer.encode(), a.peer.encode())
    elsewhere = sign_record(mallory.signer, key="dipaco/x", counter=1, expires_s=now_s + 40, body={})
    eternal = sign_record(mallory.signer, key=KEY, counter=2, expires_s=now_s + 1e9, body={})
    for owner, data, expires_s in [
        (a.peer, forged, now_s + 40),
        (a.peer, mine.to_bytes(), now_s + 40),
        (mallory.peer, elsewhere.to_bytes(), now_s + 40),
        (mallory.peer, eternal.to_bytes(), now_s + 1e9),
        (mallory.peer, b"junk", now_s + 40),
        (mallory.peer, b"x" * 20_000, now_s + 40),
    ]:
        assert not await net.plant(mallory, KEY, owner, data, expires_s)
    found = await b.get(KEY)
    assert {peer: record.body for peer, record in found.items()} == {a.peer: {"path": 1}}
    assert a.statistics().records_refused + b.statistics().records_refused > 0


async def test_an_old_record_cannot_be_replayed_over_a_newer_one(net: Any) -> None:
    a, b, mallory = [await net.join() for _ in range(3)]
    await a.put(KEY, {"path": 1}, ttl_s=1.0)
    old = (await mallory.get(KEY))[a.peer]
    await a.put(KEY, {"path": 2}, ttl_s=30)
    await net.plant(mallory, KEY, a.peer, old.to_bytes(), old.expires_s)

    async def old_is_over() -> bool:
        return SystemClock().now_s() > old.expires_s + 0.1

    await eventually(old_is_over)
    await mallory.close()  # It was spared by its own attack, and would answer for the others.
    c = await net.join()
    assert (await b.get(KEY))[a.peer].body == (await c.get(KEY))[a.peer].body == {"path": 2}


async def test_a_call_carries_header_and_body_and_names_the_caller(net: Any) -> None:
    a, b = await net.join(), await net.join()
    b.serve("echo", echo)
    for body in (b"", b"x", bytes(4 * 1024 * 1024)):
        reply = await a.call(b.peer, "echo", {"n": 1, "text": "ü"}, body, timeout_s=10)
        assert reply == Reply({"caller": a.peer, "n": 1, "text": "ü"}, body)
    assert (a.statistics().calls_made, b.statistics().calls_served) == (3, 3)
    assert a.statistics().bytes_sent == b.statistics().bytes_received > 4 * 1024 * 1024


async def test_a_peer_may_call_itself(net: Any) -> None:
    a = await net.join()
    a.serve("echo", echo)
    header: dict[str, Any] = {"list": [1]}
    reply = await a.call(a.peer, "echo", header, b"x", timeout_s=5, addresses=a.addresses)
    assert reply == Reply({"caller": a.peer, "list": [1]}, b"x") and reply.header["list"] is not header["list"]
    with pytest.raises(Refused):
        await a.call(a.peer, "none", {}, timeout_s=5)


async def test_after_leaving_nothing_can_be_reached(net: Any) -> None:
    a, b = await net.join(), await net.join()
    await b.put(KEY, {}, ttl_s=30)
    assert b.peer in await a.get(KEY)
    await a.close()
    assert not await a.put(KEY, {}, ttl_s=30)
    assert b.peer in await a.get(KEY)
    with pytest.raises(Unreachable):
        await a.call(b.peer, "echo", {}, timeout_s=1)


async def test_refusals_and_failures_reach_the_caller(net: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        raise Refused("the base is 2 versions stale", reason="stale")

    async def fail(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        raise ValueError("a secret of the server")

    async def too_large(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({}, bytes(4 * 1024 * 1024 + 1))

    a, b = await net.join(), await net.join()
    for method, handler in [("refuse", refuse), ("fail", fail), ("large", too_large)]:
        b.serve(method, handler)
    reasons = {"refuse": "stale", "fail": "internal", "large": "internal", "none": "unknown-method"}
    for method, reason in reasons.items():
        with pytest.raises(Refused) as refused:
            await a.call(b.peer, method, {}, timeout_s=5)
        assert refused.value.reason == reason
        assert "secret" not in str(refused.value)
    with pytest.raises(Refused, match="^the base is 2 versions stale$"):
        await a.call(b.peer, "refuse", {}, timeout_s=5)
    assert sum("ValueError" in (record.exc_text or "") for record in caplog.records) == 1


async def test_a_silent_or_unknown_peer_is_unreachable_in_time(net: Any) -> None:
    async def never(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        await asyncio.Event().wait()
        return Reply()

    a, b, c = [await net.join() for _ in range(3)]
    b.serve("never", never)
    loop = asyncio.get_running_loop()
    nobody = Signer(bytes([99]) * 32).peer
    await c.close()
    for peer in (b.peer, nobody, c.peer):
        start_s = loop.time()
        with pytest.raises(Unreachable):
            await a.call(peer, "never", {}, timeout_s=0.5, addresses=c.addresses)
        assert loop.time() - start_s < 2
    assert a.statistics().calls_failed == 3


async def test_one_peer_cannot_hold_all_the_calls(net: Any) -> None:
    a, b, c = [await net.join() for _ in range(3)]
    entered, leave = asyncio.Semaphore(0), asyncio.Event()

    async def wait(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        entered.release()
        await leave.wait()
        return Reply()

    b.serve("wait", wait)
    b.serve("echo", echo)
    calls = [asyncio.ensure_future(a.call(b.peer, "wait", {}, timeout_s=20)) for _ in range(INBOUND_CALLS_PER_PEER_MAX)]
    for _ in calls:
        await entered.acquire()
    with pytest.raises(Refused) as refused:
        await a.call(b.peer, "echo", {}, bytes(32 * 1024), timeout_s=5)
    assert refused.value.reason == "busy"
    assert (await c.call(b.peer, "echo", {}, timeout_s=5)).header == {"caller": c.peer}
    leave.set()
    await asyncio.gather(*calls)
    assert (await a.call(b.peer, "echo", {}, timeout_s=5)).header == {"caller": a.peer}


async def test_blobs_in_both_directions_keep_no_control_call_waiting(net: Any) -> None:
    """A peer whose reads of blobs fill all places for them is still heard, and others' reads get their turn."""

    a, b, c = [await net.join() for _ in range(3)]
    reading, go_on, served = asyncio.Semaphore(0), asyncio.Event(), list[PeerId]()

    async def read(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        reading.release()
        await go_on.wait()
        served.append(peer)
        return Reply({}, bytes(1024))

    for method in ("blob.read", "0123456789abcdef/blob.write"):
        b.serve(method, read)
    b.serve("echo", echo)
    a.serve("echo", echo)
    body, bulk = bytes(64 * 1024), []
    for method in ("blob.read", "0123456789abcdef/blob.write"):
        bulk += [asyncio.ensure_future(a.call(b.peer, method, {}, body, timeout_s=30)) for _ in range(24)]
    for _ in range(BULK_AT_ONCE_PER_PEER):
        await reading.acquire()
    late = asyncio.ensure_future(c.call(b.peer, "blob.read", {}, timeout_s=30))
    await reading.acquire()  # there is room left for who comes late
    for caller, peer in ((a, b.peer), (c, b.peer), (b, a.peer)):
        assert (await caller.call(peer, "echo", {}, timeout_s=10)).header == {"caller": caller.peer}
    go_on.set()
    await asyncio.gather(*bulk, late)
    assert served.index(c.peer) <= 2 * BULK_AT_ONCE_PER_PEER and len(served) == 49


async def test_connect_knows_good_dead_and_malformed_addresses(net: Any) -> None:
    a, b, c = [await net.join() for _ in range(3)]
    assert await a.connect(b.addresses[0], timeout_s=5) == b.peer
    dead = c.addresses[0]
    await c.close()
    with pytest.raises(Unreachable, match="no answer from /"):
        await a.connect(dead, timeout_s=1)
    for address in ("", "nonsense", "/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/xyz"):
        with pytest.raises(ConfigError):
            await a.connect(address, timeout_s=1)


async def test_time_to_live_is_bounded_where_it_is_set(net: Any) -> None:
    with pytest.raises(AssertionError):
        await (await net.join()).put(KEY, {}, ttl_s=TTL_MAX_S + 1)


async def test_a_second_close_does_nothing(net: Any) -> None:
    a = await net.join()
    await a.close()
    await a.close()
