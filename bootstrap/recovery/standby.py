"""A further seed node of a run, without the coordinator's key: an entry for newcomers, and a second archive.

Once the coordinator has appointed it, leaders hand it every contribution and version as they do the coordinator's seed
node; it makes the versions again, keeps everything, and serves it. Before, nobody relies on it, and it copies what is
final. It grants nothing and makes nothing final: only the coordinator's signature does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from dipaco_p2p.clock import Clock, SystemClock
from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, Unreachable
from dipaco_p2p.node.decree_news import serve_decrees
from dipaco_p2p.node.dial import doors, knock
from dipaco_p2p.node.doorplate import tell_address
from dipaco_p2p.node.entry import Entry, read_entry
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.node.node import open_member, serve_store
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.shardings import learn_shardings, serve_shardings
from dipaco_p2p.node.stages import Stages, fetch_stages, stages_after
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.owner.mirror_calls import MirrorCalls
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.console import log_to, on_signals
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.program.history import History
from dipaco_p2p.program.tasks import keep_going
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import read_address
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from dipaco_p2p.swarm.identity import KEY_NAME
from dipaco_p2p.swarm.relay_slots import RelayLimits
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.folder import RunFolder

from ..archives.records import PublicRecords
from ..folder import write_stage
from .catching_up import Filling
from .rejoin import Met, read_met

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks whether a stage was opened."""
ASKED_MAX = 8


class StandbyStage:
    """One stage, copied and served."""

    def __init__(self, run: Run, swarm: Swarm, store: Store, clock: Clock, retention: Retention) -> None:
        scoped, folder = ScopedSwarm(swarm, run.id), store.folder
        self.run = run
        self.node = open_member(
            run,
            scoped,
            clock,
            store,
            heartbeat=Heartbeat(role="seed", owns=False, doing="keeping an archive", light=retention.is_light),
            history=History(folder / "history.jsonl", clock),
            upload_bytes_max=2 * max(map(run.snapshot_bytes_max, run.topology.modules())),
        )
        self._met = Met(folder.parent, scoped.peer)
        self._archive = SeedArchive(run, store)
        self._archive.thinning.retention = retention
        self._chains = ArchiveChains(self.node, self._archive)
        self._filling = Filling(self.node, self._archive)
        self.missing: int | None = None
        """Files that it should have and nobody has given yet; None before the first look."""
        self._tasks: list[asyncio.Task[Any]] = []

    def begin(self) -> None:
        """Answer, and copy."""
        swarm, store = self.node.swarm, self.node.store
        serve_store(swarm, store)
        serve_decrees(self.node.swarm, self.node.decrees, self.node.presence)
        serve_shardings(self.node)
        MirrorCalls(self._chains).serve()
        PublicRecords(store, self._archive).serve(swarm)
        self._chains.listen(self._on_version)
        loops: Sequence[Callable[[], Any]] = (self.node.presence.run, self._look, self._copy)
        self._tasks = [asyncio.create_task(keep_going(loop, self.node.clock)) for loop in loops]

    async def end(self) -> None:
        """Fall silent."""
        await self.cancel()
        await self.node.presence.leave()

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def failure(self) -> EnvironmentUnfit | None:
        """What the disk refused, if it did."""
        return self.node.store.failure

    def _on_version(self, version: ModuleVersion) -> None:
        module, number = str(version.module), version.version
        self.node.history.add("archived", module=module, version=number, digest=version.digest, term=version.term)

    async def _look(self) -> None:
        interval_s = heartbeat_interval_s(self.run.config.liveness)
        while True:
            await self.node.watch.refresh()
            self._met.note(self.node.watch, workers=self._chains.workers)
            await learn_shardings(self.node)
            await self.node.clock.sleep(interval_s)

    async def _copy(self) -> None:
        """What leaders do not hand in: all that was before we came, or while we were away."""
        while True:
            for module in self.run.topology.modules():
                for peer in self._tellers(module)[:ASKED_MAX]:
                    with contextlib.suppress(DipacoError):
                        head = self.node.watch.heads[module].get(peer)
                        until = head.final if head is not None else await self._final(peer, module)
                        await self._chains[module].catch_up(peer, until=until)
            await self._filling.copy_judgements()
            missing = await self._filling.fill()
            if missing != self.missing:
                self.missing = missing
                self.node.history.add("copied", missing=missing)
            await self.node.clock.sleep(LOOK_S)

    def _tellers(self, module: ModuleId) -> list[PeerId]:
        """Who has final versions: other seed nodes, then whoever leads."""
        watch = self.node.watch
        found = dict.fromkeys([*watch.coordinators(), *watch.seeds(), *watch.heads[module]])
        return [peer for peer in found if peer != self.node.peer]

    async def _final(self, peer: PeerId, module: ModuleId) -> int:
        return (await RemoteLedger(self.node, peer, module).branch()).final


class Standby:
    """All stages of the run, as they are opened."""

    def __init__(self, swarm: Swarm, folder: RunFolder, clock: Clock, retention: Retention | None = None) -> None:
        """Without `retention` its archive drops nothing."""
        self._swarm = swarm
        self._folder = folder
        self._retention = retention or Retention()
        self._clock = clock
        self._stages = Stages(swarm)
        self.opened: list[StandbyStage] = []

    def open(self, runs: Sequence[Run]) -> None:
        """Serve these, as far as they are not served yet."""
        for run in runs:
            if run.id in [stage.run.id for stage in self.opened]:
                continue
            store = self._folder.store(run.manifest.stage)
            if not self._folder.has(run.manifest.stage):
                write_stage(store, run.sealed)
            stage = StandbyStage(run, self._swarm, store, self._clock, self._retention)
            stage.begin()
            self.opened.append(stage)
            self._stages.add(run)

    async def run(self, addresses: Sequence[str], *, dial: Callable[[], Awaitable[None]]) -> None:
        """Look for the next stage, and dial again while nobody is seen; ends when a disk has refused something."""
        while not any(stage.failure for stage in self.opened):
            if len(self.opened[-1].node.watch.heartbeats) <= 1:
                await dial()
            await self.look_for_next(addresses)
            await self._clock.sleep(LOOK_S)

    async def look_for_next(self, addresses: Sequence[str]) -> None:
        """Whether a stage was opened since, as one of those that are there tells."""
        newest = self.opened[-1]
        if newest.run.is_last_stage:
            return
        beats, author = newest.node.watch.heartbeats, newest.run.manifest.author
        known = {read_address(text).peer: (text,) for text in addresses}
        for peer in dict.fromkeys([author, *known, *list(beats)[:ASKED_MAX]]):
            if peer == self._swarm.peer:
                continue
            places = (*known.get(peer, ()), *(beats[peer].addresses if peer in beats else ()))
            with contextlib.suppress(DipacoError):
                origin = newest.run.origin
                stages = await fetch_stages(self._swarm, peer, expected=origin, author=author, addresses=places)
                if stages_after(newest.run, stages):
                    self.open(stages)
                    return


async def keep_seed(
    text: str,
    root: Path,
    *,
    listen: str,
    announce: Sequence[str],
    line: Line,
    retention: Retention,
    verbose: bool,
) -> None:
    """Serve the run that `text` leads to from `root`, until a signal says stop. Raises DipacoError."""
    entry = read_entry(text)
    with folder_lock(root, hint="end it, or choose another --dir"):
        log_to(root / "seed.log", verbose=verbose)
        swarm = await open_libp2p(
            root / KEY_NAME,
            listen=listen,
            announce=announce,
            clock=SystemClock(),
            line=line,
            relay=RelayLimits(),
        )
        standby = Standby(swarm, RunFolder(root), SystemClock(), retention)
        stopped = asyncio.Event()
        try:

            async def enter(address: str) -> None:
                await swarm.join({address: read_address(address)})

            async def dial() -> None:
                for address in entry.addresses:
                    with contextlib.suppress(DipacoError):
                        await enter(address)

            standby.open(await _stages(swarm, entry, RunFolder(root), enter))
            _print_open(root, swarm, standby.opened[-1].run, entry)
            on_signals(stopped.set)
            await _first_of(standby.run(entry.addresses, dial=dial), stopped.wait())
            await asyncio.gather(*(stage.end() for stage in standby.opened))
        finally:
            await asyncio.gather(*(stage.cancel() for stage in standby.opened))
            await swarm.close()
    for failure in (stage.failure for stage in standby.opened if stage.failure is not None):
        raise failure


async def _first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Until one of them ends; raises what it raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _stages(swarm: Any, entry: Entry, folder: RunFolder, enter: Callable[[str], Any]) -> list[Run]:
    """As the swarm tells, or what is here while nobody answers: then this is where others find back."""
    here = folder.stages()
    try:
        met = read_met(folder.root)
        opened = await knock(swarm, doors(entry, friends=met), SystemClock(), enter=enter)
    except Unreachable:
        if not here:
            raise
        return here
    return opened.stages


def _print_open(root: Path, swarm: Any, run: Run, entry: Entry) -> None:
    plate = tell_address(root, swarm, run, seeds=entry.addresses)
    print(f"a second seed node of {run.name}: it keeps an archive, and newcomers join through it", flush=True)
    print("it counts once the coordinator has run:", flush=True)
    print(f"dipaco-bootstrap appoint {swarm.peer}", flush=True)
    print("hand out this line, whose ticket names all seeds:", flush=True)
    print(plate.line, flush=True)
    print("Ctrl-C stops; run the same command again to continue.", flush=True)
