"""Blobs over calls: bytes named by their digest, moved in ranges, resumable in both directions.

A blob is fetched from several holders at once (over a home line several connections beat several streams over one); a
holder that fails or sends what it should not is dropped. Sizes are checked before anything is allocated, and nothing
is returned or accepted whose digest is not the one asked for. Ranges are shorter on slow links (pace.py), and what
takes time with large blobs, to digest, read and write them, is done beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from ..canonical import digest as digest_of
from ..canonical import is_digest
from ..errors import BlobMissing, DipacoError, IntegrityError, Refused
from ..protocol.signing import PeerId, short
from .api import Reply, Swarm
from .pace import RANGE_BYTES, pace_of

IN_FLIGHT_MAX = 4
READ, WRITE = "blob.read", "blob.write"

Holder = tuple[PeerId, Sequence[str]]
OnProgress = Callable[[int, int], None]


class PartialSink(Protocol):
    """Where an upload goes: what it holds survives a broken connection."""

    @property
    def received(self) -> int:
        """How many bytes are there already, from the start on."""

    def write(self, offset: int, data: bytes) -> None:
        """Add `data` at `offset`, which is `received`."""

    def finish(self) -> None:
        """All bytes are there: check and keep them; raises IntegrityError."""


async def fetch_blob(
    swarm: Swarm,
    digest: str,
    *,
    size_max: int,
    holders: Sequence[Holder],
    partial: Path | None = None,
    timeout_s: float,
    on_progress: OnProgress | None = None,
) -> bytes:
    """The blob named `digest`, of at most `size_max` bytes; `timeout_s` is for each range.

    What arrived is kept in `partial` until the blob is whole, so that a later fetch goes on from there.
    `on_progress` gets (bytes so far, bytes in all). Raises BlobMissing when no holder gives it, and IntegrityError
    when the only bytes to be had are wrong ones.
    """
    fetch = _Fetch(swarm, digest, size_max=size_max, timeout_s=timeout_s, on_progress=on_progress)
    data = await fetch.run(list(holders), partial)
    if data is not None and await asyncio.to_thread(digest_of, data) == digest:
        return _done(data, partial)
    # Somebody lied, or the partial file was damaged: from the start, one by one, to find the honest and name the liars.
    liars = []
    for holder in holders:
        if holder[0] in fetch.silent:
            continue
        _discard(partial)
        data = await fetch.run([holder], partial)
        if data is not None and await asyncio.to_thread(digest_of, data) == digest:
            return _done(data, partial)
        liars.append(short(holder[0]))
    if liars:
        _discard(partial)
        raise IntegrityError(f"{', '.join(liars)} sent bytes that are not the blob {digest[:12]}")
    raise BlobMissing(f"nobody gave the blob {digest[:12]}: {fetch.problem}")


class _Fetch:
    """One blob on its way: rounds of ranges, spread over the holders that are still trusted."""

    def __init__(
        self, swarm: Swarm, digest: str, *, size_max: int, timeout_s: float, on_progress: OnProgress | None
    ) -> None:
        assert is_digest(digest), f"not a digest: {digest}"
        self._swarm, self._digest, self._size_max, self._timeout_s = swarm, digest, size_max, timeout_s
        self._on_progress = on_progress or (lambda done, size: None)
        self.problem = "nobody was asked"
        self.silent: set[PeerId] = set()

    async def run(self, holders: list[Holder], partial: Path | None) -> bytes | None:
        """All the bytes, not yet verified; None if `holders`, of which those that fail are dropped, run out."""
        size = await self._size(holders)
        buffer = bytearray(await asyncio.to_thread(_read_partial, partial, size))
        while holders and len(buffer) < size:
            asked, ranges = self._plan(holders, len(buffer), size)
            pieces = await asyncio.gather(*map(self._range, asked, ranges, [size] * len(ranges)))
            fresh = _prefix(pieces)
            await asyncio.to_thread(_append_partial, partial, len(buffer), fresh)
            buffer += fresh
            self._on_progress(len(buffer), size)
            failed = [holder for holder, piece in zip(asked, pieces, strict=True) if piece is None]
            holders = [holder for holder in holders if holder not in failed]
        return bytes(buffer) if holders else None

    async def _size(self, holders: list[Holder]) -> int:
        """The size, from the first holder that tells one within bounds; those before it are dropped from the list."""
        while holders:
            reply = await self._ask(holders[0], offset=0, length=0)
            size = reply.header.get("size") if reply else None
            if _is_count(size) and size <= self._size_max:
                return int(size)
            if reply:
                self.problem = f"{short(holders[0][0])} says that it has {size!r} bytes; {self._size_max} is the most"
                self.silent.add(holders[0][0])
            del holders[0]
        return 0

    def _plan(self, holders: list[Holder], start: int, size: int) -> tuple[list[Holder], list[range]]:
        """Whom to ask next for which ranges, one after the other, each as long as its holder's pace."""
        asked: list[Holder] = []
        ranges: list[range] = []
        while start < size and len(ranges) < IN_FLIGHT_MAX:
            asked.append(holders[len(ranges) % len(holders)])
            stop = min(size, start + _range_bytes(self._swarm, asked[-1][0]))
            ranges.append(range(start, stop))
            start = stop
        return asked, ranges

    async def _range(self, holder: Holder, wanted: range, size: int) -> bytes | None:
        length = len(wanted)
        reply = await self._ask(holder, offset=wanted.start, length=length)
        if reply is None:
            return None
        if reply.header.get("size") != size or len(reply.body) != length:
            self.problem = f"{short(holder[0])} sent a range of a wrong size"
            return None
        return reply.body

    async def _ask(self, holder: Holder, *, offset: int, length: int) -> Reply | None:
        header = {"digest": self._digest, "offset": offset, "length": length}
        peer, addresses = holder
        try:
            with _timed(self._swarm, peer, length):
                return await self._swarm.call(peer, READ, header, timeout_s=self._timeout_s, addresses=addresses)
        except DipacoError as error:
            self.problem = str(error)
            self.silent.add(peer)
            return None


def serve_blobs(
    swarm: Swarm, read_range: Callable[[str, int, int], bytes | None], size_of: Callable[[str], int | None]
) -> None:
    """Give away blobs: `read_range(digest, offset, length)` and `size_of(digest)` say None for what is not held."""

    async def handle(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        digest, offset, length = _read_header(header, "offset", "length")
        size = await asyncio.to_thread(size_of, digest)
        if size is None:
            raise Refused(f"the blob {digest[:12]} is not here", reason="missing")
        length = max(0, min(length, RANGE_BYTES, size - offset))
        data = await asyncio.to_thread(read_range, digest, offset, length) if length else b""
        if data is None:
            raise Refused(f"the blob {digest[:12]} is not here any more", reason="missing")
        return Reply({"size": size}, data)

    swarm.serve(READ, handle)


async def send_blob(
    swarm: Swarm,
    peer: PeerId,
    data: bytes,
    *,
    timeout_s: float,
    addresses: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> str:
    """Bring `data` to `peer`, going on where an earlier attempt ended, and return its digest.

    `timeout_s` is for each range. Raises Unreachable, Refused (with the receiver's reason), IntegrityError.
    """
    digest, size = await asyncio.to_thread(digest_of, data), len(data)
    have, done = 0, False
    body = b""
    while not done:
        header = {"digest": digest, "size": size, "offset": have}
        with _timed(swarm, peer, len(body)):
            reply = await swarm.call(peer, WRITE, header, body, timeout_s=timeout_s, addresses=addresses)
        there, done = reply.header.get("have"), reply.header.get("done") is True
        if not _is_count(there) or there > size or (body and there <= have and not done):
            raise IntegrityError(f"{short(peer)} says it has {there!r} of {size} bytes")
        have = there
        if on_progress is not None:
            on_progress(have, size)
        body = data[have : have + _range_bytes(swarm, peer)]
    return digest


def serve_uploads(swarm: Swarm, accept: Callable[[PeerId, str, int], Awaitable[PartialSink]]) -> None:
    """Take blobs: `accept(peer, digest, size)` gives the sink of an upload, always the same one until it is finished,
    or raises Refused. A call without a body asks how much is there."""
    writing: set[tuple[PeerId, str]] = set()

    async def handle(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        digest, size, offset = _read_header(header, "size", "offset")
        if offset + len(body) > size:
            raise Refused(f"{len(body)} bytes at {offset} do not fit into {size}", reason="malformed")
        if (peer, digest) in writing:
            raise Refused(f"another call writes {digest[:12]}", reason="busy")
        writing.add((peer, digest))
        try:
            return await _take(await accept(peer, digest, size), size, offset, body)
        finally:
            writing.discard((peer, digest))

    swarm.serve(WRITE, handle)


async def _take(sink: PartialSink, size: int, offset: int, body: bytes) -> Reply:
    """Write what continues the sink; what it has already is not written twice (calls may be repeated)."""
    if body and offset == sink.received:
        await asyncio.to_thread(sink.write, offset, body)
    if sink.received < size:
        return Reply({"have": sink.received, "done": False})
    try:
        await asyncio.to_thread(sink.finish)
    except IntegrityError as error:
        raise Refused(str(error), reason="integrity") from None
    return Reply({"have": size, "done": True})


def _range_bytes(swarm: Swarm, peer: PeerId) -> int:
    return min(RANGE_BYTES, pace_of(swarm).range_bytes(peer))


@contextlib.contextmanager
def _timed(swarm: Swarm, peer: PeerId, length: int) -> Iterator[None]:
    """Tell the pace how long the block took."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    try:
        yield
    except DipacoError:
        pace_of(swarm).failed(peer, length, loop.time() - start_s)
        raise
    if length:
        pace_of(swarm).took(peer, length, loop.time() - start_s)


def _read_header(header: dict[str, Any], first: str, second: str) -> tuple[str, int, int]:
    """The digest and two counts of a request; raises Refused."""
    digest, one, other = header.get("digest"), header.get(first), header.get(second)
    if not is_digest(digest) or not _is_count(one) or not _is_count(other):
        raise Refused(f"a digest, `{first}` and `{second}` were expected", reason="malformed")
    return str(digest), one, other


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _prefix(pieces: Sequence[bytes | None]) -> bytes:
    """The pieces up to the first that is missing: what is kept has no holes."""
    end = next((index for index, piece in enumerate(pieces) if piece is None), len(pieces))
    return b"".join(piece for piece in pieces[:end] if piece)


def _read_partial(partial: Path | None, size_max: int) -> bytes:
    if partial is None or not partial.is_file() or partial.stat().st_size > size_max:
        return b""
    return partial.read_bytes()


def _append_partial(partial: Path | None, offset: int, data: bytes) -> None:
    if partial is None:
        return
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.seek(offset)
        file.write(data)


def _discard(partial: Path | None) -> None:
    if partial is not None:
        partial.unlink(missing_ok=True)


def _done(data: bytes, partial: Path | None) -> bytes:
    _discard(partial)
    return data
