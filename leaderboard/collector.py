"""The collector: follows a run through the same public protocol as any peer, and keeps account of it.

It only reads. Everything is pulled, so that after it was away it asks for what it missed; what peers say is checked
(tables.py) before it is stored or shown. Every few seconds it hands a `Snapshot` to whoever shows it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.reading import open_connection
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.program.tasks import keep_going
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.topology import PathId

from .database import Database
from .live import Live, read_live
from .model import Snapshot
from .pull import StagePull
from .refusals import Refusals
from .rows import KnownRows, StageRows, records_of, stage_rows
from .snapshot import Tables, path_states, take_snapshot
from .tables import Stage, Write

POLL_S = 3.0
POLL_MAX_S = 60.0
"""A poll that takes longer is broken off; the next one goes on where it stopped."""
SNAPSHOT_S = 3.0
POLLS_TO_CATCH_UP = 3
"""The first asks for the chains, the next for what they name."""
PRUNE_POLLS = 100

log = logging.getLogger(__name__)


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
        self._known: defaultdict[str, KnownRows] = defaultdict(KnownRows)
        self._showing = asyncio.Lock()
        self._states = dict(observed.path_states)
        self._live = Live(
            last_seen_s={PeerId(peer): at_s for peer, at_s in observed.last_seen_s.items()}, heard_s=observed.heard_s
        )
        self._polls = 0
        self._unwritten: list[Write] = []

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
        records = [records_of(stage) for stage in self._stages]
        changes = [stage.changes for stage in self._stages]
        tables = Tables(stages=tuple(records), live=self._live, refused=dict(self._refusals.counts), join=self._join)
        rows = [self._known_rows(stage.run.id, count) for stage, count in zip(self._stages, changes, strict=True)]
        now_s = self._clock.now_s()

        def work() -> tuple[list[StageRows], Snapshot]:
            made = [
                stage_rows(one, self._known[one.run.id]) if row is None else row
                for one, row in zip(records, rows, strict=True)
            ]
            return made, take_snapshot(tables, now_s=now_s, rows=made)

        made, snapshot = await asyncio.to_thread(work)
        for one, count, row in zip(records, changes, made, strict=True):
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
        self._stages += [Stage(run, self._refusals) for run in runs[len(known) :]]
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
        self._unwritten += live_writes(stage.run.id, self._live, pull, now_s=now_s)

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

    def _known_rows(self, run: str, changes: int) -> StageRows | None:
        known = self._rows.get(run)
        return known[1] if known is not None and known[0] == changes else None

    async def _write(self) -> None:
        """In a thread. What the disk refuses is tried again with the next poll."""
        for stage in self._stages:
            self._unwritten += stage.drain()
        refused = [("refused", (reason, count)) for reason, count in self._refusals.counts.items()]
        writes = [*self._unwritten, *refused]
        try:
            await asyncio.to_thread(self._database.write, writes)
            self._unwritten = self._unwritten[len(writes) - len(refused) :]
            if self._polls % PRUNE_POLLS == 0:
                await asyncio.to_thread(self._database.prune)
        except sqlite3.Error as error:
            log.error("the database was not written, and will be tried again: %s", error)


def live_writes(run: str, live: Live, pull: StagePull, *, now_s: float) -> list[Write]:
    """What peers say of themselves, for the tables; each poll in place of the last."""
    writes: list[Write] = [("no claims", (run,)), ("no heads", (run,))]
    for path, peers in live.claims.items():
        writes += [("claim", (run, str(path), peer, since_s)) for peer, since_s in peers.items()]
    for module, lead in live.leads.items():
        writes.append(("head", (run, str(module), lead.leader, lead.version, lead.digest, lead.term)))
    for peer, beat in pull.watch.heartbeats.items():
        writes.append(("heartbeat", (peer, beat.role, live.volunteers.get(peer, ""), now_s)))
    if live.heard_s is not None:
        writes.append(("heard", (live.heard_s,)))
    return writes


@asynccontextmanager
async def collect(
    address: str,
    database: Database,
    *,
    expected: str | None,
    on_snapshot: Callable[[Snapshot], None],
    join: str = "",
    stages: list[Stage] | None = None,
) -> AsyncIterator[Collector]:
    """A collector of the run at `address`, at work while the block runs. Raises as `open_connection`, `Collector`."""
    async with open_connection(address, expected=expected) as connection:
        collector = Collector(
            connection.swarm,
            connection.host,
            connection.clock,
            database,
            expected=connection.run,
            on_snapshot=on_snapshot,
            join=join,
            stages=stages,
        )
        work = asyncio.create_task(collector.run())
        try:
            yield collector
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
