"""How mandates get around: whoever shows a head whose grant says nothing to us is asked for what it goes back to.

Anybody may write a head, in any term, and be silent when it is asked. So chance decides who is asked next, not the
term; a peer that had nothing to show is left alone for a heartbeat's lifetime, whatever it writes meanwhile; and one
place is kept for peers that have owned a module or worked for the run.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from ..clock import Clock
from ..errors import IntegrityError, Refused, SwarmError
from ..protocol.documents import Grant
from ..protocol.grants import LINKS_MAX
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..topology import ModuleId
from .authority import Mandates
from .calls import GetMandate
from .items import read_items

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 4
STRANGERS_AT_ONCE = 3
ANSWER_TIMEOUT_S = 5.0
"""A stranger keeps its place as long if it teaches us nothing: it may name any address, and we dial it."""

Begin = Callable[[Coroutine[Any, Any, None]], None]


class MandateNews:
    """Asks for what this peer lacks. `addresses` are those of a peer, and those `known` are no strangers; `begin` does
    what nobody waits for."""

    def __init__(
        self,
        swarm: Swarm,
        clock: Clock,
        mandates: Mandates,
        *,
        ttl_s: float,
        addresses: Callable[[PeerId], tuple[str, ...]],
        known: Callable[[], Collection[PeerId]],
        begin: Begin,
    ) -> None:
        self._swarm, self._clock, self._mandates = swarm, clock, mandates
        self._ttl_s, self._addresses, self._known, self._begin = ttl_s, addresses, known, begin
        self._chance = random.Random(swarm.signer.sign("mandates", b""))  # nobody else foresees it
        self._wanted: dict[ModuleId, list[PeerId]] = {}
        """Who says that it leads, by heads that nothing here bears out."""
        self._asking: set[PeerId] = set()
        self._strangers_s: dict[PeerId, float] = {}
        """Until when they keep their places."""
        self._rests_s: dict[tuple[ModuleId | None, PeerId], float] = {}
        """Until when a peer is not asked again for a module, or for any if it was silent."""

    def heard(self, module: ModuleId, peers: Sequence[PeerId]) -> None:
        """These say now that they lead `module`, and are not believed."""
        self._wanted[module] = list(peers)
        self._ask_some()

    async def learn(self, module: ModuleId, peer: PeerId) -> None:
        """Learn the newest mandate that `peer` knows; raises what the call does, and IntegrityError."""
        request, addresses = GetMandate(module=module), self._addresses(peer)
        reply = await request.call(self._swarm, peer, timeout_s=ANSWER_TIMEOUT_S, addresses=addresses)
        grants = await read_items(Grant, reply, most=LINKS_MAX)
        if grants:
            self._mandates.learn(module, grants)

    def _ask_some(self) -> None:
        now_s = self._clock.now_s()
        self._rests_s = {key: until_s for key, until_s in self._rests_s.items() if until_s > now_s}
        self._strangers_s = {peer: until_s for peer, until_s in self._strangers_s.items() if until_s > now_s}
        known = self._known() if any(self._wanted.values()) else ()
        while len(self._asking) < ASKED_AT_ONCE and (free := self._free(known)):
            peer = self._chance.choice(sorted(free))
            module = self._chance.choice(free[peer])
            if peer not in known:
                self._strangers_s[peer] = now_s + ANSWER_TIMEOUT_S
            self._wanted[module].remove(peer)
            self._rests_s[module, peer] = now_s + self._ttl_s
            self._asking.add(peer)
            self._begin(self._try_learn(module, peer))

    def _free(self, known: Collection[PeerId]) -> dict[PeerId, list[ModuleId]]:
        """Who may be asked now, and for what: those that are known here, else strangers."""
        free: dict[PeerId, list[ModuleId]] = {}
        for module, peers in self._wanted.items():
            for peer in peers:
                if peer not in self._asking and self._rests_s.keys().isdisjoint(((module, peer), (None, peer))):
                    free.setdefault(peer, []).append(module)
        if any(peer in known for peer in free):
            return {peer: modules for peer, modules in free.items() if peer in known}
        if len(self._strangers_s) >= STRANGERS_AT_ONCE:
            return {}
        return {peer: modules for peer, modules in free.items() if peer not in self._strangers_s}

    async def _try_learn(self, module: ModuleId, peer: PeerId) -> None:
        now_s, before = self._clock.now_s(), len(self._mandates.grants(module))
        try:
            await self.learn(module, peer)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("%s shows no mandate for %s: %s", peer, module, error)
            if isinstance(error, SwarmError):
                self._rests_s[None, peer] = now_s + self._ttl_s
        finally:
            self._asking.discard(peer)
        if len(self._mandates.grants(module)) > before:
            self._strangers_s.pop(peer, None)
            self._rests_s.pop((module, peer), None)
            self._ask_some()
