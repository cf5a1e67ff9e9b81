"""Typed calls: a request and its reply are dataclasses, encoded and decoded at one door, on both sides.

A class derived from `Request[REPLY]` is one method of the wire. Its fields are the header, checked as `strict.load`
checks documents (types, bounds, signatures) before a handler sees a request, or a caller a reply:

- a field that is None is left out, and a field that the reader does not know is ignored, so a call can grow;
- the field `body` is the body of the frame; a class without one ignores it;
- a reply whose body says everything, in a form of its own, is a plain `Reply`, and whoever reads it checks it;
- a name that Python reserves is written with an underscore behind it: `from_` is `from` on the wire.

The sizes of header and body are bounded by the frame (frames.py). The calls of the swarm itself are below; those of a
run are in node/calls.py.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from .. import strict
from ..errors import ConfigError, IntegrityError
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, require_digest
from ..strict import bounded
from .api import Handler, Reply, Swarm

COUNT_MAX = 2**53 - 1
"""Of lengths and offsets: exact in every JSON reader."""
PORT_MIN = 1024
PROBLEM_CHARS_MAX = 300
"""Of what is wrong with a header: its sender chose the words."""

CALLS: dict[str, type[Request[Any]]] = {}
"""All that are described in the modules imported so far, by method."""

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Generic[R_co]):
    """A call that is answered with an `R_co`."""

    METHOD: ClassVar[str]
    SERVED_BY: ClassVar[str]
    REFUSES: ClassVar[tuple[Reason, ...]]
    """Its own reasons to refuse; any call may also be malformed, busy, oversize, unknown-method or internal."""

    async def call(self, swarm: Swarm, peer: PeerId, *, timeout_s: float, addresses: Sequence[str] = ()) -> R_co:
        """Ask `peer`; raises as `Swarm.call` does, and IntegrityError for a reply of another form."""
        header, body = encode(self)
        reply = await swarm.call(peer, self.METHOD, header, body, timeout_s=timeout_s, addresses=addresses)
        found: R_co = decode(
            _reply_kind(typing.cast(Any, type(self))), reply.header, reply.body, where=f"a reply to `{self.METHOD}`"
        )
        return found

    @classmethod
    def serve(cls, swarm: Swarm, handler: Callable[[PeerId, Self], Awaitable[R_co]]) -> None:
        """Answer this call with `handler`, which sees sound requests only; others are refused as malformed."""
        swarm.serve(cls.METHOD, cls.door(handler))

    @classmethod
    def door(cls, handler: Callable[[PeerId, Self], Awaitable[R_co]]) -> Handler:
        """What the swarm is given to serve: raises IntegrityError for what is not such a request."""

        async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
            request = decode(cls, header, body, where=f"a request for `{cls.METHOD}`")
            return Reply(*encode(await handler(sender, request)))

        return answer


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def call(method: str, *, by: str = "everybody", refuses: Iterable[Reason] = ()) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass, and the request of `method`, in the table of `CALLS`."""

    def described(kind: Any) -> Any:
        kind.METHOD, kind.SERVED_BY, kind.REFUSES = method, by, tuple(refuses)
        assert method not in CALLS, f"`{method}` is described already"
        CALLS[method] = dataclass(frozen=True, slots=True, kw_only=True)(kind)
        return CALLS[method]

    return described


@functools.cache
def _reply_kind(kind: Any) -> Any:
    """The class of the replies to a request: what stands in the brackets of its base."""
    reply = typing.get_args(kind.__orig_bases__[0])[0]
    return typing.get_origin(reply) or reply


@functools.cache
def _wire_names(kind: Any) -> dict[str, str]:
    """The names of the header's fields on the wire, by their names here."""
    return {field.name: strict.written(field.name) for field in dataclasses.fields(kind) if field.name != "body"}


def encode(value: Any) -> tuple[dict[str, Any], bytes]:
    """Header and body of a request or a reply."""
    if isinstance(value, Reply):
        return value.header, value.body
    fields = {wire: getattr(value, name) for name, wire in _wire_names(typing.cast(Any, type(value))).items()}
    header = {wire: strict.plain(found) for wire, found in fields.items() if found is not None}
    return header, getattr(value, "body", b"")


def decode(kind: type[T], header: dict[str, Any], body: bytes, *, where: str) -> T:
    """The inverse, of what another peer sent; raises IntegrityError with the first thing that is wrong."""
    if issubclass(kind, Reply):
        return kind(header, body)
    names = _wire_names(typing.cast(Any, kind)).values()
    values: dict[str, Any] = {name: header[name] for name in names if name in header}
    if "body" in kind.__dataclass_fields__:  # type: ignore[attr-defined]
        values["body"] = body
    try:
        return strict.load(kind, values, where=where)
    except (ConfigError, ValueError, TypeError, RecursionError) as error:
        raise IntegrityError(str(error)[:PROBLEM_CHARS_MAX]) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It is done; there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialedBack:
    """What came of dialling the asker back."""

    reached: bool
    """Whether something that speaks libp2p greets there."""
    host: str = ""
    """Where that was."""


@call("run.dialback", refuses=(Reason.UNREACHABLE,))
class DialBackMe(Request[DialedBack]):
    """Dial the asker back, on a connection of its own."""

    port: int = bounded(low=PORT_MIN, high=2**16 - 1)
    """Where the asker listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A part of a blob."""

    size: int = bounded(low=0, high=COUNT_MAX)
    """Of the whole blob."""
    body: bytes
    """From `offset` on, at most 1 MiB; under a limit of the holder fewer than `length`, but at least 4 KiB of them."""


@call("blob.read", refuses=(Reason.MISSING,))
class ReadBlob(Request[Range]):
    """A part of a blob."""

    digest: str
    offset: int = bounded(low=0, high=COUNT_MAX)
    length: int = bounded(low=0, high=COUNT_MAX)
    """0 asks for the size."""

    def __post_init__(self) -> None:
        require_digest(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How far an upload is."""

    have: int = bounded(low=0, high=COUNT_MAX)
    """Bytes that are there, from the start on."""
    done: bool = False
    range: int | None = bounded(None, low=0, high=COUNT_MAX)
    """The most that the next call should bring."""


@call("blob.write", refuses=(Reason.OVERSIZED, Reason.OFFSET, Reason.INTEGRITY))
class WriteBlob(Request[Written]):
    """Bring a part of a blob; without a body it asks how much is there."""

    digest: str
    size: int = bounded(low=0, high=COUNT_MAX)
    offset: int = bounded(low=0, high=COUNT_MAX)
    body: bytes
    """What begins at `offset`."""

    def __post_init__(self) -> None:
        require_digest(self.digest)
