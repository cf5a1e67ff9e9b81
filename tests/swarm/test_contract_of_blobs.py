"""What every swarm promises of blobs; each test runs in memory and over libp2p."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import BlobMissing, IntegrityError, Refused
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.blobs.blobs import RANGE_BYTES, send_blob, serve_blobs, serve_uploads
from dipaco_p2p.swarm.blobs.fetch import fetch_blob

BLOB = random.Random(5).randbytes(5 * RANGE_BYTES + 17)


class Store:
    """Blobs in a dict, as holders keep them; counts what was read."""

    def __init__(self, swarm: Any, data: bytes, name: str = "") -> None:
        self.blobs, self.reads = {name or digest(data): data}, 0
        serve_blobs(swarm, self.read, lambda key: len(self.blobs[key]) if key in self.blobs else None)

    def read(self, key: str, offset: int, length: int) -> bytes:
        self.reads += 1
        return self.blobs[key][offset : offset + length]


async def test_a_blob_comes_from_several_holders_and_resumes(net: Any, tmp_path: Path) -> None:
    a, b, c = [await net.join() for _ in range(3)]
    stores = [Store(b, BLOB), Store(c, BLOB)]
    holders = [(b.peer, b.addresses), (c.peer, c.addresses)]
    partial, progress = tmp_path / "partial", []

    async def fetch(**options: Any) -> bytes:
        options = {"size": len(BLOB), "holders": holders, "timeout_s": 10} | options
        return await fetch_blob(a, digest(BLOB), **options)

    assert await fetch(on_progress=lambda done, size: progress.append((done, size))) == BLOB
    assert progress[-1] == (len(BLOB), len(BLOB)) and all(store.reads >= 2 for store in stores)
    before = sum(store.reads for store in stores)
    partial.write_bytes(BLOB[: 4 * RANGE_BYTES])
    assert await fetch(partial=partial) == BLOB
    assert sum(store.reads for store in stores) < before + 5 and not partial.exists()
    partial.write_bytes(b"damaged" + BLOB[7:])
    assert await fetch(partial=partial) == BLOB
    with pytest.raises(BlobMissing, match="a wrong size"):
        await fetch(size=len(BLOB) - 1)
    with pytest.raises(IntegrityError, match="bytes that are not the blob"):
        await fetch(size=len(BLOB) + 1)


async def test_a_blob_survives_a_liar_among_the_holders_who_alone_is_named(net: Any, tmp_path: Path) -> None:
    a, liar, short_one, empty, honest = [await net.join() for _ in range(5)]
    name, bad = digest(BLOB), BLOB[:-1] + b"?"
    assert bad != BLOB
    Store(liar, bad, name), Store(short_one, BLOB[:100], name), Store(empty, b"other"), Store(honest, BLOB)
    partial = tmp_path / "partial"

    async def fetch(*swarms: Any) -> bytes:
        holders = [(swarm.peer, swarm.addresses) for swarm in swarms]
        return await fetch_blob(a, name, size=len(BLOB), holders=holders, partial=partial, timeout_s=10)

    for order in ([liar, honest], [short_one, liar, empty, honest], [honest, short_one]):
        assert await fetch(*order) == BLOB
    with pytest.raises(IntegrityError, match=liar.peer[-6:]):
        await fetch(liar, empty)
    with pytest.raises(BlobMissing, match="is not here"):
        await fetch(empty)


class Sink:
    """An upload in memory; notes where its ranges began."""

    def __init__(self) -> None:
        self.data, self.offsets, self.finished = b"", [], 0

    @property
    def received(self) -> int:
        return len(self.data)

    def write(self, offset: int, data: bytes) -> None:
        self.offsets.append(offset)
        self.data += data

    def finish(self) -> None:
        self.finished += 1
        if digest(self.data) != digest(BLOB[: len(self.data)]):
            raise IntegrityError("not the announced bytes")


async def test_under_a_limit_ranges_are_shorter_and_the_blob_is_the_same(net: Any) -> None:
    a, b = await net.join(line=Line(down_mbit=2.0)), await net.join(line=Line(up_mbit=2.0))
    blob = BLOB[: 200 * 1024]
    store, sink = Store(b, blob), Sink()

    async def accept(peer: PeerId, name: str, size: int) -> Sink:
        return sink

    serve_uploads(a, accept)
    options = {"size": len(blob), "holders": [(b.peer, b.addresses)], "timeout_s": 10.0}
    assert await fetch_blob(a, digest(blob), **options) == blob and store.reads > 1
    await send_blob(b, a.peer, blob, timeout_s=10, addresses=a.addresses)
    assert sink.data == blob and len(sink.offsets) > 1


async def test_an_upload_resumes_after_the_connection_broke(net: Any) -> None:
    a, b = await net.join(), await net.join()
    sink = Sink()

    async def accept(peer: PeerId, name: str, size: int) -> Sink:
        if size > len(BLOB):
            raise Refused(f"{size} bytes are too many", reason="too-large")
        return sink

    serve_uploads(b, accept)
    sink.data = BLOB[: 2 * RANGE_BYTES]
    assert await send_blob(a, b.peer, BLOB, timeout_s=10, addresses=b.addresses) == digest(BLOB)
    assert sink.data == BLOB and sink.offsets == [n * RANGE_BYTES for n in (2, 3, 4, 5)] and sink.finished == 1
    with pytest.raises(Refused, match="too many"):
        await send_blob(a, b.peer, BLOB + b"x", timeout_s=10)
    sink.data = b"?" + BLOB[1:-1]
    with pytest.raises(Refused) as refused:
        await send_blob(a, b.peer, BLOB, timeout_s=10)
    assert refused.value.reason == "integrity"
    sink.data = b""
    assert await send_blob(a, b.peer, BLOB, timeout_s=10, digest=digest(BLOB)) == digest(BLOB) and sink.data == BLOB
