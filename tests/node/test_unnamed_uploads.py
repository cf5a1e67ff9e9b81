"""Uploads that no document names take a bounded part of the disk, whoever sends them from wherever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from runtime_harness import World
from tiny_run import signer

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.uploads import UNNAMED_UPLOADS, UNUSED_UPLOADS_MAX, UPLOAD_SPARE_S, Uploads
from dipaco_p2p.swarm.memory import MemorySwarm
from peers.governor.allowances import Allowance, InUse, folder_bytes, limited

SIZE = 8192
NEAR = UNNAMED_UPLOADS // 2
"""Of strangers at one address."""
CROWD = range(100, 116)
HONEST = 40


@asynccontextmanager
async def receiver(folder: Path) -> AsyncIterator[tuple[Member, Uploads]]:
    """Gives one that takes uploads: the crowd is at one address, and the honest author at another."""
    async with World(folder) as world:
        node = world.peer(41)
        await_from(node, {HONEST: "192.0.2.2", **dict.fromkeys(CROWD, "192.0.2.1")})
        yield node, Uploads(node.swarm, node.store, node.clock, size_max=SIZE)


def await_from(node: Member, hosts: dict[int, str]) -> None:
    assert isinstance(node.swarm, MemorySwarm)
    node.swarm._dispatcher._hosts |= {signer(key).peer: host for key, host in hosts.items()}


def blob(key: int, number: int, size: int = SIZE) -> bytes:
    return f"{key}, {number};".encode().ljust(size, b".")


async def begin(uploads: Uploads, key: int, number: int = 0, *, size: int = SIZE, part: int = 1) -> None:
    """The first bytes of an upload."""
    data = blob(key, number, size)
    sink = await uploads._accept(signer(key).peer, digest(data), size)
    if not sink.received:
        sink.write(0, data[:part])


async def upload(uploads: Uploads, key: int, number: int = 0, *, size: int = SIZE) -> str:
    """All of it; its digest."""
    data = blob(key, number, size)
    sink = await uploads._accept(signer(key).peer, digest(data), size)
    sink.write(sink.received, data[sink.received :])
    sink.finish()
    return digest(data)


async def flood(uploads: Uploads, keys: range = CROWD) -> None:
    for number in range(UNUSED_UPLOADS_MAX):
        for key in keys:
            with suppress(Refused):
                await upload(uploads, key, number)


def taken(node: Member) -> int:
    folders = (node.store.folder / name for name in ("blobs", "partial"))
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


async def test_sixteen_keys_at_one_address_get_half_of_the_bytes_and_an_author_elsewhere_its_own(
    tmp_path: Path,
) -> None:
    """Attack: 256 uploads of the largest size used up what a volunteer gives of its disk."""
    async with receiver(tmp_path) as (node, uploads):
        name = await upload(uploads, HONEST)
        await flood(uploads)
        assert taken(node) == (NEAR + 1) * SIZE
        assert node.store.size(name) == SIZE, "it is about to be named"
        names = [await upload(uploads, HONEST, number) for number in range(1, NEAR)]
        assert all(map(node.store.size, [name, *names])) and taken(node) == UNNAMED_UPLOADS * SIZE


async def test_a_crowd_at_many_addresses_gets_all_of_the_bytes_at_most_and_gives_way(tmp_path: Path) -> None:
    async with receiver(tmp_path) as (node, uploads):
        await_from(node, {key: f"192.0.2.{100 + key % 4}" for key in CROWD})
        await flood(uploads)
        assert taken(node) == UNNAMED_UPLOADS * SIZE
        name = await upload(uploads, HONEST)
        await flood(uploads)
        assert node.store.size(name) == SIZE and taken(node) == UNNAMED_UPLOADS * SIZE


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_unfinished_uploads_take_the_bytes_that_they_are_to_have(tmp_path: Path, is_restarted: bool) -> None:
    """Whatever they said when they began, and whichever process took their first bytes."""
    async with receiver(tmp_path) as (node, uploads):
        begun = [(signer(key).peer, blob(key, number)) for number in range(2) for key in CROWD]
        for sender, data in begun:
            (await uploads._accept(sender, digest(data), 2)).write(0, data[:1])
        if is_restarted:
            uploads._arriving.clear()
        for sender, data in begun:
            with suppress(Refused):
                sink = await uploads._accept(sender, digest(data), SIZE)
                sink.write(1, data[1:-1])
        assert (NEAR - 1) * SIZE < taken(node) <= NEAR * SIZE


async def test_an_upload_has_its_place_before_its_first_bytes_are_here(tmp_path: Path) -> None:
    """A crowd took it meanwhile: what has not sent anything yet looked idle."""
    async with receiver(tmp_path) as (node, uploads):
        await flood(uploads)
        data = blob(HONEST, 0)
        sink = await uploads._accept(signer(HONEST).peer, digest(data), SIZE)
        for key in CROWD[:4]:
            await_from(node, {key: "192.0.2.3"})
        for _ in range(3):
            await flood(uploads, CROWD[:4])
            await node.clock.sleep(1.0)
        assert sink._path.exists()
        sink.write(0, data)
        sink.finish()
        assert node.store.size(digest(data)) == SIZE


async def test_an_author_that_has_worked_finds_room_beside_a_crowd_at_its_own_address(tmp_path: Path) -> None:
    async with receiver(tmp_path) as (node, uploads):
        await_from(node, {HONEST: "192.0.2.1"})
        for key in range(200, 200 + NEAR):
            await_from(node, {key: f"198.51.100.{key}"})
            await upload(uploads, key)
        await flood(uploads)
        with pytest.raises(Refused) as caught:
            await begin(uploads, HONEST)
        assert caught.value.reason == "busy"
        uploads.is_proven = {signer(HONEST).peer}.__contains__
        name = await upload(uploads, HONEST)
        await flood(uploads)
        assert node.store.size(name) == SIZE and taken(node) == UNNAMED_UPLOADS * SIZE


async def test_a_sender_that_names_nothing_gives_way_to_itself_and_in_the_end_to_its_neighbours(tmp_path: Path) -> None:
    async with receiver(tmp_path) as (node, uploads):
        await_from(node, {HONEST: "192.0.2.1"})
        first, *rest = [await upload(uploads, CROWD[0], number) for number in range(NEAR + 1)]
        assert node.store.size(first) is None and all(map(node.store.size, rest))
        for key in CROWD[1:]:
            await upload(uploads, key)
        for number in range(1, NEAR):
            with suppress(Refused):
                await upload(uploads, CROWD[0], number)
        with pytest.raises(Refused):
            await begin(uploads, HONEST)
        await node.clock.sleep(UPLOAD_SPARE_S)
        await begin(uploads, HONEST)


async def test_a_limited_disk_drops_what_nothing_names_before_it_is_full(tmp_path: Path) -> None:
    """Attack: a volunteer ended with exit code 5 once strangers had uploaded enough, and after each start again."""
    async with receiver(tmp_path) as (node, uploads):
        own = node.store.put(b"own" * SIZE)
        kept = await upload(uploads, HONEST)
        limit = folder_bytes(tmp_path) + 8 * SIZE
        with limited(Allowance(tmp_path, limit, in_use=lambda: InUse(free=uploads.free))):
            await flood(uploads)
            refs = [node.store.put(bytes([number]) * SIZE) for number in range(5)]
        assert all(node.store.size(ref.digest) for ref in (own, *refs))
        assert node.store.size(kept) is not None, "those of the address that has most go first"
        assert folder_bytes(tmp_path) <= limit
