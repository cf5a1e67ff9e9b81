"""Where a leader puts what must survive it: the mirrors of its group, and the seed's archive.

- What counts is the word of one that the leader did not choose: the group's first mirror or the archive, or any if
  these fail. The others follow.
- A contribution has its receipt once that one has signed that it is on its disk, if any of them lives.
- A version is shown to trainers once that one has made it again and cosigned. The archive's cosignature makes a version
  final.
- What one of them misses, since it was away, it gets later, in order.
- While the mirror that the coordinator chose takes what we bring, a light archive (archive.py) gets a version once a
  quorum has made it again, and a contribution only when it asks. Otherwise it gets everything, as any archive does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from ..errors import DipacoError, Refused
from ..node.node import CONTROL_TIMEOUT_S
from ..program.files import reach
from ..program.tasks import done_or_later
from ..protocol.documents import Contribution, Custody, Sealed
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from .chain import ModuleChain
from .replica import Replica, Unfit

log = logging.getLogger(__name__)

T = TypeVar("T")

LOST_TTLS = 3.0
"""Lives of a heartbeat after which contributions that nobody has count as lost, and a mirror as deaf."""
HANG_TTLS = 2.0
"""Lives of a heartbeat after which a mirror that has not answered is thought to hang, if it may be."""


class Replication:
    """One leader's dealings with its mirrors and the archive."""

    def __init__(self, chain: ModuleChain) -> None:
        self._node = chain.node
        self._chain = chain
        self._ledger = chain.ledger
        self._replicas: dict[PeerId, Replica] = {}
        self._unprovable_s: float | None = None
        """Since when contributions of our chain are not to be had by the archive, nor by us."""
        self._deaf_s: dict[PeerId, float] = {}
        """Since when a replica took nothing that we brought."""
        self._final_s = (-1, 0.0)
        """The newest version that was final when somebody asked whether all know, and since when."""
        self._absent_until_s = 0.0
        """Until when those without a heartbeat are not tried again."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In order: of a set, where each lies in memory would say which is let go of first."""
        self._on_way: dict[tuple[PeerId, str], asyncio.Task[Custody]] = {}
        """By replica, the contributions that it does not have yet."""
        self._handing_in: dict[PeerId, asyncio.Task[None]] = {}
        """By replica: one that is frozen must not come to have a queue, for which a new version would wait."""

    @property
    def is_final(self) -> bool:
        """Whether the coordinator has signed the head: then the chain is safe without us."""
        return self._ledger.final == self._ledger.head.version

    @property
    def is_told(self) -> bool:
        """Whether all mirrors that live know how far the chain is final: until then they keep what it was made of. One
        that does not hear it is not waited for without an end."""
        now_s, ttl_s = self._node.clock.now_s(), self._node.run.config.liveness.heartbeat_ttl_s
        if self._final_s[0] != self._ledger.final:
            self._final_s = self._ledger.final, now_s
        has_waited = now_s - self._final_s[1] >= LOST_TTLS * ttl_s
        mirrors = (replica for replica in self.replicas() if not replica.is_archive)
        return has_waited or all(replica.final >= self._ledger.final for replica in mirrors)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to hand in: neither versions nor what was said against work."""
        return self.is_final and self.is_told and not any(replica.unsaid for replica in self.replicas())

    async def keep(self, sealed: Sealed[Contribution], payload: bytes) -> tuple[Custody, ...]:
        """Put a contribution where it survives us; who holds it as well.

        Raises Refused when somebody else leads, or when none of those who should have it has taken it.
        """
        self._chain.add(sealed)
        reach("custody: contribution on disk, not replicated")
        replicas = self.replicas()
        if not replicas:
            return await self._keep_with_absent(sealed, payload)
        takers, spared = self._parted(replicas)
        bringing = self._brought(takers, sealed, payload)
        holder = await self._first_wanted(bringing, spared, lambda: self._brought(spared, sealed, payload))
        if holder is None and self._chain.keeps_everything:  # this disk is the archive: mirrors that lie stop nothing
            return ()
        if holder is None:
            raise Refused("no mirror has it on disk yet", reason=Reason.NO_MIRROR)
        return (holder[1],)

    async def publish(self) -> None:
        """Have the head cosigned, by one at least if any lives. Raises Refused when somebody else leads."""
        if replicas := self.replicas():
            takers, spared = self._parted(replicas)
            bringing = {self._begin(replica.bring()): replica.peer for replica in takers}
            await self._first_wanted(bringing, spared, lambda: self._hand_to(spared))
            if self._is_settled:  # else `hand_in` does, soon
                self._hand_to(spared)

    @property
    def _is_settled(self) -> bool:
        """Whether a quorum has made the head again."""
        return bool(self._ledger.versions) and self._node.mandates.has_quorum(self._ledger.versions[-1])

    def _parted(self, replicas: list[Replica]) -> tuple[list[Replica], list[Replica]]:
        """Those to whom all is brought at once, and the light archives, which are spared while the mirror that the
        coordinator chose is there."""
        wanted = self._wanted() - self.deaf()
        has_chosen = any(replica.peer in wanted and not replica.is_archive for replica in replicas)
        spared = [replica for replica in replicas if has_chosen and replica.is_light]
        return [replica for replica in replicas if replica not in spared], spared

    def _wanted(self) -> set[PeerId]:
        """Those whose word is waited for: the coordinator, and the mirror that it chose. Any stranger may have become
        another mirror, and say that it keeps what it does not."""
        grant = self._node.mandates.grant(self._chain.module)
        return {self._node.run.manifest.author, *(grant.mirrors[:1] if grant is not None else ())}

    async def hand_in(self) -> None:
        """Give everybody all that they lack, and wait for it. Raises Refused when somebody else leads."""
        takers, spared = self._parted(self.replicas())
        bringing, ttl_s = self._hand_to(takers), self._node.run.config.liveness.heartbeat_ttl_s
        if spared and not self._is_settled:
            await done_or_later(asyncio.gather(*bringing, return_exceptions=True), self._node.clock, HANG_TTLS * ttl_s)
        await self._all(bringing | self._hand_to(spared))

    def _hand_to(self, replicas: list[Replica]) -> dict[asyncio.Task[Any], PeerId]:
        """Send each replica what it lacks, unless that is on its way already."""
        for replica in replicas:
            if replica.peer not in self._handing_in or self._handing_in[replica.peer].done():
                self._handing_in[replica.peer] = self._begin(replica.bring())
        return {self._handing_in[replica.peer]: replica.peer for replica in replicas}

    def replicas(self) -> list[Replica]:
        """Those alive who should have everything that we have; the archive last, since it is busiest."""
        node = self._node
        grant = node.mandates.grant(self._chain.module)
        group = grant.mirrors if grant is not None and grant.leader == node.peer else ()
        peers = [peer for peer in group if peer in node.watch.heartbeats]
        return [self._replica(peer) for peer in [*peers, *node.watch.seeds()] if peer != node.peer]

    async def _keep_with_absent(self, sealed: Sealed[Contribution], payload: bytes) -> tuple[Custody, ...]:
        """A heartbeat may only be late: who has none is tried as well, briefly and not each time, before this disk
        alone must do."""
        clock, ttl_s = self._node.clock, self._node.run.config.liveness.heartbeat_ttl_s
        if clock.now_s() >= self._absent_until_s:
            trying = asyncio.ensure_future(self._first(self._brought(self._absent(), sealed, payload)))
            try:
                await done_or_later(trying, clock, CONTROL_TIMEOUT_S)
                if trying.done() and (holder := trying.result()) is not None:
                    return (holder[1],)
            finally:
                trying.cancel()
            self._absent_until_s = clock.now_s() + ttl_s
        return ()

    def _absent(self) -> list[Replica]:
        """Those who should be there, and from whom no heartbeat came."""
        grant = self._node.mandates.grant(self._chain.module)
        peers = {*(grant.mirrors if grant is not None else ()), self._node.run.manifest.author}
        banned = self._node.decrees.state.banned.keys()
        return [self._replica(peer) for peer in sorted(peers - banned - {self._node.peer})]

    def _replica(self, peer: PeerId) -> Replica:
        grant = self._node.mandates.grant(self._chain.module)
        if peer not in self._replicas:
            is_archive = grant is None or peer not in grant.group
            self._replicas[peer] = Replica(self._chain, peer, is_archive=is_archive)
        return self._replicas[peer]

    def deaf(self) -> set[PeerId]:
        """Those who live and have taken nothing for a while, whatever we brought them; or no version, however readily
        they take contributions, for longer by a round: a machine that needs a whole round for one cannot keep up."""
        now_s, silent_s = self._node.clock.now_s(), LOST_TTLS * self._node.run.config.liveness.heartbeat_ttl_s
        behind_s = silent_s + self._chain.timing.deadline_s()
        deaf = {peer for peer, since_s in self._deaf_s.items() if now_s - since_s >= silent_s}
        return deaf | {peer for peer, replica in self._replicas.items() if now_s - replica.behind_s >= behind_s}

    def welcome(self) -> None:
        """Have new mirrors take over our chain, soon. What fails comes right with the next version."""
        for replica in self.replicas():
            if not replica.is_archive and not replica.is_welcome:
                self._begin(replica.welcome())

    @property
    def diverged(self) -> list[PeerId]:
        """The archives that have another branch than we."""
        return sorted(peer for peer, replica in self._replicas.items() if replica.is_diverged)

    @property
    def is_unprovable(self) -> bool:
        """Whether the archive lacks contributions of our chain that nobody alive has: it can never sign that chain."""
        return any(replica.is_unprovable for replica in self._replicas.values())

    def is_hopeless(self) -> bool:
        """Whether that has been so for long enough that nobody who has them will come back."""
        now_s, ttl_s = self._node.clock.now_s(), self._node.run.config.liveness.heartbeat_ttl_s
        if not self.is_unprovable:
            self._unprovable_s = None
            return False
        self._unprovable_s = now_s if self._unprovable_s is None else self._unprovable_s
        return now_s - self._unprovable_s >= LOST_TTLS * ttl_s

    def begin_anew(self) -> None:
        """Another branch is ours now: those who have the last one take it over, too."""
        self._unprovable_s = None
        for replica in self._replicas.values():
            replica.reset()
        self.welcome()

    def close(self) -> None:
        """Let go of what is still on its way."""
        for task in self._tasks:
            task.cancel()

    def _brought(
        self, replicas: list[Replica], sealed: Sealed[Contribution], payload: bytes
    ) -> dict[asyncio.Task[Custody], PeerId]:
        """A contribution on its way to each, once: on a slow line that takes longer than a call lasts, and its author
        asks again and again."""
        for replica in replicas:
            key = replica.peer, sealed.id
            if key not in self._on_way:
                self._on_way[key] = self._begin(replica.keep(sealed, payload))
                self._on_way[key].add_done_callback(partial(self._arrived, key))
        return {self._on_way[replica.peer, sealed.id]: replica.peer for replica in replicas}

    async def _first_wanted(
        self,
        tasks: dict[asyncio.Task[T], PeerId],
        spared: list[Replica],
        bring: Callable[[], dict[asyncio.Task[T], PeerId]],
    ) -> tuple[PeerId, T] | None:
        """As `_first`, of those whose word is waited for. Archives that are `spared` get it as well if none of these
        has taken it within HANG_TTLS, or at all: a mirror may live and hang."""
        wanted, ttl_s = self._wanted(), self._node.run.config.liveness.heartbeat_ttl_s
        if not spared:
            return await self._first(tasks, wanted=wanted)
        waiting = [asyncio.ensure_future(self._first(tasks, wanted=wanted))]
        try:
            await done_or_later(waiting[0], self._node.clock, HANG_TTLS * ttl_s)
            while True:
                done = [each for each in waiting if each.done()]
                taken = [found for each in done if (found := each.result()) is not None]
                has_wanted = any(peer in wanted for peer, _ in taken)
                if has_wanted or len(done) == len(waiting) == 2:
                    return max(taken, key=lambda found: found[0] in wanted, default=None)
                if len(waiting) == 1:
                    waiting.append(asyncio.ensure_future(self._first(bring())))
                await asyncio.wait([each for each in waiting if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _first(
        self, tasks: dict[asyncio.Task[T], PeerId], *, wanted: Collection[PeerId] | None = None
    ) -> tuple[PeerId, T] | None:
        """The first that succeeds, while the others go on; None when all fail. One that is not `wanted` counts once all
        others have failed. Raises Refused if another leads."""
        pending, other = set(tasks), None
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks[task]):
                if self._succeeded(tasks[task], task):
                    found = tasks[task], task.result()
                    if wanted is None or found[0] in wanted:
                        return found
                    other = other or found
        return other

    async def _all(self, tasks: dict[asyncio.Task[T], PeerId]) -> None:
        if tasks:
            await asyncio.wait(tasks)
        for task, peer in tasks.items():
            self._succeeded(peer, task)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _arrived(self, key: tuple[PeerId, str], task: asyncio.Task[None]) -> None:
        del self._on_way[key]

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, DipacoError):
            log.error("%s: handing something in failed", self._chain.module, exc_info=error)

    def _succeeded(self, peer: PeerId, task: asyncio.Task[Any]) -> bool:
        """Whether it did; raises Refused if it says that another leads."""
        if task.cancelled():
            return False
        error = task.exception()
        if isinstance(error, Refused) and error.reason == Reason.NOT_LEADER:
            self._begin(self._node.watch.mandate_news.learn(self._chain.module, peer))
            raise error
        if error is None:
            self._deaf_s.pop(peer, None)
        elif not isinstance(error, Unfit):
            self._deaf_s.setdefault(peer, self._node.clock.now_s())
        if isinstance(error, DipacoError):
            log.info("%s: ...%s did not take it: %s", self._chain.module, short(peer), error)
        return error is None


@contextlib.contextmanager
def tried(chain: ModuleChain, sealed: Sealed[Contribution], *, stays: Callable[[], bool]) -> Iterator[None]:
    """Keep a contribution in this block, and admit it: if that fails, nothing of it stays here but its author's
    commitment, or each try would fill the disk a little more. What was here before stays: it may have a receipt. So
    does what another try admitted, and what is here when somebody else leads: we may have signed that leader's custody
    meanwhile, as its mirror. `stays` says whether it is one of these two."""
    is_new = sealed.id not in chain.ledger.kept
    try:
        yield
    except DipacoError:
        if is_new and not stays():
            chain.originals.take_back(sealed.id)
            chain.forget(sealed)
        raise
