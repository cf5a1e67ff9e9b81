"""The next round's inner steps, begun while this round's outer gradients and the next versions are on their way.

core/outer/outer_step.py says where they begin. Once the versions are there, the contributions name them as any others
do, so that leaders, chains and whoever takes the path over see no difference. Steps that stand for nothing any more,
since the swarm has moved on or went back to another branch, are dropped: the path goes on from its last inner state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dipaco_p2p.core.outer.compress import CODECS
from dipaco_p2p.core.outer.outer_step import Course, outer_gradient
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.topology import ModuleId

from .assignment import Assignment, Work
from .trainer import Flat

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HeadStart:
    """Of steps that begin before their round has opened; read by the thread that takes them."""

    is_wanted: bool = True
    opened_s: float | None = None
    """When the round opened, as seen here: the time for a round counts from there."""

    def seconds(self, began_s: float) -> float:
        """How long before its round began what began then; without end while the round is not open."""
        return math.inf if self.opened_s is None else max(0.0, self.opened_s - began_s)


class Train(Protocol):
    """Inner steps of a round from these vectors, one per level."""

    def __call__(
        self, assignment: Assignment, flats: list[Flat], *, round_number: int, head_start: HeadStart
    ) -> Awaitable[Work]: ...


class Ahead:
    """One path's steps of a round that is not open yet."""

    def __init__(self, node: Member, train: Train, *, on_change: Callable[[], None]) -> None:
        """`on_change` is told when steps begin and when they end."""
        self._node = node
        self._train = train
        self._on_change = on_change
        self._courses: dict[ModuleId, tuple[ModuleVersion, Course]] = {}
        """Of the modules that were trained ahead last, up to the version that this was based on."""
        self._head_start = HeadStart()
        self._task: asyncio.Task[Work] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether steps were begun that nobody has taken yet."""
        return self._task is not None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, assignment: Assignment, work: Work) -> None:
        """Take the steps of the round after that of `work`, whose bases are the newest versions."""
        self._head_start = head_start = HeadStart()
        versions, params = assignment.versions, assignment.params

        async def steps() -> Work:
            flats = await asyncio.to_thread(self._estimates, versions, params, work)
            return await self._train(assignment, flats, round_number=work.round_number + 1, head_start=head_start)

        self._task = asyncio.create_task(steps())
        self._task.add_done_callback(lambda task: self._on_change())
        self._on_change()

    def opened(self) -> None:
        """The round that the steps are of has opened."""
        self._head_start.opened_s = self._node.clock.now_s()

    async def take(self, assignment: Assignment) -> Work | None:
        """What was done ahead of the round that is open now, once it is done; None if nothing was that can be used."""
        if self._task is None:
            return None
        try:
            work = await self._task
        except DipacoError as error:
            self._drop(assignment, str(error))
            return None
        finally:
            self._head_start.is_wanted, self._task = False, None
        bases = assignment.bases_of(work.round_number, staleness=self._node.run.config.rounds.staleness)
        if bases is None:
            self._drop(assignment, f"round {work.round_number} is not the one that is open")
            return None
        return replace(work, bases=bases)

    async def abandon(self) -> None:
        """Nobody waits for the steps any more."""
        self._head_start.is_wanted = False
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _drop(self, assignment: Assignment, why: str) -> None:
        log.info("%s: steps that were done ahead are dropped: %s", assignment.path, why)
        self._node.history.add("ahead_dropped", path=str(assignment.path), detail=why)
        assignment.is_restored = False  # the moments are those after the steps

    def _estimates(self, versions: Sequence[ModuleVersion], params: Sequence[Flat], work: Work) -> list[Flat]:
        """Where the steps begin, one flat vector per level."""
        config, result = self._node.run.config, work.result
        rule = config.outer
        courses = [self._course(version, flat) for version, flat in zip(versions, params, strict=True)]
        self._courses = {version.module: (version, course) for version, course in zip(versions, courses, strict=True)}
        if CODECS[config.compression.uplink].goes_on:
            return [
                course.going_on(after, lr=rule.lr, momentum=rule.momentum)
                for course, after in zip(courses, result.flats, strict=True)
            ]
        return [
            course.ahead(outer_gradient(before, after), lr=rule.lr, momentum=rule.momentum)
            for course, before, after in zip(courses, work.before, result.flats, strict=True)
        ]

    def _course(self, version: ModuleVersion, params: Flat) -> Course:
        known, course = self._courses.get(version.module, (None, None))
        if known is None or course is None:
            return Course.begin(params)
        if known == version:
            return course
        if known.digest != version.parent or known.version + 1 != version.version:
            return Course.begin(params)
        rule = self._node.run.config.outer
        return course.follow(params, lr=rule.lr, momentum=rule.momentum, is_fresh=version.is_fresh)
