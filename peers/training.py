"""One round of a path: its inner steps, its outer gradients, its pushes, and what is noted of them.

With `overlap` in the run file the next round's steps begin as soon as all that this one's pushes need is on the disk
(ahead.py), unless somebody else's path would wait for us meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from dipaco_p2p.core.inner import StepReport
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.topology import PathId

from .account import Account
from .ahead import Ahead, HeadStart
from .claiming import Claiming
from .contribute import Contributor
from .pace import Pace
from .states import PathStates
from .status import Status
from .tenure import Tenure
from .trainer import Flat
from .watchdog import Watchdog
from .work import Base, Work

log = logging.getLogger(__name__)

STEPS_SHARE_MIN = 0.1
"""On leaving, less than this share of a round's steps is not worth a push."""


class Training:
    """Trains one path after the other, round by round."""

    def __init__(
        self,
        node: Member,
        status: Status,
        *,
        states: PathStates,
        claiming: Claiming,
        contributor: Contributor,
        watchdog: Watchdog,
        say: Callable[..., None],
        on_ahead: Callable[[], None],
        is_stopping: Callable[[], bool],
        is_finishing: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_ahead` is told when `is_ahead` may have changed. Who is stopping takes no further step; who is finishing
        begins no further round."""
        self._node = node
        self._status = status
        self._states = states
        self._claiming = claiming
        self._contributor = contributor
        self._watchdog = watchdog
        self._say = say
        self._is_stopping = is_stopping
        self._is_finishing = is_finishing
        self._ahead = Ahead(node, self._inner_steps, on_change=on_ahead)
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

    async def round(self, tenure: Tenure) -> None:
        """Inner steps, outer gradients, pushes."""
        work = await self._begun(tenure) or await self._from_the_start(tenure)
        if work is None:
            return
        if not work.result.steps_done:  # the GPU was wanted by others before the first one ended
            self._watchdog.end()
            return
        steps_min = STEPS_SHARE_MIN * self._node.run.config.inner.steps
        if not self._is_stopping() or work.result.steps_done >= steps_min:
            await self._contribute(tenure, work)
        tenure.contributed(work.bases)
        self._watchdog.end()
        self._account.end(tenure.path, work)

    async def _begun(self, tenure: Tenure) -> Work | None:
        """The round's steps, if they were begun ahead."""
        if not self._ahead.has_begun:
            return None
        self._say("training")
        self._watchdog.begin()
        work = await self._ahead.take(tenure)
        if work is None:
            self._watchdog.end()
        return work

    async def _from_the_start(self, tenure: Tenure) -> Work | None:
        """The round's steps; None if it has to begin again, without the inner state that was fetched."""
        if not tenure.is_restored:
            self._say("fetching its inner state")
            tenure.is_foreign_state = await self._states.restore(tenure.trainer, tenure.shares)
            tenure.is_restored = True
        await self._pace.ask(self._node.watch, tenure.path.modules())
        self._watchdog.begin()
        bases, round_number = tenure.bases, tenure.standing.progress
        self._say("training")
        try:
            flats = await asyncio.to_thread(tenure.trainer.beginning, tenure.params)
            return await self._inner_steps(tenure, flats, round_number=round_number, bases=bases)
        except DipacoError as error:
            self._watchdog.end()
            if not tenure.is_foreign_state:
                raise
            self._start_over(tenure, str(error))
            return None

    async def _inner_steps(
        self,
        tenure: Tenure,
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
        tokens = 0

        def on_step(report: StepReport) -> bool:
            nonlocal tokens
            if head_start is not None and not head_start.is_wanted:
                return False
            self._watchdog.progress()
            tokens += report.tokens
            status.step, status.loss = status.step + 1, report.loss
            status.tokens_per_s = tokens / max(time.monotonic() - began_s, 1e-9)
            elapsed_s = clock.now_s() - began_at_s
            time_s = training_s + (0.0 if head_start is None else head_start.seconds(began_at_s))
            status.is_cut = not self._pace.has_time(status.step, elapsed_s=elapsed_s, training_s=time_s)
            return not self._is_stopping() and not status.is_cut and not self._node.decrees.is_frozen

        replica, sharding = self._claiming.replica(tenure.path), tenure.trainer.sharding
        result = await tenure.trainer.train(flats, round_number=round_number, replica=replica, on_step=on_step)
        status.is_cut = status.is_cut and result.steps_done < self._node.run.config.inner.steps
        self._node.presence.note(round=round_number, tokens_per_s=round(status.tokens_per_s, 1))
        return Work(
            round_number=round_number,
            before=flats,
            bases=bases,
            result=result,
            sharding=sharding,
            is_cut=status.is_cut,
            began_s=began_at_s,
            training_s=clock.now_s() - began_at_s,
        )

    async def _contribute(self, tenure: Tenure, work: Work) -> None:
        began_s = self._node.clock.now_s()
        self._say("pushing", waits_for=f"receipts from the leaders of {tenure.path}")
        reasons = await self._contributor.contribute(tenure, work, on_kept=partial(self._go_ahead, tenure, work))
        self._freed_s = self._node.clock.now_s()
        self._pace.pushed(self._freed_s - began_s)
        if tenure.is_foreign_state and Reason.NORM in reasons:
            self._start_over(tenure, "what came of it was refused")
        tenure.is_foreign_state = False

    def _go_ahead(self, tenure: Tenure, work: Work) -> None:
        """Begin the next round's steps, if that is wanted and makes sense."""
        is_ending = self._is_stopping() or self._is_finishing()
        if self._node.run.config.rounds.overlap and not is_ending and self._may_go_ahead(tenure, work):
            self._ahead.begin(tenure, work)

    def _may_go_ahead(self, tenure: Tenure, work: Work) -> bool:
        """Not if the path needs not wait, or begins its next round with another shard, or has an inner state on trial;
        and not while a path is trained by nobody: then we go there rather than wait."""
        config, following = self._node.run.config, work.round_number + 1
        is_waiting = all(version.version == work.round_number for version in tenure.versions) and not tenure.inherited
        is_plain = following < config.rounds.rounds and following not in config.routing.reshard_rounds
        return is_waiting and is_plain and not tenure.is_foreign_state and all(self._claiming.unfinished().values())

    def _start_over(self, tenure: Tenure, why: str) -> None:
        """Another volunteer's state of the path was well-formed, and of no use: it must not stop us."""
        log.warning("%s starts over, without the inner state that was fetched: %s", tenure.path, why)
        tenure.trainer.start_over()
        tenure.is_foreign_state = False
        self._node.history.add("state", path=str(tenure.path), source="dropped", peer="")
