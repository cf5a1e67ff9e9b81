"""Who may lead: the seed node's grants, to others and to itself.

A term of a module is granted once, to one peer, and only when the last leader is gone: its head has expired or it
resigned. What a group granted itself while the seed node was away counts as any other term; whoever asks shows it.

Whoever asks may be a stranger. So its work must be on a chain of ours, since we are there to lead ourselves; it must be
its turn (protocol/owners.py); one mirror of its group is our choice; and a leader that makes no version for longer than
any round takes loses the module to us, until there is a version again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence

from dipaco_p2p.errors import Refused
from dipaco_p2p.node.calls import Adopt, Granted
from dipaco_p2p.node.node import CALL_TIMEOUT_S
from dipaco_p2p.owner.archive import ArchiveChains
from dipaco_p2p.owner.granting import Granting
from dipaco_p2p.owner.module_calls import learn_mandate, module_of_run
from dipaco_p2p.protocol.documents import Grant, Sealed
from dipaco_p2p.protocol.owners import runs_ahead
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.rounds import PATIENCE
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.topology import ModuleId

from .coups import Coups

QUIET_HEARTBEATS = 2.0
QUIET_S_MIN = 30.0
"""How long a restarted seed waits from the first volunteer that it sees, in lives of a heartbeat, and at least: others
may have gone on without it, and libp2p waits longer and longer between two dials of an address that did not answer. A
term granted meanwhile to somebody else would throw away what they did."""

LOST_CALLS = 3
"""So many calls of a round may be lost before its leader is thought to be idle."""

SLACK_HEARTBEATS = 1 / 3
"""How much later than others we may see that nobody leads, in lives of a heartbeat: two looks at the swarm."""

OnDeposed = Callable[[ModuleId, PeerId], Awaitable[None]]


class Terms(Granting):
    """The seed node's grants, to others and to itself."""

    def __init__(
        self, chains: ArchiveChains, *, on_deposed: OnDeposed, is_closed: Callable[[], bool] = lambda: False
    ) -> None:
        """`on_deposed` is told before a term goes to somebody else than the last leader; while `is_closed` nothing is
        granted."""
        self._is_closed = is_closed
        self._chains = chains
        self._node = node = chains.node
        self._deposed = on_deposed
        self._granting = asyncio.Lock()
        self._coups = Coups(node)
        self._usurpers: set[PeerId] = set()
        """Who has deposed a leader that lived: in no group of ours any more, for a member could do so again."""
        self._was_open = any(node.mandates.term(module) for module in node.run.topology.modules())
        self._met_s: float | None = None
        """When a restarted seed first saw a volunteer."""
        self._chosen: dict[ModuleId, PeerId] = {}
        """The mirror of each module that is our choice."""
        self._deaf: dict[ModuleId, set[PeerId]] = defaultdict(set)
        """Those whom we choose no more."""
        self._moved: dict[ModuleId, tuple[int, float]] = {}
        """The version that each module has, and since when somebody else could have made the next."""
        self._behind_s: dict[ModuleId, float] = {}
        """When the leader of a module last told of all versions that we have signed."""
        self._deposed_s: dict[ModuleId, float] = {}
        """Since when somebody goes on leading a module that was granted to another: it has not noticed, or lies."""
        self._ours_until: dict[ModuleId, int] = {}
        """The version before which nobody but us leads a module that we took back."""
        self._idled: Counter[tuple[ModuleId, PeerId]] = Counter()
        """How often a leader has lost a module to us."""
        self._barred_until: dict[tuple[ModuleId, PeerId], int] = {}
        """The version before which it does not lead that module again."""

    def serve(self) -> None:
        """Answer from now on."""
        Adopt.serve(self._node.swarm, self._on_adopt)

    @property
    def is_catching_up(self) -> bool:
        """Whether this seed was restarted, and those who went on without it may not have found it yet. While nobody is
        there nobody needs a leader."""
        if self._was_open and self._met_s is None:
            self._met_s = self._node.clock.now_s() if self._node.watch.volunteers() else None
        return self._is_closed() or self._node.clock.now_s() < self._caught_up_s

    @property
    def _caught_up_s(self) -> float:
        """When it was, or will be, this seed's turn again to say who leads."""
        quiet_s = max(QUIET_HEARTBEATS * self._node.run.config.liveness.heartbeat_ttl_s, QUIET_S_MIN)
        return (math.inf if self._met_s is None else self._met_s + quiet_s) if self._was_open else -math.inf

    async def obtain(self, module: ModuleId, *, mirrors: tuple[PeerId, ...]) -> None:
        if self.takes_back(module):  # the last group was its leader's choice
            if (coup := self._coups.of(module)) is not None:
                self._usurpers.add(coup.by)
            mirrors = self._with_ours(module, self._node.peer, ())
        mirrors = self._loyal(mirrors)
        await self.grant(self._node.peer, module, term=self._node.mandates.term(module) + 1, mirrors=mirrors)

    def look(self, module: ModuleId) -> None:
        self._coups.look(module)

    def takes_back(self, module: ModuleId) -> bool:
        """Whether the module's leader has made no version for longer than any round takes, while others were there and
        nothing was frozen; or tells of fewer than we have signed; or goes on though another was granted the module; or
        granted it to itself, as a stranger in a group; or runs ahead of everybody. Leading costs nothing, and a leader
        that refuses all others would stop the module. Also whether we took it back and have not come to lead it yet:
        nobody else may."""
        node, ledger, now_s = self._node, self._chains[module].ledger, self._node.clock.now_s()
        rounds, ttl_s = node.run.config.rounds, node.run.config.liveness.heartbeat_ttl_s
        leader, version = node.watch.leader(module), ledger.head.version
        if (granted := node.mandates.leader(module)) != node.peer and leader is None:
            # Who has its group changed at each life of its head leads all along.
            leader = granted if node.watch.is_taking_over(module, workers=self._chains.workers) else None
        if leader in (None, node.peer):  # whoever is gone falls under another rule
            for since in (self._moved, self._behind_s, self._deposed_s):
                since.pop(module, None)
            return leader is None and version < self._ours_until.get(module, 0)
        if self._is_usurped(module, leader) or runs_ahead(ledger.versions, leader, self._reached):
            return True
        others = len(node.watch.volunteers() - {leader})
        paths = node.run.topology.paths_through(module)
        slowest = min(self._reached(each) for path in paths for each in path.modules())
        is_excused = (
            version > slowest or ledger.is_complete or node.decrees.is_frozen or not others or self.is_catching_up
        )
        if is_excused or version != self._moved.get(module, (-1, 0.0))[0]:
            self._moved[module] = version, now_s
        if node.watch.reached(module) >= ledger.final:
            self._behind_s[module] = now_s
        since_s = min(self._moved[module][1], self._behind_s.setdefault(module, now_s))
        waves = math.ceil(len(node.watch.claims) / (1 + others))
        round_s = max((PATIENCE + waves) * rounds.deadline_s, LOST_CALLS * CALL_TIMEOUT_S)
        if (newest := node.mandates.grant(module)) is None or newest.leader == leader:
            self._deposed_s.pop(module, None)
        elif now_s - self._deposed_s.setdefault(module, now_s) >= 2 * ttl_s:
            return True
        return now_s - since_s >= 2 * ttl_s + round_s

    def _reached(self, module: ModuleId) -> int:
        return self._chains[module].ledger.head.version

    def _is_usurped(self, module: ModuleId, leader: PeerId, *, is_certain: bool = True) -> bool:
        """Whether `leader` leads without our grant, and a member gave it the module that has never worked, or has
        deposed a leader that lives. While we live that is not for the group to say; whoever has worked may go on where
        nobody else does, as after a partition."""
        mandate = self._node.mandates.newest(module)
        is_granted_by_group = len(mandate) > 1 and mandate[-1].document.leader == leader
        is_wrong = self._is_stranger(leader) or self._coups.of(module, is_certain=is_certain) is not None
        return is_granted_by_group and is_wrong and not self.is_catching_up

    def _is_stranger(self, peer: PeerId) -> bool:
        """Whether the last versions count no work of it: it could stop a module, so it gets none while we live. Nor
        while we catch up and lead nothing ourselves: that is soon over, and we take over then what others have done."""
        return peer not in self._chains.workers

    async def grant(self, peer: PeerId, module: ModuleId, *, term: int, mirrors: tuple[PeerId, ...]) -> None:
        """Grant `term` to `peer`; the mandates have it then.

        Raises Refused unless it is the next term (or the very grant that was given) and the last leader is gone.
        """
        mandates = self._node.mandates
        self._require_open(peer)
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
            self._node.history.add("grants", module=str(module), term=term, to=peer)

    async def _depose(self, module: ModuleId, newest: Grant | None, peer: PeerId) -> None:
        """Before the grant, so that what the old leader has done is still taken. We ourselves give way to anybody whose
        turn it is."""
        if newest is None or newest.leader == peer:
            return
        if newest.leader != self._node.peer and peer == self._node.peer and self.takes_back(module):
            self._bar(module, newest)
        elif newest.leader != self._node.peer:
            await self._node.watch.read_heads(module)
            head = self._node.watch.heads[module].get(newest.leader)
            is_led = head is not None and head.term == newest.term
            if is_led or self._node.watch.is_taking_over(module, workers=self._chains.workers):
                detail = f"{module} is led by ...{short(newest.leader)}, which is alive"
                raise Refused(detail, reason=Reason.NOT_LEADER)
        await self._deposed(module, newest.leader)

    def _bar(self, module: ModuleId, idle: Grant) -> None:
        """Its leader gets it back after one version the first time, then after two, four: one that was only slow soon
        leads again, and one that stops the module does so ever more rarely."""
        version, key = self._chains[module].ledger.head.version, (module, idle.leader)
        self._ours_until[module], self._barred_until[key] = version + 1, version + 2 ** self._idled[key]
        self._idled[key] += 1
        self._node.history.add("took_back", module=str(module), term=idle.term, leader=idle.leader)

    def _has_idled(self, peer: PeerId) -> bool:
        """Whether it has lost any module to us: whoever stopped one would stop the next as well."""
        return any(leader == peer for _, leader in self._idled)

    async def _require_turn(self, module: ModuleId, peer: PeerId) -> None:
        """Raises Refused while somebody else should lead: anybody may ask, and ahead of those who know the module."""
        watch, ledger, newest = self._node.watch, self._chains[module].ledger, self._node.mandates.grant(module)
        if self._is_usurped(module, peer, is_certain=False):
            raise Refused(f"a group gives {module} to nobody while this seed node lives", reason=Reason.NOT_LEADER)
        if newest is not None and newest.leader == peer:
            return
        if self._is_stranger(peer):
            detail = f"{module} falls to this seed node, and to those whose work the last versions count"
            raise Refused(detail, reason=Reason.NOT_LEADER)
        if peer not in watch.heartbeats:
            await watch.read_peers()
        if not watch.neighbourhood.is_all:
            await watch.find_electorate(module, peer)
        if self._has_idled(peer) and not all(map(self._has_idled, watch.volunteers())):
            raise Refused("a module had no new version for too long when you led it", reason=Reason.NOT_LEADER)
        version = max(self._ours_until.get(module, 0), self._barred_until.get((module, peer), 0))
        if ledger.head.version < version:
            detail = f"{module} had no new version for too long: not before version {version}"
            raise Refused(detail, reason=Reason.NOT_LEADER)
        slack_s = SLACK_HEARTBEATS * self._node.run.config.liveness.heartbeat_ttl_s
        await watch.read_heads(module)
        # While we gave no term to anybody, nobody had a turn: else all have had theirs, and the last may come first.
        since_s = -math.inf if self.is_catching_up else self._caught_up_s
        if not watch.falls_to(module, peer, workers=self._chains.workers, since_s=since_s, slack_s=slack_s):
            leader = watch.leader(module)
            detail = "falls to others first"
            if leader is not None and leader != self._node.peer:
                detail = f"is led by ...{short(leader)}, which is alive"
            raise Refused(f"{module} {detail}", reason=Reason.NOT_LEADER)

    def _with_ours(self, module: ModuleId, leader: PeerId, mirrors: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        """A group whose first mirror is our choice, if there is anybody: trainers ask for its cosignature or ours, for
        a leader that chose all mirrors would hear only itself. Nobody else can tell whom we choose, so no key can be
        made for it."""
        node, mirrors_max = self._node, self._node.run.config.rounds.owners - 1
        alive = {peer for peer in node.watch.volunteers() if node.watch.heartbeats[peer].owns}
        alive -= {leader, *self._usurpers}
        last, ours = node.mandates.grant(module), self._chosen.get(module)
        if ours is not None and last is not None and last.leader == leader and ours in last.mirrors:
            self._deaf[module] |= {ours} - set(mirrors)  # it takes nothing, says its leader: somebody else, then
        workers, hearing = self._chains.workers & alive, alive - self._deaf[module]
        if not alive or mirrors_max < 1:
            return mirrors
        known = (workers & hearing) or workers or hearing or alive  # a leader may call deaf whoever is no friend of it

        def place(peer: PeerId) -> str:
            return node.swarm.signer.sign("mirror", f"{module}|{peer}".encode())

        if self._chosen.get(module) not in known:
            self._chosen[module] = max(known, key=place)
        ours = self._chosen[module]
        if not self._deaf[module] or ours == max(workers or alive, key=place):
            self._chains.trust(module)
        else:
            self._chains.doubt(module)  # a leader could have mirrors chosen until one is its friend
        return (ours, *(peer for peer in mirrors if peer != ours))[:mirrors_max]

    def _loyal(self, mirrors: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        return tuple(peer for peer in mirrors if peer not in self._usurpers)

    async def _on_adopt(self, sender: PeerId, request: Adopt) -> Granted:
        module, mirrors = module_of_run(self._node, request.module), request.mirrors
        if len({sender, *mirrors}) <= len(mirrors):
            raise Refused("a group has different peers", reason=Reason.MALFORMED)
        self._require_open(sender)
        await self._see(module, sender, request.mandate)
        if not self._is_granted(module, sender, request.term):  # else the answer was lost
            await self._require_turn(module, sender)
            mirrors = self._with_ours(module, sender, self._loyal(mirrors))
            await self.grant(sender, module, term=request.term, mirrors=mirrors)
        return Granted(grant=self._node.mandates.newest(module)[-1])

    def _require_open(self, peer: PeerId) -> None:
        """Raises Refused while nothing is granted, or nothing to `peer`."""
        if (reason := self._node.decrees.reason(peer)) is not None:
            raise Refused(f"banned by the coordinator: {reason}", reason=Reason.BANNED)
        if self._is_closed():
            raise Refused("this seed node was restored from a backup, and catches up first", reason=Reason.BUSY)

    def _is_granted(self, module: ModuleId, peer: PeerId, term: int) -> bool:
        grant = self._node.mandates.grant(module)
        return grant is not None and (grant.term, grant.leader, grant.author) == (term, peer, self._node.peer)

    async def _see(self, module: ModuleId, sender: PeerId, shown: Sequence[Sealed[Grant]]) -> None:
        """The newest grant that the asker knows may be newer than ours: given by a group while we were away."""
        self.look(module)
        if shown and not self._node.mandates.believes(module, shown[-1]):
            await learn_mandate(self._node, module, sender)
        self.look(module)
