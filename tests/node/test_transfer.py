"""Blobs between stores: kept on request, fetched again after bit rot, and uploads within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World, node_of
from tiny_run import signer
from trickling import trickle

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import BlobMissing, Refused, SwarmError, Unreachable
from dipaco_p2p.node.node import CALL_TIMEOUT_S, LEAST_BYTES_S, WAIT_S, Member, fetch, fetch_in_time, send, serve_store
from dipaco_p2p.node.store import PARTIALS_MAX
from dipaco_p2p.node.uploads import (
    SLOW_BYTES_S,
    UNFINISHED_UPLOADS_MAX,
    UNUSED_UPLOADS_MAX,
    UPLOAD_SPARE_S,
    Uploads,
)
from dipaco_p2p.owner.chain import Chains
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.blobs.blobs import RANGE_BYTES
from dipaco_p2p.swarm.calls import ReadBlob, WriteBlob
from dipaco_p2p.swarm.memory import MemorySwarm

DATA = bytes(range(256)) * 5000  # more than one range


@asynccontextmanager
async def between_two(folder: Path) -> AsyncIterator[tuple[Member, Member, Uploads]]:
    """`scene` gets two nodes that serve their stores, and the uploads of the second."""
    async with World(folder) as world:
        one, other = world.peer(40), world.peer(41)
        for node in (one, other):
            serve_store(node.swarm, node.store)
        yield one, other, Uploads(other.swarm, other.store, other.clock, size_max=len(DATA))


async def test_a_fetched_blob_is_kept_on_request_only(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        ref = other.store.put(DATA)
        assert await fetch(one, ref, holders=[other.peer]) == DATA
        assert one.store.size(ref.digest) is None
        assert await fetch(one, ref, holders=[other.peer], keep=True) == DATA
        assert await fetch(one, ref, holders=[]) == DATA
        assert list((one.store.folder / "partial").iterdir()) == []


async def test_who_wants_a_blob_at_the_same_time_brings_it_once(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        ref, asked = other.store.put(DATA), list[int]()
        read = other.swarm._dispatcher._handlers[ReadBlob.METHOD]  # type: ignore[attr-defined]

        async def noted(sender: str, header: dict[str, Any], body: bytes) -> Reply:
            asked.append(header["offset"])
            reply: Reply = await read(sender, header, body)
            return reply

        other.swarm._dispatcher._handlers[ReadBlob.METHOD] = noted  # type: ignore[attr-defined]
        wanted = (fetch(one, ref, holders=[other.peer], keep=keep) for keep in (False, True, False))
        assert await asyncio.gather(*wanted) == [DATA] * 3
        assert len(asked) == len(set(asked)) and one.store.size(ref.digest) == len(DATA)


async def test_a_blob_that_rotted_is_fetched_again(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        ref = other.store.put(DATA)
        one.store.put(DATA)
        [path] = (one.store.folder / "blobs").rglob(ref.digest)
        path.write_bytes(DATA[:-1] + b"?")
        assert await fetch(one, ref, holders=[other.peer], keep=True) == DATA
        assert one.store.get(ref.digest) == DATA


async def test_a_blob_that_nobody_has_is_missing(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        for holders in ([], [one.peer], [other.peer]):
            with pytest.raises(BlobMissing):
                await fetch(one, BlobRef.of(DATA), holders=holders)


async def test_a_peer_that_trickles_is_not_waited_for_longer_than_a_thin_line_takes(tmp_path: Path) -> None:
    """Attack: a range in each call, as short and as late as may be, and 1 MiB took twenty minutes."""
    now_s = asyncio.get_running_loop().time
    async with World(tmp_path) as world:
        one, other, honest = (world.peer(number) for number in (40, 41, 42))
        ref, began_s = trickle(other.swarm, DATA), now_s()
        with pytest.raises(Unreachable, match="did not come in"):
            await fetch_in_time(one, ref, holders=[other.peer])
        assert now_s() - began_s == pytest.approx(WAIT_S + len(DATA) / LEAST_BYTES_S, abs=0.1)
        [partial] = (one.store.folder / "partial").iterdir()
        assert 0 < partial.stat().st_size < len(DATA)
        serve_store(honest.swarm, honest.store)
        honest.store.put(DATA)
        assert await fetch_in_time(one, ref, holders=[other.peer, honest.peer], keep=True) == DATA
        assert one.store.size(ref.digest) == len(DATA)


@pytest.mark.parametrize("size", [len(DATA), len(DATA) + 5, 2 * len(DATA)])
async def test_a_stranger_that_trickles_somebodys_blob_keeps_nobody_from_it(tmp_path: Path, size: int) -> None:
    """Attack: work that names the next update as its payload. A judge began to fetch that from its author alone, and
    whoever wanted the update joined."""
    async with World(tmp_path) as world:
        one, other, honest = (world.peer(number) for number in (40, 41, 42))
        serve_store(honest.swarm, honest.store)
        ref = honest.store.put(DATA)
        trickle(other.swarm, b"?" * size)
        judging = asyncio.ensure_future(fetch_in_time(one, BlobRef(digest=ref.digest, size=size), holders=[other.peer]))
        await asyncio.sleep(CALL_TIMEOUT_S + 1)
        assert await fetch(one, ref, holders=[honest.peer, other.peer]) == DATA
        assert not judging.done(), "it waits for the stranger, and nobody waits for it"
        with pytest.raises(SwarmError):
            await judging
        assert await fetch(one, ref, holders=[honest.peer]) == DATA, "what the stranger sent does not stay for long"


async def test_a_home_line_of_one_mbit_gives_a_state_to_four_at_once(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        swarm = world.network.join(signer(40), line=Line(up_mbit=1.0, clock=world.clock))
        author = node_of(world.run, swarm, tmp_path / "author", world.clock, Heartbeat())
        serve_store(author.swarm, author.store)
        ref, readers = author.store.put(DATA), [world.peer(number) for number in range(41, 45)]
        assert await asyncio.gather(*(fetch_in_time(one, ref, holders=[author.peer]) for one in readers)) == [DATA] * 4


async def test_more_bytes_than_the_reference_says_are_not_taken(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        ref = other.store.put(DATA)
        with pytest.raises(BlobMissing):
            await fetch(one, BlobRef(digest=ref.digest, size=10), holders=[other.peer])


async def test_an_upload_arrives_and_a_second_one_costs_nothing(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        await send(one, other.peer, DATA)
        assert other.store.get(digest(DATA)) == DATA
        before = one.swarm.statistics().bytes_sent
        await send(one, other.peer, DATA)
        assert one.swarm.statistics().bytes_sent - before < 1000
        assert list((other.store.folder / "partial").iterdir()) == []


async def test_an_upload_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        header = {"digest": digest(DATA), "size": len(DATA), "offset": 0}
        reply = await one.swarm.call(other.peer, WriteBlob.METHOD, header, DATA[:1_000_000], timeout_s=20.0)
        assert reply.header == {"have": 1_000_000, "done": False, "range": RANGE_BYTES}
        before = one.swarm.statistics().bytes_sent
        await send(one, other.peer, DATA)
        assert one.swarm.statistics().bytes_sent - before < len(DATA) - 900_000
        assert other.store.get(digest(DATA)) == DATA


async def test_an_upload_of_other_bytes_is_refused_and_forgotten(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        header = {"digest": digest(b"good"), "size": 4, "offset": 0}
        with pytest.raises(Refused) as caught:
            await one.swarm.call(other.peer, WriteBlob.METHOD, header, b"evil", timeout_s=20.0)
        assert caught.value.reason == "integrity"
        await send(one, other.peer, b"good")
        assert other.store.get(digest(b"good")) == b"good"
        assert other.store.size(digest(b"evil")) is None


@pytest.mark.parametrize("size", [0, len(DATA) + 1, 2**50])
async def test_a_size_out_of_bounds_is_refused_before_anything_is_written(tmp_path: Path, size: int) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        header = {"digest": digest(DATA), "size": size, "offset": 0}
        with pytest.raises(Refused) as caught:
            await one.swarm.call(other.peer, WriteBlob.METHOD, header, b"", timeout_s=20.0)
        assert caught.value.reason == "oversized"
        assert list((other.store.folder / "partial").iterdir()) == []


async def test_uploads_that_nothing_came_of_make_room_and_claimed_ones_stay(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        blobs = [f"upload {number}".encode() for number in range(UNUSED_UPLOADS_MAX + 2)]
        await send(one, other.peer, blobs[0])
        uploads.claim(digest(blobs[0]))
        for blob in blobs[1:]:
            await send(one, other.peer, blob)
        assert [other.store.size(digest(blob)) is not None for blob in blobs] == [True, False] + [True] * (
            UNUSED_UPLOADS_MAX
        )


async def test_a_flood_of_unfinished_uploads_makes_room_for_itself_only(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):

        async def begin(node: Member, number: int, body: bytes) -> int:
            header = {"digest": digest(str(number).encode()), "size": len(DATA), "offset": 0}
            reply = await node.swarm.call(other.peer, WriteBlob.METHOD, header, body, timeout_s=20.0)
            have: int = reply.header["have"]
            return have

        await begin(other, 0, b"theirs")  # a call of its own: another sender
        for number in range(3 * UNFINISHED_UPLOADS_MAX):
            await begin(one, number, b"ours")
        assert len(list((other.store.folder / "partial").iterdir())) == UNFINISHED_UPLOADS_MAX + 1
        assert await begin(other, 0, b"") == len(b"theirs")
        assert await begin(one, 3 * UNFINISHED_UPLOADS_MAX - 1, b"") == len(b"ours")


async def begin(uploads: Uploads, key: int, number: int = 0, *, data: bytes = b"x", offset: int = 0) -> int:
    """Some bytes of an unfinished upload by the peer with this key, as a call brings them; what is there before."""
    sink = await uploads._accept(signer(key).peer, digest(f"{key}, {number}".encode()), len(DATA) // 4)
    have: int = sink.received
    if data and have == offset:
        sink.write(offset, data)
    return have


def call_from(node: Member, hosts: dict[PeerId, str]) -> None:
    """These peers have calls open at `node`, from there."""
    assert isinstance(node.swarm, MemorySwarm)
    node.swarm._dispatcher._hosts |= hosts


async def test_nine_keys_oust_neither_an_upload_that_goes_on_nor_a_download(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        download = other.store.partial_path("0" * 64)
        download.write_bytes(b"ours")
        for part in range(10):
            assert await begin(uploads, 40, data=DATA[:20_000], offset=part * 20_000) == part * 20_000
            for number in range(8):
                for key in range(50, 59):
                    with suppress(Refused):  # so many at once are refused once the folder is full
                        await begin(uploads, key, 8 * part + number)
            await asyncio.sleep(1.0)
        assert download.exists()
        assert len(other.store.unfinished_uploads()) == PARTIALS_MAX


async def test_a_crowd_of_keys_keeps_out_strangers_only_and_only_while_it_sends(tmp_path: Path) -> None:
    async with between_two(tmp_path) as (one, other, uploads):
        uploads.is_proven = {signer(42).peer}.__contains__
        for key in (40, *range(100, 100 + PARTIALS_MAX - 1)):
            await begin(uploads, key, data=DATA[:40_000])
        for key in (250, 40):
            with pytest.raises(Refused) as caught:
                await begin(uploads, key, 1)
            assert caught.value.reason == "busy"
        assert await begin(uploads, 40, data=DATA[:40_000], offset=40_000) == 40_000, "it is one of the last ones"
        for number in range(2):
            await begin(uploads, 42, number, data=DATA[:40_000])
        assert len(other.store.unfinished_uploads()) == PARTIALS_MAX
        await asyncio.sleep(UPLOAD_SPARE_S)
        for key in range(200, 240):
            await begin(uploads, key)
        assert await begin(uploads, 42, 1, data=b"") == 40_000, "of those that were silent strangers' go first"
        assert len(other.store.unfinished_uploads()) == PARTIALS_MAX


async def test_a_crowd_at_one_address_keeps_no_stranger_elsewhere_out(tmp_path: Path) -> None:
    """Attack: 64 keys that send 1 kB/s each were all that a peer took, in a round before which nobody had worked."""
    async with between_two(tmp_path) as (one, other, uploads):
        crowd = [signer(key).peer for key in range(100, 100 + 2 * PARTIALS_MAX)]
        call_from(other, dict.fromkeys(crowd, "192.0.2.1"))
        call_from(other, dict.fromkeys([signer(40).peer, signer(41).peer], "192.0.2.2"))
        for key in range(100, 100 + PARTIALS_MAX):
            await begin(uploads, key, data=DATA[:40_000])
        for key in (40, 41):  # neighbours
            await begin(uploads, key, data=DATA[:10_000])
        for part in range(1, 5):
            await asyncio.sleep(8.0)
            for key in (40, 41):
                assert await begin(uploads, key, data=DATA[:10_000], offset=part * 10_000) == part * 10_000, (
                    "slow, at most"
                )
            for number in range(PARTIALS_MAX):
                with suppress(Refused):
                    await begin(uploads, 100 + (40 * part + number) % len(crowd), part, data=DATA[:40_000])
        assert len(other.store.unfinished_uploads()) == PARTIALS_MAX


async def test_of_uploads_from_as_many_addresses_slow_ones_give_way(tmp_path: Path) -> None:
    """Attack: the same from 64 addresses. A thin line of which eight uploads have a part each is no slow one."""
    async with between_two(tmp_path) as (one, other, uploads):
        crowd = range(100, 100 + PARTIALS_MAX)
        call_from(other, {signer(key).peer: f"192.0.2.{key}" for key in (40, *crowd)})
        part = int(SLOW_BYTES_S * 4.0) + 1
        for step in range(6):
            for _ in range(4):
                for key in crowd:
                    with suppress(Refused):
                        held = await begin(uploads, key, data=b"")
                        await begin(uploads, key, data=DATA[:1100], offset=held)
                await asyncio.sleep(1.0)
            assert await begin(uploads, 40, data=DATA[:part], offset=step * part) == step * part
        assert len(other.store.unfinished_uploads()) == PARTIALS_MAX


async def test_where_our_own_line_is_thin_no_upload_is_slow_that_has_its_part(tmp_path: Path) -> None:
    """Else newcomers would oust each other for ever, and none would come to an end."""
    async with World(tmp_path) as world:
        swarm = world.network.join(signer(41), line=Line(down_mbit=0.5, clock=world.clock))
        other = node_of(world.run, swarm, tmp_path / "other", world.clock, Heartbeat())
        uploads = Uploads(swarm, other.store, world.clock, size_max=len(DATA))
        crowd = range(100, 100 + PARTIALS_MAX)
        call_from(other, {signer(key).peer: f"192.0.2.{key}" for key in (40, *crowd)})
        for step in range(3):
            for key in crowd:
                assert await begin(uploads, key, data=DATA[:16_384], offset=step * 16_384) == step * 16_384
            await asyncio.sleep(PARTIALS_MAX * 16_384 / swarm.line.down.bytes_per_s - 1.0)
            with pytest.raises(Refused):
                await begin(uploads, 40)
            await asyncio.sleep(1.0)


async def test_uploads_by_whom_a_version_counts_go_before_those_of_strangers(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        node = world.peer(40)
        chains = Chains(node)
        chains.earlier = frozenset({signer(41).peer})
        assert [node.uploads.is_proven(signer(key).peer) for key in (41, 42)] == [True, False]


async def test_finished_uploads_of_all_senders_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dipaco_p2p.node.uploads.UNUSED_UPLOADS_IN_ALL_MAX", 5)
    async with between_two(tmp_path) as (one, other, uploads):
        await send(other, other.peer, b"theirs")
        for number in range(8):
            await send(one, other.peer, str(number).encode())
        kept = [number for number in range(8) if other.store.size(digest(str(number).encode())) is not None]
        assert kept == [4, 5, 6, 7] and other.store.size(digest(b"theirs")) is not None


async def test_uploads_of_an_earlier_process_that_nothing_came_of_are_dropped_at_a_start(tmp_path: Path) -> None:
    """Their bounds are kept in memory: without this, each restart would leave 256 more on the disk."""
    async with World(tmp_path) as world:
        one, other, again = world.peer(40), world.peer(41), world.peer(42)
        Uploads(other.swarm, other.store, other.clock, size_max=len(DATA))
        store, names = other.store, [digest(bytes([number]) * 10) for number in range(5)]
        for number in range(5):
            await send(one, other.peer, bytes([number]) * 10)
        named = store.put(b"a document names these bytes")
        store.write_document("open-somebody", b'{"payload":"' + named.digest.encode() + b'"}')
        assert all(map(store.size, names))
        Uploads(again.swarm, store, again.clock, size_max=len(DATA))
        assert not any(map(store.size, names)) and store.size(named.digest)
