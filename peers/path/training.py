"""One round of a path: its inner steps, its outer gradients, its pushes, and what is noted of them.

With `overlap` in the run file the next round's steps begin as soon as all that this one's pushes need is on the disk
(ahead.py), unless somebody else's path would wait for us meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from dipaco_p2p.clock import Clock
from dipaco_p2p.config import LivenessConfig, RoundsConfig
from dipaco_p2p.core.model.inner import StepReport
from dipaco_p2p.core.outer.compress import Sent
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.protocol.documents import Recipe
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.rounds import OpenRound, within_bounds
from dipaco_p2p.topology import ModuleId, PathId

from ..status import Status
from .ahead import Ahead, HeadStart
from .assignment import Assignment, Base, Work
from .claiming import Claiming
from .contribute import Contributor
from .kept import InnerStates
from .trainer import Flat, PathTrainer

log = logging.getLogger(__name__)

ROUNDS_SILENT_MAX = 3
"""Times of a round without progress until the claim is given up."""
ROUNDS_REMEMBERED = 5


class Watchdog:
    """Watches one volunteer's rounds; it may be told of progress from any thread."""

    def __init__(self, clock: Clock, *, deadline_s: float) -> None:
        """`deadline_s` is the longest that a round should take, and stands for one until one was seen."""
        self._clock = clock
        self._deadline_s = deadline_s
        self._rounds_s: deque[float] = deque(maxlen=ROUNDS_REMEMBERED)
        self._began_s: float | None = None
        self._last_s = 0.0
        self._silent_until_s = 0.0

    def begin(self) -> None:
        """A round begins."""
        self._began_s = self._last_s = self._clock.now_s()

    def progress(self) -> None:
        """Something got on."""
        self._last_s = self._clock.now_s()

    def expect_silence(self, duration_s: float) -> None:
        """What begins now gives no sign for so long, and gets on all the same."""
        self._silent_until_s = self._clock.now_s() + duration_s

    def end(self) -> None:
        """The round is over, well or not: what comes is waiting, which is no fault of ours."""
        if self._began_s is not None:
            self._rounds_s.append(self._clock.now_s() - self._began_s)
        self._began_s = None

    @property
    def is_working(self) -> bool:
        """Whether a round is going on: training or pushing."""
        return self._began_s is not None

    @property
    def limit_s(self) -> float:
        """Seconds without progress that are too long. A round that is quicker than a deadline is given one all the
        same: the first steps on a shard, or a disk that is busy, may take longer than everything after them."""
        usual_s = statistics.median(self._rounds_s) if self._rounds_s else self._deadline_s
        return max(ROUNDS_SILENT_MAX * usual_s, self._deadline_s)

    @property
    def is_stalled(self) -> bool:
        """Whether a round is going on, and nothing in it."""
        return self.is_working and self._clock.now_s() - max(self._last_s, self._silent_until_s) > self.limit_s


PUSHES = 3
PUSH_SHARE = 0.1
"""Of the deadline, for a push, before one was seen."""
PUSH_SHARE_MAX = 0.5
"""A push that waited for a new leader says little about the next."""


class Pace:
    """What one volunteer knows of its time."""

    def __init__(self, rounds: RoundsConfig, liveness: LivenessConfig) -> None:
        self._rounds = rounds
        self._liveness = liveness
        self._deadline_s = rounds.deadline_s
        self._left_s = 0.0
        self._pushes_s: deque[float] = deque(maxlen=PUSHES)

    async def ask(self, watch: Watch, modules: Collection[ModuleId]) -> None:
        """Learn from the leaders of `modules` how long they wait."""
        await watch.read_rounds(modules)
        self.deadline_s(watch, modules)

    def deadline_s(self, watch: Watch, modules: Collection[ModuleId]) -> float:
        """How long they wait by what they told last, the run file's for who did not."""
        self.told([watch.rounds[module] for module in modules if module in watch.rounds])
        return self._deadline_s

    def told(self, rounds: Collection[OpenRound]) -> None:
        """What the leaders of the modules wait; 0 from one that does not say. The shortest deadline counts, since the
        path has to be in time for all; but not less than any honest leader waits. Of what is left of their rounds the
        median counts: no leader can have us do next to nothing."""
        deadlines_s = [open_.deadline_s for open_ in rounds]
        self._left_s = statistics.median_low([open_.left_s for open_ in rounds] or [0.0])
        most_s = self._rounds.deadline_s
        least_s = min((each_s or most_s for each_s in deadlines_s), default=most_s)
        self._deadline_s = within_bounds(least_s, self._rounds, self._liveness)

    def pushed(self, duration_s: float) -> None:
        """Note how long a push took."""
        self._pushes_s.append(duration_s)

    def training_s(self, *, spent_s: float = 0.0) -> float:
        """Seconds for the inner steps, when `spent_s` went by since our last push in this round. The deadline counts
        from there or later: from a path that came since, or that was refused."""
        push_s = max(self._pushes_s, default=PUSH_SHARE * self._deadline_s)
        left_s = max(self._deadline_s - spent_s, min(self._left_s, self._deadline_s))
        return left_s - min(push_s, PUSH_SHARE_MAX * self._deadline_s)

    @staticmethod
    def has_time(steps: int, *, elapsed_s: float, training_s: float, once_s: float = 0.0) -> bool:
        """Whether one more step fits, if it takes as long as each of the `steps` that took `elapsed_s`, without the
        `once_s` that will not come again, such as compiling. One is tried before any was taken."""
        step_s = (elapsed_s - once_s) / steps if steps else 0.0
        return elapsed_s + step_s <= training_s


ROUNDS_OF_PACE = 16
"""What is left is reckoned from as many: the first one, which may compile, must not count for ever."""


class Account:
    """Kept over all paths that one volunteer trains in one stage of a run."""

    def __init__(self, node: Member, status: Status) -> None:
        self._node = node
        self._status = status
        self._begun: deque[tuple[int, float]] = deque(maxlen=ROUNDS_OF_PACE + 1)
        """The newest rounds that were the first of ours to reach their number, and when they began."""
        self._statistics = node.swarm.statistics()
        self.rounds_done = 0

    def begin(self, round_number: int) -> None:
        """A round's inner steps begin; from the second on the end of the run can be estimated. What is begun for a
        further path that is no further ahead says nothing of the pace."""
        now_s, status = self._node.clock.now_s(), self._status
        if self._begun and round_number <= self._begun[-1][0]:
            return
        self._begun.append((round_number, now_s))
        first, began_s = self._begun[0]
        if round_number > first:
            left = status.rounds - round_number + status.rounds_after
            status.eta_s = left * (now_s - began_s) / (round_number - first)

    def end(self, path: PathId, work: Work, sent: Sent) -> None:
        """A round is done, its push included: note what it took. Rounds whose steps began ahead overlap in time."""
        before, after = self._statistics, self._node.swarm.statistics()
        self._statistics = after
        self.rounds_done += 1
        self._node.history.add(
            "round",
            path=str(path),
            round=work.round_number,
            steps=work.result.steps_done,
            is_cut=work.is_cut,
            tokens=work.result.tokens,
            loss=work.result.loss,
            seconds=self._node.clock.now_s() - work.began_s,
            training_s=work.training_s,
            bytes_pushed=after.bytes_sent - before.bytes_sent,
            bytes_pulled=after.bytes_received - before.bytes_received,
            captured=sent.captured,
            owed=sent.owed,
        )


STEPS_SHARE_MIN = 0.1
"""On leaving, less than this share of a round's steps is not worth a push."""


class Voice(Protocol):
    """The volunteer, as far as its training asks and tells it."""

    is_stopping: bool
    is_finishing: bool
    is_compiling: bool

    def say(self, doing: str, *, waits_for: str = "") -> None: ...

    def say_again(self) -> None:
        """Steps that go on beside pushes and waiting have begun or ended."""


class Training:
    """Trains one path after the other, round by round."""

    def __init__(
        self,
        node: Member,
        status: Status,
        volunteer: Voice,
        *,
        states: InnerStates,
        claiming: Claiming,
        contributor: Contributor,
        watchdog: Watchdog,
    ) -> None:
        self._node = node
        self._status = status
        self._states = states
        self._claiming = claiming
        self._contributor = contributor
        self._watchdog = watchdog
        self._for = volunteer
        self._ahead = Ahead(node, self._inner_steps, on_change=volunteer.say_again)
        self._pace = Pace(node.run.config.rounds, node.run.config.liveness)
        self._account = Account(node, status)
        self._freed_s: float | None = None
        """When the last push ended, while this round goes on: the deadline counts from there for the next path."""

    @property
    def rounds_done(self) -> int:
        return self._account.rounds_done

    @property
    def is_ahead(self) -> bool:
        """Whether inner steps go on beside pushes and waiting."""
        return self._ahead.is_running

    @property
    def has_begun(self) -> bool:
        """Whether steps of a round were begun before it opened, and are not pushed yet."""
        return self._ahead.has_begun

    def deadline_s(self, path: PathId) -> float:
        """How long the leaders of the path's modules wait, by what they told last."""
        return self._pace.deadline_s(self._node.watch, path.modules())

    def turn_came(self) -> None:
        """A round has opened for the path that we train."""
        self._freed_s = None
        self._ahead.opened()

    async def leave(self) -> None:
        """Another path, or none, will be trained next."""
        await self._ahead.abandon()

    async def round(self, assignment: Assignment) -> None:
        """Inner steps, outer gradients, pushes. Whatever goes wrong on another volunteer's inner state is taken to come
        from that: the round begins again from the start of the stage, where a fault of ours shows once more."""
        try:
            await self._round(assignment)
        except Exception as error:
            self._watchdog.end()
            if not assignment.is_foreign_state:
                raise
            log.info("%s failed on an inner state that was fetched", assignment.path, exc_info=True)
            self._start_over(assignment, str(error))

    async def _round(self, assignment: Assignment) -> None:
        work = await self._begun(assignment) or await self._from_the_start(assignment)
        if not work.result.steps_done:  # the GPU was wanted by others before the first one ended
            self._watchdog.end()
            return
        steps_min = STEPS_SHARE_MIN * self._node.run.config.inner.steps
        if not self._for.is_stopping or work.result.steps_done >= steps_min:
            await self._contribute(assignment, work)
        assignment.contributed(work.bases)
        self._watchdog.end()
        self._account.end(assignment.path, work, assignment.trainer.sent)

    async def _begun(self, assignment: Assignment) -> Work | None:
        """The round's steps, if they were begun ahead."""
        if not self._ahead.has_begun:
            return None
        self._for.say("training")
        self._watchdog.begin()
        work = await self._ahead.take(assignment)
        if work is None:
            self._watchdog.end()
        return work

    async def _from_the_start(self, assignment: Assignment) -> Work:
        """The round's steps, from the newest inner state that is to be had."""
        audited = self._node.run.config.audited
        if not assignment.is_restored or (audited and not assignment.is_named):
            self._for.say("fetching its inner state")
            if assignment.is_restored:
                assignment.trainer.start_over()
            assignment.is_foreign_state = await self._states.restore(assignment.trainer, assignment.shares)
            assignment.is_restored = True
        await self._pace.ask(self._node.watch, assignment.path.modules())
        self._watchdog.begin()
        bases, round_number = assignment.bases, assignment.standing.progress
        self._for.say("training")
        flats = await asyncio.to_thread(assignment.trainer.beginning, assignment.params)
        return await self._inner_steps(assignment, flats, round_number=round_number, bases=bases)

    async def _inner_steps(
        self,
        assignment: Assignment,
        flats: list[Flat],
        *,
        round_number: int,
        bases: Sequence[Base] = (),
        head_start: HeadStart | None = None,
    ) -> Work:
        """As many as the run wants, or as the time until the deadline allows; one at least."""
        status, clock, began_s, began_at_s = self._status, self._node.clock, time.monotonic(), self._node.clock.now_s()
        is_ahead = head_start is not None
        spent_s = 0.0 if is_ahead or self._freed_s is None else began_at_s - self._freed_s
        training_s = self._pace.training_s(spent_s=spent_s)
        status.round, status.step, status.is_cut = round_number, 0, False
        self._account.begin(round_number)
        tokens, once_steps, once_s = 0, 0, 0.0

        def on_step(report: StepReport) -> bool:
            nonlocal tokens, began_s, once_steps, once_s
            if head_start is not None and not head_start.is_wanted:
                return False
            self._watchdog.progress()
            tokens += report.tokens
            status.step, status.loss = status.step + 1, report.loss
            elapsed_s = clock.now_s() - began_at_s
            if self._for.is_compiling:  # what that took says nothing of the steps to come
                tokens, began_s, once_steps, once_s = 0, time.monotonic(), status.step, elapsed_s
            else:
                status.tokens_per_s = tokens / max(time.monotonic() - began_s, 1e-9)
            time_s = training_s + (0.0 if head_start is None else head_start.seconds(began_at_s))
            steps = status.step - once_steps
            status.is_cut = not self._pace.has_time(steps, elapsed_s=elapsed_s, training_s=time_s, once_s=once_s)
            return not self._for.is_stopping and not status.is_cut and not self._node.decrees.is_frozen

        replica, sharding = self._claiming.replica(assignment.path), assignment.trainer.sharding
        recipe = self._recipe(assignment.trainer, replica, round_number=round_number)
        result = await assignment.trainer.train(flats, round_number=round_number, replica=replica, on_step=on_step)
        status.is_cut = status.is_cut and result.steps_done < self._node.run.config.inner.steps
        self._node.presence.note(round=round_number, tokens_per_s=round(status.tokens_per_s, 1))
        return Work(
            round_number=round_number,
            before=flats,
            bases=bases,
            result=result,
            sharding=sharding,
            is_cut=status.is_cut,
            recipe=recipe,
            began_s=began_at_s,
            training_s=clock.now_s() - began_at_s,
        )

    def _recipe(self, trainer: PathTrainer, replica: tuple[int, int], *, round_number: int) -> Recipe | None:
        """What others need to take the steps again that begin now."""
        if not self._node.run.config.audited:
            return None
        place, replicas = replica
        since = trainer.state_since if trainer.state_ref is not None else 0
        return Recipe(round=round_number, place=place, replicas=replicas, start=trainer.state_ref, since=since)

    async def _contribute(self, assignment: Assignment, work: Work) -> None:
        began_s = self._node.clock.now_s()
        self._for.say("pushing", waits_for=f"receipts from the leaders of {assignment.path}")
        reasons = await self._contributor.contribute(
            assignment, work, on_kept=partial(self._go_ahead, assignment, work)
        )
        self._freed_s = self._node.clock.now_s()
        self._pace.pushed(self._freed_s - began_s)
        if assignment.is_foreign_state and Reason.NORM in reasons:
            self._start_over(assignment, "what came of it was refused")
        assignment.is_foreign_state = False

    def _go_ahead(self, assignment: Assignment, work: Work) -> None:
        """Begin the next round's steps, if that is wanted and makes sense."""
        is_ending = self._for.is_stopping or self._for.is_finishing
        if self._node.run.config.rounds.overlap and not is_ending and self._may_go_ahead(assignment, work):
            self._ahead.begin(assignment, work)

    def _may_go_ahead(self, assignment: Assignment, work: Work) -> bool:
        """Not if the path needs not wait, or begins its next round with another shard, or has an inner state on trial;
        and not while a path is trained by nobody: then we go there rather than wait."""
        config, following = self._node.run.config, work.round_number + 1
        is_waiting = (
            all(version.version == work.round_number for version in assignment.versions) and not assignment.inherited
        )
        is_plain = following < self._node.run.rounds and following not in config.routing.reshard_rounds
        return is_waiting and is_plain and not assignment.is_foreign_state and all(self._claiming.unfinished().values())

    def _start_over(self, assignment: Assignment, why: str) -> None:
        """Another volunteer's state of the path was well-formed, and of no use: it must not stop us."""
        log.warning("%s starts over, without the inner state that was fetched: %s", assignment.path, why)
        assignment.trainer.start_over()
        assignment.is_foreign_state = False
        self._node.history.add("state", path=str(assignment.path), source="dropped", peer="")
