"""Who leads which module in which term: the coordinator's word, one grant for each term.

A term is granted once, to one peer, and only when the last leader is gone: its head has expired or it resigned. What a
group granted itself while the seed node was away counts as any other term; whoever asks shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.node.calls import Adopt, Granted
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner.leadership import Granting
from dipaco_p2p.owner.module_calls import learn_mandate, module_of_run
from dipaco_p2p.protocol.documents import Grant, Sealed
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.topology import ModuleId

QUIET_HEARTBEATS = 2.0
QUIET_S_MIN = 30.0
"""How long a restarted seed waits from the first volunteer that it sees, in lives of a heartbeat, and at least: others
may have gone on without it, and libp2p waits longer and longer between two dials of an address that did not answer. A
term granted meanwhile to somebody else would throw away what they did."""

OnDeposed = Callable[[ModuleId, PeerId], Awaitable[None]]


class Terms(Granting):
    """The seed node's grants, to others and to itself."""

    def __init__(self, node: Member, *, on_deposed: OnDeposed, is_closed: Callable[[], bool] = lambda: False) -> None:
        """`on_deposed` is told before a term goes to somebody else than the last leader; while `is_closed` nothing is
        granted."""
        self._is_closed = is_closed
        self._node = node
        self._deposed = on_deposed
        self._granting = asyncio.Lock()
        self._was_open = any(node.mandates.term(module) for module in node.run.topology.modules())
        self._met_s: float | None = None
        """When a restarted seed first saw a volunteer."""

    def serve(self) -> None:
        """Answer from now on."""
        Adopt.serve(self._node.swarm, self._on_adopt)

    @property
    def is_catching_up(self) -> bool:
        """Whether this seed was restarted, and those who went on without it may not have found it yet. While nobody is
        there nobody needs a leader."""
        if self._was_open and self._met_s is None:
            beats = self._node.watch.heartbeats.values()
            self._met_s = self._node.clock.now_s() if any(beat.role == "volunteer" for beat in beats) else None
        if self._is_closed():
            return True
        quiet_s = max(QUIET_HEARTBEATS * self._node.run.config.liveness.heartbeat_ttl_s, QUIET_S_MIN)
        return self._was_open and (self._met_s is None or self._node.clock.now_s() < self._met_s + quiet_s)

    async def obtain(self, module: ModuleId, *, mirrors: tuple[PeerId, ...]) -> None:
        await self.grant(self._node.peer, module, term=self._node.mandates.term(module) + 1, mirrors=mirrors)

    async def grant(self, peer: PeerId, module: ModuleId, *, term: int, mirrors: tuple[PeerId, ...]) -> None:
        """Grant `term` to `peer`; the mandates have it then.

        Raises Refused unless it is the next term (or the very grant that was given) and the last leader is gone.
        """
        mandates, reason = self._node.mandates, self._node.decrees.reason(peer)
        if reason is not None:
            raise Refused(f"banned by the coordinator: {reason}", reason=Reason.BANNED)
        if self._is_closed():
            raise Refused("this seed node was restored from a backup, and catches up first", reason=Reason.BUSY)
        async with self._granting:
            newest = mandates.grant(module)
            if newest is not None and (newest.term, newest.leader, newest.mirrors) == (term, peer, mirrors):
                return
            if term != mandates.term(module) + 1:
                detail = f"the next term of {module} is {mandates.term(module) + 1}, not {term}"
                raise Refused(detail, reason=Reason.NOT_LEADER)
            if newest is not None and peer not in newest.group and self.is_catching_up:
                detail = f"the group of {module} may still come back: this seed node was away"
                raise Refused(detail, reason=Reason.NOT_LEADER)
            await self._depose(module, newest, peer)
            mandates.grant_next(self._node.swarm.signer, module, leader=peer, mirrors=mirrors)

    async def _depose(self, module: ModuleId, newest: Grant | None, peer: PeerId) -> None:
        """Before the grant, so that what the old leader has done is still taken. We ourselves give way to anybody."""
        if newest is None or newest.leader == peer:
            return
        if newest.leader != self._node.peer:
            await self._node.watch.read_heads(module)
            head = self._node.watch.heads[module].get(newest.leader)
            is_led = head is not None and head.term == newest.term
            if is_led or self._node.watch.is_taking_over(module):
                detail = f"{module} is led by ...{short(newest.leader)}, which is alive"
                raise Refused(detail, reason=Reason.NOT_LEADER)
        await self._deposed(module, newest.leader)

    async def _on_adopt(self, sender: PeerId, request: Adopt) -> Granted:
        module, mirrors = module_of_run(self._node, request.module), request.mirrors
        if len({sender, *mirrors}) <= len(mirrors):
            raise Refused("a group has different peers", reason=Reason.MALFORMED)
        await self._see(module, sender, request.mandate)
        await self.grant(sender, module, term=request.term, mirrors=mirrors)
        return Granted(grant=self._node.mandates.newest(module)[-1])

    async def _see(self, module: ModuleId, sender: PeerId, shown: Sequence[Sealed[Grant]]) -> None:
        """The newest grant that the asker knows may be newer than ours: given by a group while we were away."""
        if shown:
            sealed = shown[-1]
            if sealed.document.module != module:
                raise IntegrityError(f"a grant of {sealed.document.module} for {module}")
            if not self._node.mandates.believes(module, sealed):
                await learn_mandate(self._node, module, sender)
