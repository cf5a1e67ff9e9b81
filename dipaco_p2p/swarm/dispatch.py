"""From a request frame to a reply frame: the same limits and the same refusals on every transport."""

from __future__ import annotations

import logging
from collections import Counter

from ..errors import IntegrityError, Refused
from ..protocol.signing import PeerId, short
from . import frames
from .api import INBOUND_CALLS_MAX, INBOUND_CALLS_PER_PEER_MAX, Handler, Reply
from .frames import Frame, Kind

_log = logging.getLogger(__name__)


class Dispatcher:
    """The handlers of one swarm, and how many calls each remote peer has open."""

    def __init__(self, counts: Counter[str]) -> None:
        self._handlers: dict[str, Handler] = {}
        self._open: Counter[PeerId] = Counter()
        self._counts = counts

    def serve(self, method: str, handler: Handler) -> None:
        """Answer `method` with `handler`."""
        assert method not in self._handlers, f"`{method}` is served already"
        self._handlers[method] = handler

    def enter(self, caller: PeerId) -> bool:
        """Count a call of `caller` in, before reading what it says; False if too many are open already."""
        if self._open[caller] >= INBOUND_CALLS_PER_PEER_MAX or self._open.total() >= INBOUND_CALLS_MAX:
            return False
        self._open[caller] += 1
        return True

    def leave(self, caller: PeerId) -> None:
        """Count a call out."""
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]

    async def answer(self, caller: PeerId, request: Frame) -> Frame:
        """The reply to `request`, whatever its handler does; only cancellation passes through."""
        try:
            method, header = frames.read_request(request)
            reply = await self._invoke(caller, method, header, request.body)
            self._counts["calls_served"] += 1
            return reply
        except IntegrityError as error:
            return self.refuse(Refused(str(error), reason="malformed"))
        except Refused as refused:
            return self.refuse(refused)

    def refuse(self, refused: Refused) -> Frame:
        """The frame of a refusal, counted."""
        self._counts["calls_refused"] += 1
        return frames.refusal(refused)

    async def _invoke(self, caller: PeerId, method: str, header: dict[str, object], body: bytes) -> Frame:
        handler = self._handlers.get(method)
        if handler is None:
            raise Refused(f"no such method: {method[:64]}", reason="unknown-method")
        try:
            return encodable(await handler(caller, header, body))
        except (Refused, IntegrityError):
            raise  # the caller's doing: `answer` tells it
        except Exception:
            _log.exception("`%s`, called by %s, failed", method, short(caller))
            raise Refused(f"`{method}` failed at the other side", reason="internal") from None


def busy() -> Refused:
    """Why a call over the limit per peer is not taken."""
    return Refused(f"more than {INBOUND_CALLS_PER_PEER_MAX} calls at once, or too many of others", reason="busy")


def encodable(reply: Reply) -> Frame:
    """The frame of `reply`; raises what `encode_head` raises, while the handler can still be blamed for it."""
    frame = Frame(kind=Kind.REPLY, header=reply.header, body=reply.body)
    frames.encode_head(frame)
    return frame
