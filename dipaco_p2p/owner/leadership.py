"""Which modules this peer leads: takes those that fall to it, keeps their groups full, and hands them over.

It also answers for what this peer keeps: as a leader to trainers, as a mirror to leaders, as a holder to whoever takes
a module over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection

from ..errors import DipacoError, IntegrityError, Refused, SwarmError
from ..node.calls import Take
from ..node.ledger import RemoteLedger
from ..node.node import CALL_TIMEOUT_S, CONTROL_TIMEOUT_S, ask
from ..protocol import owners
from ..protocol.documents import Grant
from ..protocol.liveness import heartbeat_interval_s
from ..protocol.reasons import NOTED, Reason
from ..protocol.signing import PeerId, short
from ..topology import ModuleId
from .chain import Chains, ModuleChain
from .granting import Granting
from .leader import Leader
from .mirror_calls import MirrorCalls
from .module_calls import ModuleCalls
from .rejections import Rejections
from .replication import LOST_TTLS

log = logging.getLogger(__name__)

MERGE_REST = 10
"""So a former leader that shows no branch takes at most a tenth of a round's time."""


class Leadership:
    """All the modules that this peer leads."""

    def __init__(self, chains: Chains, granting: Granting, *, may_take: Callable[[], bool] = lambda: True) -> None:
        node = self._node = chains.node
        self.chains = chains
        self._granting = granting
        self._may_take = may_take
        self._leaders: dict[ModuleId, Leader] = {}
        self._tasks: dict[ModuleId, asyncio.Task[None]] = {}
        self._taking: dict[ModuleId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._offers: dict[ModuleId, asyncio.Task[None]] = {}
        """Contributions on their way to another leader."""
        self._watches: list[asyncio.Task[None]] = []
        self._is_leaving = False
        self._began_s: dict[ModuleId, float] = {}
        """Since when we try to take a module over, of which a newer version is known than can be had."""
        self._asked: dict[ModuleId, int] = {}
        """The last term that we asked for in this process's life."""
        self._groups: dict[ModuleId, tuple[PeerId, ...]] = {}
        """Who owned it before our grant."""
        self._declined: dict[ModuleId, set[PeerId]] = defaultdict(set)
        """Whom the coordinator did not want as mirrors when we last asked: else we would ask again at each look."""
        self._silent_s: dict[PeerId, float] = {}
        """Since when mirrors of ours are not heard of."""
        self._followed: dict[ModuleId, PeerId] = {}
        """Whom we last saw leading a module that we do not lead."""
        self._refused: dict[ModuleId, dict[str, tuple[PeerId, int, str]]] = defaultdict(dict)
        """Contributions that a leader did not take: who led, which version it had then, and the reason."""
        self._merges_s: dict[ModuleId, float] = defaultdict(float)
        """When we look again at branches that others say are better than ours."""
        self._untold: dict[ModuleId, tuple[int, float]] = {}
        """Of modules that we mirror and know newer versions of: the newest that is final here, and since when."""
        for chain in chains.all():
            chain.lost.update(chain.ledger.open)  # from before a restart
        node.watch.concerns.led = self._leaders.keys
        ModuleCalls(node, self._leader_of, self._take_from, Rejections(chains)).serve()
        MirrorCalls(chains).serve()

    @property
    def modules(self) -> list[ModuleId]:
        return sorted(self._leaders)

    def held(self) -> set[ModuleId]:
        """The modules that we own, or keep anything of that is not settled."""
        mandates = self._node.mandates
        return {
            chain.module
            for chain in self.chains.all()
            if chain.lost or chain.ledger.open or chain.ledger.spent or self._owns(mandates.grant(chain.module))
        }

    @property
    def is_complete(self) -> bool:
        """Whether nothing that we lead or mirror, or once did, needs us any more."""
        modules = self._node.run.topology.modules()
        return all(leader.is_complete for leader in self._leaders.values()) and all(map(self._is_settled, modules))

    def _is_settled(self, module: ModuleId) -> bool:
        """Whether every contribution that has a receipt by us, or by a leader that we were a mirror of, is in a final
        version or was reported: of a module that others own by now, we may be the last to have it."""
        chain = self.chains[module]
        if self._owns(self._node.mandates.grant(module)):
            return chain.ledger.final >= self._node.run.rounds
        return not chain.ledger.spent and not chain.lost

    async def run(self) -> None:
        """Take modules that fall to us, drop those that others lead in a newer term; ends when cancelled."""
        # Side by side: who waits for a frozen peer in one module must not keep the others waiting.
        modules = self._node.run.topology.modules()
        self._watches = [asyncio.create_task(self._look_after(module)) for module in modules]
        try:
            await asyncio.gather(*self._watches)
        finally:
            for task in [*self._watches, *self._offers.values()]:
                task.cancel()

    async def _look_after(self, module: ModuleId) -> None:
        while True:
            await self._check(module)
            await self._node.clock.sleep(heartbeat_interval_s(self._node.run.config.liveness) / 2)

    async def leave(self) -> None:
        """Hand every module to its next leader; contributions with a receipt are with its mirrors already."""
        self._is_leaving = True
        for module in self.modules:
            await self._let_go(module)
        for module, taking in list(self._taking.items()):
            async with taking:  # what just falls to us is led for a moment, or nobody would hear that it is free
                if module in self._leaders:
                    await self._let_go(module)
        for module in self._node.run.topology.modules():
            await self._resubmit(module)

    async def _let_go(self, module: ModuleId) -> None:
        await self.drop(module)
        await self._node.presence.resign(module)
        await self._pass_on(module)

    async def close(self) -> None:
        """Nothing goes on here: what was not handed over in time is where its next leader finds it."""
        self._is_leaving = True
        tasks = [*self._tasks.values(), *self._watches, *self._offers.values()]
        for module in self.modules:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):  # as far as it gets without waiting
                    await self.drop(module)
        self.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Do nothing more, at once."""
        self._is_leaving = True
        for task in [*self._tasks.values(), *self._watches, *self._offers.values()]:
            task.cancel()

    async def take(self, module: ModuleId) -> None:
        """Lead `module` from now on, in a new term; raises DipacoError if nobody who may grants it."""
        async with self._taking[module]:
            if module in self._leaders or self._is_leaving:
                return
            leader = await self._begin(module)
            self._leaders[module] = leader
            self._tasks[module] = asyncio.create_task(leader.run(), name=f"leader of {module}")
            self._say_group(leader)
            term, version = leader.grant.term, leader.head.version
            self._node.history.add("leads", module=str(module), term=term, version=version)

    async def _take_from(self, sender: PeerId, module: ModuleId) -> None:
        """Lead `module`, since `sender` leaves it. Who led the newest term may say so, or may have granted us the next;
        anybody else could depose whoever leads by its word, and is heard only if it is our turn. Raises DipacoError."""
        grant = self._node.mandates.grant(module)
        is_handed_over = grant is not None and grant.leader in (sender, self._node.peer)
        if not (is_handed_over or self._is_our_turn(module)):
            raise Refused(f"{module} is not yours to hand over", reason=Reason.NOT_LEADER)
        await self.take(module)

    async def _begin(self, module: ModuleId) -> Leader:
        """In a new term, unless a try before has got one, perhaps without hearing of it in time: what this disk says of
        earlier terms may be out of date."""
        mandates = self._node.mandates
        last = mandates.grant(module)
        last_group = last.group if last is not None else ()
        is_over = last is not None and last.term < self.chains[module].ledger.head.term  # by a member banned since
        if last is None or is_over or (last.leader, last.term) != (self._node.peer, self._asked.get(module)):
            self._groups[module], self._asked[module] = last_group, mandates.term(module) + 1
            await self._obtain(module, self._mirrors(module, last_group))
            self._asked[module] = mandates.term(module)
        waited_s = self._node.clock.now_s() - self._begins(module)
        leader = Leader(self.chains[module])
        last_group = self._groups.get(module, last_group)
        # Whoever has a module taken from it had long enough to show what it says that there is.
        has_waited = waited_s >= LOST_TTLS * self._node.run.config.liveness.heartbeat_ttl_s
        is_patient = not (has_waited or self._granting.takes_back(module))
        await leader.start(last_group=last_group, is_patient=is_patient)
        del self._began_s[module]
        return leader

    def _begins(self, module: ModuleId) -> float:
        """When somebody, we or another, was first about to lead `module`. Patience counts from then, not from our own
        newest term: else each candidate would wait as long as the one before it, while nobody leads."""
        if self._began_s.get(module, -math.inf) < self._node.watch.led_s[module]:
            self._began_s[module] = self._node.clock.now_s()
        return self._began_s[module]

    async def drop(self, module: ModuleId) -> None:
        """Lead `module` no more."""
        leader = self._leaders.pop(module, None)
        if leader is not None:
            task = self._tasks.pop(module)  # at once: it may be taken again while we wait
            try:
                await leader.stop()
            finally:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # a failure was logged when it was noticed
            self.chains[module].lost.update(self.chains[module].ledger.open)

    # -- looking after them

    async def _check(self, module: ModuleId) -> None:
        leading = self._leaders.get(module)
        if leading is None and module not in self._node.watch.concerns.watched:
            return
        try:
            self._granting.look(module)
            if self.chains[module].ledger.head.version > self._node.run.rounds:
                await self._end_early(module)
            elif leading is None:
                if self._node.watch.is_silent(module):
                    self._begins(module)
                if module not in self._offers or self._offers[module].done():
                    self._offers[module] = asyncio.create_task(self._resubmit(module))
                if self._is_our_turn(module):
                    await self.take(module)
            elif self._is_over(leading):
                self._node.history.add("deposed", module=str(module), term=leading.grant.term)
                await self.drop(module)
                await self._node.presence.resign(module)
            else:
                if self._node.mandates.grant(module) != leading.grant:  # the answer to our question came late
                    await leading.renew()
                await self._merge(leading)
                await self._renew(leading)
        except DipacoError as error:
            log.info("%s stays as it is for now: %s", module, error)

    async def _end_early(self, module: ModuleId) -> None:
        """We heard late that the stage ends, since its grid grows: nobody counts what goes beyond, so what that counts
        is submitted again, and gets a reason."""
        await self.drop(module)
        self.chains[module].give_up(to=self._node.run.rounds)

    def _is_our_turn(self, module: ModuleId) -> bool:
        return not self._is_leaving and self._may_take() and self._falls_to_us(module)

    def _falls_to_us(self, module: ModuleId) -> bool:
        watch = self._node.watch
        is_led = watch.leader(module) in watch.volunteers()  # as mostly: no need to look who has worked
        is_next = not is_led and watch.falls_to(module, self._node.peer, workers=self.chains.workers)
        return is_next or self._granting.takes_back(module)

    def _owns(self, grant: Grant | None) -> bool:
        """Whether we are in the group: its leader perhaps, that has not everything yet that it needs to lead."""
        return grant is not None and self._node.peer in grant.group

    def _is_over(self, leader: Leader) -> bool:
        """Whether leading failed, or the newest mandate is somebody else's."""
        task = self._tasks[leader.module]
        if task.done() and not task.cancelled() and task.exception() is not None:
            log.error("leading %s failed", leader.module, exc_info=task.exception())
            return True
        return not leader.is_leading

    async def _merge(self, leader: Leader) -> None:
        """Look at the heads of other leaders: after a partition or a race, theirs may be the better branch. It is their
        word, and our round waits while we look: after a look in vain it goes on for MERGE_REST times as long."""
        node, module, began_s = self._node, leader.module, self._node.clock.now_s()
        ours, heads = self.chains[module].ledger.branch, node.watch.heads[module]
        better = [peer for peer in heads if peer != node.peer and heads[peer].branch.is_better(ours)]
        if better and began_s >= self._merges_s[module]:
            peer = min(better, key=lambda peer: node.swarm.signer.lot("merge", f"{peer}|{began_s}".encode()))
            try:
                await leader.merge(peer, heads[peer].branch)
            except DipacoError as error:
                log.info("%s: the better branch of ...%s is not to be had: %s", module, short(peer), error)
            if heads[peer].branch.is_better(self.chains[module].ledger.branch):
                self._merges_s[module] = began_s + (1 + MERGE_REST) * (node.clock.now_s() - began_s)
        for archive in leader.diverged_archives:
            await leader.merge(archive, await RemoteLedger(self._node, archive, leader.module).branch())

    async def _renew(self, leader: Leader) -> None:
        """Fill the gap of a mirror that is gone, or takes nothing, in a new term."""
        unwanted = leader.deaf | self._declined[leader.module]
        mirrors = self._mirrors(leader.module, leader.grant.mirrors, without=unwanted)
        if not self._is_worth_a_term(leader.grant.mirrors):
            return
        if set(mirrors) != set(leader.grant.mirrors) and not leader.is_complete:
            await self._obtain(leader.module, mirrors)
            await leader.renew()
            self._say_group(leader)

    async def _obtain(self, module: ModuleId, mirrors: tuple[PeerId, ...]) -> None:
        await self._granting.obtain(module, mirrors=mirrors)
        grant = self._node.mandates.grant(module)
        self._declined[module] = set(mirrors).difference(grant.mirrors if grant is not None else ())

    def _is_worth_a_term(self, present: tuple[PeerId, ...]) -> bool:
        """Not while a mirror has only just fallen silent: its heartbeat may be late, and every term costs calls."""
        now_s, ttl_s = self._node.clock.now_s(), self._node.run.config.liveness.heartbeat_ttl_s
        silent = [peer for peer in present if peer not in self._node.watch.heartbeats]
        self._silent_s = {peer: self._silent_s.get(peer, now_s) for peer in silent} | {
            peer: since_s for peer, since_s in self._silent_s.items() if peer not in self._node.watch.heartbeats
        }
        return all(now_s - self._silent_s[peer] >= ttl_s for peer in silent)

    def _mirrors(
        self, module: ModuleId, present: tuple[PeerId, ...], *, without: Collection[PeerId] = ()
    ) -> tuple[PeerId, ...]:
        node, count, workers = self._node, self._node.run.config.rounds.owners, self.chains.workers
        alive = {peer: beat for peer, beat in node.watch.heartbeats.items() if peer not in without}
        return owners.mirrors(module, alive, leader=node.peer, present=present, owners=count, workers=workers)

    async def _resubmit(self, module: ModuleId) -> None:
        """Contributions with a receipt that the chain may lack, since another branch or leader went on: offered to the
        leader, until each has a place or a reason. While nobody leads, as after the end of the run, the coordinator
        says what is final; after the last version nothing can count, and nobody has to be asked."""
        watch, chain = self._node.watch, self.chains[module]
        leader = watch.leader(module)
        source = leader or next(iter(watch.coordinators()), None)
        if source is None or source == self._node.peer or leader == self._node.peer:
            return
        # A new leader may have missed what the last one gave a receipt for.
        if leader is not None and self._followed.get(module) != leader:
            self._followed[module] = leader
            chain.lost.update(chain.ledger.open)
        await self._look_back(chain, source)
        ledger = chain.ledger
        if not chain.keeps_everything and ledger.final >= self._node.run.rounds:
            late = [sealed for sealed in ledger.open.values() if sealed.document.base_version >= ledger.base_min]
            for sealed in late:  # what a rollback has undone is reported as that, when the module is settled
                chain.expire(sealed, Reason.COMPLETE)
            chain.lost.clear()
        if leader is None:
            return
        for contribution in sorted(chain.lost):
            try:
                is_settled = await self._offer(chain, contribution, leader)
            except (SwarmError, IntegrityError) as error:
                log.info("%s: ...%s did not take %s again: %s", module, short(leader), contribution[:8], error)
                return
            if is_settled:
                chain.lost.discard(contribution)
        self._refused[module] = {id_: told for id_, told in self._refused[module].items() if id_ in chain.lost}

    async def _look_back(self, chain: ModuleChain, leader: PeerId) -> None:
        try:
            if self._is_untold(chain, leader):
                branch = await RemoteLedger(self._node, leader, chain.module).branch()
                if branch.final > chain.ledger.final:
                    await chain.welcome(leader)
            await chain.look_back(leader)
        except DipacoError as error:
            log.info("%s: ...%s does not say what is final: %s", chain.module, short(leader), error)

    def _is_untold(self, chain: ModuleChain, leader: PeerId) -> bool:
        """Whether `leader`, whose mirror we are, told us of nothing final for LOST_TTLS, and has versions that may
        be. It may have told us before this disk was lost, or given up; after the last version nothing else comes."""
        module, final, now_s = chain.module, chain.ledger.final, self._node.clock.now_s()
        head = self._node.watch.heads[module].get(leader)
        if head is None or head.version <= final or not chain.is_owner:
            self._untold.pop(module, None)
            return False
        if module not in self._untold or self._untold[module][0] != final:
            self._untold[module] = final, now_s
        if now_s - self._untold[module][1] < LOST_TTLS * self._node.run.config.liveness.heartbeat_ttl_s:
            return False
        del self._untold[module]  # it is asked again after as long
        return True

    async def _offer(self, chain: ModuleChain, contribution: str, leader: PeerId) -> bool:
        """Whether this one is settled: it counts, or can count no more. That it may not is the leader's word, and any
        stranger may lead: we keep it, and offer it again, until final versions have left it behind. Raises SwarmError
        and IntegrityError."""
        module, history, watch = chain.module, self._node.history, self._node.watch
        sealed, refusals = chain.ledger.open.get(contribution), self._refused[module]
        if sealed is None:
            return True
        if refusals.get(contribution, ("", 0))[:2] != (leader, watch.reached(module)):
            payload = self._node.store.get(sealed.document.payload.digest)
            if payload is None:
                return True
            try:
                await RemoteLedger(self._node, leader, module).forward(sealed, payload)
                history.add("resubmitted", module=str(module), id=contribution, to=leader)
                return True
            except Refused as refused:
                if refused.reason in NOTED:  # others speak of the leader
                    refusals[contribution] = leader, watch.reached(module), refused.reason
        source = next((peer for peer in watch.coordinators() if peer != self._node.peer), leader)
        try:
            is_counted = await chain.is_counted(sealed, source)
        except Refused:
            return False
        if is_counted:
            chain.forget(sealed)
        elif is_counted is False:
            chain.expire(sealed, refusals.get(contribution, (leader, 0, Reason.STALE_BASE))[2])
        return is_counted is not None

    async def _pass_on(self, module: ModuleId) -> None:
        """Tell the next leader at once, rather than let it find out. If none is seen to live, its heartbeat may only be
        late: who owns the module with us is told all the same, and the coordinator."""
        node, watch = self._node, self._node.watch
        watch.heads[module].pop(self._node.peer, None)
        watch.heartbeats.pop(self._node.peer, None)
        successors = watch.successors(module, workers=self.chains.workers)
        alive = [peer for peer in successors if peer != self._node.peer]
        if alive:
            if not watch.coordinators() and self.chains[module].is_owner:
                # Nobody else may be able to: our last act as a member of the group.
                node.mandates.grant_next(self._node.swarm.signer, module, leader=alive[0], mirrors=())
            await self._hand_over(module, alive[0], timeout_s=CALL_TIMEOUT_S)
            return
        for absent in owners.absent(node.mandates.grant(module), coordinator=self._node.run.manifest.author):
            if absent != self._node.peer and await self._hand_over(module, absent, timeout_s=CONTROL_TIMEOUT_S):
                return

    async def _hand_over(self, module: ModuleId, successor: PeerId, *, timeout_s: float) -> bool:
        """Whether it says that it leads."""
        node = self._node
        request = Take(module=module, grant=node.mandates.shown(module))
        try:
            await ask(node, successor, request, timeout_s=timeout_s)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("%s did not take %s over: %s", short(successor), module, error)
            return False
        self._node.history.add("handed_over", module=str(module), to=successor)
        return True

    def _say_group(self, leader: Leader) -> None:
        grant = leader.grant
        self._node.history.add("mirrors", module=str(leader.module), term=grant.term, mirrors=list(grant.mirrors))

    def _leader_of(self, module: ModuleId) -> Leader:
        if module not in self._leaders:
            raise Refused(f"{module} is not led here", reason=Reason.NOT_LEADER)
        return self._leaders[module]
