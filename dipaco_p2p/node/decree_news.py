"""How the coordinator's decrees get around: every heartbeat says how many its peer has, and who has fewer asks it."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from ..clock import Clock
from ..errors import EnvironmentUnfit, IntegrityError, Refused, SwarmError
from ..protocol.decrees import Decree
from ..protocol.liveness import Heartbeat
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from .authority import Decrees
from .calls import GetDecrees
from .items import Page, items_reply, read_items
from .presence import Presence

log = logging.getLogger(__name__)

DECREES_ASKED = 2
"""Peers that are asked at once for the coordinator's decrees that we lack."""
ANSWER_TIMEOUT_S = 5.0


class DecreeNews:
    """Asks for what this peer lacks; `addresses` are those of a peer."""

    def __init__(
        self,
        swarm: Swarm,
        clock: Clock,
        decrees: Decrees,
        *,
        ttl_s: float,
        addresses: Callable[[PeerId], tuple[str, ...]],
    ) -> None:
        self._swarm = swarm
        self._clock = clock
        self._decrees = decrees
        self._ttl_s = ttl_s
        self._addresses = addresses
        self._chance = random.Random(swarm.signer.sign("decrees", b""))
        self._asked_s: dict[PeerId, float] = {}
        """When peers were last asked for decrees that they said they have; those that gave some are not in here."""

    def heard(
        self,
        beats: Mapping[PeerId, Heartbeat],
        known: Collection[PeerId],
        *,
        begin: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Ask two of the peers that say they have more decrees than we do: one of those that are `known`, then those
        that were not asked yet. Anybody may say so, and a crowd that lies must not hide the one that does not."""
        now_s = self._clock.now_s()
        self._asked_s = {peer: at_s for peer, at_s in self._asked_s.items() if peer in beats}
        ahead = [peer for peer, beat in beats.items() if beat.decrees > self._decrees.count]
        rested = [
            peer
            for peer in ahead
            if peer != self._swarm.peer and now_s - self._asked_s.get(peer, -math.inf) >= self._ttl_s
        ]
        order = sorted(rested, key=lambda peer: (self._asked_s.get(peer, -math.inf), self._chance.random()))
        first = [peer for peer in order if peer in known][:1]
        for peer in [*first, *(peer for peer in order if peer not in first)][:DECREES_ASKED]:
            self._asked_s[peer] = now_s
            begin(self.try_learn(peer))

    async def try_learn(self, peer: PeerId) -> None:
        """As `learn`, as far as it goes."""
        before = self._decrees.count
        try:
            await self.learn(peer)
        except (SwarmError, Refused, IntegrityError, EnvironmentUnfit) as error:  # a full disk the store has noted
            log.info("%s told no decrees: %s", peer, error)
        if self._decrees.count > before:
            self._asked_s.pop(peer, None)

    async def learn(self, peer: PeerId) -> None:
        """Learn all that `peer` has and we lack; raises what the call does, IntegrityError, and EnvironmentUnfit."""
        while True:
            request, addresses = GetDecrees(after=self._decrees.count), self._addresses(peer)
            reply = await request.call(self._swarm, peer, timeout_s=ANSWER_TIMEOUT_S, addresses=addresses)
            found = await read_items(Decree, reply, author=self._decrees.coordinator)
            before = self._decrees.count
            self._decrees.learn_all(found)
            if self._decrees.count == before:
                return


def serve_decrees(swarm: Swarm, decrees: Decrees, presence: Presence) -> None:
    """Tell ours to whoever asks, and in every heartbeat how many they are."""

    async def answer(sender: PeerId, request: GetDecrees) -> Page[Decree]:
        return items_reply(decrees.log[max(request.after, 0) :])

    GetDecrees.serve(swarm, answer)
    presence.note(decrees=decrees.count)
    decrees.listen(lambda: presence.note(decrees=decrees.count))
