"""Whether a peer can be reached from outside: another one dials it back, on a connection of its own.

    run.dialback    {"port": N}  ->  {"reached": whether something that speaks libp2p listens there, "host": where}

A call or a ping shows nothing of this: they go back over the connection that the asker has opened, through any router.
Rules, so that nobody can aim it at others:

1. the host is where the asker's own connection comes from, as the transport says; the request names a port only;
2. that port is above 1023; one TCP connection is opened there, nothing is sent, and only a greeting is read;
3. each peer and each host is dialled only now and then, and few at once; a peer that asks too soon is refused with
   `busy`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

from ..clock import Clock
from ..errors import ConfigError, DipacoError, Refused
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from .addresses import host_of, is_circuit, read_address, read_place
from .api import Swarm
from .calls import DialBackMe, DialedBack

DIAL_BACK_S = 4.0
DIAL_BACK_EVERY_S = 10.0
"""For one peer."""
DIAL_BACK_PER_HOST = 4
"""In the same time, for all who come from one host, or one IPv6 /48 network: identities are free, and some homes have
several volunteers."""
DIAL_BACK_AT_ONCE = 4
DIAL_BACK_REMEMBERED = 256
ASK_TIMEOUT_S = 10.0
GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p listener says first (multistream-select 1.0)."""

Places = Callable[[PeerId], Awaitable[Sequence[str]]]
"""Where the connections with a peer lead to: multiaddrs without the peer."""
Greets = Callable[[str, int], Awaitable[bool]]
"""Whether a libp2p listener answers at this host and port."""


class Reach(StrEnum):
    """What others say of us."""

    YES = "yes"
    RELAYED = "relayed"
    """Through a relay, or a hole that it helped to punch."""
    NO = "no"
    UNKNOWN = "unknown"


class DialBack:
    """Answers `run.dialback`."""

    def __init__(self, clock: Clock, *, places: Places, greets: Greets) -> None:
        self._clock = clock
        self._places = places
        self._greets = greets
        self._served_s: dict[str, list[float]] = {}
        """When each peer and each host was served lately, the one that was served last at the end."""
        self._open = 0

    async def answer(self, sender: PeerId, request: DialBackMe) -> DialedBack:
        """Dial the sender back once; raises Refused."""
        self._take(sender, most=1)
        found = []
        for place in await self._places(sender):
            with contextlib.suppress(ConfigError):
                found.append((read_place(place)[0], place))
        if not found:
            raise Refused("no direct connection shows where you are", reason=Reason.UNREACHABLE)
        host, place = found[0]
        self._take(host_of(place) or host, most=DIAL_BACK_PER_HOST)
        if self._open >= DIAL_BACK_AT_ONCE:
            raise Refused("others are dialled back just now", reason=Reason.BUSY)
        self._open += 1
        try:
            return DialedBack(reached=await self._greets(host, request.port), host=host)
        finally:
            self._open -= 1

    def _take(self, who: str, *, most: int) -> None:
        now_s = self._clock.now_s()
        recent = [at_s for at_s in self._served_s.pop(who, []) if abs(now_s - at_s) < DIAL_BACK_EVERY_S]
        is_full = len(recent) >= most
        self._served_s[who] = recent if is_full else [*recent, now_s]
        while len(self._served_s) > DIAL_BACK_REMEMBERED:
            del self._served_s[next(iter(self._served_s))]
        if is_full:
            raise Refused(f"{most} in {DIAL_BACK_EVERY_S:g} s is the most", reason=Reason.BUSY)


async def greets(host: str, port: int) -> bool:
    """Whether somebody at this place speaks libp2p."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(DIAL_BACK_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.close()
    return False


async def ask_reach(swarm: Swarm, witnesses: Sequence[tuple[PeerId, Sequence[str]]]) -> tuple[Reach, str]:
    """Ask all `witnesses` (peer and addresses) to dial us back: one that can is enough for YES, for NO all that answer
    must agree. With it the place at which the first that could dialled us, /ip4/HOST/tcp/PORT, if we do not tell of it
    yet: behind a router that forwards a port it is the router's."""
    if not swarm.addresses:
        return Reach.NO, ""
    own = [read_address(address).place for address in swarm.addresses if not is_circuit(address)]
    _, port = read_place(own[0])
    asked = (_ask(swarm, peer, addresses, port) for peer, addresses in witnesses)
    said = [reply for reply in await asyncio.gather(*asked) if reply is not None]
    reached = [_place(reply.host, port) for reply in said if reply.reached]
    if not reached:
        return Reach.NO if said else Reach.UNKNOWN, ""
    return Reach.YES, "" if reached[0] in own or not host_of(reached[0]) else reached[0]


def _place(host: str, port: int) -> str:
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"


async def _ask(swarm: Swarm, peer: PeerId, addresses: Sequence[str], port: int) -> DialedBack | None:
    try:
        reply = await DialBackMe(port=port).call(swarm, peer, timeout_s=ASK_TIMEOUT_S, addresses=addresses)
        if reply.reached:
            read_place(_place(reply.host, port))  # we shall tell others of it
        return reply
    except DipacoError:  # too busy, of an older version, away, or a liar: nothing is known
        return None
