"""From a request frame to a reply frame: the same limits and the same refusals on every transport.

A stream carries one frame per request and one per reply; its lengths are checked before anything is allocated.

    magic "DPP" | version u8 | kind u8 | header length u32 | body length u32 | header | body        (big-endian)

The header is canonical JSON, a table; the body is bytes. Nothing here does I/O of its own: `read_frame` is given a
coroutine that reads exactly so many bytes.

Calls that move blobs are *bulk*: they are counted apart, only a few are served at once, and the waiting peers take
turns. So a peer that fetches and sends all it can still gets its heads, rounds and receipts answered, and so do others.
A turn is for whose bytes come: one that is slower than a thin line loses it to a peer that has none.

What one caller may have is a fixed fraction of what is *still free* (dynamic thresholds: Choudhury and Hahne, "Dynamic
queue length thresholds for shared-memory packet switches", 1998). A caller alone gets all that one caller may have; the
more callers there are, the less each gets; and something stays free for the next one, whatever the others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..canonical import canonical_bytes, read_canonical
from ..errors import IntegrityError, Refused
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from ..words import printable
from .api import (
    BODY_BYTES_MAX,
    BULK_AT_ONCE,
    BULK_AT_ONCE_PER_PEER,
    BULK_CALLS_MAX,
    BULK_CALLS_PER_PEER_MAX,
    CONTROL_BODY_BYTES_MAX,
    HEADER_BYTES_MAX,
    INBOUND_CALLS_MAX,
    INBOUND_CALLS_PER_PEER_MAX,
    OPEN_CALLS_MAX,
    OPEN_CALLS_PER_PEER_MAX,
    Handler,
)
from .calls import ReadBlob, WriteBlob

_log = logging.getLogger(__name__)

MAGIC = b"DPP"
VERSION = 1
_PREFIX = struct.Struct(">3sBBII")
PREFIX_BYTES = _PREFIX.size
HEADER_VALUES_MAX = 16 * 1024
"""Of the JSON values in a header, more or less: fifty bytes of memory each. Of the largest document about 12 000."""
LATE_S, THIN_BYTES_S = 2.0, 31_250
"""What a turn awaits may take so long, and its size at 0.25 Mbit/s besides, while a peer without a turn waits."""
MESSAGE_CHARS_MAX = 400
REASON_CHARS_MAX = 32
BULK_METHODS = frozenset({ReadBlob.METHOD, WriteBlob.METHOD})

ReadExactly = Callable[[int], Awaitable[bytes]]
Awaiting = Callable[[int], AbstractAsyncContextManager[object]]


class Kind(enum.IntEnum):
    """What a frame is."""

    REQUEST = 0
    REPLY = 1
    REFUSAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A decoded frame."""

    kind: Kind
    header: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


def encode_head(frame: Frame) -> bytes:
    """Prefix and header; the body follows as it is, so that large bodies are not copied."""
    header = canonical_bytes(frame.header)
    assert len(header) <= HEADER_BYTES_MAX, f"a header of {len(header)} bytes; at most {HEADER_BYTES_MAX} fit"
    assert len(frame.body) <= BODY_BYTES_MAX, f"a body of {len(frame.body)} bytes; at most {BODY_BYTES_MAX} fit"
    return _PREFIX.pack(MAGIC, VERSION, frame.kind, len(header), len(frame.body)) + header


def size_bytes(frame: Frame) -> int:
    """The length of the whole frame."""
    return len(encode_head(frame)) + len(frame.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A frame whose body has not been read."""

    kind: Kind
    header: dict[str, Any]
    body_bytes: int

    async def frame(self, read_exactly: ReadExactly) -> Frame:
        """Read the body, too."""
        body = await read_exactly(self.body_bytes) if self.body_bytes else b""
        return Frame(kind=self.kind, header=self.header, body=body)


async def read_head(read_exactly: ReadExactly) -> Head:
    """Read a frame up to its body; nothing is read, so nothing allocated, beyond the limits of lengths.

    Raises IntegrityError for what is not a frame, and Refused ("oversize") for lengths beyond the limits."""
    data = await read_exactly(PREFIX_BYTES)
    magic, version, kind, header_bytes, body_bytes = _PREFIX.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise IntegrityError(f"not a frame of version {VERSION}: it begins with {data[:4].hex()}")
    if kind not in set(Kind):
        raise IntegrityError(f"a frame of unknown kind {kind}")
    if header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise Refused(f"a frame of {header_bytes} + {body_bytes} bytes is over the limits", reason=Reason.OVERSIZE)
    data = await read_exactly(header_bytes)
    if sum(map(data.count, (b",", b"[", b"{"))) > HEADER_VALUES_MAX:
        raise IntegrityError(f"a header of more than {HEADER_VALUES_MAX} values")
    header = read_canonical(data)
    if not isinstance(header, dict):
        raise IntegrityError("the header of a frame must be a table")
    return Head(kind=Kind(kind), header=header, body_bytes=body_bytes)


async def read_frame(read_exactly: ReadExactly) -> Frame:
    """Read one whole frame; raises as `read_head`."""
    return await (await read_head(read_exactly)).frame(read_exactly)


def request(method: str, header: dict[str, Any], body: bytes = b"") -> Frame:
    """The frame that asks for `method`."""
    return Frame(kind=Kind.REQUEST, header={"method": method, "header": header}, body=body)


def read_request(frame: Frame) -> tuple[str, dict[str, Any]]:
    """Method and header of a request; raises IntegrityError."""
    method, header = frame.header.get("method"), frame.header.get("header")
    if frame.kind is not Kind.REQUEST or not isinstance(method, str) or not isinstance(header, dict):
        raise IntegrityError("not a request")
    return method, header


def refusal(refused: Refused) -> Frame:
    """The frame that says why a request is refused."""
    message, reason = str(refused)[:MESSAGE_CHARS_MAX], refused.reason[:REASON_CHARS_MAX]
    return Frame(kind=Kind.REFUSAL, header={"message": message, "reason": reason})


def read_reply(frame: Frame) -> tuple[dict[str, Any], bytes]:
    """Header and body of a reply; raises Refused if it is a refusal, IntegrityError if it is neither."""
    if frame.kind is Kind.REPLY:
        return frame.header, frame.body
    message, reason = frame.header.get("message"), frame.header.get("reason")
    if frame.kind is not Kind.REFUSAL or not isinstance(message, str) or not isinstance(reason, str):
        raise IntegrityError("not a reply")
    raise Refused(printable(message[:MESSAGE_CHARS_MAX]), reason=printable(reason[:REASON_CHARS_MAX]))


class Caller(NamedTuple):
    """A remote peer, as limits see it."""

    peer: PeerId
    host: str = ""
    """The address that it calls from, or the network that is as cheap as one (addresses.py); empty without a limit."""


class Dispatcher:
    """The handlers of one swarm, and how many calls each remote peer has open."""

    def __init__(self, counts: Counter[str]) -> None:
        self._handlers: dict[str, Handler] = {}
        self._open = Share(OPEN_CALLS_MAX, per_peer=OPEN_CALLS_PER_PEER_MAX)
        self._control = Share(INBOUND_CALLS_MAX, per_peer=INBOUND_CALLS_PER_PEER_MAX)
        self._bulk = Share(BULK_CALLS_MAX, per_peer=BULK_CALLS_PER_PEER_MAX)
        self._bulk_turns = Turns(BULK_AT_ONCE, per_peer=BULK_AT_ONCE_PER_PEER)
        self.heads = Turns(INBOUND_CALLS_MAX, per_peer=INBOUND_CALLS_PER_PEER_MAX)
        """For reading what a call is."""
        self._hosts: dict[PeerId, str] = {}
        """Where the last of a peer's open calls comes from."""
        self._counts = counts
        self.known: Collection[PeerId] = ()
        """Peers that have worked or owned a module, seeds and the coordinator (`Watch.known`)."""

    def caller(self, peer: PeerId, host: str) -> Caller:
        """`peer`, which calls from `host`, as limits see it. Who is known is counted alone: at a relay's address, or
        that of a provider's NAT, a stranger with a few keys would keep everybody else out."""
        return Caller(peer, "" if peer in self.known else host)

    def serve(self, method: str, handler: Handler) -> None:
        """Answer `method` with `handler`."""
        assert method not in self._handlers, f"`{method}` is served already"
        self._handlers[method] = handler

    @contextlib.contextmanager
    def entered(self, caller: Caller) -> Iterator[None]:
        """Count a call of `caller` while the block runs, from before its request is read until its stream is closed;
        raises Refused ("busy")."""
        try:
            with self._open.place(caller):
                self._hosts[caller.peer] = caller.host
                yield
        finally:
            if not self._open.held(caller):
                self._hosts.pop(caller.peer, None)

    def host(self, peer: PeerId) -> str:
        """As `Swarm.host`."""
        return self._hosts.get(peer, "")

    @contextlib.asynccontextmanager
    async def turn(self, caller: Caller, header: dict[str, Any], body_bytes: int) -> AsyncIterator[Awaiting]:
        """What a call is, is known now: if it is bulk it waits for its turn, before its body is read. Gives what its
        body and its reply, of so many bytes, are awaited in. Raises Refused ("busy")."""
        if is_bulk(header, body_bytes):
            with self._bulk.place(caller):
                async with self._bulk_turns.turn(caller):
                    yield self._bulk_turns.awaiting
        else:
            with self._control.place(caller):
                yield nullcontext

    async def answer(self, caller: PeerId, request: Frame) -> Frame:
        """The reply to `request`, whatever its handler does; only cancellation passes through."""
        try:
            method, header = read_request(request)
            reply = await self._invoke(caller, method, header, request.body)
            self._counts["calls_served"] += 1
            return reply
        except IntegrityError as error:
            return self.refuse(Refused(str(error), reason=Reason.MALFORMED))
        except Refused as refused:
            return self.refuse(refused)

    def refuse(self, refused: Refused) -> Frame:
        """The frame of a refusal, counted."""
        self._counts["calls_refused"] += 1
        return refusal(refused)

    async def _invoke(self, caller: PeerId, method: str, header: dict[str, object], body: bytes) -> Frame:
        handler = self._handlers.get(method)
        if handler is None:
            raise Refused(f"no such method: {method[:64]}", reason=Reason.UNKNOWN_METHOD)
        try:
            reply = await handler(caller, header, body)
            frame = Frame(kind=Kind.REPLY, header=reply.header, body=reply.body)
            encode_head(frame)  # raises while the handler can still be blamed for it
            return frame
        except (Refused, IntegrityError):
            raise  # the caller's doing: `answer` tells it
        except Exception:
            _log.exception("`%s`, called by %s, failed", method, short(caller))
            raise Refused(f"`{method}` failed at the other side", reason=Reason.INTERNAL) from None


def is_bulk(header: dict[str, Any], body_bytes: int) -> bool:
    """Whether a request with this header and body moves a blob; of a stage's method the name follows a slash."""
    method = str(header.get("method"))[:MESSAGE_CHARS_MAX].rpartition("/")[2]
    return body_bytes > CONTROL_BODY_BYTES_MAX or method in BULK_METHODS


class Share:
    """Counts what callers hold of `in_all`: each peer at most `per_peer`, and at most a fraction of what is free; all
    peers of one address together at most half, and the less the fuller it is, since keys cost nothing."""

    def __init__(self, in_all: int, *, per_peer: int) -> None:
        assert 2 * per_peer <= in_all, "one caller could keep everybody else out"
        self._in_all, self._per_peer = in_all, per_peer
        self._fraction = in_all // (2 * per_peer)
        self._held: Counter[PeerId] = Counter()
        self._held_at: Counter[str] = Counter()

    def take(self, caller: Caller) -> bool:
        """Take one for `caller`; False if it already has its share."""
        free = self._in_all - self._held.total()
        limit = min(self._per_peer, max(1, free // self._fraction))
        limit_at = max(1, 2 * free * free // self._in_all)  # half for one alone; two that held half would hold all
        if not free or self._held[caller.peer] >= limit or self._held_at[caller.host] >= limit_at:
            return False
        self._held[caller.peer] += 1
        self._held_at[caller.host] += bool(caller.host)
        return True

    @contextlib.contextmanager
    def place(self, caller: Caller) -> Iterator[None]:
        """One for `caller` while the block runs; raises Refused ("busy")."""
        if not self.take(caller):
            raise Refused("more calls at once than one peer, or one address, may have now", reason=Reason.BUSY)
        try:
            yield
        finally:
            self.give_back(caller)

    def give_back(self, caller: Caller) -> None:
        """One that `caller` took is free again."""
        self._held[caller.peer] -= 1
        self._held_at[caller.host] -= bool(caller.host)
        if not self._held[caller.peer]:
            del self._held[caller.peer]
        if not self._held_at[caller.host]:
            del self._held_at[caller.host]

    @property
    def is_full(self) -> bool:
        return self._held.total() >= self._in_all

    def held(self, caller: Caller) -> int:
        """By the peer."""
        return self._held[caller.peer]

    def held_at(self, caller: Caller) -> int:
        """By all peers of its address; 0 where no address counts."""
        return self._held_at[caller.host]


class Turns:
    """Lets work through as the share allows; peers that have to wait take turns, those of the address that has fewest
    first."""

    def __init__(self, at_once: int, *, per_peer: int) -> None:
        self._share = Share(at_once, per_peer=per_peer)
        self._waiting: OrderedDict[Caller, deque[asyncio.Future[None]]] = OrderedDict()
        self._due_s: dict[asyncio.Timeout, float] = {}
        """When what is awaited of a turn is late."""

    @contextlib.asynccontextmanager
    async def turn(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a turn of `caller`, and have it while the block runs."""
        await self._begin(caller)
        try:
            yield
        finally:
            self._share.give_back(caller)
            self._wake()

    @contextlib.asynccontextmanager
    async def awaiting(self, size_bytes: int) -> AsyncIterator[None]:
        """For a block in which whoever has a turn is to send or to take so much. Raises TimeoutError if that is late
        while a peer without a turn waits for one."""
        async with asyncio.timeout(None) as limit:
            self._due_s[limit] = asyncio.get_running_loop().time() + LATE_S + size_bytes / THIN_BYTES_S
            self._press()
            try:
                yield
            finally:
                del self._due_s[limit]

    async def _begin(self, caller: Caller) -> None:
        if caller not in self._waiting and self._share.take(caller):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._press()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the very moment the caller gave up
                self._share.give_back(caller)
                self._wake()
            raise

    def _wake(self) -> None:
        """Give what is free to the peers that wait, one each: first at the address that holds the fewest, and there to
        the one whose last turn is longest ago."""
        for caller in sorted(self._waiting, key=self._share.held_at):
            turns = self._waiting[caller]
            while turns and turns[0].done():  # given up
                turns.popleft()
            if turns and self._share.take(caller):
                turns.popleft().set_result(None)
                self._waiting.move_to_end(caller)
            if not turns:
                del self._waiting[caller]
        self._press()

    def _press(self) -> None:
        """What is late is given up from now on if a peer without a turn waits for one, and no longer if none does."""
        waiting = (caller for caller, turns in self._waiting.items() if not all(turn.done() for turn in turns))
        is_pressed = self._share.is_full and any(not self._share.held(caller) for caller in waiting)
        for limit, due_s in self._due_s.items():
            if not limit.expired():
                limit.reschedule(due_s if is_pressed else None)
