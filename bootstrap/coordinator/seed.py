"""The seed node: where newcomers knock. It opens the stages of a run one after the other, and serves them.

Its identity, terms and chains are on disk, so a restart goes on where it stopped, at the same address: also between the
end of a stage and the opening of the next.

After a restart the stages before the open one are still served: a collector that was away at their end, or whoever
measures or verifies them, needs no folder for that. Nobody leads them, nothing is taken, and no heartbeat says that we
are there: who finds a seed node in a stage expects that it grants terms.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dipaco_p2p.clock import Clock, SystemClock
from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.doorplate import Doorplate, tell_address, whom_to_name
from dipaco_p2p.node.node import open_member, serve_store
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.owner.mirror_calls import MirrorCalls
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.console import LogFormat, log_to, on_signals
from dipaco_p2p.program.control.server import listening
from dipaco_p2p.program.curves import Curves
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.protocol.decrees import ACTS, GROW, ROLLBACK
from dipaco_p2p.protocol.liveness import heartbeat_interval_s
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from dipaco_p2p.swarm.identity import KEY_NAME
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.use.folder import RunFolder

from ..archives.records import Checks, PublicRecords
from ..archives.writing import PageWords
from ..control.decrees import SEQUENCES_MIN, Decreeing, decrees_in
from ..control.requests import Control, Request
from ..control.view import Seen, View, metrics_served
from ..folder import require_caught_up
from ..genesis.growth import grow
from ..genesis.prepare import fork, prepare
from ..processes import PublicPage
from ..recovery.rejoin import find_swarm
from ..runfile import ArchiveConfig, Place, RunFile
from ..text.added import drop_unnamed, joined, keep_text, read_text, texts_of, validation_bounds
from ..text.sequences import Sequences
from .stage import SeedStage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a start may be asked for besides."""

    through: Sequence[str] = ()
    """Addresses or tickets of peers that are in the run: for a coordinator at an address that nobody knows."""
    metrics: Place | None = None
    """Where to serve its figures."""
    log_format: LogFormat = LogFormat.TEXT
    curves: Curves = field(default_factory=Curves)


async def start(file: RunFile, folder: Path, wishes: Wishes, *, verbose: bool) -> None:
    """Prepare the run if need be, then serve it until a signal says stop. Raises DipacoError."""
    with folder_lock(folder, hint="end it, or choose another --dir"):
        log_to(folder / "seed.log", verbose=verbose, kind=wishes.log_format)
        control = Control()
        view = View(folder, SystemClock())
        view.add_verbs(control)
        gc.freeze()  # what was imported stays: it need not be looked through again and again
        async with (
            listening(folder, Request, control.answer),
            metrics_served(wishes.metrics, view.metrics) as address,
        ):
            if address:
                print(f"metrics: {address}", flush=True)
            await _serve(file, RunFolder(folder), control, view, wishes, verbose=verbose)


async def _serve(
    file: RunFile, folder: RunFolder, control: Control, view: View, wishes: Wishes, *, verbose: bool
) -> None:
    # The port comes first: to learn after minutes of preparation that it is taken would be a pity.
    swarm = await open_libp2p(
        folder.root / KEY_NAME,
        listen=file.node.listen,
        announce=file.node.announce,
        clock=SystemClock(),
        line=file.node.line(),
        relay=file.node.relay_limits(),
    )
    page = PublicPage(file.leaderboard, folder.root, verbose=verbose)
    try:
        await find_swarm(swarm, folder, wishes.through)
        run = await asyncio.to_thread(prepare, file, folder, swarm.signer)
        seed = Seed(file, folder, swarm, clock=SystemClock(), on_open=page.begin, curves=wishes.curves)
        view.stage = seed.stage
        seed.add_verbs(control)
        on_signals(seed.stop)
        await seed.run(run)
    finally:
        await page.end()
        await swarm.close()


class Seed:
    """One running seed node."""

    def __init__(
        self,
        file: RunFile,
        folder: RunFolder,
        swarm: Swarm,
        *,
        clock: Clock,
        on_open: Callable[[Doorplate], None] = lambda plate: None,
        curves: Curves | None = None,
    ) -> None:
        """`on_open` is told where and how, once volunteers may join; `curves` follow every stage. Raises
        EnvironmentUnfit for a full disk."""
        self._file = file
        self._folder = folder
        self._swarm = swarm
        self._clock = clock
        self._on_open = on_open
        self._curves = curves
        self._words = PageWords(file.leaderboard, folder.root)
        self._stages = Stages(swarm)
        self._opened: list[SeedStage] = []
        self._decrees: Decrees | None = None
        """Of all stages; None before the first is open."""
        self._saying: set[asyncio.Task[None]] = set()
        """Heartbeats that tell of a decree and are under way."""
        self._reading, self._going_back = asyncio.Lock(), asyncio.Lock()
        """One text of a growth is read at a time."""
        self._stopped = asyncio.Event()

    async def run(self, run: Run) -> None:
        """Serve one stage after the other until stopped; then hand over what is led here.

        Raises EnvironmentUnfit when the disk refused a write: an archive that keeps nothing helps nobody.
        """
        naming = asyncio.create_task(self._keep_naming(run))
        try:
            await self._serve(run)
            await asyncio.gather(*(opened.end() for opened in self._opened))
        finally:
            naming.cancel()
            for opened in self._opened:
                opened.cancel()
            for saying in self._saying:
                saying.cancel()
        for failure in (opened.failure for opened in self._opened if opened.failure is not None):
            raise failure

    async def _serve(self, run: Run) -> None:
        for earlier in self._folder.stages():
            if earlier.id != run.id:
                self._open_earlier(earlier)
        stage = self._open(run)
        self._print_address(run)
        while await self._is_complete(stage) and not run.is_last_stage:
            go_on = fork if run.growth is None else grow
            run = await asyncio.to_thread(go_on, self._file, self._folder, self._swarm.signer)
            stage = self._open(run)  # the last one stays: some volunteers still fetch what came of it
            self._print_open(run)
        await self._stopped.wait()

    def stop(self) -> None:
        """Hand over soon, and end."""
        self._stopped.set()

    def stage(self) -> Seen | None:
        """How the open stage stands; None before there is one."""
        return self._opened[-1].seen() if self._opened else None

    # -- what its owner decrees

    def add_verbs(self, control: Control) -> None:
        """Answer to the acts of a decree, and to `decrees`."""
        for act in ACTS:
            control.on(act, self._decree)
        control.on("decrees", lambda request: self._decreeing().listed())

    async def _decree(self, request: Request) -> dict[str, Any]:
        require_caught_up(self._folder.root)
        if request.ask == GROW and request.corpus:
            row = await self._grow_with_text(request)
        else:
            # One rollback after the other: the next one says what is to become of what the last one has not yet done.
            async with self._going_back if request.undo or request.ask == ROLLBACK else contextlib.nullcontext():
                decreeing = self._decreeing()
                row = decreeing.issue(request, at_s=self._clock.now_s())
                self._tell()  # of a ban at once: to undo what it has done takes a while
                if request.undo:
                    row["undone"] = await decreeing.undo(request, PeerId(row["peer"]), now_s=self._clock.now_s)
        log.warning("decreed: %s", row)
        self._tell()
        return row

    async def _grow_with_text(self, request: Request) -> dict[str, Any]:
        """The text is read first, and on disk before the decree that names it is signed; a growth that is refused
        leaves nothing behind."""
        async with self._reading:
            decreeing, run = self._decreeing(), self._opened[-1].run
            least = decreeing.sequences_needed(request)
            text = await asyncio.to_thread(
                read_text, self._file, self._folder, run, request.corpus, sequences_min=least
            )
            if self._opened[-1].run is not run:
                raise ConfigError(f"the {run.manifest.stage} has ended while the text was read", hint="say it again")
            keep_text(self._folder.root, text)
            try:
                # Rounds went on meanwhile: what may be decreed is looked at once more.
                row = self._decreeing().issue(replace(request, corpus=text.digest), at_s=self._clock.now_s())
            finally:
                assert self._decrees is not None, "a stage is open"
                drop_unnamed(self._folder.root, (sealed.document.corpus for sealed in self._decrees.log))
        return row | {"text": text.counts | {"paths": least // SEQUENCES_MIN}}

    def _tell(self) -> None:
        """Let peers hear soon that there is a further decree. It holds already: nobody who decreed waits until records
        are stored, which takes seconds where some of the peers that keep them have gone."""
        for stage in self._opened:
            saying = asyncio.create_task(stage.say())
            self._saying.add(saying)
            saying.add_done_callback(self._saying.discard)

    def _decreeing(self) -> Decreeing:
        if self._decrees is None or not self._opened:
            raise ConfigError("the run is still being prepared", hint="wait until its line to join with is printed")
        seen = self._opened[-1].seen()
        alive = list(seen.watch.heartbeats)
        return Decreeing(
            self._decrees,
            self._swarm.signer,
            seen.run,
            seen.ledgers,
            alive,
            thinned=seen.thinned,
            reached=seen.watch.reached,
            rebuild=self._opened[-1].rebuild,
        )

    def _open(self, run: Run) -> SeedStage:
        if self._decrees is None:
            self._decrees = decrees_in(self._folder, run)
        stage = SeedStage(
            run,
            self._swarm,
            self._folder.store(run.manifest.stage),
            sequences=partial(self._sequences, run.manifest.stage),
            texts=validation_bounds(self._folder, run.manifest.stage),
            clock=self._clock,
            on_failure=self.stop,
            decrees=self._decrees,
            follows=self._opened[-1] if self._opened else None,
            curves=self._curves,
            words=self._words,
            retention=retention_of(self._file.archive),
        )
        stage.begin()
        self._opened.append(stage)
        self._stages.add(run)
        return stage

    def _sequences(self, stage: str) -> Sequences:
        return joined(texts_of(self._file, self._folder, stage)[1])

    def _open_earlier(self, run: Run) -> None:
        """A stage before the open one: after a restart it is told of, and its archive is served."""
        self._stages.add(run)
        serve_earlier(run, self._swarm, self._folder.store(run.manifest.stage), clock=self._clock)

    async def _is_complete(self, stage: SeedStage) -> bool:
        """Wait for the end of a stage, or for a stop; whether it was the former."""
        waits = [asyncio.create_task(event.wait()) for event in (stage.complete, self._stopped)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self._stopped.is_set()

    def _print_address(self, run: Run) -> None:
        plate = tell_address(self._folder.root, self._swarm, run)
        self._print_open(run)
        print("volunteers join with this line, its last word is the ticket:", flush=True)
        print(plate.line, flush=True)
        print("Ctrl-C hands over and stops; run the same command again to continue.", flush=True)
        self._on_open(plate)

    async def _keep_naming(self, run: Run) -> None:
        """Have the ticket name volunteers as they come and go: with it others join while this machine is off."""
        is_told = False
        while True:
            await self._clock.sleep(heartbeat_interval_s(run.config.liveness))
            if not self._opened:
                continue
            seen = self._opened[-1].seen()
            seeds, volunteers = whom_to_name(seen.watch, workers=self._opened[-1].workers)
            try:
                tell_address(self._folder.root, self._swarm, seen.run, seeds=seeds, volunteers=volunteers)
            except EnvironmentUnfit as error:
                log.warning("the ticket was not renewed: %s", error)
            if volunteers and not is_told:
                is_told = True
                print("the ticket now names volunteers, too: with it others join while this machine is off", flush=True)

    def _print_open(self, run: Run) -> None:
        if run.manifest.is_grown:
            print(f"{run.name} has grown: {run.topology} modules, {run.topology.path_count} paths", flush=True)
        elif run.manifest.router is not None:
            print(f"{run.name} is open: {run.topology} modules, {run.topology.path_count} paths", flush=True)
        else:
            rounds = run.rounds
            print(f"{run.name} is open: {rounds} rounds of warm-up, all on one path", flush=True)


def retention_of(archive: ArchiveConfig) -> Retention:
    """What a run file says of its archive."""
    return Retention(**asdict(archive))


def serve_earlier(run: Run, swarm: Swarm, store: Store, *, clock: Clock) -> None:
    """Answer from now on. A damaged archive is not served: the open stage does without it."""
    scoped = ScopedSwarm(swarm, run.id)
    node = open_member(run, scoped, clock, store)
    try:
        archive = SeedArchive(run, store)
    except IntegrityError as error:
        log.warning("the archive of the %s is not served: %s", run.manifest.stage, error)
        return
    records = PublicRecords(store, archive)
    serve_store(scoped, store)
    MirrorCalls(ArchiveChains(node, archive)).serve_reading()
    records.serve(scoped)
    Checks(run, store, archive, judged=records.judgement, is_alive=lambda peer: False).serve(scoped, is_open=False)
