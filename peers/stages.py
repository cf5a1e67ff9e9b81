"""One volunteer's way through the stages of a run, on one open swarm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.clock import Clock
from dipaco_p2p.core.model.engine import BFLOAT16, EXACT
from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, IntegrityError, SwarmError, WrongRun
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.decree_news import serve_decrees
from dipaco_p2p.node.doorplate import whom_to_name
from dipaco_p2p.node.invitations import Chain
from dipaco_p2p.node.node import Member, open_member, serve_store
from dipaco_p2p.node.presence import Presence
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.shardings import serve_shardings
from dipaco_p2p.node.stages import Stages, fetch_stages, stages_after
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.owner.chain import Chains
from dipaco_p2p.owner.granting import Electing
from dipaco_p2p.owner.judge import Judge, Measure
from dipaco_p2p.owner.keeper import FOLDER as KEEP_FOLDER
from dipaco_p2p.owner.keeper import Keeper, Kept
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.program.console import log_to
from dipaco_p2p.program.curves import Curves, Subject
from dipaco_p2p.program.history import HISTORY_NAME, History, read_history
from dipaco_p2p.program.tasks import keep_going
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm

from .config import PeerConfig
from .decrees import ask_first
from .display import show
from .governor.governor import between_steps
from .governor.machine import give_memory_back, trainer_settings
from .path.kept import outbox_of
from .path.repeating import Repeater
from .path.trainer import Engines, PathTrainer
from .preferences.keys import GB
from .status import Pauses, Status, in_words
from .volunteer import Volunteer

log = logging.getLogger(__name__)

NEXT_STAGE_S = 1.0
"""Between two looks whether the next stage is open."""
OTHERS_ASKED = 3
"""Volunteers that are asked whether it is, after a rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a simulation of many volunteers in one process puts its own in place of, and what only some starts have."""

    make_trainer: Callable[..., PathTrainer] = PathTrainer
    show: Callable[[Status, History], AbstractAsyncContextManager[None]] = show
    log_to: Callable[[Path], None] = partial(log_to, verbose=False)
    measure: Measure | None = None
    make_repeater: Callable[..., Repeater] = Repeater
    keeps_on: bool = True
    """Whether keepers stay after the last round."""
    curves: Curves = field(default_factory=Curves)


async def _stay() -> None:
    """For a swarm that is always connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """How we came into the swarm, and come back."""

    host: PeerId
    """The peer that we joined through."""
    dial: Callable[[], Awaitable[None]] = _stay
    """Joins again. Raises DipacoError."""
    meet: Callable[[Run, Watch, Collection[PeerId]], None] = lambda run, watch, workers: None
    """Is told whom we see, and whose work counts."""
    name: Callable[[Run, Sequence[str], Sequence[str]], None] = lambda run, seeds, volunteers: None
    """Is told whom a ticket may name: where the seeds are, and volunteers that have worked."""
    invitations: Chain = ()
    """What we show where only the invited may take part."""


class StageRunner:
    """One volunteer's way through the stages of a run, on one open swarm."""

    def __init__(
        self,
        swarm: Swarm,
        config: PeerConfig,
        clock: Clock,
        *,
        entrance: Entrance,
        device: str,
        parts: Parts | None = None,
    ) -> None:
        self._swarm = swarm
        self._config = config
        self._clock = clock
        self._entrance = entrance
        self._device = device
        self._parts = parts = parts or Parts()
        settings = trainer_settings(config)
        self._engines = Engines(device, wanted=config.engine)
        self.steps = between_steps(config, settings["micro"], device=device)
        """What goes on between inner steps, to keep its owner's limits."""
        self._make_trainer = partial(parts.make_trainer, **settings, steps=self.steps)
        self.typed: dict[PeerId, tuple[str, ...]] = {}
        """Where the peer is that was named on the command line, whatever it says itself."""
        self._known = Stages(swarm)
        self._pausing = Pauses(clock)
        self._volunteer: Volunteer | None = None
        self._stopped = asyncio.Event()
        self._later: Run | None = None
        """The newest stage, if that was found to be open while we took part in an earlier one."""
        self.is_finishing = False
        """Whether we leave after the round that is going on."""
        self.status: Status | None = None
        """Of the stage that we take part in; None before the first."""
        self.node: Member | None = None
        """What this stage was last taken part in with."""
        self._keeper: Keeper | None = None

    async def take_part(self, stages: Sequence[Run]) -> None:
        """Take part from the newest of `stages` on, until the run is complete or a signal says stop."""
        for stage in stages:
            self._known.add(stage)
        run: Run | None = stages[-1]
        while run is not None:
            following = await self._stage(run)
            if following is run:  # it is complete
                following = None if run.is_last_stage else await self._next(run)
            run = following

    def stop(self) -> None:
        """Leave in good order."""
        self.steps.stop()
        self._stopped.set()
        self._pausing.wake()
        if self._volunteer is not None:
            self._volunteer.stop()

    def finish(self) -> None:
        """Leave in good order after the round that is going on: all its steps, its pushes and their receipts. Without
        one, now."""
        self.is_finishing = True
        self._stopped.set()
        self._pausing.wake()
        if self._volunteer is not None:
            self._volunteer.finish()

    @property
    def is_stopping(self) -> bool:
        """Whether we are about to leave, at once or after this round."""
        return self._stopped.is_set()

    # -- resting

    def pause(self, reason: str, *, until_s: float | None = None) -> None:
        """Rest from now on for this reason, until `resume` or the clock shows `until_s`: no inner steps, no claim, no
        module is led, nobody is answered. What was trained is pushed, if that takes no longer than the grace time; the
        process and its place in the network stay. Several reasons may hold at once."""
        self._pausing.add(reason, until_s=until_s)
        if self.pauses and self._volunteer is not None:
            self._volunteer.stop()

    def resume(self, reason: str) -> None:
        """This reason to rest is gone; without another one we take part again, in the newest stage."""
        self._pausing.end(reason)

    @property
    def pauses(self) -> Mapping[str, float | None]:
        """The reasons to rest, each with the time of the clock at which it ends by itself."""
        return self._pausing.reasons

    async def _rest(self, status: Status, history: History) -> None:
        """Until no reason is left, or a signal says stop."""
        told: Mapping[str, float | None] = {}
        while (reasons := self.pauses) and not self._stopped.is_set():
            if reasons != told:
                if not told:
                    give_memory_back()
                told, words = reasons, in_words(reasons)
                status.doing, status.waits_for, status.eta_s = "paused", words, None
                history.add("paused", reasons=dict(reasons), detail=words)
            await self._pausing.changed()
        if told:
            status.doing, status.waits_for = "starting", ""
            history.add("resumed")

    # -- a stage

    async def _stage(self, run: Run) -> Run | None:
        """Take part in one stage, with rests; itself when it is complete, a later one that was opened while we rested
        or slept, None after a stop.

        To go on after a rest is to start anew on what the disk holds, as after a stop of the program: nothing that ran
        before still writes there, but perhaps a thread that ends its last blob."""
        self._later = None
        folder = self._config.run_folder(run.id)
        self._parts.log_to(folder / "peer.log")
        history = History(folder / HISTORY_NAME, self._clock)
        stage = run.manifest.stage
        self._parts.curves.follow(history, Subject(run=run.name, run_id=run.origin, stage=stage, peer=self._swarm.peer))
        status = self._new_status(run)
        scope = ScopedSwarm(self._swarm, run.id)
        async with self._parts.show(status, history):
            while not self._stopped.is_set():
                if self.pauses:
                    await self._rest(status, history)
                    newest = None if self._stopped.is_set() else await self._newest(run)
                    if newest is not None:
                        return newest
                    continue
                await self._begin(run, scope, history)
                await self._live(status)
                if self._later is not None:
                    return self._later
                if status.is_complete:  # others may still need what is here
                    await self._keep_on(status)
                    if not self.pauses or self._stopped.is_set():
                        return run
                await scope.close()
        return None

    def _new_status(self, run: Run) -> Status:
        config = run.config
        status = Status(run=run.name, peer=self._swarm.peer, rounds=run.rounds, steps=config.inner.steps)
        status.paths, status.is_last_stage = run.topology.path_count, run.is_last_stage
        status.rounds_after = run.rounds_after
        histories = [self._config.run_folder(stage) / HISTORY_NAME for stage in self._known.ids]
        status.receipts = sum(map(receipts_in, histories))
        self.status = status
        return status

    async def _begin(self, run: Run, scope: ScopedSwarm, history: History) -> None:
        """Open what is kept here, answer others, and look around."""
        clock, store = self._clock, Store(self._config.run_folder(run.id))
        store.write_document("manifest", canonical_bytes(run.sealed.to_dict()))
        decrees = Decrees(run, store)
        if self.node is not None:  # they hold in all stages, and after a rest
            decrees.learn_all(self.node.decrees.log)
        node = self.node = open_member(
            run,
            scope,
            clock,
            store,
            heartbeat=Heartbeat(owns=True, name=self._config.name, team=self._config.team),
            history=history,
            upload_bytes_max=max(map(run.payload_bytes_max, run.topology.modules())),
            decrees=decrees,
        )
        node.invitations.own = self._entrance.invitations
        watch = node.watch
        watch.typed.update(self.typed)
        keeper = self._keeper = self._open_keeper(node)
        serve_store(scope, store, outbox_of(store), *([keeper.store] if keeper is not None else []))
        serve_decrees(node.swarm, node.decrees, node.presence)
        serve_shardings(node)
        history.add("joined", run=run.origin, stage=run.manifest.stage, peer=scope.peer)
        await watch.refresh()
        await ask_first(node)
        await withdraw_claims(watch, node.presence, scope.peer)

    def _open_keeper(self, node: Member) -> Keeper | None:
        """Who keeps old versions for others, if our owner gives room for that; what was kept before goes without it. Of
        the warm-up nobody keeps any: everybody moves on to the grid."""
        folder, room_bytes = node.store.folder / KEEP_FOLDER, int(self._config.limits.keep_gb * GB)
        if not room_bytes or not node.run.is_last_stage:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        keeper = Keeper(node, folder, room_bytes=room_bytes, on_change=self._note_kept)
        keeper.serve()
        return keeper

    def _note_kept(self, kept: Kept) -> None:
        if (status := self.status) is not None:
            status.keep_bytes, status.kept_bytes = kept.room_bytes, kept.used_bytes
            status.kept_ranges, status.keeping_proofs = kept.ranges, kept.proofs

    async def _live(self, status: Status) -> None:
        """Train until the stage is complete, or we are to stop or to rest."""
        node = self.node
        assert node is not None
        volunteer: Volunteer | None = None
        # As trainers do before their choice: a whole round's steps repay no compiling.
        wanted = EXACT if self._config.engine == EXACT or self._device == "cpu" else BFLOAT16
        engines = Engines(self._device, wanted=wanted)
        make_trainer = partial(self._make_trainer, device=self._device, engines=engines)
        repeat = self._parts.make_repeater(node, make_trainer=make_trainer)
        chains, judge = Chains(node), Judge(node, device=self._device, measure=self._parts.measure, repeat=repeat)
        chains.appraise = judge.appraise
        judge.serve()
        ownership = Leadership(
            chains,
            Electing(node),
            may_take=lambda: volunteer is not None and volunteer.is_run_open(),
        )
        volunteer = Volunteer(
            node,
            ownership,
            status,
            device=self._device,
            engines=self._engines,
            make_trainer=self._make_trainer,
            evaluate=self._config.evaluate,
        )
        self.steps.tell(partial(_note_limit, node.history, status))
        every_s = heartbeat_interval_s(node.run.config.liveness)
        beside = [asyncio.create_task(self._keep_joined(node, chains, every_s=every_s))]
        if self._keeper is not None:
            chains.kept, chains.find_kept = self._keeper.versions, self._keeper.archive.find_stored
            beside.append(asyncio.create_task(keep_going(self._keeper.run, node.clock)))
        try:
            await self._run(volunteer)
        finally:
            judge.close()
            repeat.close()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _keep_on(self, status: Status) -> None:
        """After the last round: whoever keeps old versions for others stays for that, until we are to stop or to
        rest."""
        node, keeper = self.node, self._keeper
        if keeper is None or node is None or not self._parts.keeps_on:
            return
        status.doing = "keeping"
        print("the run is complete; old versions are still kept here for others: Ctrl-C leaves", flush=True)
        await node.presence.say(left=False, doing="keeping", path=None)
        loops = (node.presence.run, keeper.run, partial(_look_on, node))
        tasks = [asyncio.create_task(keep_going(loop, node.clock)) for loop in loops]
        try:
            while not (self._stopped.is_set() or self.pauses):
                await self._pausing.changed()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await node.presence.leave()

    async def _run(self, volunteer: Volunteer) -> None:
        node = self.node
        assert node is not None
        if self._stopped.is_set() or self.pauses:  # said while we looked around
            receipts = 0 if self.status is None else self.status.receipts
            node.history.add("left", complete=False, receipts=receipts, stage=node.run.manifest.stage)
            return
        self._volunteer = volunteer
        try:
            await volunteer.run(grace_s=self._config.grace_s)
        finally:
            self._volunteer = None

    async def _keep_joined(self, node: Member, chains: Chains, *, every_s: float) -> None:
        """Note who is there; and dial again while no seed node is seen: one that restarted knows nobody, and nobody
        looks for it. It may be of a later stage as well, if this machine slept through the end of ours."""
        while True:
            await node.clock.sleep(every_s)
            watch = node.watch
            self._entrance.meet(node.run, watch, chains.workers)
            seeds, volunteers = whom_to_name(watch, workers=chains.workers)
            try:
                self._entrance.name(node.run, seeds, volunteers)
            except EnvironmentUnfit as error:
                log.warning("the ticket was not renewed: %s", error)
            if not watch.seeds():
                with contextlib.suppress(DipacoError):
                    await self._entrance.dial()
                self._later = await self._opened(node.run, {})
                if self._later is not None and self._volunteer is not None:
                    self._volunteer.stop()

    # -- the stage after it

    async def _next(self, run: Run) -> Run | None:
        """The stage after `run`, as soon as the coordinator has opened it; None after a stop."""
        ended, what = ("warm-up", "the grid") if run.growth is None else (run.manifest.stage, "the larger grid")
        print(f"the {ended} is complete; waiting for the coordinator to open {what}", flush=True)
        assert self.status is not None and self.node is not None
        while not self._stopped.is_set():
            await self._rest(self.status, self.node.history)
            self.status.doing, self.status.waits_for = "waiting", f"the coordinator to open {what}"
            if (opened := await self._opened(run, {})) is not None:
                return opened
            with contextlib.suppress(DipacoError):
                await self._entrance.dial()
            await self._clock.sleep(NEXT_STAGE_S)
        return None

    async def _newest(self, run: Run) -> Run | None:
        """The stage that was opened after `run` while we rested, as whoever can be reached tells; None without one."""
        if run.is_last_stage:
            return None
        beats = {} if self.node is None else self.node.watch.heartbeats
        others = {peer: beats[peer].addresses for peer in sorted(beats)[:OTHERS_ASKED]}
        return await self._opened(run, others)

    async def _opened(self, run: Run, others: Mapping[PeerId, Sequence[str]]) -> Run | None:
        """The newest stage after `run`, if the coordinator, our host or one of `others` says that there is one."""
        for host in dict.fromkeys((run.manifest.author, self._entrance.host, *others)):
            with contextlib.suppress(SwarmError, WrongRun, IntegrityError):
                addresses = others.get(host, ())
                stages = await fetch_stages(self._swarm, host, expected=run.origin, addresses=addresses)
                for stage in (later := stages_after(run, stages)):
                    self._known.add(stage)
                if later:
                    return later[-1]
        return None


def receipts_in(history: Path) -> int:
    """How many contributions have one, as far back as a history goes."""
    return len({event.get("id") for event in read_history(history) if event.get("ev") == "receipt"})


async def _look_on(node: Member) -> None:
    """See who is there, while nothing is trained here any more."""
    while True:
        await node.watch.refresh()
        await node.clock.sleep(heartbeat_interval_s(node.run.config.liveness))


def _note_limit(history: History, status: Status, text: str) -> None:
    status.limited = text
    history.add("limited", detail=text)


async def withdraw_claims(watch: Watch, presence: Presence, me: PeerId) -> None:
    """Take back what this peer claimed before a crash, else its own old claim would send it to another path."""
    if not watch.is_whole and (beat := watch.heartbeats.get(me)) is not None and beat.path in watch.claims:
        await watch.read_claims([beat.path])
    for path, claims in watch.claims.items():
        if me in claims:
            await presence.claim(path, since_s=claims[me].since_s, round_number=claims[me].round)
            await presence.release()
