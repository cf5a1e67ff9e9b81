"""The collector: follows a run through the same public protocol as any peer, and keeps account of it.

It only reads. Everything is pulled (`StagePull`): after it was away it asks for what it missed, and for nothing else. A
peer that does not answer, answers slowly, or not what was asked, costs one time limit, and others are asked; what one
answer may bring is bounded. What peers say is checked (ledger.py) before it is stored or shown. Every few seconds the
`Collector` hands a `Snapshot` to whoever shows it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.calls import GetChain, GetChecks, GetContributions, GetJudgements, GetReceipts, GetRejections
from dipaco_p2p.node.node import CONTROL_TIMEOUT_S, ask, open_observer
from dipaco_p2p.node.reading import Teller, ask_chain, chain_tellers, open_connection
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.program.tasks import in_time, keep_going
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Receipt, Rejection, Sealed, rejected
from dipaco_p2p.protocol.judgement import Check, Judgement
from dipaco_p2p.protocol.rounds import OpenRound
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import is_final
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.calls import Request
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId
from leaderboard.chains import Refusals

from .database import Database
from .ledger import Stage, Write
from .model import Snapshot
from .rows import StageRows, stage_rows
from .snapshot import Live, path_states, read_live, take_snapshot

POLL_S = 3.0
POLL_MAX_S = 60.0
"""A poll that takes longer is broken off; the next one goes on where it stopped."""
SNAPSHOT_S = 3.0
POLLS_TO_CATCH_UP = 3
"""The first asks for the chains, the next for what they name."""
PRUNE_POLLS = 100

TELLER_S = 10.0
"""One peer has so long for all pages of a list: whoever answers each call just in time costs the others little."""
CHAINS_S = 30.0
"""All modules have so long in one poll; the next poll goes on."""
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

log = logging.getLogger(__name__)

R = TypeVar("R")


class Collector:
    """Keeps account of one run."""

    def __init__(
        self,
        swarm: Swarm,
        host: PeerId,
        clock: Clock,
        database: Database,
        *,
        expected: str | None,
        on_snapshot: Callable[[Snapshot], None],
        poll_s: float = POLL_S,
        join: str = "",
        stages: list[Stage] | None = None,
    ) -> None:
        """`host` is a peer of the run; `expected` is the run's id or the start of it: without one, `host` must be the
        coordinator. `join` is the line that volunteers join with; `stages` is what the database holds, if it was loaded
        already: that may take a while. Raises what `Database.load` does."""
        self._swarm = swarm
        self._host = host
        self._clock = clock
        self._database = database
        self._expected = expected
        self._on_snapshot = on_snapshot
        self._poll_s = poll_s
        self._join = join
        observed = database.observed()
        self._refusals = stages[0].refusals if stages else Refusals(dict(observed.refused))
        self._stages = database.load(self._refusals) if stages is None else stages
        if self._stages and expected is None:
            self._expected = self._stages[0].run.origin
        self._pulls: dict[str, StagePull] = {}
        self._rows: dict[str, tuple[int, StageRows]] = {}
        self._showing = asyncio.Lock()
        self._states = dict(observed.path_states)
        self._live = Live(
            last_seen_s={PeerId(peer): at_s for peer, at_s in observed.last_seen_s.items()},
            names={PeerId(peer): said for peer, said in observed.names.items()},
            heard_s=observed.heard_s,
        )
        self._polls = 0
        self._unwritten: list[Write] = []
        self._said: list[Write] = []
        """What the newest poll heard of who lives: the next one hears it again, so nothing of it waits for the disk."""

    @property
    def stages(self) -> Sequence[Stage]:
        """What was taken in so far; the first stage first."""
        return self._stages

    @property
    def is_settled(self) -> bool:
        """Whether the run is over, and all there is to know of it is here."""
        return bool(self._stages) and self._stages[-1].run.is_last_stage and all(s.is_settled for s in self._stages)

    async def wait_caught_up(self) -> None:
        """Until all there is to know now is here, as far as it was told."""
        while not self.is_settled and self._polls < POLLS_TO_CATCH_UP:
            await self._clock.sleep(self._poll_s / 10)

    async def run(self) -> None:
        """Poll and make snapshots until cancelled."""
        await asyncio.gather(keep_going(self._poll_forever, self._clock), keep_going(self._show_forever, self._clock))

    async def poll(self) -> None:
        """Ask for everything once, and write it down. Never raises for what peers or the disk do."""
        self._polls += 1
        try:
            async with asyncio.timeout(POLL_MAX_S):
                await self._find_stages()
                for stage in self._stages:
                    await self._poll_stage(stage)
        except TimeoutError:
            log.info("a poll took more than %g s, and was broken off", POLL_MAX_S)
        self._note_live()
        await self._write()

    async def snapshot(self) -> Snapshot | None:
        """What is known now; None before the run is known."""
        if not self._stages:
            return None
        async with self._showing:  # one at a time: they share the rows that are known
            return await self._take_snapshot()

    async def _take_snapshot(self) -> Snapshot:
        stages = tuple(stage.copy() for stage in self._stages)
        changes = [stage.changes for stage in self._stages]
        live, refused = self._live, dict(self._refusals.counts)
        known = [self._rows.get(stage.run.id, (-1, None)) for stage in stages]
        rows = [row if made_at == count else None for (made_at, row), count in zip(known, changes, strict=True)]
        now_s = self._clock.now_s()

        def work() -> tuple[list[StageRows], Snapshot]:
            made = [stage_rows(one) if row is None else row for one, row in zip(stages, rows, strict=True)]
            return made, take_snapshot(stages, now_s=now_s, live=live, refused=refused, join=self._join, rows=made)

        made, snapshot = await asyncio.to_thread(work)
        for one, count, row in zip(stages, changes, made, strict=True):
            self._rows[one.run.id] = count, row
        return snapshot

    async def _poll_forever(self) -> None:
        while True:
            await self.poll()
            await self._clock.sleep(self._poll_s)

    async def _show_forever(self) -> None:
        while True:
            snapshot = await self.snapshot()
            if snapshot is not None:
                self._on_snapshot(snapshot)
            await self._clock.sleep(SNAPSHOT_S)

    async def _find_stages(self) -> None:
        """Until the last one is known, whoever may know it is asked: the host, and the coordinator."""
        if self._stages and self._stages[-1].run.is_last_stage:
            return
        author = [self._stages[0].run.manifest.author] if self._stages else []
        for peer in dict.fromkeys([self._host, *author]):
            try:
                runs = await fetch_stages(self._swarm, peer, expected=self._expected)
                self._add_stages(runs)
                return
            except DipacoError as error:
                log.info("%s did not tell the stages of the run: %s", peer, error)

    def _add_stages(self, runs: Sequence[Run]) -> None:
        known = [stage.run.id for stage in self._stages]
        if [run.id for run in runs[: len(known)]] != known:
            log.warning("another run is served than the one that is known here: %s", runs[0].name)
            return
        for run in runs[len(known) :]:
            self._stages.append(Stage(run, self._refusals, self._stages[0].decrees if self._stages else None))
        self._expected = runs[0].origin

    async def _poll_stage(self, stage: Stage) -> None:
        """Of a stage that is over only what is missing is asked for."""
        is_open = stage is self._stages[-1]
        if not is_open and stage.is_settled:
            return
        pull = self._pulls.get(stage.run.id)
        if pull is None:
            pull = self._pulls[stage.run.id] = StagePull(stage, self._swarm, self._clock, host=self._host)
        await pull.poll()

    def _note_live(self) -> None:
        """Who is there now, and since when each path is in its state."""
        stage = self._stages[-1] if self._stages else None
        pull = self._pulls.get(stage.run.id) if stage is not None else None
        if stage is None or pull is None:
            return
        now_s = self._clock.now_s()
        live = read_live(pull.watch, self._live, now_s=now_s)
        self._live = replace(live, path_states=self._since(stage, live, now_s=now_s))
        self._said = [] if live.heard_s is None else [("heard", (live.heard_s,))]
        for peer, beat in pull.watch.heartbeats.items():
            doing, said = live.volunteers.get(peer, ""), live.names.get(peer, ("", ""))
            self._said.append(("heartbeat", (peer, beat.role, doing, now_s, *said)))

    def _since(self, stage: Stage, live: Live, *, now_s: float) -> dict[PathId, tuple[str, float]]:
        """The state of each path, and since when."""
        run, since = stage.run.id, {}
        reached = {module: chain.head.version for module, chain in stage.chains.items()}
        for path, state in path_states(stage.run, reached, live).items():
            key = run, str(path)
            if key not in self._states or self._states[key][0] != state:
                self._states[key] = state.value, now_s
                self._unwritten.append(("path", (*key, *self._states[key])))
            since[path] = self._states[key]
        return since

    async def _write(self) -> None:
        """In a thread. What the disk refuses is tried again with the next poll."""
        for stage in self._stages:
            self._unwritten += stage.drain()
        refused = [("refused", (reason, count)) for reason, count in self._refusals.counts.items()]
        count = len(self._unwritten)
        try:
            await asyncio.to_thread(self._database.write, [*self._unwritten, *self._said, *refused])
            self._unwritten = self._unwritten[count:]
            if self._polls % PRUNE_POLLS == 0:
                await asyncio.to_thread(self._database.prune)
        except sqlite3.Error as error:
            log.error("the database was not written, and will be tried again: %s", error)


class StagePull:
    """What one stage lacks, and whom to ask."""

    def __init__(self, stage: Stage, swarm: Swarm, clock: Clock, *, host: PeerId) -> None:
        self.stage = stage
        self._node = open_observer(stage.run, ScopedSwarm(swarm, stage.run.id), clock, stage.decrees)
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
        await self._try("judgements", self._pull_judgements())  # before any leader may keep us waiting
        await self._try("open rounds", self.watch.read_rounds())
        await self._try("chains", in_time(self._poll_modules(), self._clock, CHAINS_S, what="the chains"))
        for peer in self._seeds() if self.stage.judgements else ():
            await self._hear(f"checks of {peer}", self._pull_checks_of(peer))
        await self._try("contributions", self._pull_contributions())

    async def _poll_modules(self) -> None:
        """Each poll begins with another module: slow leaders of some must not always come before the same others."""
        gate, modules = asyncio.Semaphore(MODULES_AT_ONCE), list(self.stage.chains)
        first = self._polls * MODULES_AT_ONCE % len(modules)
        await asyncio.gather(*(self._poll_module(module, gate) for module in [*modules[first:], *modules[:first]]))

    async def _poll_module(self, module: ModuleId, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self._try(f"versions of {module}", self._pull_chain(module))
            is_news = self.watch.rounds.get(module) != self._receipted.get(module)
            await self._hear(f"receipts of {module}", self._pull_receipts(module))
            if is_news or self._polls % REJECTIONS_POLLS == 0:
                await self._hear(f"rejections of {module}", self._pull_rejections(module))

    async def _pull_chain(self, module: ModuleId) -> None:
        """Until what the leader announces is here, or nobody has more. What is not final yet is asked for again: it may
        have been replaced, or signed."""
        for teller in self._tellers(module):
            if not self._lacks(module):
                return
            await self._hear(f"{teller[1].METHOD} of {module}", self._pull_from(teller, module))

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
            page = await self.stage.refusals.read_page(ModuleVersion, reply.body)
            found += page
            if not page or begin + len(page) > self.stage.run.rounds + 1:
                return
            await self._learn_grants(teller[0], module, page)
            self.stage.take_versions(module, found, now_s=self._clock.now_s())
            if [sealed.document.version for sealed in page] != list(range(begin + 1, begin + len(page) + 1)):
                return  # they were counted; whoever goes on with others could page for ever
            if chain.head == found[-1].document:
                after, found = chain.head.version, []

    async def _learn_grants(self, peer: PeerId, module: ModuleId, found: Sequence[Sealed[ModuleVersion]]) -> None:
        """Who tells versions that are not final shows the mandates of their leaders."""
        coordinator = self.stage.run.manifest.author
        self.stage.take_grants(module, self._node.mandates.grants(module))
        unknown = [one for one in found if one.document.grant not in self.stage.grants]
        if any(not is_final(sealed, coordinator=coordinator) for sealed in unknown):
            await self._try(f"mandates of {module}", self.watch.mandate_news.learn(module, peer))
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
            page = await self.stage.refusals.read_page(Receipt, reply.body)
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
            page = await self.stage.refusals.read_page(Rejection, reply.body)
            self.stage.take_rejections(module, page)
            if not page or (last := rejected(page[-1].document).id) <= after:
                return
            after = last

    async def _pull_checks_of(self, peer: PeerId) -> None:
        for _ in range(PAGES_MAX):
            begin = self._checks_from.get(peer, 0)
            reply = await self._ask(peer, GetChecks(from_=begin))
            self.stage.take_checks(await self.stage.refusals.read_page(Check, reply.body))
            if reply.next is None or reply.next <= begin:
                return
            self._checks_from[peer] = reply.next

    async def _pull_judgements(self) -> None:
        """From the coordinator, or whoever else has them: they are signed."""
        if len(self.stage.judgements) > self.stage.run.rounds:
            return
        for peer in self._seeds():
            if await self._hear(f"judgements of {peer}", self._pull_judgements_of(peer)):
                return

    async def _pull_judgements_of(self, peer: PeerId) -> None:
        for _ in range(PAGES_MAX):
            reply = await self._ask(peer, GetJudgements(from_=self._judgements_from))
            page = await self.stage.refusals.read_page(Judgement, reply.body)
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
            await self._hear(f"contributions of {peer}", self._pull_portion_of(peer, ids))
            ids = [id_ for id_ in ids if not self.stage.has(id_)]
            if not ids:
                return
        for id_ in ids:
            times = self._asked.get(id_, (0, 0))[0] + 1
            self._asked[id_] = times, self._polls + 2 ** min(times, BACK_OFF_MAX)

    async def _pull_portion_of(self, peer: PeerId, ids: list[str]) -> None:
        reply = await self._ask(peer, GetContributions(ids=tuple(ids)))
        self.stage.take_contributions(await self.stage.refusals.read_page(Contribution, reply.body))

    def _seeds(self) -> Iterator[PeerId]:
        """The coordinator first: its archive is the one that counts."""
        author = self.stage.run.manifest.author
        yield from islice(dict.fromkeys([author, *self.watch.seeds(), self._host]), TELLERS_MAX)

    async def _ask(self, peer: PeerId, request: Request[R]) -> R:
        return await ask(self._node, peer, request, timeout_s=CONTROL_TIMEOUT_S)

    async def _hear(self, what: str, work: Awaitable[None]) -> bool:
        """As `_try`, of what one peer tells."""
        return await self._try(what, in_time(work, self._clock, TELLER_S, what=what))

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


@asynccontextmanager
async def collect(
    address: str, database: Database, *, expected: str | None, **options: Any
) -> AsyncIterator[Collector]:
    """A collector of the run at `address`, at work while the block runs; `options` are those of `Collector`. Raises as
    `open_reader` and `Collector` do."""
    async with open_connection(address, expected=expected) as connection:
        collector = Collector(
            connection.swarm, connection.host, connection.clock, database, expected=connection.run, **options
        )
        work = asyncio.create_task(collector.run())
        try:
            yield collector
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
