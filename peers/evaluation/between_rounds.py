"""Work for others between rounds of one's own: scoring paths for the next router, and measuring rounds.

The seed node fits the next routers on the scores (DiPaCo, arXiv 2403.10616, section 2.4.2). A coordinator that has no
parameters has volunteers measure each round (bootstrap/coordinator/measurements.py). With `dipaco-peer join --evaluate`
a volunteer also takes a path that nobody, or hardly anybody, has checked, and that it has no work in;
measures it as the coordinator did (node/measuring.py), and gives its finding, signed, to the seed nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from dipaco_p2p.canonical import digest
from dipaco_p2p.clock import Clock
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.model.shards import HeldOut, decode_held_out
from dipaco_p2p.core.model.transformer import PathModel, load_modules
from dipaco_p2p.core.routing.evaluate import encode_scores, window_nats
from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, IntegrityError, Interrupted, SwarmError
from dipaco_p2p.node.calls import GetMeasure, Wanted
from dipaco_p2p.node.measuring import Measuring, check_of, measuring_s, read_checks, send_check
from dipaco_p2p.node.node import CONTROL_TIMEOUT_S, Member, ask, fetch
from dipaco_p2p.node.reading import fetch_judgements
from dipaco_p2p.node.shardings import Work, ask_work, is_composed_of, is_scoring_due, learn_shardings, send_scores
from dipaco_p2p.program.tasks import done_or_later
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.protocol.judgement import OF_AUTHOR_MAX, Judgement, PathLoss, agrees
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

log = logging.getLogger(__name__)

WAIT_S = 1.0
BATCH = 32
"""Sequences between two looks whether we are to stop."""


class Scoring:
    """What one volunteer scores."""

    def __init__(self, node: Member, *, device: str, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """`is_stopping` is asked between batches: nobody waits for the scores then."""
        self._node = node
        self._device = device
        self._is_stopping = is_stopping
        self._part: HeldOut | None = None

    async def between_rounds(self, path: PathId, *, round_number: int, say: Callable[[PathId], None]) -> None:
        """Score one path if a sharding waits for it, our own before others, and learn what was published."""
        if is_scoring_due(self._node, round_number):
            work, _ = await ask_work(self._node, path)
            if work is not None:
                await self._do(work, say)
            await learn_shardings(self._node)

    async def at_the_end(self, *, say: Callable[[PathId], None]) -> None:
        """When training is over: score until nothing is wanted any more, or others have had time enough."""
        clock, rounds = self._node.clock, self._node.run.config.rounds
        until_s = clock.now_s() + rounds.deadline_s
        while is_scoring_due(self._node, self._node.run.rounds) and clock.now_s() < until_s:
            work, may_come = await ask_work(self._node, None)
            if work is not None:
                await self._do(work, say)
            elif may_come:
                await clock.sleep(WAIT_S)
            else:
                return

    async def _do(self, work: Work, say: Callable[[PathId], None]) -> None:
        say(work.path)
        try:
            table = await asyncio.to_thread(self._score, work, [await self._blob(ref) for ref in work.snapshots])
            is_taken = await send_scores(self._node, work, table)
            self._node.history.add("scored", path=str(work.path), sharding=work.sharding, taken=is_taken)
        except (SwarmError, IntegrityError, Interrupted) as error:
            log.info("%s was not scored: %s", work.path, error)

    def _score(self, work: Work, snapshots: list[bytes]) -> bytes:
        run = self._node.run
        layouts = [run.layout(module) for module in work.path.modules()]
        model = PathModel(run.config.model).to(self._device)
        load_modules(model, [decode_module(data, layout) for data, layout in zip(snapshots, layouts, strict=True)])
        assert self._part is not None
        tokens, found = self._part.tokens, []
        for first in range(0, max(len(tokens), 1), BATCH):
            if self._is_stopping():
                raise Interrupted("the scores are not wanted any more")
            found.append(window_nats(model, tokens[first : first + BATCH], batch=BATCH))
        return encode_scores(np.concatenate(found))

    async def _blob(self, ref: BlobRef) -> bytes:
        if self._part is None:
            model = self._node.run.config.model
            data = await fetch(self._node, self._node.run.manifest.router_split, holders=self._node.watch.seeds())
            self._part = decode_held_out(data, vocab_size=model.vocab_size, context=model.context)
        return await fetch(self._node, ref, holders=self._node.watch.seeds())


SHARE_MAX = 0.1
"""Of a volunteer's time."""


class Budget:
    """How much of a volunteer's time one kind of work for others has taken, and may take."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.now_s()
        self._spent_s = 0.0
        self._last_s = 0.0

    @property
    def is_left(self) -> bool:
        """Whether there is time for as much again as last time."""
        return self._spent_s + self._last_s <= SHARE_MAX * (self._clock.now_s() - self._began_s)

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """What the block takes is taken from it."""
        began_s = self._clock.now_s()
        try:
            yield
        finally:
            self._last_s = self._clock.now_s() - began_s
            self._spent_s += self._last_s


class Measurer:
    """What one volunteer measures for the coordinator of one stage: the path and the round are the coordinator's
    choice."""

    def __init__(self, node: Member, measuring: Measuring) -> None:
        self._node = node
        self._measuring = measuring
        self._budget = Budget(node.clock)
        self._asked = -1

    async def while_waiting(
        self, round_number: int, *, is_due: Callable[[], bool], say: Callable[[PathId], None]
    ) -> None:
        """Until a round begins, and once for each: measure what is wanted, as long as there is time for it and the
        round is not due. Others wait as well, and still have the parameters that their last round began with."""
        if round_number == self._asked:
            return
        self._asked = round_number
        while not is_due() and self._budget.is_left:
            if not await self._one(say):
                return

    async def at_the_end(self, *, say: Callable[[PathId], None]) -> None:
        """When training is over: until nothing is wanted any more, or others have had time enough."""
        clock, rounds = self._node.clock, self._node.run.config.rounds
        until_s = clock.now_s() + rounds.deadline_s
        while clock.now_s() < until_s and (is_done := await self._one(say)) is not None:
            if not is_done:
                await clock.sleep(WAIT_S)

    async def _one(self, say: Callable[[PathId], None]) -> bool | None:
        """Ask, and measure; whether that was done, and None if nothing will be wanted any more."""
        node = self._node
        with self._budget.spent():
            wanted = await self._ask()
            if wanted is None or wanted.path is None:
                return False if wanted is not None and wanted.wait else None
            measuring = asyncio.ensure_future(self._do(wanted, wanted.path, say))
            try:
                await done_or_later(measuring, node.clock, measuring_s(node.run.config.rounds))
                return measuring.done() and measuring.result()
            finally:
                measuring.cancel()

    async def _ask(self) -> Wanted | None:
        """None unless there is a coordinator whose archive is light: others measure all themselves."""
        watch = self._node.watch
        for seed in watch.coordinators():
            if seed in watch.heartbeats and watch.heartbeats[seed].light:
                try:
                    return await ask(self._node, seed, GetMeasure(), timeout_s=CONTROL_TIMEOUT_S)
                except DipacoError as error:
                    log.info("the coordinator does not say what to measure: %s", error)
        return None

    async def _do(self, wanted: Wanted, path: PathId, say: Callable[[PathId], None]) -> bool:
        """Whether the coordinator has the figure."""
        node = self._node
        try:
            if not is_composed_of(node.run, path, wanted.snapshots):
                raise IntegrityError("the coordinator asks for a path that this run has not")
            say(path)
            usable = [each for each in node.run.topology.paths() if each not in wanted.untrained]
            found = await self._measuring.measure(
                path, wanted.version, wanted.sharding, wanted.snapshots, usable=usable
            )
            sealed = check_of(node, found)
            if sealed is None:
                return False
            await send_check(node, sealed, node.run.manifest.author)
            node.history.add("measured", path=str(path), version=wanted.version, loss=sealed.document.loss)
            return True
        except EnvironmentUnfit:
            raise
        except DipacoError as error:
            log.info("%s was not measured at round %d: %s", path, wanted.version, error)
            return False


WANTED = 3
"""Checks of one path at one round: that many of different peers say enough."""

Place = tuple[int, PathId]


class Evaluating:
    """What one volunteer checks in one stage."""

    def __init__(self, node: Member, measuring: Measuring) -> None:
        self._node = node
        self._measuring = measuring
        self._budget = Budget(node.clock)
        self._judgements: dict[int, Judgement] = {}
        self._checks: Counter[Place] = Counter()
        self._from: dict[PeerId, int] = {}
        """Of each seed node, the number of the check that comes next."""
        self._done: set[Place] = set()
        """What we have measured, or found not to be measured by us."""

    async def between_rounds(self, *, say: Callable[[PathId], None]) -> None:
        """Check one path, if there is time for it and one that wants it."""
        if self._budget.is_left:
            await self._one(say)

    async def at_the_end(self, *, say: Callable[[PathId], None]) -> None:
        """When training is over: check the last round, as much of it as one volunteer may, if somebody judges it."""
        clock, rounds = self._node.clock, self._node.run.config.rounds
        until_s = clock.now_s() + rounds.deadline_s
        while clock.now_s() < until_s and self._node.watch.seeds():
            if not await self._one(say):
                if self._node.run.rounds in self._judgements:
                    return
                await clock.sleep(WAIT_S)

    async def _one(self, say: Callable[[PathId], None]) -> bool:
        """Whether there was something to check."""
        try:
            with self._budget.spent():
                await self._look()
                place = await self._next()
                if place is not None:
                    say(place[1])
                    await self._check(*place)
                return place is not None
        except EnvironmentUnfit:
            raise
        except DipacoError as error:
            log.info("nothing was checked: %s", error)
            return False

    async def _look(self) -> None:
        """What is judged, and what others have checked since."""
        node = self._node
        begin = max(self._judgements, default=-1) + 1
        for judgement in await fetch_judgements(node, begin=begin):
            self._judgements[judgement.version] = judgement
        for seed in node.watch.seeds():
            found, self._from[seed] = await read_checks(node, seed, begin=self._from.get(seed, 0))
            self._checks.update((sealed.document.version, sealed.document.path) for sealed in found)

    async def _next(self) -> Place | None:
        """Of the newest judged round the path that wants it most; the same volunteer does not begin with the same path
        as all others."""
        if not self._judgements:
            return None
        version = max(self._judgements)
        if sum(number == version for number, _ in self._done) >= OF_AUTHOR_MAX:
            return None
        for found in self._in_order(version, self._judgements[version].paths):
            place = version, found.path
            if self._node.peer not in await self._measuring.trainers(found.path, version):
                return place
            self._done.add(place)
        return None

    def _in_order(self, version: int, paths: Iterable[PathLoss]) -> list[PathLoss]:
        open_ = [
            found
            for found in paths
            if found.loss is not None
            and (version, found.path) not in self._done
            and self._checks[version, found.path] < WANTED
        ]

        def rank(found: PathLoss) -> tuple[int, str]:
            name = f"{self._node.peer} {found.path} {version}"
            return self._checks[version, found.path], digest(name.encode())

        return sorted(open_, key=rank)

    async def _check(self, version: int, path: PathId) -> None:
        self._done.add((version, path))
        judgement = self._judgements[version]
        sealed = check_of(self._node, await self._measuring.measure_again(judgement, path))
        if sealed is None:
            return
        said = next(found.loss for found in judgement.paths if found.path == path)
        assert said is not None
        is_same = agrees(sealed.document.loss, said)
        self._node.history.add(
            "checked", path=str(path), version=version, loss=sealed.document.loss, said=said, agrees=is_same
        )
        if not is_same:
            log.warning("round %d, %s: measured %.4f, published %.4f", version, path, sealed.document.loss, said)
        for seed in self._node.watch.seeds():
            try:
                await send_check(self._node, sealed, seed)
            except DipacoError as error:
                log.info("a seed node did not take the check of %s: %s", path, error)
