"""What this peer says of itself in the DHT: its heartbeat, its claim, the modules that it leads.

`Presence` holds the latest wording of each record. `say` puts a new one out at once, and the loop repeats all of them
before they expire. A claim that was not repeated in time has lapsed, and others may have taken the path: it is said as
a new one, which comes after theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import strict
from ..clock import Clock
from ..errors import SwarmError
from ..protocol.liveness import (
    ADDRESS_CHARS_MAX,
    ADDRESSES_MAX,
    Claim,
    Head,
    Heartbeat,
    heartbeat_interval_s,
)
from ..protocol.records import claims_key, heads_key
from ..swarm.api import Swarm
from ..topology import ModuleId, PathId
from .neighbourhood import Neighbourhood
from .run import Run

log = logging.getLogger(__name__)


class Presence:
    """Keeps our records alive in the DHT."""

    def __init__(
        self,
        run: Run,
        swarm: Swarm,
        clock: Clock,
        heartbeat: Heartbeat,
        neighbourhood: Neighbourhood,
    ) -> None:
        self._neighbourhood = neighbourhood
        self._run = run
        self._swarm = swarm
        self._clock = clock
        self._ttl_s = run.config.liveness.heartbeat_ttl_s
        self._claim: Claim | None = None
        self._claimed_s = 0.0
        """When the claim was last said."""
        self._heads: dict[ModuleId, Head] = {}
        self._tell: dict[ModuleId, Callable[[], str]] = {}
        self.heartbeat = heartbeat
        self._would_own = heartbeat.owns
        """Whether we lead modules while we can be dialled; behind a NAT that may come and go with the relays."""

    async def say(self, **changes: Any) -> None:
        """Change the heartbeat and put it out now."""
        self._would_own = changes.pop("owns", self._would_own)
        # Of an address at a relay the relay has said the beginning: at one that is too long nobody hears of us.
        short = [address for address in self._swarm.addresses if len(address) <= ADDRESS_CHARS_MAX]
        addresses, relays = tuple(short[:ADDRESSES_MAX]), self._swarm.offers_relay
        owns = self._would_own and bool(addresses)
        self.heartbeat = replace(self.heartbeat, addresses=addresses, owns=owns, relays=relays, **changes)
        for key in self._neighbourhood.keys:
            await self._put(key, self.heartbeat)

    def note(self, **changes: Any) -> None:
        """Change the heartbeat; the next one carries it."""
        self.heartbeat = replace(self.heartbeat, **changes)

    @property
    def has_claim(self) -> bool:
        """Whether we say that we train a path."""
        return self._claim is not None and not self._claim.released

    async def claim(self, path: PathId, *, since_s: float, round_number: int = 0) -> None:
        """Say that we train `path` from now on."""
        self._claim, self._claimed_s = Claim(path=path, since_s=since_s, round=round_number), self._clock.now_s()
        await self._put(claims_key(self._run.id, path), self._claim)

    def note_round(self, round_number: int) -> None:
        """The round that we train now or next; the next repetition of our claim carries it."""
        if self._claim is not None and not self._claim.released:
            self._claim = replace(self._claim, round=round_number)

    async def release(self) -> None:
        """Say that we train no path any more."""
        if self._claim is not None:
            gone = self._claim = replace(self._claim, released=True)  # until it is said: who is cancelled says it again
            await self._put(claims_key(self._run.id, gone.path), gone)
            if self._claim is gone:
                self._claim = None

    async def lead(self, module: ModuleId, head: Head, *, tell: Callable[[], str] = str) -> None:
        """Say that we lead `module`, and its newest version; `tell` is what to say of its paths at each time."""
        self._heads[module], self._tell[module] = head, tell
        await self._put_head(module)

    async def _put_head(self, module: ModuleId) -> None:
        head = replace(self._heads[module], paths=self._tell[module]())
        await self._put(heads_key(self._run.id, module), head)

    async def resign(self, module: ModuleId) -> None:
        """Say that we do not lead `module` any more."""
        head = self._heads.pop(module, None)
        if head is not None:
            await self._put(heads_key(self._run.id, module), replace(head, resigned=True))

    async def leave(self) -> None:
        """Say good-bye, so that nobody waits for our expiry."""
        await self.release()
        for module in list(self._heads):
            await self.resign(module)
        await self.say(left=True, doing="left")

    async def run(self) -> None:
        """Repeat everything three times per life of a record; ends when cancelled."""
        while True:
            await self.beat()
            await self._clock.sleep(heartbeat_interval_s(self._run.config.liveness))

    async def beat(self) -> None:
        """Put every record out once more."""
        await self.say()
        if self._claim is not None:
            await self._renew(self._claim)
        for module in list(self._heads):
            if module in self._heads:  # still: a head that follows its resignation would be the newer record
                await self._put_head(module)

    async def _renew(self, claim: Claim) -> None:
        now_s = self._clock.now_s()
        if now_s - self._claimed_s >= self._ttl_s:
            claim = self._claim = replace(claim, since_s=now_s)
        self._claimed_s = now_s
        await self._put(claims_key(self._run.id, claim.path), claim)

    async def _put(self, key: str, body: Heartbeat | Claim | Head) -> None:
        try:
            stored = await self._swarm.put(key, strict.plain(body), ttl_s=self._ttl_s)
        except SwarmError as error:
            stored = False
            log.info("could not store %s: %s", key, error)
        if not stored:
            log.debug("nobody stored %s", key)
