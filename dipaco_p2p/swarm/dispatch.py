"""From a request frame to a reply frame: the same limits and the same refusals on every transport.

Calls that move blobs are *bulk*: they have a count of their own, and only so many are served at once, of all peers in
turn. So a peer that fetches and sends all it can still gets its heads, rounds and receipts answered, and so do others.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ..errors import IntegrityError, Refused
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from . import frames
from .api import (
    BULK_AT_ONCE,
    BULK_AT_ONCE_PER_PEER,
    BULK_CALLS_MAX,
    BULK_CALLS_PER_PEER_MAX,
    CONTROL_BODY_BYTES_MAX,
    INBOUND_CALLS_MAX,
    INBOUND_CALLS_PER_PEER_MAX,
    OPEN_CALLS_MAX,
    OPEN_CALLS_PER_PEER_MAX,
    Handler,
    Reply,
)
from .calls import ReadBlob, WriteBlob
from .frames import MESSAGE_CHARS_MAX, Frame, Kind
from .turns import Share, Turns

BULK_METHODS = frozenset({ReadBlob.METHOD, WriteBlob.METHOD})
_log = logging.getLogger(__name__)


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
        self._counts = counts

    def serve(self, method: str, handler: Handler) -> None:
        """Answer `method` with `handler`."""
        assert method not in self._handlers, f"`{method}` is served already"
        self._handlers[method] = handler

    @contextlib.contextmanager
    def entered(self, caller: PeerId) -> Iterator[Entrance]:
        """Count a call of `caller` while the block runs, from before its request is read; raises Refused ("busy")."""
        entrance = Entrance(caller)
        try:
            entrance.take(self._open)
            yield entrance
        finally:
            entrance.leave()

    @contextlib.asynccontextmanager
    async def turn(self, entrance: Entrance, header: dict[str, Any], body_bytes: int) -> AsyncIterator[None]:
        """What a call is, is known now: if it is bulk it waits for its turn, before its body is read."""
        if is_bulk(header, body_bytes):
            entrance.take(self._bulk)
            async with self._bulk_turns.turn(entrance.caller):
                yield
        else:
            entrance.take(self._control)
            yield

    async def answer(self, caller: PeerId, request: Frame) -> Frame:
        """The reply to `request`, whatever its handler does; only cancellation passes through."""
        try:
            method, header = frames.read_request(request)
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
        return frames.refusal(refused)

    async def _invoke(self, caller: PeerId, method: str, header: dict[str, object], body: bytes) -> Frame:
        handler = self._handlers.get(method)
        if handler is None:
            raise Refused(f"no such method: {method[:64]}", reason=Reason.UNKNOWN_METHOD)
        try:
            return encodable(await handler(caller, header, body))
        except (Refused, IntegrityError):
            raise  # the caller's doing: `answer` tells it
        except Exception:
            _log.exception("`%s`, called by %s, failed", method, short(caller))
            raise Refused(f"`{method}` failed at the other side", reason=Reason.INTERNAL) from None


class Entrance:
    """The places that one open call takes."""

    def __init__(self, caller: PeerId) -> None:
        self.caller = caller
        self._taken: list[Share] = []

    def take(self, share: Share) -> None:
        """Take a place; raises Refused ("busy")."""
        if not share.take(self.caller):
            raise Refused("more calls at once than one peer may have now", reason=Reason.BUSY)
        self._taken.append(share)

    def leave(self) -> None:
        for share in self._taken:
            share.give_back(self.caller)


def is_bulk(header: dict[str, Any], body_bytes: int) -> bool:
    """Whether a request with this header and body moves a blob; of a stage's method the name follows a slash."""
    method = str(header.get("method"))[:MESSAGE_CHARS_MAX].rpartition("/")[2]
    return body_bytes > CONTROL_BODY_BYTES_MAX or method in BULK_METHODS


def encodable(reply: Reply) -> Frame:
    """The frame of `reply`; raises what `encode_head` raises, while the handler can still be blamed for it."""
    frame = Frame(kind=Kind.REPLY, header=reply.header, body=reply.body)
    frames.encode_head(frame)
    return frame
