"""What a volunteer does about the coordinator's decrees: it leaves when it is banned, and rests while all is frozen.

A round that a freeze meets ends after its inner step. What was trained is pushed when the run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import IntegrityError, Refused, SwarmError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.node import Member, Observer, open_observer
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm

from .invitations import check_admitted

log = logging.getLogger(__name__)

LOOK_S = 0.5
ASKED_FIRST = 2
"""Peers that are asked for decrees before anything is done."""


class Obeying:
    """One volunteer's, in one stage."""

    def __init__(self, node: Member, *, on_change: Callable[[], None], is_ending: Callable[[], bool]) -> None:
        """`on_change` is told of every further decree, and of a rest that begins; who is ending rests no longer."""
        self._node = node
        self._decrees = node.decrees
        self._tell = on_change
        self._is_ending = is_ending
        self._decrees.listen(on_change)

    @property
    def is_frozen(self) -> bool:
        return self._decrees.is_frozen

    @property
    def is_out(self) -> bool:
        """Whether we are banned, or somebody is by whose invitation we take part."""
        try:
            self.check()
        except Refused:
            return True
        return False

    @property
    def words(self) -> str:
        """What is said while nothing is trained."""
        return frozen_words(self._decrees)

    def check(self) -> None:
        """Raise Refused if we are banned, or not admitted to the run (any more)."""
        node, decreed = self._node, self._decrees.state
        check_ban(decreed, node.peer)
        check_admitted(node.run, node.peer, node.invitations.own, decreed)

    async def thawed(self) -> None:
        """Until the run goes on, or we are to leave."""
        if self.is_frozen and not self._is_ending():
            self._tell()
        while self.is_frozen and not self._is_ending():
            await self._node.clock.sleep(LOOK_S)


def check_ban(decreed: Decreed, peer: PeerId) -> None:
    """Raise Refused if `peer` is banned."""
    reason = decreed.banned.get(peer)
    if reason is not None:
        hint = f"ask whoever runs the coordinator, and name this volunteer: {peer}"
        raise Refused(f"the coordinator has banned this volunteer: {reason}", reason=Reason.BANNED, hint=hint)


def frozen_words(decrees: Decrees) -> str:
    """`frozen by the coordinator: a bad shard`; empty while the run goes on."""
    return f"frozen by the coordinator: {decrees.state.frozen}" if decrees.is_frozen else ""


async def ask_first(node: Observer) -> None:
    """Learn the decrees that others have before anything is done; the seed nodes know best, and may be away."""
    watch = node.watch
    others = sorted(watch.heartbeats.keys() - {node.peer}, key=lambda peer: -watch.heartbeats[peer].decrees)
    for peer in list(dict.fromkeys([*watch.seeds(), *others]))[:ASKED_FIRST]:
        beat = watch.heartbeats.get(peer)  # what was learnt from the first may be that the second is banned
        if beat is not None and beat.decrees > node.decrees.count:
            await _learn(watch, peer)


async def decrees_at(run: Run, swarm: Swarm, host: PeerId) -> Decrees:
    """What the peer that we join through tells of decrees; none if it tells nothing."""
    node = open_observer(run, ScopedSwarm(swarm, run.id), SystemClock())
    await _learn(node.watch, host)
    return node.decrees


async def _learn(watch: Watch, peer: PeerId) -> None:
    try:
        await watch.decree_news.learn(peer)
    except (SwarmError, Refused, IntegrityError) as error:
        log.info("%s told no decrees: %s", peer, error)
