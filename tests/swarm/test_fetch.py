"""Many holders and limited lines, in virtual time: who brings how much, and what waits for nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from virtual_time import VirtualClock, play

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import BlobMissing, IntegrityError
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.blobs.bandwidth import CUT_BYTES_MIN, MBIT_BYTES, Line
from dipaco_p2p.swarm.blobs.blobs import (
    RANGE_BYTES,
    RANGE_BYTES_MIN,
    SLOW_S,
    pace_of,
    send_blob,
    serve_blobs,
    serve_uploads,
)
from dipaco_p2p.swarm.blobs.fetch import HOLDERS_AT_ONCE, KEEP_EVERY_S, LATE_S, Holders, fetch_blob
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm

BLOB = random.Random(3).randbytes(16 * RANGE_BYTES + 5)
DELAY_S = 0.02
TIMEOUT_S = 20.0


class Net:
    """A network with the same delay everywhere; whoever joins has a line of its own."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(1, self.clock, delay_s=(DELAY_S, DELAY_S))

    def join(self, **limits: float) -> MemorySwarm:
        number = len(self.network.nodes) + 1
        return self.network.join(Signer(bytes([number]) * 32), line=Line(clock=self.clock, **limits))

    def holder(self, data: bytes = BLOB, *, name: str = digest(BLOB), **limits: float) -> Holder:
        return Holder(self.join(**limits), data, name)


class Holder:
    """Serves one blob, and counts the bytes that were read."""

    def __init__(self, swarm: MemorySwarm, data: bytes, name: str) -> None:
        self.swarm, self.peer, self.data, self.read_bytes = swarm, swarm.peer, data, 0
        serve_blobs(swarm, self._read, lambda key: len(data) if key == name else None)

    def _read(self, key: str, offset: int, length: int) -> bytes:
        self.read_bytes += length
        return self.data[offset : offset + length]


async def fetch(reader: MemorySwarm, *holders: Holder, **options: Any) -> tuple[bytes, float]:
    """The blob, and how many seconds it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    known = [(holder.peer, ()) for holder in holders]
    options = {"size": len(BLOB), "timeout_s": TIMEOUT_S} | options
    data = await fetch_blob(reader, digest(BLOB), holders=known, **options)
    return data, loop.time() - began_s


# -- several holders


async def test_a_holder_that_is_four_times_as_fast_brings_most() -> None:
    net = Net()
    slow, fast = net.holder(up_mbit=8.0), net.holder(up_mbit=32.0)
    data, took_s = await fetch(net.join(), slow, fast)
    assert data == BLOB
    assert 3 < fast.read_bytes / slow.read_bytes < 6
    assert took_s < 1.3 * len(BLOB) / (40 * MBIT_BYTES)


async def test_many_holders_share_the_work() -> None:
    net = Net()
    holders = [net.holder(up_mbit=20.0) for _ in range(HOLDERS_AT_ONCE + 2)]
    data, took_s = await fetch(net.join(), *holders)
    assert data == BLOB
    first, rest = holders[:HOLDERS_AT_ONCE], holders[HOLDERS_AT_ONCE:]
    assert all(len(BLOB) / 6 < holder.read_bytes < len(BLOB) / 3 for holder in first)
    assert not any(holder.read_bytes for holder in rest)
    assert took_s < 1.3 * len(BLOB) / (HOLDERS_AT_ONCE * 20 * MBIT_BYTES)


async def test_those_that_have_it_not_make_room_for_those_that_have() -> None:
    net = Net()
    without = [net.holder(b"other", name="other") for _ in range(HOLDERS_AT_ONCE + 1)]
    assert (await fetch(net.join(), *without, net.holder()))[0] == BLOB


@pytest.mark.parametrize("limits", [{"up_mbit": 0.1}, {}], ids=["slow", "frozen"])
async def test_nobody_slow_or_frozen_is_waited_for(limits: dict[str, float]) -> None:
    net = Net()
    slow, fast = net.holder(**limits), net.holder(up_mbit=80.0)
    if not limits:
        net.network.freeze(slow.peer)
    data, took_s = await fetch(net.join(), slow, fast)
    assert data == BLOB
    assert took_s < len(BLOB) / (80 * MBIT_BYTES) + 2 * SLOW_S + LATE_S < TIMEOUT_S


async def test_a_holder_that_dies_costs_no_more_than_what_it_had_under_way() -> None:
    net = Net()
    mortal, other = net.holder(up_mbit=20.0), net.holder(up_mbit=20.0)

    def on_progress(done: int, size: int) -> None:
        if done > size // 2:
            net.network.kill(mortal.peer)

    data, _ = await fetch(net.join(), mortal, other, on_progress=on_progress)
    assert data == BLOB and mortal.read_bytes > len(BLOB) // 5
    assert mortal.read_bytes + other.read_bytes <= len(BLOB) + 4 * RANGE_BYTES


async def test_of_wrong_bytes_those_of_one_holder_at_a_time_are_fetched_again() -> None:
    for place in range(3):
        net = Net()
        holders = [net.holder(up_mbit=20.0) for _ in range(3)]
        holders[place].data = bytes(len(BLOB))
        assert (await fetch(net.join(), *holders))[0] == BLOB
        assert sum(holder.read_bytes for holder in holders) <= 2 * len(BLOB) + 4 * RANGE_BYTES


async def test_two_liars_among_three_are_found_too(tmp_path: Path) -> None:
    net = Net()
    liars = [net.holder(bytes([number]) * len(BLOB)) for number in (1, 2)]
    assert (await fetch(net.join(), *liars, net.holder(), partial=tmp_path / "partial"))[0] == BLOB
    assert not (tmp_path / "partial").exists()


async def test_who_sent_wrong_bytes_is_asked_last_from_then_on() -> None:
    net = Net()
    liar, *others = [net.holder(up_mbit=20.0) for _ in range(3)]
    liar.data, reader = bytes(len(BLOB)), net.join()
    await fetch(reader, liar, *others)
    known = Holders(reader, digest(BLOB), [(each.peer, ()) for each in (liar, *others)], size=1, timeout_s=1.0)
    assert known.trusted()[-1][0] == liar.peer and pace_of(reader).has_lied(liar.peer)


async def test_what_several_liars_sent_shows_who_they_are_once_the_blob_is_there() -> None:
    net, wrong = Net(), list[Any]()
    liars, honest = [net.holder(bytes([number]) * len(BLOB), up_mbit=20.0) for number in (1, 2)], net.holder()
    with pytest.raises(IntegrityError):
        await fetch(net.join(), *liars, honest, wrong=wrong)
    assert [ranges.liars(BLOB) for ranges in wrong] == [{liar.peer for liar in liars}]
    assert sum(each.read_bytes for each in (*liars, honest)) < 4 * len(BLOB)


@pytest.mark.parametrize(("up_mbit", "is_kept"), [(8.0, True), (800.0, False)], ids=["slow", "fast"])
async def test_a_beginning_is_kept_once_a_second_and_not_of_what_comes_at_once(
    tmp_path: Path, up_mbit: float, is_kept: bool
) -> None:
    """So that a reader that is killed goes on from there."""

    net, partial, progress = Net(), tmp_path / "partial", list[tuple[float, int, int]]()
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def on_progress(done: int, size: int) -> None:
        kept = partial.stat().st_size if partial.exists() else 0
        assert partial.exists() is False or BLOB.startswith(partial.read_bytes())
        progress.append((loop.time() - began_s, done, kept))

    await fetch(net.join(), net.holder(up_mbit=up_mbit), partial=partial, on_progress=on_progress)
    assert not partial.exists()
    assert any(kept for _, _, kept in progress) is is_kept
    written = {kept for _, _, kept in progress}
    assert len(written) <= progress[-1][0] / KEEP_EVERY_S + 1
    if is_kept:
        assert all(done - kept <= 3 * RANGE_BYTES for _, done, kept in progress[:-1])


async def test_what_came_before_all_holders_died_is_not_fetched_again(tmp_path: Path) -> None:
    net, partial = Net(), tmp_path / "partial"
    mortals = [net.holder(up_mbit=20.0) for _ in range(2)]

    def on_progress(done: int, size: int) -> None:
        if done > size // 2:
            for mortal in mortals:
                net.network.kill(mortal.peer)

    reader, later = net.join(), net.holder()
    with pytest.raises(BlobMissing, match="nobody gave the blob"):
        await fetch(reader, *mortals, partial=partial, on_progress=on_progress)
    assert (await fetch(reader, later, partial=partial))[0] == BLOB
    assert later.read_bytes < 0.7 * len(BLOB) and not partial.exists()


async def test_who_was_fast_is_asked_before_who_was_slow_but_the_likeliest_first() -> None:
    net = Net()
    likely, slow, fast, unknown = [(net.join().peer, ()) for _ in range(4)]
    reader = net.join()
    for (peer, _), elapsed_s in ((likely, 1.9), (slow, 1.5), (fast, 0.1)):
        pace_of(reader).brought(peer, RANGE_BYTES, RANGE_BYTES, elapsed_s)
    known = Holders(reader, digest(BLOB), [likely, unknown, slow, fast], size=1, timeout_s=1.0)
    assert known.trusted() == [likely, fast, unknown, slow]
    assert known.trusted(but=fast[0]) == [likely, unknown, slow]


# -- a limited line

MBIT = 0.8
BYTES_PER_S = MBIT * MBIT_BYTES


class Sink:
    """Takes an upload and forgets it."""

    def __init__(self) -> None:
        self.received = 0

    def write(self, offset: int, data: bytes) -> None:
        self.received += len(data)

    def finish(self) -> None:
        """Nothing to check."""


def take_uploads(swarm: MemorySwarm) -> None:
    sinks: dict[PeerId, Sink] = {}

    async def accept(peer: PeerId, name: str, size: int) -> Sink:
        return sinks.setdefault(peer, Sink())

    serve_uploads(swarm, accept)


def fetching(net: Net) -> tuple[MemorySwarm, list[Awaitable[Any]]]:
    reader = net.join(down_mbit=MBIT)
    return reader, [fetch(reader, *[net.holder() for _ in range(HOLDERS_AT_ONCE)])]


def serving(net: Net) -> tuple[MemorySwarm, list[Awaitable[Any]]]:
    holder = net.holder(up_mbit=MBIT)
    return holder.swarm, [fetch(net.join(), holder) for _ in range(3)]


def sending(net: Net) -> tuple[MemorySwarm, list[Awaitable[Any]]]:
    sender, leaders = net.join(up_mbit=MBIT), [net.join() for _ in range(6)]
    for leader in leaders:
        take_uploads(leader)
    return sender, [send_blob(sender, leader.peer, BLOB, timeout_s=TIMEOUT_S) for leader in leaders]


def taking(net: Net) -> tuple[MemorySwarm, list[Awaitable[Any]]]:
    leader = net.join(down_mbit=MBIT)
    take_uploads(leader)
    return leader, [send_blob(net.join(), leader.peer, BLOB, timeout_s=TIMEOUT_S) for _ in range(3)]


ways = pytest.mark.parametrize("way", [fetching, serving, sending, taking])
Way = Callable[[Net], tuple[MemorySwarm, list[Awaitable[Any]]]]


def busy(way: Way, scene: Callable[[Net, MemorySwarm], Awaitable[None]]) -> None:
    """`scene` runs while blobs go over the limited line of a peer."""

    async def scenario() -> None:
        net = Net()
        limited, transfers = way(net)
        tasks = [asyncio.ensure_future(transfer) for transfer in transfers]
        try:
            await scene(net, limited)
            assert not any(task.done() for task in tasks), "they go on all the time"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    play(scenario)


@ways
def test_in_a_minute_as_much_goes_over_the_line_as_its_limit_says(way: Way) -> None:
    async def scene(net: Net, limited: MemorySwarm) -> None:
        moved = list[int]()
        await asyncio.sleep(5.0)
        for _ in range(61):
            statistics = limited.statistics()
            moved.append(max(statistics.bytes_sent, statistics.bytes_received))
            await asyncio.sleep(1.0)
        assert moved[-1] - moved[0] == pytest.approx(60 * BYTES_PER_S, rel=0.03)
        seconds = [after - before for before, after in zip(moved, moved[1:], strict=False)]
        assert all(0.4 * BYTES_PER_S < second < 1.6 * BYTES_PER_S for second in seconds), "it flows evenly"

    busy(way, scene)


@ways
def test_calls_and_records_do_not_wait_for_blobs(way: Way) -> None:
    async def echo(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply(header, body)

    async def scene(net: Net, limited: MemorySwarm) -> None:
        loop, other = asyncio.get_running_loop(), net.join()
        for swarm in (limited, other):
            swarm.serve("echo", echo)
        for number in range(80):
            await asyncio.sleep(0.13)
            for caller, peer in ((limited, other.peer), (other, limited.peer)):
                began_s = loop.time()
                assert (await caller.call(peer, "echo", {"n": number}, timeout_s=5.0)).header == {"n": number}
                assert loop.time() - began_s == pytest.approx(2 * DELAY_S)
            began_s = loop.time()
            assert await limited.put("dipaco/test/peers", {"n": number}, ttl_s=9.0)
            assert loop.time() - began_s == pytest.approx(DELAY_S)

    busy(way, scene)


@pytest.mark.parametrize("way", [fetching, sending])
def test_a_limit_of_our_own_is_not_taken_for_a_slow_peer(way: Way) -> None:
    async def scene(net: Net, limited: MemorySwarm) -> None:
        await asyncio.sleep(60.0)
        peers = [node.peer for node in net.network.nodes if node is not limited]
        assert [pace_of(limited).range_bytes(peer) for peer in peers] == [RANGE_BYTES] * len(peers)

    busy(way, scene)


async def test_what_a_peer_sends_to_itself_takes_nothing_of_its_line() -> None:
    net = Net()
    owner, loop = net.join(up_mbit=MBIT, down_mbit=MBIT), asyncio.get_running_loop()
    take_uploads(owner)
    await send_blob(owner, owner.peer, BLOB, timeout_s=TIMEOUT_S)
    assert loop.time() < 0.1 * len(BLOB) / BYTES_PER_S


async def test_a_receiver_cannot_ask_for_ranges_of_nothing() -> None:
    net = Net()
    sender, tyrant, lengths = net.join(), net.join(), list[int]()

    async def write(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        lengths.append(len(body))
        have = header["offset"] + len(body)
        return Reply({"have": have, "done": have == header["size"], "range": 0})

    tyrant.serve("blob.write", write)
    await send_blob(sender, tyrant.peer, BLOB[: 4 * RANGE_BYTES_MIN], timeout_s=TIMEOUT_S)
    assert len(lengths) <= 1 + 4 * RANGE_BYTES_MIN // CUT_BYTES_MIN


async def test_a_holder_that_gives_byte_by_byte_is_dropped() -> None:
    net = Net()
    miser = net.join()

    async def read(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({"size": len(BLOB)}, BLOB[header["offset"] :][:1])

    miser.serve("blob.read", read)
    with pytest.raises(BlobMissing, match="a wrong size"):
        await fetch_blob(net.join(), digest(BLOB), size=len(BLOB), holders=[(miser.peer, ())], timeout_s=TIMEOUT_S)
