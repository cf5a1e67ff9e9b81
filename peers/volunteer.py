"""A volunteer's life: claim a path, then round after round: modules, inner steps, outer gradients, next versions.

Read it from top to bottom. What it leads for others, its heartbeat and its view of the swarm run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from dipaco_p2p.core.model.engine import Engine
from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, SwarmError
from dipaco_p2p.node.measuring import Measuring
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.program.tasks import done_or_later, keep_going
from dipaco_p2p.program.text import duration
from dipaco_p2p.protocol.claims import ClaimEvent
from dipaco_p2p.protocol.liveness import heartbeat_interval_s
from dipaco_p2p.protocol.rounds import PATIENCE
from dipaco_p2p.topology import ModuleId, PathId

from .decrees import Obeying
from .evaluation.between_rounds import Evaluating, Measurer, Scoring
from .path.assignment import Assignment
from .path.claiming import Claiming
from .path.contribute import Contributor
from .path.kept import InnerStates
from .path.shard_source import ShardSource
from .path.trainer import Engines, PathTrainer
from .path.training import ROUNDS_SILENT_MAX, Training, Watchdog
from .status import Status

log = logging.getLogger(__name__)

STAND_BY_S = 0.5
BESIDE_STEPS = ("pushing", "waiting")
ENDING = ("finishing", "leaving")


class Volunteer:
    """One volunteer in one run; `run` returns when the run is complete or after `stop`."""

    def __init__(
        self,
        node: Member,
        ownership: Leadership,
        status: Status,
        *,
        device: str,
        engines: Engines | None = None,
        make_trainer: Callable[..., PathTrainer] = PathTrainer,
        evaluate: bool = False,
    ) -> None:
        """`engines` are those of the process, which may have taken part in an earlier stage; `evaluate` offers to check
        the coordinator's losses between rounds."""
        self._node = node
        self._ownership = ownership
        self._status = status
        self._device = device
        self._engines = engines or Engines(device)
        self._engines.follow(self._say_engine, on_compiling=self._say_compiling, on_compiled=self._say_compiled)
        self._make_trainer = partial(make_trainer, device=device, engines=self._engines)
        self._obeying = Obeying(node, on_change=self._obey, is_ending=lambda: self._is_ending)
        states = InnerStates(node)
        self._supplies = ShardSource(node, on_wait=lambda: self.say("waiting", waits_for="the seed node"))
        self._watchdog = Watchdog(node.clock, deadline_s=node.run.config.rounds.deadline_s)
        self._claiming = Claiming(node, states, is_ready=self._is_ready)
        self._contributor = Contributor(
            node, states, status, on_progress=self._watchdog.progress, on_unclaimed=self._claim_again
        )
        self._training = Training(
            node,
            status,
            self,
            states=states,
            claiming=self._claiming,
            contributor=self._contributor,
            watchdog=self._watchdog,
        )
        self._scoring = Scoring(node, device=device, is_stopping=lambda: self._is_ending)
        measuring = Measuring(node, device=device, is_stopping=lambda: self._is_ending)
        self._measurer = Measurer(node, measuring)
        self._evaluating = Evaluating(node, measuring) if evaluate else None
        node.watch.concerns.held = ownership.held
        node.watch.concerns.is_busy = lambda: self._watchdog.is_working or self._obeying.is_frozen
        self._look_every_s = heartbeat_interval_s(node.run.config.liveness) / 2
        self.is_stopping = False
        """Whether no further step is taken."""
        self.is_finishing = False
        """Whether no further round is begun."""
        self.is_compiling = False
        """Whether the steps that are under way are compiled first."""
        self._compiling = ""
        """The same in words."""
        self._work: asyncio.Task[None] | None = None
        self._readers: dict[ModuleId, Follower] = {}
        self._broken: set[PathId] = set()
        """Paths whose training failed here."""
        self._has_begun = False
        self._said = ("", "")

    async def run(self, *, grace_s: float) -> None:
        """Take part until the run is complete or `stop`; then leave in good order. Raises EnvironmentUnfit when the
        disk refused a write, even one on behalf of others: who cannot keep things must not be trusted with them. Raises
        Refused when the coordinator bans us, or who invited us."""
        self._obeying.check()
        self._grace_s = grace_s
        background = [asyncio.create_task(part) for part in self._background()]
        self._work = asyncio.create_task(self._take_part())
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        finally:
            await self._leave(background)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # it was not only our work that was ended
            raise asyncio.CancelledError
        self._obeying.check()
        if self._node.store.failure is not None:
            raise self._node.store.failure

    def stop(self) -> None:
        """Finish soon: in a round, push what was trained if that takes no longer than the grace time; else at once."""
        if self.is_stopping or self._work is None:
            return
        self.is_stopping = True
        self.say("finishing")
        if self._watchdog.is_working:
            asyncio.get_running_loop().call_later(self._grace_s, self._work.cancel)
        else:
            self._work.cancel()

    def finish(self) -> None:
        """Leave as soon as the round that is going on is done, with all its steps and pushes; without one, at once."""
        if self._is_ending or self._work is None:
            return
        self.is_finishing = True
        if not self._is_in_round:
            self.stop()

    # -- the story

    async def _take_part(self) -> None:
        await self._obeying.thawed()
        await self._contributor.resume(within_s=self._node.run.config.rounds.deadline_s)
        while not self._is_ending and not self._is_over():
            if self._obeying.is_frozen:
                await self._obeying.thawed()
            elif self._has_work():
                self.say("claiming a path")
                path = self._status.path = await self._claiming.claim()
                if path is not None:
                    is_ours = await self._wait_start(path)
                    await self._release(await self._train_path(path) if is_ours else ClaimEvent.YIELDED)
            else:
                self.say("standing by", waits_for="the last rounds of other paths")
                if not self._node.watch.is_whole:
                    await self._node.watch.survey()
                await self._node.clock.sleep(STAND_BY_S)
        if not self._is_ending:
            await self._scoring.at_the_end(say=self._say_scoring)
            await self._measurer.at_the_end(say=self._say_measuring)
            if self._evaluating is not None:
                await self._evaluating.at_the_end(say=self._say_checking)
        self._status.is_complete = not self._is_ending

    async def _wait_start(self, path: PathId) -> bool:
        """Before the first round, until enough paths are claimed; False if we should take another path than this."""
        watch, needed = self._node.watch, self._node.run.config.rounds.min_paths
        while not self.is_run_open():
            await self._supplies.ask_archive(path)
            covered = watch.paths.covered()
            self.say("waiting", waits_for=f"{needed} paths to be claimed; {covered} are")
            await self._node.clock.sleep(STAND_BY_S)
            await watch.refresh()
            if self._claiming.must_yield(path):
                return False
        self._has_begun = True
        return True

    async def _train_path(self, path: PathId) -> ClaimEvent:
        """Round after round, until the path is complete or another one needs us more; why it is released."""
        try:
            assignment = await self._begin(path)
            while not self.is_stopping and not assignment.is_complete:
                await self._obeying.thawed()
                if assignment.standing.is_due and not self._obeying.is_frozen:
                    await self._route(assignment)
                    if self._claiming.is_drawn(path, assignment.standing.progress):
                        await self._training.round(assignment)
                    else:
                        self._sit_out(assignment)
                self._claiming.note_round(assignment.standing.progress)
                if self.is_finishing and not self._is_in_round:
                    return ClaimEvent.RELEASED
                if not self.is_stopping and (event := await self._wait_turn(assignment)) is not None:
                    return event
        except SwarmError as error:
            log.info("%s cannot be trained here now: %s", path, error)
            await self._node.clock.sleep(self._look_every_s)  # else it would be claimed again at once, for ever
        except DipacoError as error:
            self._give_up(path, error)
        finally:
            await self._training.leave()
        return ClaimEvent.YIELDED

    def _sit_out(self, assignment: Assignment) -> None:
        """Leave a round to the others on the path: more train it than a version counts."""
        path, progress = assignment.path, assignment.standing.progress
        assignment.leave_round(until_s=self._node.clock.now_s() + self._training.deadline_s(path))
        self._node.history.add("sat_out", path=str(path), round=progress)

    async def _begin(self, path: PathId) -> Assignment:
        """Everything that training the path needs, but its inner state."""
        run, watch = self._node.run, self._node.watch
        self.say("fetching its shard")
        shard, sharding = await self._supplies.newest_shard(path, run.sharding_at(watch.round(path)))
        optimizer = await self._supplies.optimizer()
        trainer = self._make_trainer(run, path, shard, sharding=sharding, optimizer=optimizer)
        self.say("fetching modules")
        readers = [self._reader(module) for module in path.modules()]
        await self._read_rounds(path)  # before the versions, so that these are not older
        await asyncio.gather(*(reader.sync() for reader in readers))
        assignment = Assignment(trainer, readers, rounds=lambda: run.rounds)
        is_alone = self._claiming.replica(path)[1] == 1
        left_until_s = self._node.clock.now_s() + self._training.deadline_s(path)
        from_round = self._claiming.round
        assignment.begin(
            watch.rounds, me=self._node.peer, is_alone=is_alone, from_round=from_round, left_until_s=left_until_s
        )
        return assignment

    async def _read_rounds(self, path: PathId) -> None:
        """Learn what is in the open rounds of the path's modules: work that is in must not be done again. A module that
        changes hands answers soon; one that nobody leads is not waited for longer than until that is noticed."""
        watch, clock = self._node.watch, self._node.clock
        until_s = clock.now_s() + self._node.run.config.liveness.heartbeat_ttl_s
        await watch.read_rounds(path.modules())
        while clock.now_s() < until_s and (silent := [one for one in path.modules() if one not in watch.rounds]):
            await clock.sleep(STAND_BY_S)
            await asyncio.gather(*map(watch.read_heads, silent))
            await watch.read_rounds(silent)

    def _reader(self, module: ModuleId) -> Follower:
        if module not in self._readers:
            self._readers[module] = Follower(self._node, module, self._ownership.chains[module])
        return self._readers[module]

    async def _route(self, assignment: Assignment) -> None:
        """Before a round: score a path if that is wanted, and move to the shard that holds from here on."""
        progress, trainer = assignment.standing.progress, assignment.trainer
        await self._scoring.between_rounds(assignment.path, round_number=progress, say=self._say_scoring)
        if self._evaluating is not None:
            await self._evaluating.between_rounds(say=self._say_checking)
        sharding = self._node.run.sharding_at(progress)
        if sharding != trainer.sharding:
            try:
                trainer.use_shard(await self._supplies.shard(assignment.path, sharding), sharding)
                self._node.history.add("resharded", path=str(assignment.path), sharding=sharding)
            except SwarmError as error:
                log.info("%s stays on the shard it has: %s", assignment.path, error)

    async def _wait_turn(self, assignment: Assignment) -> ClaimEvent | None:
        """Until the path can be trained (again): None. Or until another one needs us more: why."""
        waiting, doubted_s = asyncio.ensure_future(assignment.wait_due(self._say_late)), self._node.clock.now_s()
        try:
            await self._node.watch.read_claims()
            while not waiting.done() and not self._is_due(assignment):
                event = await self._claiming.should_move(assignment.path, assignment.standing)
                assignment.heard(self._node.watch.rounds)
                if event is ClaimEvent.EXPIRED or (event is not None and not self._is_due(assignment)):
                    return event
                doubted_s = await self._doubt(assignment, doubted_s)
                await self._measurer.while_waiting(
                    assignment.standing.progress, is_due=waiting.done, say=self._say_measuring
                )
                await done_or_later(waiting, self._node.clock, self._look_every_s)
            if waiting.done():
                await waiting
            self._training.turn_came()
            return None
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _doubt(self, assignment: Assignment, doubted_s: float) -> float:
        """Ask the leaders whether they have our part, when nothing has moved for longer than any round takes; when we
        asked last. A refused or unanswered push, or a leader's lost disk, leaves a round that waits for us."""
        watch, rounds, now_s = self._node.watch, self._node.run.config.rounds, self._node.clock.now_s()
        if min(now_s - doubted_s, watch.still_s(assignment.path)) < PATIENCE * rounds.deadline_s:
            return doubted_s
        await watch.read_rounds(assignment.path.modules())
        assignment.doubt(watch.rounds)
        return now_s

    def _is_due(self, assignment: Assignment) -> bool:
        """Whether the path can be trained, perhaps with what we left to others."""
        is_alone = self._claiming.replica(assignment.path)[1] == 1
        assignment.take_up(is_alone=is_alone, now_s=self._node.clock.now_s())
        return assignment.is_ready

    # -- its parts

    def _give_up(self, path: PathId, error: DipacoError) -> None:
        """A path that cannot be trained is left alone, if there are others; raises `error` otherwise."""
        self._watchdog.end()
        if isinstance(error, EnvironmentUnfit) or not self._training.rounds_done:
            raise error
        self._broken.add(path)
        self._node.history.add("failed", path=str(path), detail=str(error))
        log.error("%s cannot be trained here: %s", path, error)
        if self._broken >= self._claiming.unfinished().keys():
            raise error

    async def _release(self, event: ClaimEvent) -> None:
        await self._claiming.release(event)
        self._status.path = None

    async def _leave(self, background: list[asyncio.Task[Any]]) -> None:
        self.say("leaving")
        with contextlib.suppress(asyncio.TimeoutError, EnvironmentUnfit):
            await asyncio.wait_for(self._ownership.leave(), self._grace_s)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._ownership.close()
        self._node.watch.close()
        self._status.leads = []
        await self._release(ClaimEvent.RELEASED)
        await self._node.presence.leave()
        complete, receipts, stage = self._status.is_complete, self._status.receipts, self._node.run.manifest.stage
        grows = self._node.run.growth is not None
        self._node.history.add("left", complete=complete, receipts=receipts, stage=stage, grows=grows)

    # -- small questions and notes

    @property
    def _is_ending(self) -> bool:
        """Whether no round is begun any more."""
        return self.is_stopping or self.is_finishing

    @property
    def _is_in_round(self) -> bool:
        """Whether a round is going on, or was begun before it opened."""
        return self._watchdog.is_working or self._training.has_begun

    def is_run_open(self) -> bool:
        """Whether the first round may start, or has."""
        if self._has_begun:  # who goes from path to path leaves some without a claim
            return True
        watch = self._node.watch
        return watch.may_have_begun or any(self._ownership.chains[each].ledger.head.version for each in watch.heads)

    def _has_work(self) -> bool:
        """At first any unfinished path. Once we have finished one, a path that nobody trains; or if all have somebody,
        as a replica one with more than a last round ahead."""
        unfinished, watch = self._claiming.unfinished(), self._node.watch
        if not self._training.rounds_done or not all(unfinished.values()):
            return bool(unfinished)
        return any(self._node.run.rounds - watch.round(path) > 1 for path in unfinished)

    def _is_ready(self, path: PathId) -> bool:
        """Whether we could train `path` now: its shard is here, or there is somebody to ask for it."""
        return path not in self._broken and self._supplies.has_source(path)

    def _is_over(self) -> bool:
        """Whether every module has its last version, and nothing that we lead or keep needs us. After a partition the
        branch may go on that is behind: then there is work again."""
        last, watch = self._node.run.rounds, self._node.watch
        return all(watch.reached(module) >= last for module in watch.heads) and self._ownership.is_complete

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        loops = (self._node.presence.run, self._watch_swarm, self._ownership.run)
        return [keep_going(loop, self._node.clock) for loop in loops]

    async def _watch_swarm(self) -> None:
        while True:
            await self._node.watch.refresh()
            run, watch, status = self._node.run, self._node.watch, self._status
            status.rounds, status.rounds_after, status.is_last_stage = run.rounds, run.rounds_after, run.is_last_stage
            status.peers_alive = watch.peers_alive
            status.peers_training = watch.paths.training()
            status.paths_covered = watch.paths.covered()
            status.leads = self._ownership.modules
            await self._give_up_if_stalled()
            if self._node.store.failure is not None and self._work is not None:
                self._work.cancel()
            await self._node.clock.sleep(self._look_every_s)

    async def _give_up_if_stalled(self) -> None:
        """A claim without progress keeps others from the path; the heartbeat goes on."""
        path = self._status.path
        if self._watchdog.is_stalled and path is not None and self._node.presence.has_claim:
            log.warning("no progress for %.0f s: the claim of %s is given up", self._watchdog.limit_s, path)
            self._node.history.add("stalled", path=str(path), silent_s=self._watchdog.limit_s)
            await self._claiming.release(ClaimEvent.EXPIRED)

    async def _claim_again(self) -> None:
        """A leader takes no work without a claim. If ours was given up while none took any, and whoever leads now never
        saw it, each would wait for the other: that a leader asks for it is what the round was waiting for."""
        if self._status.path is not None and not self._node.presence.has_claim:
            self._watchdog.progress()
            await self._claiming.again()

    def _obey(self) -> None:
        """The coordinator has decreed something."""
        self.say_again()
        if self._obeying.is_out and self._work is not None:
            self._work.cancel()

    def _say_engine(self, engine: Engine) -> None:
        self._node.history.add("engine", is_fast=engine.is_fast, detail=str(engine))

    def _say_compiling(self, takes_s: float) -> None:
        """No step is done meanwhile, which must not be taken for a stall: on a busy machine it takes longer."""
        self._watchdog.expect_silence(ROUNDS_SILENT_MAX * takes_s)
        self.is_compiling, self._compiling = True, f"compiling: about {duration(takes_s)}"
        self.say_again()

    def _say_compiled(self) -> None:
        self.is_compiling = False
        self.say_again()

    def _say_late(self, modules: list[ModuleId]) -> None:
        self.say("waiting", waits_for="the next version of " + ", ".join(map(str, sorted(modules))))

    def _say_scoring(self, path: PathId) -> None:
        self.say("scoring", waits_for=f"the next router: how well {path} predicts")

    def _say_measuring(self, path: PathId) -> None:
        self.say("evaluating", waits_for=f"the loss of a round: how well {path} predicts")

    def _say_checking(self, path: PathId) -> None:
        self.say("evaluating", waits_for=f"a second measurement of how well {path} predicts")

    def say(self, doing: str, *, waits_for: str = "") -> None:
        if self.is_stopping and doing not in (*ENDING, "pushing"):
            return
        self._said = (doing, waits_for)
        self.say_again()

    def say_again(self) -> None:
        """Inner steps go before what goes on beside them."""
        doing, waits_for = self._said
        if self._training.is_ahead and doing in BESIDE_STEPS:
            doing, waits_for = "training", ""
        if self.is_compiling and doing == "training":
            doing = self._compiling
        if self._obeying.is_frozen and doing not in ENDING:
            doing, waits_for = self._obeying.words, ""
        if (self._status.doing, self._status.waits_for) != (doing, waits_for):
            self._status.doing, self._status.waits_for = doing, waits_for
            self._node.presence.note(doing=doing.partition(":")[0])
            self._node.history.add("doing", doing=doing, waits_for=waits_for)
