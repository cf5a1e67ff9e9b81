"""Blobs between stores: kept on request, fetched again after bit rot, and uploads within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import BlobMissing, Refused
from dipaco_p2p.node.node import Member, fetch, send, serve_store
from dipaco_p2p.node.store import UNFINISHED_UPLOADS_MAX, UNUSED_UPLOADS_MAX, Uploads
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.blobs.blobs import RANGE_BYTES
from dipaco_p2p.swarm.calls import ReadBlob, WriteBlob

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


async def test_finished_uploads_of_all_senders_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dipaco_p2p.node.store.UNUSED_UPLOADS_IN_ALL_MAX", 5)
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
