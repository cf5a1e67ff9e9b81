"""The slots at relays that a peer behind a NAT keeps, so that others can dial it.

Looked after once a second: a slot is renewed every 15 s, and one whose relay hung up is asked for again at once, there
or at the next relay. A relay that has none for us is left alone for a while. Two are kept, so that one may die. A
laptop that changes networks keeps connections that are dead and do not know it: a relay that is silent twice is hung up
on and dialled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from ...clock import Clock
from ...errors import Refused
from ...protocol.signing import PeerId, short
from ..addresses import Address, circuit_through, is_circuit, places_of
from .circuits import ask_slot

KEPT = 2
LOOK_S = 1.0
REST_S = 1.0
"""How long a relay that failed is left alone at first; each time it is twice as long, but for"""
AWAY_REST_S = 5.0
"""one that does not answer at most this, since it may be restarting,"""
REFUSED_REST_S = 60.0
"""and for one that has no slot for us this."""
CONNECT_S = 10.0
RENEW_S = 15.0
SILENT_MAX = 2
LOST_S = 15.0
"""How long what we announced last stays announced without a slot: a relay that restarts has one again within seconds,
and who announces nothing has its modules taken over."""
ADDRESSES_PER_RELAY = 2
SLOT_S_MAX = 3600.0
"""Nobody's word that a slot lasts longer is believed."""
_log = logging.getLogger(__name__)


class Dials(Protocol):
    """What of the daemon is used here."""

    async def ways(self) -> Mapping[PeerId, Sequence[str]]:
        """Where the connections with each peer lead to; raises P2PDaemonError."""

    async def connect(self, peer: PeerId, places: Sequence[str]) -> None:
        """Raises P2PDaemonError."""

    async def disconnect(self, peer: PeerId) -> None:
        """Raises P2PDaemonError."""

    async def open_stream(self, peer: PeerId, protocol: str) -> tuple[StreamReader, StreamWriter]:
        """Raises P2PDaemonError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A slot."""

    renew_s: float
    until_s: float
    addresses: tuple[str, ...]
    """Ours there."""


class Reservations:
    """Keeps them from `begin` to `close`."""

    def __init__(self, me: PeerId, daemon: Dials, *, clock: Clock) -> None:
        self._given: Mapping[PeerId, Sequence[str]] = {}
        self._relays: Mapping[PeerId, Sequence[str]] = {}
        """Who relays, with addresses; the first choice first."""
        self._me, self._daemon, self._clock = me, daemon, clock
        self._held: dict[PeerId, Held] = {}
        self._rests: dict[PeerId, tuple[float, float]] = {}
        """Of relays that failed: how long they rest, and until when."""
        self._silent: Counter[PeerId] = Counter()
        """How often a relay with a slot of ours has not answered."""
        self._announced: tuple[str, ...] = ()
        self._had_s = -math.inf
        """When there was a slot last."""
        self._task: asyncio.Task[None] | None = None
        self._is_reachable = asyncio.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can dial us now, or could until a moment ago."""
        if not self._held and self._clock.now_s() - self._had_s >= LOST_S:
            return ()
        return self._announced

    def begin(self, relays: Mapping[PeerId, Sequence[str]]) -> None:
        """Look for slots from now on: at these relays always, and at those that are noted."""
        self._given = relays
        self.note({})
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    def note(self, relays: Mapping[PeerId, Sequence[str]]) -> None:
        """Who relays now."""
        given = {relay: places for relay, places in self._given.items() if relay not in relays}
        self._relays = {**relays, **given}

    async def wait_reachable(self, timeout_s: float) -> bool:
        """Whether there is a slot within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_reachable.wait()
        except TimeoutError:
            pass
        return bool(self._held)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # whatever it is: without this loop nobody can dial us any more
                _log.info("slots at relays: %r", error)
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Drop what is lost, renew what is due, and ask for what is missing."""
        ways, now_s = await self._daemon.ways(), self._clock.now_s()
        for relay, held in list(self._held.items()):
            if held.until_s <= now_s or not _direct(ways.get(relay, ())):
                del self._held[relay]
        due = [relay for relay, held in self._held.items() if held.renew_s <= now_s]
        free = [
            relay
            for relay in self._relays
            if relay != self._me and relay not in self._held and self._rests.get(relay, (0.0, 0.0))[1] <= now_s
        ]
        await asyncio.gather(*map(self._ask, [*due, *free[: max(0, KEPT - len(self._held))]]))
        if self._held:
            self._announced = tuple(address for held in self._held.values() for address in held.addresses)
            self._had_s = self._clock.now_s()
            self._is_reachable.set()
        else:
            self._is_reachable.clear()

    async def _ask(self, relay: PeerId) -> None:
        given = _direct(places_of(relay, self._relays.get(relay, ())))
        try:
            async with asyncio.timeout(CONNECT_S):
                if given:
                    await self._daemon.connect(relay, given)
            until_s = await ask_slot(self._daemon.open_stream, relay)
        except Exception as error:  # a stranger chose the address: whatever comes of it, the other relays are kept
            most_s = REFUSED_REST_S if isinstance(error, Refused) else AWAY_REST_S
            rest_s = min(2 * self._rests.get(relay, (REST_S / 2, 0.0))[0], most_s)
            self._rests[relay] = (rest_s, self._clock.now_s() + rest_s)
            _log.info("no slot at %s: %r", short(relay), error)
            await self._note_silent(relay)
            return
        self._rests.pop(relay, None)
        del self._silent[relay]
        now_s = self._clock.now_s()
        until_s = min(until_s, now_s + SLOT_S_MAX)
        # What we reach it at comes first: behind a forwarded port it does not know its own address.
        places = dict.fromkeys([*_direct((await self._daemon.ways()).get(relay, ())), *given])
        addresses = [circuit_through(Address(peer=relay, place=place), self._me) for place in places]
        self._held[relay] = Held(
            renew_s=min((now_s + until_s) / 2, now_s + RENEW_S),
            until_s=until_s,
            addresses=tuple(addresses[:ADDRESSES_PER_RELAY]),
        )

    async def _note_silent(self, relay: PeerId) -> None:
        """Hang up on a relay whose connection seems dead; the next look dials it again."""
        self._silent[relay] += relay in self._held
        if self._silent[relay] >= SILENT_MAX:
            del self._silent[relay], self._held[relay]
            with contextlib.suppress(OSError, P2PDaemonError):
                await self._daemon.disconnect(relay)


def _direct(places: Sequence[str]) -> list[str]:
    return [place for place in places if not is_circuit(place)]
