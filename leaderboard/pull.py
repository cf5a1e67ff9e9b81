"""Asking the peers of one stage for what is not here yet, through the same calls as any peer of the run.

Everything is pulled: whoever was away for a while asks for more, and for nothing else. A peer that does not answer, or
not what was asked, costs one time limit, and others are asked. What one answer may bring is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.calls import GetChain, GetChecks, GetContributions, GetJudgements, GetReceipts, GetRejections
from dipaco_p2p.node.node import CONTROL_TIMEOUT_S, open_observer
from dipaco_p2p.node.reading import Teller, ask, ask_chain, chain_tellers
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Receipt, Rejection, Sealed, rejected
from dipaco_p2p.protocol.judgement import Check, Judgement
from dipaco_p2p.protocol.rounds import OpenRound
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import is_final
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.calls import Request
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId

from .tables import Stage

MODULES_AT_ONCE = 8
TELLERS_MAX = 6
"""Peers that are asked for one list."""
PAGES_MAX = 64
"""Of one list, in one poll; the next poll goes on."""
IDS_AT_ONCE = 64
"""Contributions asked for in one call: as many as fit into an answer, if they are small."""
IDS_MAX = 1024
"""Contributions asked for in one poll."""
REJECTIONS_POLLS = 10
"""Leaders are asked for what they refused whenever their open round has changed, and else in every tenth poll."""
BACK_OFF_MAX = 6
"""What was asked for so often in vain is asked for every 2^6 = 64 polls."""

R = TypeVar("R")

log = logging.getLogger(__name__)


class StagePull:
    """What one stage lacks, and whom to ask."""

    def __init__(self, stage: Stage, swarm: Swarm, clock: Clock, *, host: PeerId) -> None:
        self.stage = stage
        self._node = open_observer(stage.run, ScopedSwarm(swarm, stage.run.id), clock)
        self.watch = self._node.watch
        self._clock = clock
        self._host = host
        self._polls = 0
        self._judgements_from = 0
        self._checks_from: dict[PeerId, int] = {}
        """Of each seed node, the number of the check to go on with."""
        self._receipted: dict[ModuleId, OpenRound] = {}
        """The open rounds whose receipts were asked for."""
        self._asked: dict[str, tuple[int, int]] = {}
        """Of contributions that nobody had: how often they were asked for, and the poll in which to ask again."""

    async def poll(self) -> None:
        """Ask for everything once. A failure of one peer or one call is logged, and the others go on."""
        self._polls += 1
        await self._try("heartbeats, claims and heads", self.watch.refresh())
        await self._try("open rounds", self.watch.read_rounds())
        gate = asyncio.Semaphore(MODULES_AT_ONCE)
        await asyncio.gather(*(self._poll_module(module, gate) for module in self.stage.chains))
        await self._try("judgements", self._pull_judgements())
        for peer in self._seeds() if self.stage.judgements else ():
            await self._try(f"checks of {peer}", self._pull_checks_of(peer))
        await self._try("contributions", self._pull_contributions())

    async def _poll_module(self, module: ModuleId, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self._try(f"versions of {module}", self._pull_chain(module))
            is_news = self.watch.rounds.get(module) != self._receipted.get(module)
            await self._try(f"receipts of {module}", self._pull_receipts(module))
            if is_news or self._polls % REJECTIONS_POLLS == 0:
                await self._try(f"rejections of {module}", self._pull_rejections(module))

    async def _pull_chain(self, module: ModuleId) -> None:
        """Until what the leader announces is here, or nobody has more. What is not final yet is asked for again: it may
        have been replaced, or signed."""
        for teller in self._tellers(module):
            if not self._lacks(module):
                return
            await self._try(f"{teller[1].METHOD} of {module}", self._pull_from(teller, module))

    def _tellers(self, module: ModuleId) -> list[Teller]:
        """The coordinator before others that say that they are seed nodes: of these there may be many. It alone, where
        nobody says anything any more: of a stage that is over it still answers, also after a restart."""
        author = self.stage.run.manifest.author
        tellers = list(chain_tellers(self._node, module)) or [(author, GetChain)]
        archive = [teller for teller in tellers if teller == (author, GetChain)]
        return list(dict.fromkeys([*tellers[:1], *archive, *tellers]))[:TELLERS_MAX]

    async def _pull_from(self, teller: Teller, module: ModuleId) -> None:
        """Page by page, so that a poll that is broken off is not lost. Of another branch than ours all that was told so
        far is looked at each time: only whole it may be the better one."""
        chain = self.stage.chains[module]
        after = chain.final
        found: list[Sealed[ModuleVersion]] = []
        for _ in range(PAGES_MAX):
            begin = after + len(found)
            reply = await ask_chain(self._node, teller, module, after=begin, timeout_s=CONTROL_TIMEOUT_S)
            page = self.stage.refusals.read_page(ModuleVersion, reply.body)
            found += page
            if not page or begin + len(page) > self.stage.run.config.rounds.rounds + 1:
                return
            await self._learn_grants(teller[0], module, page)
            self.stage.take_versions(module, found, now_s=self._clock.now_s())
            if chain.head == found[-1].document:
                after, found = chain.head.version, []

    async def _learn_grants(self, peer: PeerId, module: ModuleId, found: Sequence[Sealed[ModuleVersion]]) -> None:
        """Who tells versions that are not final shows the mandates of their leaders."""
        coordinator = self.stage.run.manifest.author
        self.stage.take_grants(module, self._node.mandates.grants(module))
        unknown = [one for one in found if one.document.grant not in self.stage.grants]
        if any(not is_final(sealed, coordinator=coordinator) for sealed in unknown):
            await self._try(f"mandates of {module}", self.watch.learn_mandate(module, peer))
            self.stage.take_grants(module, self._node.mandates.grants(module))

    def _lacks(self, module: ModuleId) -> bool:
        """Whether there may be news of a chain. While nobody leads, or not all is final, the archive is asked."""
        chain, leader = self.stage.chains[module], self.watch.leader(module)
        if chain.is_settled:
            return False
        if leader is None or chain.final < chain.head.version:
            return True
        return self.watch.heads[module][leader].branch != chain.branch

    async def _pull_receipts(self, module: ModuleId) -> None:
        """Whenever something has come into the open round, or it is another one."""
        leader, round_ = self.watch.leader(module), self.watch.rounds.get(module)
        if leader is None or round_ is None or round_ == self._receipted.get(module):
            return
        after = ""
        for _ in range(PAGES_MAX):
            reply = await self._ask(leader, GetReceipts(module=module, after=after))
            page = self.stage.refusals.read_page(Receipt, reply.body)
            self.stage.take_receipts(module, page)
            if not page or page[-1].document.contribution <= after:
                break
            after = page[-1].document.contribution
        self._receipted[module] = round_

    async def _pull_rejections(self, module: ModuleId) -> None:
        """What the leader says that it refused."""
        leader, after = self.watch.leader(module), ""
        if leader is None:
            return
        self.stage.take_grants(module, self._node.mandates.grants(module))
        for _ in range(PAGES_MAX):
            reply = await self._ask(leader, GetRejections(module=module, after=after))
            page = self.stage.refusals.read_page(Rejection, reply.body)
            self.stage.take_rejections(module, page)
            if not page or (last := rejected(page[-1].document).id) <= after:
                return
            after = last

    async def _pull_checks_of(self, peer: PeerId) -> None:
        for _ in range(PAGES_MAX):
            begin = self._checks_from.get(peer, 0)
            reply = await self._ask(peer, GetChecks(from_=begin))
            self.stage.take_checks(self.stage.refusals.read_page(Check, reply.body))
            if reply.next is None or reply.next <= begin:
                return
            self._checks_from[peer] = reply.next

    async def _pull_judgements(self) -> None:
        """From the coordinator, or whoever else has them: they are signed."""
        if len(self.stage.judgements) > self.stage.run.config.rounds.rounds:
            return
        for peer in self._seeds():
            if await self._try(f"judgements of {peer}", self._pull_judgements_of(peer)):
                return

    async def _pull_judgements_of(self, peer: PeerId) -> None:
        for _ in range(PAGES_MAX):
            reply = await self._ask(peer, GetJudgements(from_=self._judgements_from))
            page = self.stage.refusals.read_page(Judgement, reply.body)
            self.stage.take_judgements(page)
            newest = max(self.stage.judgements, default=-1) + 1
            if not page or newest == self._judgements_from:
                return
            self._judgements_from = newest

    async def _pull_contributions(self) -> None:
        """Of what is missing those whose turn it is, in small portions."""
        missing = self.stage.missing()
        self._asked = {id_: self._asked[id_] for id_ in missing if id_ in self._asked}
        due = [id_ for id_ in missing if self._asked.get(id_, (0, 0))[1] <= self._polls][:IDS_MAX]
        for begin in range(0, len(due), IDS_AT_ONCE):
            await self._pull_portion(due[begin : begin + IDS_AT_ONCE])

    async def _pull_portion(self, ids: list[str]) -> None:
        for peer in self._seeds():
            await self._try(f"contributions of {peer}", self._pull_portion_of(peer, ids))
            ids = [id_ for id_ in ids if not self.stage.has(id_)]
            if not ids:
                return
        for id_ in ids:
            times = self._asked.get(id_, (0, 0))[0] + 1
            self._asked[id_] = times, self._polls + 2 ** min(times, BACK_OFF_MAX)

    async def _pull_portion_of(self, peer: PeerId, ids: list[str]) -> None:
        reply = await self._ask(peer, GetContributions(ids=tuple(ids)))
        self.stage.take_contributions(self.stage.refusals.read_page(Contribution, reply.body))

    def _seeds(self) -> Iterator[PeerId]:
        """The coordinator first: its archive is the one that counts."""
        author = self.stage.run.manifest.author
        yield from islice(dict.fromkeys([author, *self.watch.seeds(), self._host]), TELLERS_MAX)

    async def _ask(self, peer: PeerId, request: Request[R]) -> R:
        return await ask(self._node, peer, request, timeout_s=CONTROL_TIMEOUT_S)

    @staticmethod
    async def _try(what: str, work: Awaitable[None]) -> bool:
        """Whether it succeeded."""
        try:
            await work
            return True
        except DipacoError as error:
            log.info("%s: %s", what, error)
        except Exception:  # of our own making: it must not keep the others from being asked
            log.exception("%s failed", what)
        return False
